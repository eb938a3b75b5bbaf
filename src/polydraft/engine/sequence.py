"""One running sequence: what was asked, what was emitted, and what the models hold of it."""

import reprlib
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from polydraft.core import Request
from polydraft.core.cursor import Cursor
from polydraft.engine.speculation import PLAIN, Speculation
from polydraft.engine.stats import RequestStats
from polydraft.engine.stopping import Stopper

COLOURS = ("76, 175, 80", "33, 150, 243", "255, 152, 0", "156, 39, 176", "0, 188, 212", "233, 30, 99")
"""Of drafted text in notebooks, as red, green, blue; half transparent, they are legible on light and dark pages."""
UNDRAFTED = ""
"""The label of what no drafter made."""


def coloured_text(pieces: Iterable[tuple[str, str]], caption: str) -> str:
    """HTML for notebooks: a block of text whose pieces have the colour of their label, and a legend below.

    pieces: text and label; everything is escaped.  caption: what stands before the legend.

    Example:
        >>> html = coloured_text([("<b>", "model, path 1"), ("x", "")], "2 tokens")
        >>> "&lt;b&gt;</span>x</pre>" in html, "<b>" in html
        (True, False)
    """
    colours = dict[str, str]()
    parts = list[str]()
    for label, neighbours in groupby(pieces, key=lambda piece: piece[1]):
        text = "".join(piece for piece, _ in neighbours)
        if text:
            if label != UNDRAFTED:
                colours.setdefault(label, COLOURS[len(colours) % len(COLOURS)])
            parts.append(_mark(text, label, colours))
    legend = [_mark(f"drafted by {label}", label, colours) for label in colours]
    notes = " · ".join([escape(caption), *legend, *(["plain: by the target model"] if legend else [])])
    # a newline at the beginning of <pre> is dropped by browsers
    return f'<pre style="white-space: pre-wrap; margin: 0">\n{"".join(parts)}</pre><small>{notes}</small>'


def _mark(text: str, label: str, colours: dict[str, str]) -> str:
    if label == UNDRAFTED:
        return escape(text)
    return f'<span title="{escape(label)}" style="background: rgba({colours[label]}, 0.35)">{escape(text)}</span>'


class Origin(NamedTuple):
    """Who made a token: "target" (the extra token of a step) or a drafter, on which branch below the root."""

    source: str
    branch: int = 0


class TokenLogprob(NamedTuple):
    """Log-probability of a token, and of the most likely alternatives at its position. rank: of a prompt's token among all, from 1 on."""

    token_id: int
    logprob: float
    top: dict[int, float]
    rank: int | None = None


_SHORT = reprlib.Repr()
_SHORT.maxstring = 80


@dataclass(repr=False)
class Sample:
    """One generated continuation.

    finish_reason: "stop" | "length" | "abort" | "error".  stop_reason: the stop id or string, if one did it.
    error: what failed, where something did.  refused: whether that was what the request asked for.
    seed: the seed that was used, also where none was given.  origins: one for each token.  text_ends: likewise, the length of the text behind
        it, before a stop string was cut off.  sources: likewise, where it stands in a passage
        (`papers.nest.spans.Standing`) or None; empty where the drafter does not say.
    """

    index: int
    seed: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    refused: bool = False
    logprobs: list[TokenLogprob] | None = None
    origins: list[Origin] = field(default_factory=list[Origin])
    text_ends: list[int] = field(default_factory=list[int])
    sources: list[Any] = field(default_factory=list[Any])
    stats: RequestStats = field(default_factory=RequestStats)

    def __repr__(self) -> str:
        return (
            f"Sample(index={self.index}, text={_SHORT.repr(self.text)}, finish_reason={self.finish_reason!r}, tokens={len(self.token_ids)}, "
            f"tokens_per_step={self.stats.tokens_per_step:.2f}, seed={self.seed})"
        )

    @property
    def pieces(self) -> list[tuple[str, Origin]]:
        """The text, token by token, with who made each; "" where a token completes no character."""
        bounds = [0, *self.text_ends[:-1], len(self.text)]
        return [
            (self.text[start:end], origin)
            for start, end, origin in zip(bounds, bounds[1:], self.origins, strict=False)
        ]

    def _repr_html_(self) -> str:
        texts = (
            self.pieces
            if any(self.text_ends)
            else [(f"{token} ", o) for token, o in zip(self.token_ids, self.origins, strict=True)]
        )
        return coloured_text([(text, _label(origin)) for text, origin in texts], self._caption)

    @property
    def _caption(self) -> str:
        stats = self.stats
        drafts = f", acceptance rate {stats.acceptance_rate:.0%}" if stats.drafted_tokens else ""
        ended = f", ended by {self.error or self.finish_reason}" if self.finish_reason else ""
        return f"{len(self.token_ids)} tokens, {stats.tokens_per_step:.2f} tokens per step{drafts}{ended}"


def _label(origin: Origin) -> str:
    return UNDRAFTED if origin.source == "target" else f"{origin.source}, path {origin.branch + 1}"


class Quotation(NamedTuple):
    """Tokens start .. end - 1 of an output, which stand in a passage of the document `source` from `position` on."""

    start: int
    end: int
    source: str
    passage: int
    position: int


def quotations(sample: Sample) -> list[Quotation]:
    """Neighbouring tokens of one passage, joined."""
    quotations = list[Quotation]()
    for i, x in enumerate(sample.sources):
        if x is None:
            continue
        last = quotations[-1] if quotations else None
        if last and (last.end, last.passage, last.position + i - last.start) == (i, x.passage, x.position):
            quotations[-1] = last._replace(end=i + 1)
        else:
            quotations.append(Quotation(i, i + 1, x.source, x.passage, x.position))
    return quotations


@dataclass(repr=False)
class Result:
    """What `generate` returns for one prompt: `n` samples; the properties are those of the first.

    index: number of the prompt in its call. Sample j's noise is a function of (`seed`, j, index): this result alone is repeated, for the same
        policy, by `generate(prompt, params.with_(seed=result.seed), first_index=result.index)`.
    lossless: whether the output follows the distribution that is named by `lossless_to` exactly.
    """

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    samples: list[Sample]
    lossless: bool = True
    index: int = 0
    lossless_to: str = "the target distribution"

    @property
    def seed(self) -> int:
        return self.samples[0].seed

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.samples[0].token_ids

    @property
    def sources(self) -> list[Quotation]:
        """Which span of the output is a quotation of which passage."""
        return quotations(self.samples[0])

    @property
    def finish_reason(self) -> str | None:
        return self.samples[0].finish_reason

    @property
    def stats(self) -> RequestStats:
        return self.samples[0].stats

    def __repr__(self) -> str:
        return f"Result(id={self.id!r}, prompt_tokens={len(self.prompt_token_ids)}, samples={self.samples!r})"

    def _repr_html_(self) -> str:
        return "<hr>".join(sample._repr_html_() for sample in self.samples)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "id": self.id,
            "index": self.index,
            "prompt": self.prompt,
            "prompt_token_ids": self.prompt_token_ids,
            "lossless": self.lossless,
            "lossless_to": self.lossless_to,
            "samples": [
                {
                    "index": s.index,
                    "seed": s.seed,
                    "text": s.text,
                    "token_ids": s.token_ids,
                    "finish_reason": s.finish_reason,
                    "stop_reason": s.stop_reason,
                    "error": s.error,
                    "sources": [quotation._asdict() for quotation in quotations(s)],
                    "logprobs": None
                    if s.logprobs is None
                    else [{"token_id": t.token_id, "logprob": t.logprob, "top": t.top} for t in s.logprobs],
                    "stats": s.stats.to_dict(),
                }
                for s in self.samples
            ],
        }


class Unread(NamedTuple):
    """Hidden states that a drafter was not told, by layer, and the row of them that is a sequence's."""

    hidden: Mapping[int, Float[np.ndarray, "B N D"]]
    row: int


@dataclass(eq=False)
class Sequence:
    """The engine's record of a sample while it runs.

    token_ids: prompt and output, the one truth about what is committed.  seat: its text in the target, None while waiting.  filling: part of it is still
        to be read.
    due: when, in prompt tokens that the engine reads, see `reader`.
    state: the drafter's, or None where drafting is off.  course: the policy's.  num_told: committed tokens that the state has been told.
    held: whether it has no drafts for now, as their code is being compiled or as its drafter begins anew.
    is_suspect: whether its drafter failed in a step of several sequences, and was not told of a step of this one alone since then.
    stopped: whether its policy drafts nothing for it any more; what is copied from its text is verified nevertheless.
    postponed: size of the batch in which drafts for it did not pay, see `opening`; 0 otherwise.
    copying: whether what is verified in this step was copied from the text, not drafted.
    unread: hidden states of the steps since then, where the drafter needs them.
    speculation: how it is drafted for.
    second_ids, second: how the second sequence begins and where it is, where a decoding method reads one.
    """

    request: Request
    stopper: Stopper
    sample: Sample
    token_ids: list[int]
    seat: Cursor | None = None
    filling: bool = False
    due: int = 0
    state: Any = None
    course: Any = None
    num_told: int = 0
    copying: bool = False
    unread: list[Unread] = field(default_factory=list[Unread])
    drafting: bool = True
    stopped: bool = False
    postponed: int = 0
    held: bool = False
    is_suspect: bool = False
    second_ids: tuple[int, ...] = ()
    second: Cursor | None = None
    speculation: Speculation = PLAIN

    @property
    def cursor(self) -> Cursor:
        """Its text in the target, while it has a slot there."""
        assert self.seat is not None
        return self.seat

    @property
    def second_text(self) -> list[int]:
        """The tokens of the second sequence."""
        return [*self.second_ids, *self.token_ids[self.num_prompt_tokens :]]

    @property
    def has_drafter(self) -> bool:
        """Whether a drafter drafts for it, now or behind a pause."""
        return self.drafting and not self.stopped

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def context(self) -> tuple[tuple[int, ...], ...]:
        """All that its caches are a function of: the source and the beginning of the second sequence, if there are any, and the committed tokens."""
        return self.request.source_token_ids, self.second_ids, tuple(self.token_ids)

    @property
    def num_ahead(self) -> int:
        """Tokens by which the second sequence is longer."""
        return max(0, len(self.second_ids) - self.num_prompt_tokens)

    @property
    def follows_drafts(self) -> bool:
        """See `SamplingParams.follows_drafts`."""
        return self.request.params.follows_drafts

    @property
    def finished(self) -> bool:
        return self.sample.finish_reason is not None

    def commit(self, token_ids: Seq[int], origins: Seq[Origin]) -> None:
        """Go on by emitted tokens: what models read, prompt and output, and what users get, the output alone."""
        self.token_ids += token_ids
        self.sample.token_ids += token_ids
        self.sample.origins += origins

    def publish(self) -> str:
        """Give the sample its text and, last of all, why it ended, for which other threads wait. Returns the text that became certain."""
        self.sample.text = self.stopper.text
        if self.stopper.stop is not None:
            self.sample.stop_reason = self.stopper.stop.stop_reason
            self.sample.finish_reason = self.stopper.stop.finish_reason
        return self.stopper.take()


def slots_of(sequences: Seq[Sequence]) -> list[int]:
    """Where the target holds sequences that run."""
    return [s.cursor.slot for s in sequences]


def alike(sequences: Seq[Sequence]) -> list[tuple[Speculation, list[Sequence]]]:
    """Those that are drafted for alike, in order."""
    groups: dict[Speculation, list[Sequence]] = {}
    for s in sequences:
        groups.setdefault(s.speculation, []).append(s)
    return list(groups.items())
