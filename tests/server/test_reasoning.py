"""What a model thinks between <think> and </think> is `reasoning_content`, in any pieces, whole and streamed."""

import random

import pytest

from polydraft.core.thinking import Thinking
from polydraft.server.formats.parser import AnswerParser

CASES = [
    ("<think>\nTwo and two.\n</think>\n\nFour.", False, ("Two and two.", "Four.")),
    ("Two and two.\n</think>\n\nFour.", True, ("Two and two.", "Four.")),
    ("\n <think>a < b</thin</think>c", False, ("a < b</thin", "c")),
    ("<think>\n\n</think>\n\nFour.", False, ("", "Four.")),
    ("<think>broken off", False, ("broken off", "")),
    ("Four. <think>no</think>", False, ("", "Four. <think>no</think>")),
    ("<thinking> is text", False, ("", "<thinking> is text")),
    ("<thi", False, ("", "<thi")),
    ("  blanks stay\n", False, ("", "  blanks stay\n")),
    ("", False, ("", "")),
]


@pytest.mark.parametrize(("text", "opened", "expected"), CASES)
def test_reasoning_is_told_apart_whatever_pieces_it_comes_in(text, opened, expected):
    for seed in range(30):
        rng = random.Random(seed)
        parser = AnswerParser(thinking=Thinking(opened=opened))
        cuts = sorted(rng.sample(range(len(text) + 1), min(seed, len(text))))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        pieces = [p for i, part in enumerate(parts) for p in parser.push(part, last=i == len(parts) - 1)]
        assert ("".join(p.reasoning for p in pieces), "".join(p.content for p in pieces)) == expected


FORM = {"guided_regex": "<think>\nso [a-c]{3}\n</think>\n\nx [d-f]{3}"}
ASK = {"model": "small", "messages": [{"role": "user", "content": "?"}], "max_tokens": 60, "seed": 3}


def streamed(served, **asked):
    deltas = [c.choices[0].delta for c in served.openai.chat.completions.create(**asked, stream=True)]
    reasoning = "".join((d.model_extra or {}).get("reasoning_content") or "" for d in deltas)
    return reasoning, "".join(d.content or "" for d in deltas)


def test_a_chat_tells_reasoning_apart_whole_and_streamed(served):
    message = served.openai.chat.completions.create(**ASK, extra_body=FORM).choices[0].message
    reasoning = message.model_extra["reasoning_content"]
    assert (
        reasoning.startswith("so ")
        and len(reasoning) == 6
        and message.content.startswith("x ")
        and len(message.content) == 5
    )
    assert streamed(served, **ASK, extra_body=FORM) == (reasoning, message.content)
    told = [*ASK["messages"], message.model_dump(), {"role": "user", "content": "And?"}]
    assert served.post("/v1/chat/completions", **{**ASK, "messages": told}).status_code == 200
