"""What a drafter or a decoding method asks of a target, checked when an engine is built."""

from polydraft.core import Decoding, Drafter, Needs, SecondSequenceDecoding, Target
from polydraft.drafters.base import Auxiliary, Reading
from polydraft.errors import CapacityError, IncompatibleError, InvalidInputError
from polydraft.models.load import check_same_context

SAID = {
    "embeddings": "the embeddings of tokens (`embed`)",
    "head": "the output head (`head`)",
    "logits": "logits of its rounds",
    "aux": "auxiliary rows",
}
ADVICE = "Load the target with another backend ('compiled' or 'transformers'), or use something that needs less."


def _check(target: Target, needs: Needs, who: str) -> None:
    offers = target.offers
    lacking = [words for name, words in SAID.items() if getattr(needs, name) and not getattr(offers, name)]
    layers = sorted({*needs.hidden} - {*offers.hidden})
    if layers:
        there = f"it has those of layers 0 to {max(offers.hidden)}" if offers.hidden else "it has none"
        lacking.append(f"hidden states of layer {', '.join(map(str, layers))} ({there})")
    if lacking:
        raise IncompatibleError(f"{who} needs {' and '.join(lacking)}, which {type(target).__name__} does not give. {ADVICE}")


def check_drafter(target: Target, drafter: Drafter) -> None:
    """Refuse a drafter whose needs the target cannot meet, or that cannot take what it needs.

    Raises:
        IncompatibleError: naming what is lacking.
    """
    name, needs = drafter.info.name, drafter.needs
    _check(target, needs, f"the drafter {name!r}")
    for need, kind, method in ((needs.hidden, Reading, "read"), (needs.aux, Auxiliary, "aux")):
        if need and not isinstance(drafter, kind):
            raise IncompatibleError(f"the drafter {name!r} needs {needs}, but has no method `{method}` that takes it. Add one.")


def check_decoding(target: Target, decoding: Decoding) -> None:
    """Refuse a decoding method whose needs the target or its second model cannot meet.

    Raises:
        IncompatibleError: naming what is lacking.
        CapacityError: a target without a slot for the second sequence.
        InvalidInputError: an object that is no decoding method.
    """
    name = type(decoding).__name__
    if not (callable(decoding) and isinstance(getattr(decoding, "needs", None), Needs) and hasattr(decoding, "gives_logits")):
        raise InvalidInputError(
            f"decoding={decoding!r} was given; expected a `core.Decoding`: callable, with `needs` and `gives_logits`."
        )
    if decoding.needs.aux or decoding.needs.every_round:
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
