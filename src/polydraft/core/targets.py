"""What a target model promises: scores of token trees in slots, and what it offers beyond logits."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from polydraft.core.outcomes import Outcome
from polydraft.core.trees import TokenTree


@dataclass(frozen=True)
class Scores:
    """What one forward pass of the target returns, as arrays of NumPy.

    logits: [B, N, V] in float32; row n is for the token after node n of `tree`.
    hidden: layer index -> [B, T, D], only the layers asked for: T = N, after a prefill all tokens that it was given, zero behind
        the end of a shorter text.  extra_logits: [B, X, V] of nodes that a drafter asked for beside its draft, see `Offers.extra_nodes`.
    second: the same tree in the second sequence of each request, where a decoding method reads one.
    """

    tree: TokenTree
    logits: Float[np.ndarray, "B N V"]
    hidden: Mapping[int, Float[np.ndarray, "B T D"]] = field(default_factory=dict[int, np.ndarray])
    extra_logits: Float[np.ndarray, "B X V"] | None = None
    second: "Scores | None" = None


@dataclass(frozen=True)
class Needs:
    """What a drafter or a decoding method asks of the target beyond its distributions, or what a target has to offer.

    hidden: layers whose states are wanted of every committed token: 0 is the embedding, l what layer l puts out, the last one
        after the final norm, as in transformers' `hidden_states`.
    embeddings: `target.embed(token_ids) -> [..., D]`.  head: `target.head(hidden) -> [..., V]`, logits of last states; arrays of NumPy.
    logits: those of the steps that it drafts for.  every_step: to be told of steps without drafts too, one by one.

    Example:
        >>> Needs(hidden=(2,)) | Needs(hidden=(0, 2), head=True)
        Needs(hidden=(0, 2), embeddings=False, head=True, logits=False, every_step=False)
    """

    hidden: tuple[int, ...] = ()
    embeddings: bool = False
    head: bool = False
    logits: bool = False
    every_step: bool = False

    def __or__(self, other: "Needs") -> "Needs":
        """What either asks for."""
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        hidden = tuple(sorted({*self.hidden, *other.hidden}))
        return Needs(**{name: a or b for name, (a, b) in pairs.items() if name != "hidden"}, hidden=hidden)

    @property
    def each_step(self) -> bool:
        """Whether what is needed of a step cannot be had later, from its tokens alone."""
        return self.every_step or bool(self.hidden)


class Target(Protocol):
    """A model that scores token trees in slots; a slot holds the keys and values of committed tokens and nothing else.

    Node 0 of a tree is committed by the text but not yet in the cache: `score` feeds all nodes and `commit` retains the
    rows of the root and of the accepted path. The extra token is the root of the next tree.

    Derive from this class: what has a value here is optional.

    name: that it is known by again.  eos_token_ids, bos_token_id: that end and begin a text.  rolls_back: whether `cut` is cheap.
    on_device: whether it computes on a device of its own, beside the processors.
    same_bits: whether a row has the same bits whatever is beside it in a forward pass.
    absent_ids: ids below `vocab_size` without a token, which have probability 0.
    plain_reason: why no drafts can be scored, or None where they can.
    draft_ids: tokens that a draft model has logits of, where they are not all.  pool: entered around each forward pass.
    passes: forward passes so far.  checkpoint: where its weights can be read again.  weight_bytes, cache_bytes: of its weights and of a full cache, 0 where nobody says.
    cache_grows: whether memory is taken as tokens are written.  cache_tokens: that all slots may hold together, 0 for full slots.
    number_format: what it computes in.
    weight_format, quantization_error, activations, rounded_again, draft_vocabulary: see `models.compiled.model`.
    """

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    name: str = ""
    eos_token_ids: Sequence[int] = ()
    bos_token_id: int | None = None
    on_device: bool = False
    same_bits: bool = True
    rolls_back: bool = True
    plain_reason: str | None = None
    absent_ids: Sequence[int] = ()
    draft_ids: np.ndarray = np.empty(0, np.int64)
    pool: Any = nullcontext()
    passes: int = 0
    checkpoint: Any = None
    weight_bytes: int = 0
    cache_bytes: int = 0
    cache_grows: bool = False
    cache_tokens: int = 0
    weight_format: str | None = None
    number_format: str = "float32"
    quantization_error: float | None = None
    activations: str | None = None
    rounded_again: Mapping[str, set[str]] = MappingProxyType({})
    draft_vocabulary: int | None = None

    @property
    def num_threads(self) -> int:
        """Threads that a forward pass runs on."""
        return 1

    @property
    def lengths(self) -> np.ndarray:
        """[slots] committed tokens in each cache, to be read; see `models.slots`."""
        ...

    @property
    def offers(self) -> Needs:
        """What it can give beyond logits; a bit that is set stands for the method of that name."""
        return Needs()

    def prefill(
        self, slots: Sequence[int], token_ids: Sequence[Sequence[int]], *, hidden: Sequence[int] = ()
    ) -> Scores:
        """Append committed tokens to the slots' caches, in chunks; logits of the last row only ([B, 1, V]), hidden states of all."""
        ...

    def score(
        self, slots: Sequence[int], tree: TokenTree, *, hidden: Sequence[int] = (), since: int = 0
    ) -> Scores:
        """One forward pass over the nodes `since` .. N-1, whose ancestors the last calls on these slots scored (a tree that grows).

        The committed cache is not changed. hidden: layers whose states are wanted, as in transformers' `hidden_states`.
        """
        ...

    def commit(self, slots: Sequence[int], outcome: Outcome) -> None:
        """Retain the KV cache entries of the root and the path of the last `score`; drop the siblings."""
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

    reads_prompts_apart: bool = False
    """Whether a token of a prompt leaves another entry in the cache than one that was generated, which is read again where it stands in a prompt."""

    def set_prompt_length(self, slot: int, length: int) -> None:
        """The text of a slot begins with so many tokens that stand in a prompt. How a token is read may depend on that, and on nothing beside its text:
        not on what is read with it, nor in which pieces."""

    def draft_over(self, num_first: int | None = None, special_ids: Sequence[int] = ()) -> bool:
        """Compute logits of a part of the vocabulary only, as a draft model, see `models.growing.draft_vocabulary`; False where it cannot."""
        return False

    def resumes(self, slot: int, length: int) -> int:
        """Of the first `length` committed tokens of a slot, behind how many a text goes on with nothing read again: fewer where there is a state."""
        return length


@runtime_checkable
class Proposing(Protocol):
    """A draft model that makes whole proposals in one call, None where it does not apply; see `models.growing.proposals`.

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
    """A target whose KV cache entries can be copied out of a slot, and back into any, in blocks of `block_tokens` tokens; 0 where it cannot now.

    state_bytes: of the states of recurrent layers in a slot, 0 where there are none.
    """

    block_tokens: int
    bytes_per_token: int
    state_bytes: int

    def read_block(self, slot: int, start: int) -> Any:
        """A copy of the entries of a block of committed tokens; start: a multiple of `block_tokens`."""
        ...

    def reads(self, slot: int, token_ids: Sequence[int]) -> None:
        """The text of a slot goes on so, though no forward pass reads it: its entries are written in blocks."""
        ...

    def write_block(self, slot: int, entries: Any) -> None:
        """Append a block to a slot that holds whole blocks; its tokens are committed."""
        ...

    def read_states(self, slot: int, length: int) -> Any:
        """A copy of the states of recurrent layers after the first `length` tokens, a multiple of `block_tokens`; None where nobody knows it any more."""
        ...

    def write_states(self, slot: int, states: Any) -> None:
        """They are the states of recurrent layers after the committed tokens, which were written in blocks."""
        ...


@runtime_checkable
class Mixing(Target, Protocol):
    """A target whose forward passes take pieces of prompts beside the trees of others."""

    def score_mixed(
        self,
        slots: Sequence[int],
        tree: TokenTree,
        pieces: Mapping[int, Sequence[int]],
        *,
        hidden: Sequence[int] = (),
    ) -> tuple[Scores, Scores]:
        """`Target.score` of the tree in the same forward pass as a `prefill` of each piece, by slot: the results of both, the second without logits."""
        ...
