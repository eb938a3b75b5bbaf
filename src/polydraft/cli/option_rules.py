"""Which options of commands exclude or need each other: one table, from which the checks before loading come.

An option is written as on the command line, alone or with the value that it is about: "--exact", "--drafter none".
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from polydraft.config import NEEDED, SpeculationConfig, flag_of
from polydraft.errors import InvalidInputError
from polydraft.methods.registry import DRAFTERS, HEADS, OF_TEXT


class Given(NamedTuple):
    """Options of a command.

    values: of all by name, defaults too, "" for those without one.  named: those on the command line, in order.
    """

    values: Mapping[str, str]
    named: tuple[str, ...]

    def has(self, option: str) -> bool:
        """Whether an option is on the command line, or has this value, be it the default. A drafter's kind is left aside."""
        name, _, value = option.partition(" ")
        if not value:
            return name in self.named
        return self.values.get(name, "").partition(":")[0] == value

    def written(self, option: str) -> str:
        """As it was given, with its value."""
        name = option.partition(" ")[0]
        return f"{name} {self.values[name]}".strip()


class Excluding(NamedTuple):
    """first, others: of which one leaves nothing to say for the other.  unless: what gives both a meaning.  why: "{other}" is the other.  of: the command alone."""

    first: tuple[str, ...]
    others: tuple[str, ...]
    why: str
    unless: tuple[str, ...] = ()
    of: str = ""

    def check(self, given: Given) -> None:
        """Refuse two of them."""
        if any(map(given.has, self.unless)):
            return
        for option, other in self._pairs(given):
            raise InvalidInputError(
                f"{given.written(option)} and {given.written(other)} were given; {self.why.format(other=other.partition(' ')[0])}. Drop one of them."
            )

    def _pairs(self, given: Given) -> Iterator[tuple[str, str]]:
        others = [
            other for other in self.others if given.has(other) and other.partition(" ")[0] in given.named
        ]
        return ((option, other) for option in self.first if given.has(option) for other in others)


class Needing(NamedTuple):
    """first: says nothing without one of others.  why: goes behind their names.  of: the command alone."""

    first: tuple[str, ...]
    others: tuple[str, ...]
    why: str
    of: str = ""

    def check(self, given: Given) -> None:
        """Refuse it alone, where the command has one of the others."""
        has_one = any(other.partition(" ")[0] in given.values for other in self.others)
        alone = next((option for option in self.first if given.has(option)), None)
        if alone is not None and has_one and not any(map(given.has, self.others)):
            raise InvalidInputError(
                f"{given.written(alone)} was given without {' or '.join(self.others)}, {self.why}. Add it, or drop {alone}."
            )


DRAFT_MODEL = ("--draft-model", "--draft-quantization", "--draft-vocabulary")
MODELS_OF_OTHERS = ("--decoding", "--offer")
"""A decoding method may have the draft model as its amateur, and requests may name a drafter that is offered."""
SHARED_NOISE = ("--verifier race", "--verifier list_race")
"""They draw the same text with drafts and without."""
ONE_SAMPLE = ("--n 1",)
RULES: tuple[Excluding | Needing, ...] = (
    Excluding(
        ("--drafter none",), ("--verifier",), "without drafts {other} says nothing", unless=SHARED_NOISE
    ),
    Excluding(
        ("--drafter none",),
        ("--head", "--index", "--profile", "--asynchronous", "--lead-cap"),
        "without drafts {other} says nothing",
    ),
    Excluding(
        ("--drafter none",),
        ("--depth", "--num-paths", "--draft-tree", "--drafter-option"),
        "without drafts {other} says nothing",
        unless=("--offer",),
    ),
    Excluding(
        ("--drafter none",), DRAFT_MODEL, "without drafts {other} says nothing", unless=MODELS_OF_OTHERS
    ),
    Excluding(
        tuple(f"--drafter {name}" for name in (*OF_TEXT, *HEADS)),
        DRAFT_MODEL,
        "this drafter reads no draft model",
        unless=MODELS_OF_OTHERS,
    ),
    Excluding(("--head",), DRAFT_MODEL, "the head drafts, without a draft model", unless=MODELS_OF_OTHERS),
    Excluding(
        tuple(f"--drafter {name}" for name in DRAFTERS),
        ("--index",),
        "an index is read by drafters of a corpus, such as trigram and retrieval",
    ),
    Excluding(
        tuple(f"--drafter {name}" for name in DRAFTERS if name not in HEADS),
        ("--head",),
        "a head is read by its own drafter",
    ),
    Excluding(
        ("--profile",),
        ("--depth", "--num-paths", "--draft-tree"),
        "a profile is for draft shapes that the policy chooses",
    ),
    Excluding(("--draft-tree",), ("--depth", "--num-paths"), "a tree has its own depth and number of paths"),
    Excluding(
        ("--asynchronous",),
        ("--profile", "--num-paths", "--draft-tree"),
        "asynchronous drafts are one path, as long as the target lets them",
    ),
    Excluding(("--exact",), ("--quantization",), "exact are the weights as they are in the file"),
    Excluding(
        ("--backend transformers",),
        ("--quantization", "--exact", "--cache-dtype", "--draft-quantization", "--draft-vocabulary"),
        "only the compiled backend has {other}",
    ),
    Excluding(
        ("--tensor-parallel",),
        ("--quantization", "--exact", "--cache-dtype", "--backend compiled"),
        "only transformers' models are shared by processes",
    ),
    Excluding(("--json",), ("--stream",), "JSON comes when the text is whole"),
    Excluding(("--show",), ("--json", "--no-stream"), "colours are of one text while it is streamed"),
    Excluding(("--show", "--stream"), ("--n",), "one text alone is streamed", unless=ONE_SAMPLE),
    Excluding(("--quick",), ("--repetitions",), "a quick run has its own number of them"),
    Excluding(
        ("--share",),
        ("--drafter",),
        "shared outputs are for the drafter suffix",
        unless=("--drafter suffix",),
    ),
    Excluding(("--warm",), ("--json",), "what is compiled reports nothing"),
    Excluding(("--warm",), ("--model",), "what is compiled is the same for all models"),
    Excluding(("--print",), ("--draft-model",), "no server is started that could load it"),
    Excluding(("--kind text",), ("--model", "--append"), "{other} is for passages", of="build"),
    Excluding(
        ("--kind passages",), ("--tokenizer",), "passages are read with the tokenizer of --model", of="build"
    ),
    Excluding(
        ("--url",),
        (
            "--draft-model",
            "--drafter",
            "--verifier",
            "--depth",
            "--num-paths",
            "--backend",
            "--top-p",
            "--top-k",
            "--self-test",
        ),
        "the server drafts, and is asked with temperature and length alone",
        of="check",
    ),
    Excluding(("--start",), ("--size",), "the head to start from has its sizes"),
    *(
        Needing(
            (flag_of(SpeculationConfig, name),), (flag_of(SpeculationConfig, needed),), "whose option it is"
        )
        for name, needed in NEEDED.items()
    ),
    Needing(("--index",), ("--drafter",), "which reads it"),
    Needing(("--trace",), ("--asynchronous",), "whose option it is"),
    Needing(("--logprobs",), ("--json",), "which alone reports them"),
    Needing(("--name",), ("--url",), "whose model it names", of="check"),
    Needing(("--url",), ("--model",), "the model that the server says it has", of="check"),
    Needing(("--max-replicas", "--cpus", "--gpus", "--address"), ("--replicas",), "which it is about"),
)
"""Rows that name options which a command does not have say nothing about it."""


def check_options(command: str, given: Given) -> None:
    """Refuse options of a command that contradict each other, or say nothing.

    Raises:
        InvalidInputError: naming both.

    Example:
        >>> check_options("generate", Given({"--drafter": "none", "--depth": "4"}, ("--drafter", "--depth")))
        Traceback (most recent call last):
        polydraft.errors.InvalidInputError: --drafter none and --depth 4 were given; without drafts --depth says nothing. Drop one of them.
    """
    for rule in RULES:
        if rule.of in ("", command):
            rule.check(given)
