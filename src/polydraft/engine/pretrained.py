"""From the names in a configuration to models and tokenizers."""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from polydraft.config import EngineConfig, ModelConfig
from polydraft.core import Target
from polydraft.engine import by_name, parts
from polydraft.engine.plan import Plan
from polydraft.errors import PolydraftError, first_line
from polydraft.heads.finding import fetch_predictor, head_for
from polydraft.heads.folder import HeadFolder
from polydraft.models import load
from polydraft.models.loading.matching import check_same_context
from polydraft.models.store.hub import located
from polydraft.numerics.processor import usable_cores

T = TypeVar("T")


class Models(NamedTuple):
    """What an engine is built from. decoding_options: with the models among them.  head: that was found for a target for which nobody named a drafter."""

    target: Target
    tokenizer: Any
    draft: Target | None
    draft_tokenizer: Any
    decoding_options: dict[str, Any]
    head: HeadFolder | None

    def build(self, engine: Callable[..., T]) -> T:
        """An engine with the head that was found; without it, and with a warning, where it does not fit."""
        if self.head is None:
            return engine()
        try:
            return engine(head=self.head)
        except PolydraftError as error:
            warnings.warn(
                f"the draft head {str(self.head)!r} cannot be used here: {first_line(error)}", stacklevel=3
            )
            return engine()


def load_models(plan: Plan) -> Models:
    """Target, draft model or head, and the models of the decoding method; errors as of `Engine.from_pretrained`."""
    name = plan.name
    located(name)  # what is not here is fetched once, and first
    if plan.seeks_head:
        fetch_predictor(name)
    with ThreadPoolExecutor(1) as beside:
        reading = beside.submit(load.load_tokenizer, name)
        return _load(plan, reading.result)


def _load(plan: Plan, tokenizer_of_target: Callable[[], Any]) -> Models:
    config = plan.config
    if config.asynchronous and config.threads is None and usable_cores() <= 2:
        config = config.with_(threads=1)  # the other core is the draft's
    slots: dict[str, Any] = {"max_num_seqs": config.max_num_seqs * parts.slots(config.decoding)}
    target = load.load_model(plan.name, **config.part(ModelConfig) | slots)
    drafts = by_name.drafts(config.drafter, target)
    tokenizer = tokenizer_of_target()
    options = config.all_decoding_options
    amateur = options.get("amateur")
    draft_name = config.draft_model if drafts or config.drafter != "auto" else None
    may_draft = not drafts or config.drafter == "auto" or plan.method.startswith("model")
    role = "draft"
    if isinstance(amateur, str) and draft_name is None and may_draft:
        draft_name = options.pop("amateur")
        role = "amateur"
    elif isinstance(amateur, str):
        options["amateur"] = _second(amateur, config)
        _share_vocabulary(target, tokenizer, options["amateur"], load.load_tokenizer(amateur), "amateur")
    if draft_name is None and drafts:
        draft_name = plan.draft_name
    draft = None
    draft_tokenizer = None
    if draft_name is not None:
        of_draft = config.with_(threads=1) if config.asynchronous else config
        draft = _second(draft_name, of_draft, as_draft=role == "draft")
        draft_tokenizer = load.load_tokenizer(draft_name)
        _join(config, target, tokenizer, draft, draft_tokenizer, role)
    load.take_vocabulary(target, tokenizer)
    asks = plan.seeks_head and draft is None and config.decoding is None and not config.asynchronous
    head = head_for(plan.name, target) if asks else None
    return Models(target, tokenizer, draft, draft_tokenizer, options, head)


def _join(
    config: EngineConfig, target: Target, tokenizer: Any, draft: Target, draft_tokenizer: Any, role: str
) -> None:
    """Let both speak of the same tokens, but for drafters between two vocabularies; refuse a draft model of shorter texts."""
    if by_name.has_own_vocabulary(config.drafter):
        load.take_vocabulary(draft, draft_tokenizer)
    else:
        _share_vocabulary(target, tokenizer, draft, draft_tokenizer, role)
        if role == "draft":
            parts.limit_draft_vocabulary(draft, draft_tokenizer, config.draft_vocabulary)
    check_same_context(target.max_model_len, draft.max_model_len)


def _second(name: str, config: EngineConfig, as_draft: bool = False) -> Target:
    """A model beside the target."""
    fields = {
        field: getattr(config, field)
        for field in ("dtype", "device", "backend", "max_model_len", "max_num_seqs", "threads")
    }
    of_file = config.draft_quantization == "file"
    quantization = None if of_file else config.draft_quantization
    return load.load_model(name, quantization=quantization, as_draft=as_draft and not of_file, **fields)


def _share_vocabulary(
    target: Target, tokenizer: Any, second: Target, second_tokenizer: Any, role: str
) -> None:
    sizes = target.vocab_size, second.vocab_size
    load.take_vocabulary(
        second, second_tokenizer, load.check_same_vocabulary(tokenizer, second_tokenizer, *sizes, role=role)
    )
