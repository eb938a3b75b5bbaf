"""What the constraints of outputs allow."""

from polydraft.server.formats.calls import CallSource


def calls_of(tokenizer, grammars, functions, **options):
    """The constraint of answers that may call tools."""
    ends = {"vocab_size": len(tokenizer), "stop_ids": [tokenizer.eos_token_id]}
    return CallSource.of(
        functions, tokenizer, grammars.compiled, **ends, **{"required": False, "parallel": True, **options}
    )


def is_allowed(tokenizer, source, text):
    """Whether a text and then its end are allowed."""
    constraint = source.constraint(1)
    ids = [0]
    for token in [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]:
        if not constraint.allowed(ids, [ids[-1]], [-1])[0, token]:
            return False
        ids.append(token)
    return True
