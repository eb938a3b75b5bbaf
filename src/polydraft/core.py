"""The nouns of polydraft: token trees, drafts, verdicts, and what a drafter, a verifier and a target promise.

A node is a context. Node 0 is the last committed token; row n of every [B, N, V] tensor is the distribution of the next token
given the path 0..n. A chain of gamma drafted tokens has N = gamma + 1 nodes and row gamma of the target distribution is the bonus
row. Every tensor has a leading batch dimension B; trees are padded to N nodes and padding cannot be reached.

    p  target distribution      q  draft distribution      both after sampling parameters, summing to one
"""

import reprlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from functools import cached_property
from numbers import Integral
from operator import index
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.budget import Budget, TreeShape
from polydraft.deprecation import renamed
from polydraft.errors import InvalidInputError
from polydraft.params import SamplingParams

FIXED = frozenset(TreeShape) - {TreeShape.GROWN}
"""Shapes that are settled before the first draw."""


class DraftSampling(Enum):
    """How the children of one node were drawn; it decides which rules may verify them."""

    IID = auto()
    """With replacement from q, duplicates kept."""
    WITHOUT_REPLACEMENT = auto()
    """One after the other from q without the tokens already drawn, in this order."""
    POINT_MASS = auto()
    """Deterministic: top-k, retrieval, n-gram, argmax; there is no q."""
    COUPLED = auto()
    """By an exponential race whose noise the verifier shares: the smallest E/q first."""
    GREEDY_PLUS_ONE = auto()
    """The top n-1 of q, then one draw from the rest of q."""
    INDEPENDENT = auto()
    """With replacement, draw j from a row q_j of its own (several draft models); duplicates kept."""
    LISTED = auto()
    """Paths that each win races of their own: argmin E^(k)/q, one set of clocks a path, which the verifier shares."""
    SYSTEMATIC = auto()
    """The k draws at a context at equal steps of one uniform: draw j is the token where q's cumulative distribution passes (u + j)/k. Copies pool theirs, in node order."""


@dataclass(frozen=True)
class TokenTree:
    """A batch of token trees: topological order, siblings in draw order, duplicates kept, padding last.

    tokens: [B, N] token ids; tokens[:, 0] is the last committed token; padding: 0.
    parents: [B, N] node indices, parents[:, 0] == -1 and parents[:, n] < n; padding: -1.

    Example:
        >>> chain = TokenTree.chain(torch.tensor([[5, 7, 9]]))
        >>> chain.parents.tolist()
        [[-1, 0, 1]]
    """

    tokens: Int[Tensor, "B N"]
    parents: Int[Tensor, "B N"]

    @cached_property
    def host(self) -> tuple[np.ndarray, np.ndarray]:
        """`tokens` and `parents` as arrays on the host, for compiled walks."""
        return self.tokens.cpu().contiguous().numpy(), self.parents.cpu().contiguous().numpy()

    @cached_property
    def lists(self) -> tuple[list[list[int]], list[list[int]]]:
        """`tokens` and `parents` as plain integers."""
        tokens, parents = self.host
        return tokens.tolist(), parents.tolist()

    @classmethod
    def of(cls, tokens: np.ndarray, parents: np.ndarray) -> "TokenTree":
        """From int64 arrays on the host, which the tree shares.

        Example:
            >>> TokenTree.of(np.array([[5, 7]]), np.array([[-1, 0]])).num_nodes
            2
        """
        tree = cls(torch.from_numpy(tokens), torch.from_numpy(parents))
        tree.__dict__["host"] = tokens, parents
        return tree

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_nodes(self) -> int:
        """N, padding included."""
        return self.tokens.shape[1]

    @property
    def is_node(self) -> Bool[Tensor, "B N"]:
        """True where there is a node, False where there is padding."""
        mask = self.parents >= 0
        mask[:, 0] = True
        return mask

    @classmethod
    def chain(cls, tokens: Int[Tensor, "B N"]) -> "TokenTree":
        """One path: node n hangs on node n-1."""
        return cls(tokens, torch.arange(-1, tokens.shape[1] - 1, device=tokens.device).expand_as(tokens).contiguous())

    @classmethod
    def roots(cls, tokens: Int[Tensor, " B"]) -> "TokenTree":
        """Trees with no draft at all: plain decoding."""
        return cls(tokens[:, None], tokens.new_full((len(tokens), 1), -1))


@dataclass(frozen=True)
class NoiseKey:
    """Which noise a row of the batch meets; see `polydraft.noise` for the draws made with it.

    seed: [B] the request's seed.  sample: [B] sample index, for n > 1.
    position: [B] committed length at the start of the round (absolute position for the race stream).
    """

    seed: Int[Tensor, " B"]
    sample: Int[Tensor, " B"]
    position: Int[Tensor, " B"]

    @cached_property
    def host(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`seed`, `sample` and `position` as arrays on the host, for compiled walks."""
        return self.seed.cpu().numpy(), self.sample.cpu().numpy(), self.position.cpu().numpy()

    @classmethod
    def of(cls, seeds: Sequence[int], samples: Sequence[int], positions: Sequence[int]) -> "NoiseKey":
        """A key from plain integers, one each per row."""
        rows = np.array([list(seeds), list(samples), list(positions)], np.int64)
        key = cls(*torch.from_numpy(rows).unbind())
        key.__dict__["host"] = tuple(rows)
        return key


@dataclass(frozen=True)
class Draft:
    """A batch of drafted trees with all that a rule may know of how they were drawn.

    tree: the drafted tokens.  sampling: how siblings were drawn.  shape: what was fixed beforehand.
    probs: [B, R, V] the very rows that the tokens were drawn from, in full; None where `sampling` is POINT_MASS.
    rows: [B, N] row of `probs` that node n was drawn from; -1 = deterministic, root or padding.
        Siblings share one row, and nodes that hang on equal prefixes share one row (bit-equal distributions); only where `sampling` is
        INDEPENDENT has each sibling a row of its own.
    noise: the shared noise, only for COUPLED and LISTED.
    logits: [B, N, V] of the draft model after every node, leaves too, where it drafts in the slots of a decoding method's second sequences; its
        cache then holds every node at its first copy. For the decoding method; no verifier reads them.
    confidence: [B, N] of a draft model in each node's token, see `polydraft.confidence`; None where nobody says. No rule reads it.
    """

    tree: TokenTree
    sampling: DraftSampling
    shape: TreeShape
    probs: Float[Tensor, "B R V"] | None
    rows: Int[Tensor, "B N"]
    noise: NoiseKey | None = None
    logits: Float[Tensor, "B N V"] | None = None
    confidence: Float[Tensor, "B N"] | None = None

    @classmethod
    def empty(cls, roots: Int[Tensor, " B"]) -> "Draft":
        """No draft: the engine then decodes plainly."""
        tree = TokenTree.roots(roots)
        return cls(tree, DraftSampling.POINT_MASS, TreeShape.CHAIN, None, tree.parents)


@dataclass(frozen=True)
class Outcome:
    """What a round keeps.

    path: [B, A] accepted nodes below the root, padded with -1.
    num_accepted: [B]; row b emits num_accepted[b] + 1 tokens, never zero.
    token: [B] the extra token.
    """

    path: Int[Tensor, "B A"]
    num_accepted: Int[Tensor, " B"]
    token: Int[Tensor, " B"]

    @classmethod
    def of(cls, path: np.ndarray, num_accepted: np.ndarray, token: np.ndarray) -> "Outcome":
        """From int64 arrays on the host, which the outcome shares.

        Example:
            >>> Outcome.of(np.array([[1, -1]]), np.array([1]), np.array([9])).lists
            ([[1]], [9])
        """
        outcome = cls(*map(torch.from_numpy, (path, num_accepted, token)))
        outcome.__dict__["host"] = path, num_accepted, token
        return outcome

    @cached_property
    def host(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`path`, `num_accepted` and `token` as arrays on the host."""
        return self.path.cpu().contiguous().numpy(), self.num_accepted.cpu().numpy(), self.token.cpu().numpy()

    @cached_property
    def lists(self) -> tuple[list[list[int]], list[int]]:
        """Accepted nodes without padding, and the extra tokens, as plain integers."""
        path, counts, token = (x.tolist() for x in self.host)
        return [nodes[:count] for nodes, count in zip(path, counts, strict=True)], token

    def emitted(self, tree: TokenTree) -> list[list[int]]:
        """The tokens that each row emits: accepted path, then the extra token."""
        tokens = tree.host[0]
        path, counts, extra = self.host
        return [
            [*tokens[b].take(path[b, :count]).tolist(), last] if count else [last]
            for b, (count, last) in enumerate(zip(counts.tolist(), extra.tolist(), strict=True))
        ]


class Verdict(Protocol):
    """What a rule decides, before any randomness; randomness then is two draws: stop node and extra token."""

    @property
    def stop(self) -> Float[Tensor, "B N"]:
        """P(the last accepted node is n); rows sum to 1; padding 0; equal siblings: on the first copy."""
        ...

    def after(self, node: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
        """Distribution of the one extra token once stopped at `node`."""
        ...

    def sample(self, key: NoiseKey) -> Outcome:
        """Draw the stop node and the extra token."""
        ...


@renamed({"laws": "draft_sampling"})
@dataclass(frozen=True)
class Method:
    """What a verifier or a drafter declares about itself; tables, checks and docs are made from it.

    draft_sampling: draft sampling methods that a verifier accepts, or the one that a drafter makes.
    shapes: that a verifier accepts, or that a drafter makes: the one of its budget, but for GROWN, which it makes of any.
    arxiv: id such as "2211.17192", or "" where there is no paper.
    shared_noise: the verdict is a function of the draft's own noise, a point mass once that is known.
    ranked: a drafter whose trees of any number of nodes are its most probable nodes, in this order.
    own_vocabulary: a drafter whose draft model has a tokenizer of its own.
    """

    name: str
    title: str
    authors: str
    year: int
    arxiv: str
    draft_sampling: frozenset[DraftSampling]
    shapes: frozenset[TreeShape]
    lossless: bool = True
    shared_noise: bool = False
    ranked: bool = False
    own_vocabulary: bool = False


@dataclass(frozen=True)
class DecodingMethod:
    """What a decoding method declares about itself. lossless_to: the distribution that outputs follow with a lossless verifier, in words.
    drafter: that drafts for it where none is named.  The other fields are as of `Method`."""

    name: str
    title: str
    authors: str
    year: int
    arxiv: str
    lossless_to: str
    drafter: str = ""


@runtime_checkable
class Verifier(Protocol):
    """A rule: drafts and target distributions in, a verdict out. `info` declares what it accepts."""

    @property
    def info(self) -> Method: ...

    def __call__(self, draft: Draft, target_probs: Float[Tensor, "B N V"]) -> Verdict: ...


@runtime_checkable
class Walking(Protocol):
    """A verifier with a fast form, which is tested against its verdict. All is on the host."""

    def walk(self, draft: Draft, logits: Float[Tensor, "B N V"], key: NoiseKey) -> Outcome | None:
        """The outcome that the verdict for p = softmax(logits) would sample, in one call that makes only the distributions that it needs, for
        float32 logits; None where the call does not apply."""
        ...


@dataclass(frozen=True)
class Request:
    """One sequence to generate.

    seed, sample: its noise, never shared by two requests that run together: policies look at the whole batch, and would couple them.
    `seed` is resolved (never None); `sample` is in [0, 2**32): sample j of prompt i of a call is number 65,536 i + j.
    slot: of the target, which holds all tokens but the last, for drafters that share its cache; None where nobody says.
    second_slot: the same of the second sequence that a decoding method reads, in its own model.
    budget: of each of its drafts, in place of the engine's policy; max_depth 0 decodes it plainly.
    drafter, verifier: by name, in place of the engine's: one of those that it was built with, and a rule that is exact for it.
    prediction_token_ids: what the output may be, as its sender guesses; drafters from text look it up, and nothing else reads it.
    source_token_ids: what the encoder of an encoder-decoder reads; the prompt then is how every output begins, see `EncoderDecoder`.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    sample: int = 0
    slot: int | None = None
    second_slot: int | None = None
    budget: Budget | None = None
    drafter: str | None = None
    verifier: str | None = None
    source_token_ids: tuple[int, ...] = ()
    prediction_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("prompt_token_ids", "source_token_ids", "prediction_token_ids"):
            object.__setattr__(self, name, _token_ids(name, getattr(self, name)))
        if not self.prompt_token_ids:
            raise InvalidInputError(
                "an empty prompt was given; expected at least one token. Give some text, or the model's BOS token."
            )
        for name, value, valid, expected in (
            ("id", self.id, isinstance(self.id, str), "a string"),
            (
                "params",
                self.params,
                isinstance(self.params, SamplingParams),
                "a SamplingParams, such as SamplingParams(max_tokens=64)",
            ),
            ("seed", self.seed, _is_whole(self.seed, 1 << 63), "a whole number in [0, 2**63)"),
            ("sample", self.sample, _is_whole(self.sample, 1 << 32), "a whole number in [0, 2**32)"),
        ):
            if not valid:
                raise InvalidInputError(f"{name}={value!r} was given in a request; expected {expected}.")


def _is_whole(value: object, end: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) < end


def _token_ids(name: str, ids: Any) -> tuple[int, ...]:
    """Token ids of a request as Python's integers.

    Raises:
        InvalidInputError: not a sequence of whole numbers.
    """
    if type(ids) is tuple and all(type(token) is int for token in ids):
        return ids
    try:
        return tuple(index(token) for token in ids)
    except TypeError as error:
        raise InvalidInputError(
            f"{name}={reprlib.repr(ids)} was given in a request; expected whole numbers: token ids."
        ) from error


@dataclass(frozen=True)
class AuxRows:
    """Extra rows of a scoring pass, returned and never committed; real rows never see them.

    inputs: [B, X] token ids or [B, X, D] embeddings.  positions: [B, X] below the root (root = 0).
    nodes: [B, X] tree node whose path each row sees.  mask: [B, X, X] which aux rows see which.
    """

    inputs: Tensor
    positions: Int[Tensor, "B X"]
    nodes: Int[Tensor, "B X"]
    mask: Bool[Tensor, "B X X"]


@dataclass(frozen=True)
class Scores:
    """What one pass of the target returns.

    logits: [B, N, V] in float32; row n is for the token after node n of `tree`.
    hidden: layer index -> [B, T, D], only the layers asked for: T = N, after a prefill all tokens that it was given, zero behind
        the end of a shorter text.  aux_logits: [B, X, V] for auxiliary rows.
    second: the same tree in the second sequence of each request, where a decoding method reads one.
    """

    tree: TokenTree
    logits: Float[Tensor, "B N V"]
    hidden: Mapping[int, Float[Tensor, "B T D"]] = field(default_factory=dict[int, Tensor])
    aux_logits: Float[Tensor, "B X V"] | None = None
    second: "Scores | None" = None


@dataclass(frozen=True)
class Needs:
    """What a drafter or a decoding method asks of the target beyond its distributions, or what a target has to offer.

    hidden: layers whose states are wanted of every committed token: 0 is the embedding, l what layer l puts out, the last one
        after the final norm, as in transformers' `hidden_states`.
    embeddings: `target.embed(token_ids) -> [..., D]`.  head: `target.head(hidden) -> [..., V]`, logits of last states.
    logits: those of the rounds that it drafts for.  aux: auxiliary rows in the pass, see `AuxRows`.
    every_round: to be told of rounds without drafts too, one by one.

    Example:
        >>> Needs(hidden=(2,)) | Needs(hidden=(0, 2), head=True)
        Needs(hidden=(0, 2), embeddings=False, head=True, logits=False, aux=False, every_round=False)
    """

    hidden: tuple[int, ...] = ()
    embeddings: bool = False
    head: bool = False
    logits: bool = False
    aux: bool = False
    every_round: bool = False

    def __or__(self, other: "Needs") -> "Needs":
        """What either asks for."""
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        hidden = tuple(sorted({*self.hidden, *other.hidden}))
        return Needs(**{name: a or b for name, (a, b) in pairs.items() if name != "hidden"}, hidden=hidden)

    @property
    def each_round(self) -> bool:
        """Whether what is needed of a round cannot be had later, from its tokens alone."""
        return self.every_round or bool(self.hidden)


class Drafter(Protocol):
    """A source of drafts. State is a value beside the object: only the newest state of a request is valid.

    `info.draft_sampling` and `info.shapes` hold the one draft sampling method and the shapes that it makes. `needs` says what it asks of the target
    beyond tokens; a target that cannot give it is refused when the engine is built. One that does not need every
    round is not told of rounds for which no draft was asked until it is asked for the next, then of all their tokens at once,
    with the hidden states that it needs and without logits.

    One that needs `hidden` has `read(states, scores) -> states`, called after `start` with the states of all tokens but the last
    ([B, T, D], zero behind the end of a shorter text): what the rounds do not score. One that needs `aux` has
    `aux(states) -> AuxRows | None`, called in rounds for which a draft was asked, whose nodes are those of its last proposal; the
    rows' logits come with the next `observe`. One that needs `embeddings` or `head` is given the target when it is built.
    `drafters.base` has what a drafter and its states may offer beyond that.
    """

    @property
    def info(self) -> Method: ...

    @property
    def needs(self) -> Needs: ...

    def start(self, requests: Sequence[Request]) -> list[Any]:
        """Fresh state for each request; reads the prompt."""
        ...

    def propose(self, states: Sequence[Any], budgets: Sequence[Budget]) -> Draft:
        """One batched call; row b belongs to states[b]; an empty row is legal."""
        ...

    def observe(self, states: Sequence[Any], outcome: Outcome, scores: Scores) -> list[Any]:
        """States after a round: row b emitted `outcome.emitted(scores.tree)[b]`; `scores` has what `needs` names."""
        ...

    def release(self, states: Sequence[Any]) -> None:
        """Give back what the states of finished requests hold (slots, buffers)."""
        ...


class Target(Protocol):
    """A model that scores token trees in slots; a slot holds the keys and values of committed tokens and nothing else.

    Node 0 of a tree is committed by the text but not yet in the cache: `score` feeds all nodes and `commit` keeps the
    rows of the root and of the accepted path. The extra token is the root of the next tree.

    Derive from this class: what has a value here is optional.

    name: that it is known by again.  eos_token_ids, bos_token_id: that end and begin a text.  rolls_back: whether `cut` is cheap.
    draft_ids: tokens that a draft model has logits of, where they are not all.  pool: entered around each pass.
    checkpoint: where its weights can be read again.  weight_bytes, cache_bytes: of its weights and of a full cache, 0 where nobody says.
    weight_format, quantization_error, activations, rounded_again, draft_vocabulary: see `models.compiled.llama`.
    """

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    name: str = ""
    eos_token_ids: Sequence[int] = ()
    bos_token_id: int | None = None
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    rolls_back: bool = True
    draft_ids: np.ndarray = np.empty(0, np.int64)
    pool: Any = nullcontext()
    checkpoint: Any = None
    weight_bytes: int = 0
    cache_bytes: int = 0
    cache_grows: bool = False
    weight_format: str | None = None
    quantization_error: float | None = None
    activations: str | None = None
    rounded_again: Mapping[str, set[str]] = MappingProxyType({})
    draft_vocabulary: int | None = None

    @property
    def num_threads(self) -> int:
        """Threads that a pass runs on."""
        return torch.get_num_threads()

    @property
    def lengths(self) -> np.ndarray:
        """[slots] committed tokens in each cache, to be read; see `models.slots`."""
        ...

    @property
    def offers(self) -> Needs:
        """What it can give beyond logits; a bit that is set stands for the method of that name."""
        return Needs()

    def prefill(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]], *, hidden: Sequence[int] = ()) -> Scores:
        """Append committed tokens to the slots' caches, in chunks; logits of the last row only ([B, 1, V]), hidden states of all."""
        ...

    def score(
        self, slots: Sequence[int], tree: TokenTree, *, hidden: Sequence[int] = (), aux: AuxRows | None = None, since: int = 0
    ) -> Scores:
        """One pass over the nodes `since` .. N-1, whose ancestors the last calls on these slots scored (a tree that grows).

        The committed cache is not changed. hidden: layers whose states are wanted, as in transformers' `hidden_states`.
        """
        ...

    def commit(self, slots: Sequence[int], outcome: Outcome) -> None:
        """Keep the rows of the root and the path of the last `score`; drop the siblings."""
        ...

    def cut(self, slot: int, length: int) -> None:
        """Forget all committed tokens of a slot but the first `length`."""
        ...

    def copy(self, source: int, slot: int, length: int) -> None:
        """The first `length` committed tokens of a slot into an empty one: a prefix that two sequences share."""
        ...

    def release(self, slots: Sequence[int]) -> None:
        """Empty the slots."""
        ...


@runtime_checkable
class Proposing(Protocol):
    """A draft model that makes whole proposals in one call, None where it does not apply; see `models.compiled.proposals`.

    What it scored is committed like any tree.
    """

    def propose_paths(self, *arguments: Any, **options: Any) -> Any: ...

    def propose_tree(self, *arguments: Any, **options: Any) -> Any: ...


@runtime_checkable
class EncoderDecoder(Target, Protocol):
    """A target that reads a source before it writes: each slot holds one, beside the committed tokens of the output.

    decoder_prompt: ids with which every output begins.  max_source_len: most tokens of a source.
    """

    decoder_prompt: tuple[int, ...]
    max_source_len: int

    def check_source(self, ids: Sequence[int], whose: str) -> None:
        """Refuse a source that is empty or too long."""
        ...

    def encode(self, slots: Sequence[int], sources: Sequence[Sequence[int]]) -> None:
        """Read the source of each slot once; it stays until the slot is released."""
        ...


@runtime_checkable
class BlockCopying(Target, Protocol):
    """A target whose KV cache entries can be copied out of a slot, and back into any, in blocks of `block_tokens` tokens; 0 where it cannot now."""

    block_tokens: int
    bytes_per_token: int

    def read_block(self, slot: int, start: int) -> Any:
        """A copy of the entries of a block of committed tokens; start: a multiple of `block_tokens`."""
        ...

    def write_block(self, slot: int, entries: Any) -> None:
        """Append a block to a slot that holds whole blocks; its tokens are committed."""
        ...


@runtime_checkable
class Mixing(Target, Protocol):
    """A target whose passes take pieces of prompts beside the trees of others."""

    def score_mixed(
        self, slots: Sequence[int], tree: TokenTree, pieces: Mapping[int, Sequence[int]], *, hidden: Sequence[int] = ()
    ) -> tuple[Scores, Scores]:
        """`Target.score` of the tree in the same pass as a `prefill` of each piece, by slot: the results of both, the second without logits."""
        ...


class Decoding(Protocol):
    """What is sampled, from the target's rows: its sampling parameters on its logits are one decoding method, contrastive decoding another.

    needs: hidden states that it reads in `scores`.
    gives_logits: whether it returns logits in place of the target's, to which each request's sampling parameters apply and the rules'
        fused walks; else it returns p itself, instead of what the parameters would make.

    A method of several logits that belong together (a second model's, the same model's after another prompt) also is a `SecondSequenceDecoding`.
    One that is built by name is a `NamedDecoding` and has `build(parts, **options)`.
    A row depends on its own path alone: methods are called for whole batches and, where that fails, for single sequences.
    """

    needs: Needs
    gives_logits: bool

    def __call__(
        self, scores: Scores, tree: TokenTree, contexts: Sequence[Sequence[int]], second: Scores | None = None
    ) -> Float[Tensor, "B N V"]:
        """[B, N, V], row n for the token after node n. contexts: committed tokens of each sequence."""
        ...


@runtime_checkable
class NamedDecoding(Protocol):
    """A decoding method that says what it is: what an engine says of outputs it reads here."""

    info: DecodingMethod


@runtime_checkable
class SecondSequenceDecoding(Protocol):
    """A decoding method that reads a second sequence of each request, which begins differently and goes on with the same tokens.

    second_model: that runs it, with the target's vocabulary; None is the target, in slots of its own and in the same pass. Where it is the
        engine's draft model too, drafts are made in the slots of its second sequences, and what the draft pass scored is not scored again.
    """

    second_model: Target | None

    def second_prompt(self, request: Request) -> Sequence[int]:
        """How it begins: at least one token."""
        ...
