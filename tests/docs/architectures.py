"""The table of architectures: what each of them runs by, and what it is checked against, from the registries and the tiny files of the tests."""

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

from polydraft.models.compiled.model import CompiledModel
from polydraft.models.load import load_model
from polydraft.models.loading.gguf import GgufWeights
from polydraft.models.networks import COMPILED, NETWORKS
from polydraft.models.torch.own_cache import OwnCacheTarget

FILES = sorted((Path(__file__).parents[1] / "models" / "oracle_gguf").glob("*.gguf"))
HEAD = ("architecture", "GGUF files call it", "checked on files")
UNCOMPILED = ("architecture", "drafts", "trees", "the compiled path lacks")


def model_type(path: Path) -> str:
    """What transformers calls a file's architecture."""
    return GgufWeights.of(path).network.model_type


def names_in_files() -> dict[str, list[str]]:
    """What GGUF files call each architecture, by the name of transformers."""
    return {kind: sorted(network.gguf_names) for kind, network in NETWORKS.items()}


def ways(path: Path) -> list[str]:
    """Drafts and trees of a file's model, as it is loaded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target = load_model(str(path), device="cpu", max_num_seqs=1, max_model_len=64)
    assert not isinstance(target, CompiledModel), path
    if not isinstance(target, OwnCacheTarget):
        return ["yes", "yes"]
    return ["none"] * 2 if target.plain_reason else ["on a copy of the state", "a row a path"]


def files_by_architecture() -> dict[str, list[Path]]:
    """The tiny files of the tests."""
    files: dict[str, list[Path]] = {}
    for path in FILES:
        files.setdefault(model_type(path), []).append(path)
    return files


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def table() -> str:
    """A row for each architecture that GGUF files or the compiled path have."""
    files = files_by_architecture()
    return markdown(
        HEAD,
        (
            (f"`{name}`", listed(in_files), listed(path.stem for path in files.get(name, [])))
            for name, in_files in sorted(names_in_files().items())
        ),
    )


def missing() -> str:
    """Those that run through transformers: how they draft there, and what the compiled path lacks."""
    files = files_by_architecture()
    lacking = {name: NETWORKS[name].lacks for name in sorted(NETWORKS) if name not in COMPILED}
    return markdown(
        UNCOMPILED,
        ((f"`{name}`", *ways(files[name][0]), parts) for name, parts in lacking.items()),
    )
