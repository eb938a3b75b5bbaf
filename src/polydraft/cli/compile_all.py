"""Everything that a run may call is called once, on the embedded pair, so that numba has compiled it for later runs."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from inspect import Parameter, signature
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from polydraft.cli.compile_walks import compile_walks
from polydraft.core import Budget, Method, SamplingParams, Target
from polydraft.core import geometry as tree
from polydraft.drafters.text.suffix import SuffixStore
from polydraft.drafters.text.text_index import TextIndex
from polydraft.engine.api import Engine
from polydraft.errors import DrafterWarning
from polydraft.methods import registry
from polydraft.models import load, pair
from polydraft.models.matrices.products import compile_products
from polydraft.numerics.compiled_code import EVERYTHING, mark
from polydraft.policy.adaptive import AdaptivePolicy
from polydraft.policy.fixed import FixedPolicy
from polydraft.policy.profile import Profile
from polydraft.train.run import untrained
from polydraft.verifiers import pairing

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
SAMPLED = GREEDY.with_(temperature=1.0, seed=1)
FILTERED = SAMPLED.with_(top_p=0.9, top_k=20, min_p=0.01, repetition_penalty=1.1, logprobs=2)
POLICIES = tuple(
    FixedPolicy(Budget.fixed(parents)) for parents in (tree.chain(3), tree.paths(2, 2), (-1, 0, 0, 1))
)


def compile_all() -> None:
    """Compile what a run may call, in two processes that take turns with drafters; formats of weights while the first drafter compiles the forward pass."""
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        first, *others = list(dict.fromkeys(info.name.partition(":")[0] for info in _infos()))
        jobs = [
            pool.submit(compile_drafters, [first]),
            pool.submit(compile_walks),
            pool.submit(compile_formats),
        ]
        for done in [*jobs, *(pool.submit(compile_drafters, [name]) for name in others)]:
            done.result()
    with suppress(OSError):
        mark(EVERYTHING).touch()


def compile_drafters(names: Sequence[str]) -> None:
    """Generate a few tokens with these drafters of `polydraft methods`, every verifier that fits them and every kind of draft."""
    with _pair() as (place, prompts, tokenizer):
        models = [_model(name) for name in ("target", "draft")]
        chosen = _options(place, prompts, tokenizer, names)
        for kind, options in chosen.items():
            for verifier in _verifiers(_info(kind)):
                _generate(tokenizer, prompts, models, kind, verifier, options)
                _mark(kind, verifier)
        if "suffix" in chosen:
            _generate(tokenizer, prompts, models, "suffix", "match", {"store": SuffixStore()})


def compile_first(kind: str, verifier: str) -> None:
    """What the policy's drafts of one drafter call with one verifier, greedy, sampled and truncated, long repeats of the text included."""
    with _pair() as (place, prompts, tokenizer):
        models = [_model(name) for name in ("target", "draft")]
        parts = {"tokenizer": tokenizer, "draft_model": models[1], "draft_tokenizer": tokenizer}
        options = _options(place, prompts, tokenizer, [kind])[kind]
        policy = AdaptivePolicy(Profile.assumed(), copying=True)
        engine = Engine.of(
            models[0], **parts, drafter=kind, verifier=verifier, drafter_options=options, policy=policy
        )
        for params in (GREEDY, SAMPLED, SAMPLED.with_(seed=None), FILTERED):
            engine.generate(prompts[:1], params.with_(max_tokens=16))
    _mark(kind, verifier)


def _mark(kind: str, verifier: str) -> None:
    with suppress(OSError):
        mark(f"{kind} {verifier}").touch()


def compile_formats() -> None:
    """Products with weights of every format, and a few tokens of models that torch runs."""
    compile_products()
    with _pair() as (_, prompts, tokenizer):
        models = [_model(name, "transformers") for name in ("target", "draft")]
        for kind in ("model", "lookahead"):
            _generate(tokenizer, prompts, models, kind, pairing.best_for(_info(kind)), {})


@contextmanager
def _pair() -> Iterator[tuple[Path, list[list[int]], Any]]:
    """A folder for what is built, prompts, and the tokenizer."""
    torch.set_num_threads(1)
    tokenizer = load.load_tokenizer(str(pair.target_folder()))
    prompts = [load.encode(tokenizer, p.text)[:40] for p in pair.prompts()[:2]]
    with TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore", DrafterWarning)
        yield Path(place), [ids + ids for ids in prompts], tokenizer  # those that copy then find something


def _options(
    folder: Path, texts: list[list[int]], tokenizer: Any, names: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Every kind of these drafters, or of all, with what it cannot be built without."""

    def needed(family: str) -> dict[str, Any]:
        if registry.takes(family, "index"):
            TextIndex.build(texts, len(tokenizer)).save(folder / family)
            return {"index": folder / family}
        if registry.takes(family, "models"):
            return {"models": [_model("draft")]}
        return {"weights": untrained(family, _model("target"), folder / family)} if _is_head(family) else {}

    drafters = [(info.name, info.name.partition(":")[0]) for info in _infos()]
    return {
        kind: needed(family) for kind, family in drafters if not names or kind in names or family in names
    }


def _is_head(drafter: str) -> bool:
    """Whether a drafter is a network of its own for each target."""
    return (
        drafter in registry.names("recipe")
        and "weights" in signature(registry.drafter(drafter).build).parameters
    )


def _infos() -> Iterator[Method]:
    """Of all drafters but those that want of the user what nobody else has, such as a head's weights."""
    for name in registry.names("drafter"):
        drafter = registry.drafter(name)
        parameters = signature(drafter.build).parameters.values()
        is_trained_here = name.partition(":")[0] in registry.names("recipe")
        trained_elsewhere = any(p.name == "weights" for p in parameters) and not is_trained_here
        of_others = trained_elsewhere or name in [
            registry.decoding(method).info.drafter for method in registry.names("decoding")
        ]
        if not of_others and not any(
            p.kind is Parameter.KEYWORD_ONLY and p.default is Parameter.empty for p in parameters
        ):
            yield from drafter.methods


def _info(kind: str) -> Method:
    return next(info for info in _infos() if info.name == kind)


def _verifiers(drafter: Method) -> list[str]:
    """Those that are exact for it, and those that are nobody's exactly; of drafters that draw as an earlier one does, the best alone."""
    first = next(
        info
        for info in _infos()
        if (info.draft_sampling, info.shapes) == (drafter.draft_sampling, drafter.shapes)
    )
    if first.name != drafter.name:
        return [pairing.best_for(drafter)]
    relaxed = [name for name in registry.names("verifier") if not registry.verifier(name).info.lossless]
    fits = [
        n
        for n in relaxed
        if drafter.draft_sampling <= (v := registry.verifier(n).info).draft_sampling
        and drafter.shapes <= v.shapes
    ]
    return [*pairing.fitting(drafter), *fits]


def _model(name: str, backend: str = "auto") -> Target:
    """The target or the draft of the embedded pair."""
    return load.load_model(
        str(getattr(pair, f"{name}_folder")()), device="cpu", backend=backend, max_num_seqs=2
    )


def _generate(
    tokenizer: Any,
    prompts: list[list[int]],
    models: list[Target],
    kind: str,
    verifier: str,
    options: Mapping[str, Any],
) -> None:
    """A few tokens with drafts of every shape that drafter and verifier take."""
    policies = [
        policy
        for policy in POLICIES
        if pairing.allowed([policy.budget], _info(kind), registry.verifier(verifier).info)
    ]
    ahead = kind.partition(":")[0] == "amusd"  # which takes what waits, whatever it costs
    # the assumed profile drafts, with ends by the drafts' own paths
    sizes = [
        *({"policy": policy} for policy in policies),
        *(() if ahead else ({"profile": Profile.assumed()},)),
    ]
    parts = {"tokenizer": tokenizer, "draft_model": models[1], "draft_tokenizer": tokenizer}
    engines = [
        Engine.of(models[0], **parts, drafter=kind, verifier=verifier, drafter_options=options, **size)
        for size in sizes
    ]
    for engine in engines:
        engine.generate(prompts, GREEDY)
        engine.generate(prompts, [SAMPLED, FILTERED])
