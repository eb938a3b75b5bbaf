"""A result in a notebook: its own text, all of it escaped, with accepted draft tokens in colour."""

from html.parser import HTMLParser

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from polydraft import Engine, SamplingParams
from polydraft.engine.sequence import Origin, Result, Sample
from tests.engine.tables import TableModel

HOSTILE = ["<script>alert(1)</script>", "</pre>", "&amp;", '" onmouseover="', "\n", "<img src=x>", "é"]


class Page(HTMLParser):
    """What a browser would make of it: tags with their attributes, and the text inside <pre>."""

    def __init__(self, html):
        super().__init__()
        self.tags = []
        self.text = ""
        self.marked = ""
        self._open = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, frozenset(dict(attrs))))
        self._open += [tag] if tag != "hr" else []

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open[-1] == "pre" and self.tags[-1][0] == "pre":
            data = data.removeprefix("\n")  # directly behind <pre>, browsers drop it
        self.text += data if "pre" in self._open else ""
        self.marked += data if {"pre", "span"} <= set(self._open) else ""


@pytest.fixture(scope="module")
def engine():
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(HOSTILE)}, unk_token=HOSTILE[0]))
    backend.decoder = decoders.Fuse()
    return Engine.of(
        TableModel(), tokenizer=PreTrainedTokenizerFast(tokenizer_object=backend), drafter="ngram", depth=3
    )


def test_a_result_shows_its_text_escaped_with_accepted_drafts_marked(engine):
    result = engine.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=40))[0]
    page = Page(result._repr_html_())
    drafted = "".join(
        HOSTILE[t]
        for t, origin in zip(result.token_ids, result.samples[0].origins, strict=True)
        if origin.source == "ngram"
    )
    assert page.text == result.text and "</pre>" in result.text
    assert page.marked == drafted != ""
    assert {tag for tag, _ in page.tags} == {"pre", "span", "small"}
    assert all(names <= {"style", "title"} for _, names in page.tags)


def test_every_sample_is_shown_and_a_stop_string_ends_the_text(engine):
    result = engine.generate([[1, 2]], SamplingParams(seed=1, n=3, max_tokens=30, stop=["é<img"]))[0]
    assert Page(result._repr_html_()).text == "".join(s.text for s in result.samples)
    for sample in result.samples:
        assert "".join(text for text, _ in sample.pieces) == sample.text


def test_names_and_errors_are_escaped_too():
    hostile = '"><script>x</script>'
    sample = Sample(
        0,
        1,
        "ab",
        [1, 2],
        "error",
        error=hostile,
        origins=[Origin(hostile), Origin("target")],
        text_ends=[1, 2],
    )
    page = Page(Result("r", None, [1], [sample])._repr_html_())
    assert {tag for tag, _ in page.tags} == {"pre", "span", "small"} and page.marked == "a"


def test_token_ids_without_a_tokenizer_are_shown():
    result = Engine.of(TableModel(), drafter="ngram").generate(
        [[1, 2]], SamplingParams(temperature=0, max_tokens=6)
    )[0]
    assert Page(result._repr_html_()).text.split() == [str(token) for token in result.token_ids]
