"""What an engine is built of, checked when it is built: models that read the same texts, a decoding method, and targets that give what is asked of them."""

from collections.abc import Mapping
from typing import Any

from polydraft.core import Decoding, Drafter, EncoderDecoder, Needs, SecondSequenceDecoding, Target
from polydraft.drafters.base import Parts
from polydraft.errors import CapacityError, IncompatibleError, InvalidInputError
from polydraft.methods import registry
from polydraft.models.load import token_names
from polydraft.models.loading.matching import check_draft_vocabulary, check_same_context
from polydraft.models.slot_pool import Slots
from polydraft.policy.measuring import seconds_of_a_pass

NEED_WORDS = {
    "embeddings": "the embeddings of tokens (`embed`)",
    "head": "the output head (`head`)",
    "logits": "logits of its steps",
}
ADVICE = (
    "Load the target with another backend ('compiled' or 'transformers'), or use something that needs less."
)


def _check(target: Target, needs: Needs, who: str) -> None:
    offers = target.offers
    lacking = [
        words for name, words in NEED_WORDS.items() if getattr(needs, name) and not getattr(offers, name)
    ]
    layers = sorted({*needs.hidden} - {*offers.hidden})
    if layers:
        there = f"it has those of layers 0 to {max(offers.hidden)}" if offers.hidden else "it has none"
        lacking.append(f"hidden states of layer {', '.join(map(str, layers))} ({there})")
    if lacking:
        raise IncompatibleError(
            f"{who} needs {' and '.join(lacking)}, which {type(target).__name__} does not give. {ADVICE}"
        )


def check_step(target: Target, slots: Slots, max_step: float) -> None:
    """Refuse a time of a step, in seconds, within which the idle target makes no forward pass of one row.

    Raises:
        InvalidInputError: with both times.
    """
    if isinstance(target, EncoderDecoder):  # whose forward pass takes what its source says
        return
    slot = slots.take()
    try:
        seconds = seconds_of_a_pass(target, slot)
    finally:
        slots.give_back(slot)
    if seconds > max_step:
        raise InvalidInputError(
            f"max_step_ms={1e3 * max_step:g} was given; expected at least {1e3 * seconds:.3g}, which one forward pass takes here. "
            "Raise it, or leave it out."
        )


def check_drafter(target: Target, drafter: Drafter) -> None:
    """Refuse a drafter whose needs the target cannot meet, or that cannot take what it needs.

    Raises:
        IncompatibleError: naming what is lacking.
    """
    name = drafter.info.name
    needs = drafter.needs
    offers = drafter.offers
    _check(target, needs, f"the drafter {name!r}")
    if needs.hidden and offers.read is None:
        raise IncompatibleError(
            f"the drafter {name!r} needs {needs}, but offers no `read` that takes it. Add one to its `offers`."
        )


def check_decoding(target: Target, decoding: Decoding) -> None:
    """Refuse a decoding method whose needs the target or its second model cannot meet.

    Raises:
        IncompatibleError: naming what is lacking.
        CapacityError: a target without a slot for the second sequence.
        InvalidInputError: an object that is no decoding method.
    """
    name = type(decoding).__name__
    if not (
        callable(decoding)
        and isinstance(getattr(decoding, "needs", None), Needs)
        and hasattr(decoding, "gives_logits")
    ):
        raise InvalidInputError(
            f"decoding={decoding!r} was given; expected a `core.Decoding`: callable, with `needs` and `gives_logits`."
        )
    if decoding.needs.every_step:
        raise IncompatibleError(
            f"the decoding method {name} needs {decoding.needs}; a decoding method may need hidden states, embeddings and the head only."
        )
    _check(target, decoding.needs, f"the decoding method {name}")
    if not isinstance(decoding, SecondSequenceDecoding):
        return
    if decoding.second_model is None and target.max_num_seqs < 2:
        raise CapacityError(
            f"the decoding method {name} takes two slots for each request; the target has one. Raise max_num_seqs."
        )
    if decoding.second_model is not None and decoding.second_model.vocab_size != target.vocab_size:
        raise IncompatibleError(
            f"the second model of the decoding method {name} has {decoding.second_model.vocab_size} rows of logits and the target {target.vocab_size}; "
            "expected the same vocabulary. Use a model of the target's tokenizer."
        )
    if decoding.second_model is not None:
        check_same_context(target.max_model_len, decoding.second_model.max_model_len)


def decoding(named: str | Decoding | None, parts: Parts, options: Mapping[str, Any]) -> Decoding | None:
    """By name, or as it is; None leaves the sampling parameters alone.

    Raises:
        InvalidInputError: options beside an object or without a decoding method.
    """
    if isinstance(named, str):
        return registry.build_decoding(named, parts, options)
    if options:
        raise InvalidInputError(
            f"decoding_options={dict(options)} were given beside decoding={named!r}; expected them with the name of a decoding method: {', '.join(registry.names('decoding'))}."
        )
    return named


def slots(decoding: str | Decoding | None) -> int:
    """How many of the target's slots a request takes: two where the decoding method reads the target after another prompt, too.

    Example:
        >>> slots(None), slots("contrastive"), slots("guidance")
        (1, 1, 2)
    """
    method = registry.decoding(decoding) if isinstance(decoding, str) else decoding
    return 2 if isinstance(method, SecondSequenceDecoding) and method.second_model is None else 1


def check_encoders(parts: Parts) -> None:
    """Refuse a draft model or a decoding method that reads other texts than the target.

    Raises:
        IncompatibleError: one of them is an encoder-decoder and the other is not; vocabularies or decoding methods that are for causal models only.
    """
    ours = isinstance(parts.target, EncoderDecoder)
    if parts.draft_model is not None and isinstance(parts.draft_model, EncoderDecoder) != ours:
        raise IncompatibleError(
            "one of target and draft model is an encoder-decoder and the other a causal model; expected two of one kind, as both read the "
            "same texts. Use a smaller model of the target's kind, or drafter='ngram'."
        )
    if ours and (
        parts.draft_tokenizer is not None
        and token_names(parts.draft_tokenizer) != token_names(parts.tokenizer)
    ):
        raise IncompatibleError(
            "an encoder-decoder was given with a draft model of another vocabulary, which could not read its source. Use one of the same vocabulary."
        )
    if ours and isinstance(parts.decoding, SecondSequenceDecoding):
        raise IncompatibleError(
            f"the decoding method {type(parts.decoding).__name__} reads a second sequence, which an encoder-decoder does not have. Leave it out."
        )


def limit_draft_vocabulary(draft_model: Target, tokenizer: Any, wanted: int | None) -> None:
    """Let a draft model compute logits of a part of its vocabulary, see `models.growing.draft_vocabulary`.

    wanted: number of first tokens; 0: the whole vocabulary; None: the default, where the model covers it.

    Raises:
        IncompatibleError: a number, for a model that runs through torch.
        InvalidInputError: more than the vocabulary has.
    """
    check_draft_vocabulary(wanted, draft_model.vocab_size)
    if (
        wanted != 0
        and not draft_model.draft_over(wanted, getattr(tokenizer, "all_special_ids", ()))
        and wanted is not None
    ):
        raise IncompatibleError(
            f"draft_vocabulary={wanted} was given for a draft model of type {type(draft_model).__name__}; expected a compiled one. Leave it out."
        )
