"""Whether two models speak of the same tokens over the same lengths, from what is known before they are loaded."""

from collections.abc import Mapping

from polydraft.errors import IncompatibleError, InvalidInputError


def without_padding(tokens: Mapping[str, int]) -> dict[str, int]:
    """The tokens of a vocabulary without what stands for ids that have none: converters to GGUF fill it up to the rows of the model, and the
    rows of two models of one vocabulary may differ.

    Example:
        >>> without_padding({"a": 0, "[PAD1]": 1, "[PAD]": 2})
        {'a': 0, '[PAD]': 2}
    """
    return {token: i for token, i in tokens.items() if token[:4] != "[PAD" or token != f"[PAD{i}]"}


def check_same_tokens(ours: Mapping[str, int], theirs: Mapping[str, int], *, role: str = "draft") -> None:
    """Refuse a second model with other ids of tokens than the target's; padding does not count.

    role: what it is called, "amateur" for that of a decoding method.

    Raises:
        IncompatibleError: naming the first token that differs.

    Example:
        >>> check_same_tokens({"a": 0}, {"a": 0})
    """
    ours = without_padding(ours)
    theirs = without_padding(theirs)
    if ours == theirs:
        return
    differing = ours.items() ^ theirs.items()
    lowest = min(i for _, i in differing)
    first = min(token for token, i in differing if i == lowest)
    bridges = ", or drafter='tli' (common tokens) or drafter='slem' (through text)" if role == "draft" else ""
    raise IncompatibleError(
        f"target and {role} have different vocabularies: {len({token for token, _ in differing})} tokens differ, the first is {first!r}, "
        f"id {ours.get(first)} in the target and {theirs.get(first)} in the {role}. "
        f"Use one trained with the target's tokenizer{bridges}."
    )


def check_draft_vocabulary(wanted: int | None, vocab_size: int) -> None:
    """Refuse to draft over more tokens than a draft model has.

    Raises:
        InvalidInputError: with both numbers.

    Example:
        >>> check_draft_vocabulary(2048, 2048)
    """
    if (wanted or 0) > vocab_size:
        raise InvalidInputError(
            f"draft_vocabulary={wanted} was given; the draft model has {vocab_size} tokens. Give at most that, or 0 for all."
        )


def check_same_context(target_length: int, draft_length: int) -> None:
    """Refuse a draft with a shorter context than the target's `max_model_len`.

    Raises:
        IncompatibleError: with both lengths and what to lower.

    Example:
        >>> check_same_context(1024, 2048)
    """
    if draft_length < target_length:
        raise IncompatibleError(
            f"the draft's context holds {draft_length} tokens, the target's {target_length}. "
            f"Use max_model_len <= {draft_length} for both."
        )
