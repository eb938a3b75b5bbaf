"""What a configuration asks for that cannot be, told from names, headers and small files alone: nothing is loaded, and torch is not imported.

What only a loaded model shows is refused where it is loaded. A model that has to be downloaded first is not looked into.
"""

from os import PathLike
from pathlib import Path

from polydraft.config import EngineConfig, SpeculationConfig
from polydraft.core.params import SamplingParams
from polydraft.engine.plan import Plan
from polydraft.errors import CapacityError, InvalidInputError, no_template, too_long, unknown_name
from polydraft.methods import registry
from polydraft.models import pair
from polydraft.models.store import hub

POLICIES = ("adaptive", "fixed")


def check(config: EngineConfig, params: SamplingParams | None = None) -> None:
    """Refuse a configuration, and parameters of a request, that an engine would refuse once its models are loaded.

    Raises:
        UnknownNameError, InvalidInputError, ModelLoadError, IncompatibleError, CapacityError: each says what to do.

    Example:
        >>> check(EngineConfig(verifier="blok"))
        Traceback (most recent call last):
        polydraft.errors.UnknownNameError: unknown verifier 'blok'; did you mean 'block'? Known: ...
    """
    check_speculation(config)
    _check_files(config)
    plan = Plan.of(config)
    plan.check()
    if params is not None and plan.length is not None and (params.max_tokens or 0) >= plan.length:
        raise CapacityError(
            f"max_tokens={params.max_tokens} was given; the context holds {plan.length} tokens, the prompt's among them. Use fewer."
        )


def check_speculation(config: SpeculationConfig) -> None:
    """The part of it that is about drafters, verifiers and decoding methods by name.

    Raises:
        UnknownNameError, InvalidInputError, IncompatibleError: each says what to do.
    """
    _check_names(config)
    _check_fit(config)


def check_prompt(prompt: str) -> None:
    """Refuse an empty text.

    Raises:
        InvalidInputError: it is empty.
    """
    if not prompt:
        raise InvalidInputError(
            "an empty prompt was given; expected at least one token. Give some text to continue."
        )


def check_length(prompt: str, config: EngineConfig) -> None:
    """Refuse a text of more tokens than the context holds, before weights are loaded: by the model's tokenizer, where it has as many bytes.

    Raises:
        CapacityError: with both numbers.
        ModelLoadError: there is no tokenizer.
    """
    plan = Plan.of(config)
    longest = plan.length
    if plan.target is None or longest is None or len(prompt.encode(errors="replace")) < longest - 1:
        return
    from polydraft.models import load

    length = len(load.encode(load.load_tokenizer(str(plan.target.place)), prompt))
    if length >= longest:
        raise too_long(length, longest)


def check_template(config: EngineConfig) -> None:
    """Refuse a chat with a model whose files have no chat template, before weights are loaded.

    Raises:
        IncompatibleError: there is none.
    """
    plan = Plan.of(config)
    if plan.target is not None and not plan.target.has_template:
        raise no_template(plan.name)


def _check_names(config: SpeculationConfig) -> None:
    for name, kind, method in (
        ("drafter", "core.Drafter", "propose"),
        ("verifier", "core.Verifier", "__call__"),
    ):
        value = getattr(config, name)
        if not isinstance(value, str) and not hasattr(value, method) and (name, value) != ("drafter", None):
            raise InvalidInputError(
                f"{name}={value!r} was given; expected a name of `polydraft methods`, or a `{kind}`. Give one, or leave it out."
            )
    for drafter in (config.drafter, *config.offered):
        if isinstance(drafter, str) and drafter not in ("auto", "none"):
            registry.check_drafter(drafter)
    if isinstance(config.verifier, str) and config.verifier != "auto":
        registry.check_name("verifier", config.verifier)
    if isinstance(config.decoding, str):
        registry.check_name("decoding", config.decoding)
    if isinstance(config.policy, str) and config.policy not in POLICIES:
        raise unknown_name("policy", config.policy, POLICIES)


def _check_fit(config: SpeculationConfig) -> None:
    """A kind of a drafter, and a verifier beside a drafter: their modules say what there is and what fits, and import torch."""
    named = _drafter_named(config)
    verifier = config.verifier if isinstance(config.verifier, str) and config.verifier != "auto" else None
    name, _, kind = named.partition(":")
    if not name or not (verifier or kind) or config.asynchronous or "kind" in (config.drafter_options or {}):
        return
    from polydraft.verifiers import pairing

    drawn = registry.declared(named)
    if verifier is not None and drawn is not None:
        pairing.check_pair(drawn, registry.verifier(verifier).info)


def _drafter_named(config: SpeculationConfig) -> str:
    """The drafter that will draft, "" where only loaded models tell it."""
    if not isinstance(config.drafter, str) or config.drafter in ("auto", "none"):
        is_left = (
            config.drafter == "auto" and config.decoding is None and isinstance(config.head, (str, PathLike))
        )
        return _kind_of_head(config.head) if is_left and config.head is not None else ""
    return config.drafter


def _kind_of_head(folder: str | PathLike[str]) -> str:
    from polydraft.heads.folder import kind_of

    return kind_of(folder)


def _check_files(config: EngineConfig) -> None:
    drafter = config.drafter.partition(":")[0] if isinstance(config.drafter, str) else ""
    if isinstance(config.head, (str, PathLike)) and (drafter == "auto" or drafter in registry.heads()):
        from polydraft.heads.finding import check_head
        from polydraft.heads.folder import HeadFolder

        check_head(HeadFolder.of(config.head), hub.local(config.model or pair.EMBEDDED))
    if isinstance(config.index, (str, Path)) and drafter and registry.takes(drafter, "index"):
        from polydraft.drafters.text.index_file import check_header

        check_header(config.index, "text")
    if config.prefix_cache_file is not None:
        from polydraft.models.prefix_file import check_prefix_file

        check_prefix_file(config.prefix_cache_file)
    if isinstance(config.profile, (str, Path)):
        from polydraft.policy.profile import changed, read_profile

        _, whole = read_profile(config.profile)
        if not whole:
            raise changed(config.profile)
