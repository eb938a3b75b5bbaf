"""The table of architectures: what each of them runs by, and what it is checked against, from the registries and the tiny files of the tests."""

import warnings
from pathlib import Path

from polydraft.models.compiled.model import CompiledModel
from polydraft.models.load import load_model
from polydraft.models.loading.gguf import GgufWeights
from polydraft.models.networks import COMPILED, NETWORKS
from polydraft.models.torch.own_cache import OwnCacheTarget

FILES = sorted((Path(__file__).parents[1] / "models" / "oracle_gguf").glob("*.gguf"))
HEAD = ("architecture", "files", "backend", "drafts", "trees", "checked against")


def model_type(path: Path) -> str:
    """What transformers calls a file's architecture."""
    return GgufWeights.of(path).network.model_type


def names_in_files() -> dict[str, list[str]]:
    """What GGUF files call each architecture, by the name of transformers."""
    return {kind: sorted(network.gguf_names) for kind, network in NETWORKS.items()}


def ways(path: Path) -> list[str]:
    """Backend, drafts and trees of a file's model, as it is loaded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target = load_model(str(path), device="cpu", max_num_seqs=1, max_model_len=64)
    if isinstance(target, CompiledModel):
        return ["compiled", "yes", "yes"]
    if not isinstance(target, OwnCacheTarget):
        return ["transformers", "yes", "yes"]
    return [
        "transformers",
        *(["none"] * 2 if target.plain_reason else ["on a copy of the state", "a row a path"]),
    ]


def table() -> str:
    """A row for each architecture that GGUF files or the compiled path have."""
    files: dict[str, list[Path]] = {}
    for path in FILES:
        files.setdefault(model_type(path), []).append(path)
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for name, in_files in sorted(names_in_files().items()):
        theirs = files.get(name, [])
        backend = ["compiled", "yes", "yes"] if name in COMPILED else ways(theirs[0])
        kinds = ", ".join(["folder", *(f"GGUF `{own}`" for own in in_files)])
        oracles = ", ".join(f"`{path.stem}`" for path in theirs)
        against = f"transformers, and files of llama.cpp's converter: {oracles}" if theirs else "transformers"
        lines.append(f"| `{name}` | {kinds} | {' | '.join(backend)} | {against} |")
    return "\n".join(lines)


def missing() -> str:
    """What the compiled path lacks, an architecture a line."""
    lacking = {name: network.lacks for name, network in NETWORKS.items() if network.lacks}
    return "\n".join(f"- `{name}`: {parts}." for name, parts in sorted(lacking.items()))
