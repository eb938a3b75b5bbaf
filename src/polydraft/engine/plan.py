"""What is known of an engine before weights are read: which models it is of, how long its texts may be, how it drafts, and what is refused.

It is told from names, headers and small files: nothing is loaded, and torch is not imported. A model that has to be downloaded first is not looked into;
what only a loaded model shows is refused where it is loaded.
"""

from os import PathLike
from pathlib import Path
from typing import NamedTuple

from polydraft.config import EngineConfig, SpeculationConfig
from polydraft.core.params import SamplingParams
from polydraft.errors import CapacityError, InvalidInputError, no_template, too_long, unknown_name
from polydraft.methods import registry
from polydraft.models import pair
from polydraft.models.loading.matching import check_draft_vocabulary, check_same_context, check_same_tokens
from polydraft.models.store import hub
from polydraft.models.store.catalogue import default_draft
from polydraft.models.store.store import Store, opened

OF_ONE_VOCABULARY = ("auto", "model", "amusd")
"""Drafters whose draft models have the target's tokens; others are asked once they are imported."""
POLICIES = ("adaptive", "fixed")


class Plan(NamedTuple):
    """A configuration of which nothing is wrong as far as that is known.

    config: of the engine.  name: of the target.  method: the drafter's name without its kind, "" for an object.
    draft_name: of the draft model that is named, or that the table of models has.
    target, draft: their stores, None for a model that is not here yet.
    """

    config: EngineConfig
    name: str
    method: str
    draft_name: str | None
    target: Store | None
    draft: Store | None

    @classmethod
    def of(cls, config: EngineConfig) -> "Plan":
        """Of a configuration, which is refused where an engine would refuse it once its models are loaded.

        Raises:
            UnknownNameError, InvalidInputError, ModelLoadError, IncompatibleError, CapacityError: each says what to do.

        Example:
            >>> plan = Plan.of(EngineConfig(max_model_len=512))
            >>> plan.name, plan.method, plan.draft_name is not None, plan.length
            ('embedded', 'auto', True, 512)
            >>> Plan.of(EngineConfig(verifier="blok"))
            Traceback (most recent call last):
            polydraft.errors.UnknownNameError: unknown verifier 'blok'; did you mean 'block'? Known: ...
        """
        config = with_several(config)
        check_speculation(config)
        _check_files(config)
        name = config.model or pair.EMBEDDED
        method = _method(config)
        listed = default_draft(name) if method in ("auto", "model") else None
        draft_name = config.draft_model or listed
        draft = None if draft_name is None else _store(draft_name)
        plan = cls(config, name, method, draft_name, _store(name), draft)
        plan._check_tokens()
        plan._check_lengths()
        return plan

    @property
    def length(self) -> int | None:
        """Of the longest text, where it is known."""
        return None if self.target is None else self.config.max_model_len or self.target.context

    @property
    def kind(self) -> str:
        """What engines have in common that call the same code: the names of models and methods."""
        config = self.config
        names = self.name, self.draft_name, config.head, config.drafter, config.verifier, config.decoding
        return " ".join(str(name) for name in names if isinstance(name, (str, Path)))

    @property
    def seeks_head(self) -> bool:
        """Whether a head is looked for, as nobody says how to draft."""
        config = self.config
        return config.drafter == "auto" and config.head is None and config.draft_model is None

    def check_params(self, params: SamplingParams) -> None:
        """Refuse parameters of a request that asks for more tokens than the context holds.

        Raises:
            CapacityError: with both numbers.
        """
        if self.length is not None and (params.max_tokens or 0) >= self.length:
            raise CapacityError(
                f"max_tokens={params.max_tokens} was given; the context holds {self.length} tokens, the prompt's among them. Use fewer."
            )

    def check_prompt(self, prompt: str) -> None:
        """Refuse an empty text, and one of more tokens than the context holds: by the model's tokenizer, where it has as many bytes.

        Raises:
            InvalidInputError: it is empty.
            CapacityError: with both numbers.
            ModelLoadError: there is no tokenizer.
        """
        if not prompt:
            raise InvalidInputError(
                "an empty prompt was given; expected at least one token. Give some text to continue."
            )
        longest = self.length
        num_bytes = len(prompt.encode(errors="replace"))
        if self.target is None or longest is None or num_bytes < longest - 1:
            return
        from polydraft.models import load

        length = len(load.encode(load.load_tokenizer(str(self.target.place)), prompt))
        if length >= longest:
            raise too_long(length, longest)

    def check_template(self) -> None:
        """Refuse a chat with a model whose files have no chat template.

        Raises:
            IncompatibleError: there is none.
        """
        if self.target is not None and not self.target.has_template:
            raise no_template(self.name)

    def _check_tokens(self) -> None:
        if self.target is None or self.draft is None or self.method not in OF_ONE_VOCABULARY:
            return
        if self.target.raw_tokens == self.draft.raw_tokens:
            return
        ours = self.target.tokens
        theirs = self.draft.tokens
        if ours and theirs:
            check_same_tokens(ours, theirs)

    def _check_lengths(self) -> None:
        """Texts that are longer than a model holds, and a part of a draft model's vocabulary that is larger than all of it."""
        asked = self.config.max_model_len or 0
        for store in (self.target, self.draft):
            if store is not None and store.context is not None and asked > store.context:
                raise CapacityError(
                    f"max_model_len={asked} was given; the model's context holds {store.context}. Give at most that."
                )
        if self.draft is None or self.config.drafter in (None, "none"):
            return
        if self.draft.vocab_size is not None:
            check_draft_vocabulary(self.config.draft_vocabulary, self.draft.vocab_size)
        if self.length is not None and self.draft.context is not None:
            check_same_context(self.length, self.draft.context)


def with_several(config: EngineConfig) -> EngineConfig:
    """With the drafter of several draft models, where there are further ones.

    Raises:
        InvalidInputError: there is no first one.
        IncompatibleError: another drafter is named.
    """
    if not config.further_draft_models:
        return config
    if config.draft_model is None:
        raise InvalidInputError(
            "further_draft_models were given without draft_model; expected the one that fits best there. Move the first of them."
        )
    drafter = registry.load("option", "further_draft_models")(config.drafter, config.verifier)
    options = {**(config.drafter_options or {}), "models": list(config.further_draft_models)}
    return config.with_(drafter=drafter, drafter_options=options, further_draft_models=())


def _store(name: str) -> Store | None:
    place = hub.local(name)
    return None if place is None else opened(place)


def _method(config: SpeculationConfig) -> str:
    """The drafter's name without its kind."""
    return config.drafter.partition(":")[0] if isinstance(config.drafter, str) else ""


def check_speculation(config: SpeculationConfig) -> None:
    """The part of it that is about drafters, verifiers and decoding methods by name.

    Raises:
        UnknownNameError, InvalidInputError, IncompatibleError: each says what to do.
    """
    _check_names(config)
    _check_fit(config)


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
    drafter = _method(config)
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
