"""Which tokens of a GGUF file begin and end texts: by the file's keys, and by names, as llama.cpp goes by them (`src/llama-vocab.cpp`).

A fill-in-the-middle model ends its piece with a token that begins another file, so these end a text, too.
"""

from polydraft.models.store.gguf_header import GgufHeader, TextList

TOKENS = "tokenizer.ggml.tokens"
TEMPLATE = "tokenizer.chat_template"
CONTROL = 3
USER_DEFINED = 4
"""Types of tokens that are matched whole before text is split; the first are no text."""
PART_END = "<|end|>"
TAG = "</s>"
TOOL_RESPONSE = "<|tool_response>"
ENDS = [
    *(
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        PART_END,
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
    ),
    *(
        "<|endoftext|>",
        "<|end_of_text|>",
        TAG,
        "<eos>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<end_of_utterance>",
        "<turn|>",
    ),
    *(TOOL_RESPONSE, "<｜end▁of▁sentence｜>", "[e~["),
]
"""Tokens that end a text or a turn, whatever their type; </s> as a control token alone, and not of Gemma 4: it is a tag of HTML, too."""
MIDDLE_ENDS = {
    "fim_pad": ["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"],
    "fim_rep": ["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"],
    "fim_sep": ["<|file_sep|>"],
}
"""Names of a token, by the key of files that have one."""


def special_id(file: GgufHeader, role: str) -> int | None:
    """Id of the token of a role, such as "eos", or None where the file has none."""
    tokens = file.metadata.get(TOKENS)
    token_id = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
    num_tokens = tokens.length if isinstance(tokens, TextList) else float("inf")
    if isinstance(token_id, int) and not isinstance(token_id, bool) and 0 <= token_id < num_tokens:
        return token_id
    # ids of SentencePiece vocabularies, where a file has no key
    return (
        {"bos": 1, "eos": 2, "unknown": 0}.get(role)
        if file.metadata.get("tokenizer.ggml.model") == "llama"
        else None
    )


def end_ids(file: GgufHeader) -> list[int]:
    """Ids of all tokens that end a text, the end-of-sequence token first."""
    names = [*ENDS, *(name for names in MIDDLE_ENDS.values() for name in names)]
    ids = file.find(TOKENS, names) if isinstance(file.metadata.get(TOKENS), TextList) else {}
    types = file.metadata.get("tokenizer.ggml.token_type") or ()
    if TAG in ids and (types[ids[TAG] :][:1] != [CONTROL] or TOOL_RESPONSE in ids):
        del ids[TAG]
    # where there are such tokens, <|end|> ends a part of an answer
    in_parts = {"<|return|>", "<|call|>"} <= ids.keys() or {"<|flush|>", "<|calls|>"} <= ids.keys()
    no_end = ids.get(PART_END) if in_parts else None
    ids_of_ends = [special_id(file, role) for role in ("eos", "eot", "eom")] + [
        ids.get(name) for name in ENDS
    ]
    for role, names in MIDDLE_ENDS.items():
        by_key = special_id(file, role)
        ids_of_ends.append(
            next((ids[name] for name in names if name in ids), None) if by_key is None else by_key
        )
    return list(dict.fromkeys(i for i in ids_of_ends if i not in (None, no_end)))
