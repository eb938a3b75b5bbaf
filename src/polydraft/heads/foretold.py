"""Heads that know the logits of all depths after one forward pass: rows that are copied, with what drafted tokens add, and the model that has them.

Medusa's heads, rows that a target transferred, a block that was drafted at once: what they know of a sequence before its drafts are
logits by depth, [K, D]. `DepthDistributions.know` computes them; all kinds of drafts come from `proposals` unchanged, which copies them, and adds what
the drafted tokens before a node say, where a head has such a part (`heads.markov`). Branches cost no forward pass of the head. Nothing is cached: a slot
has no columns.

A depth's distribution is made once where no drafted token says anything (`heads.markov`). A most probable tree adds a Markov part's bias to the
CANDIDATES largest of the depth alone, as a tree of point masses may be any; the rows of draws have it in full.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numba.extending import overload

from polydraft.core import Needs, SamplingParams, Scores, TokenTree
from polydraft.heads.markov import Markov, add_bias, bias_vectors, markov
from polydraft.models.growing.draft_vocabulary import draft_samplings
from polydraft.models.growing.proposals import CompiledProposals
from polydraft.models.growing.rows import FORETELLING, Foretelling, draft_distribution, draft_forward
from polydraft.models.matrices.kernels import copy_row
from polydraft.models.matrices.vectors import aligned
from polydraft.models.mixers.cache import whole
from polydraft.models.slots import RowAndStates
from polydraft.numerics.compile_time import inner
from polydraft.numerics.compiled_code import njit
from polydraft.numerics.threads import ROWS, sync

CANDIDATES = 256
"""Tokens of a depth to which a Markov part's bias is added."""
_f32 = np.float32


class DepthSizes(NamedTuple):
    """As `layers.Sizes`; outputs: D in whole panels."""

    outputs: int


class DepthMemory(NamedTuple):
    """As `cache.SlotMemory`."""

    lengths: np.ndarray


class DepthArrays(NamedTuple):
    """logits: [slots, K, outputs], of the first to the K-th token behind the root."""

    sizes: DepthSizes
    memory: DepthMemory
    logits: np.ndarray
    markov: Markov


@njit(cache=True, nogil=True)
def depth_forward(model, slots, tokens, parents, first_nodes, node_ends, logits_from, logits):
    """Logits of the nodes logits_from[b] .. node_ends[b]-1 that are no padding, each those of its depth and path, see `forward.compiled_forward`."""
    row = 0
    rank = model.markov.words.shape[1]
    vectors = np.empty((len(logits) if model.markov.kind else 0, rank), _f32)
    for b in range(len(slots)):
        for n in range(max(first_nodes[b], logits_from[b]), node_ends[b]):
            if n > 0 and parents[b, n] < 0:
                continue
            depth = _depth_of(parents[b], n)
            copy_row(model.logits[slots[b], depth], logits[row])
            if model.markov.kind:
                bias_vectors(model.markov, slots[b], tokens[b], parents[b], n, depth, vectors[row])
            row += 1
    if model.markov.kind:
        add_bias(model.markov.rows, vectors, logits, row)


@overload(draft_forward)
def _(model, slots, tokens, parents, first_nodes, node_ends, logits_from, logits):
    if model.instance_class is DepthArrays:
        return lambda model, slots, tokens, parents, first_nodes, node_ends, logits_from, logits: (
            depth_forward(model, slots, tokens, parents, first_nodes, node_ends, logits_from, logits)
        )
    return None


@inner
def _depth_of(parents, n):
    depth = 0
    while parents[n] >= 0:
        depth += 1
        n = parents[n]
    return depth


@inner(error_model="numpy")
def _row(model, slot, tokens, parents, node, logits):
    """See `rows.foretold_row`."""
    depth = _depth_of(parents, node)
    copy_row(model.logits[slot, depth], logits[0])
    if model.markov.kind:
        vectors = np.empty((1, model.markov.words.shape[1]), _f32)
        bias_vectors(model.markov, slot, tokens, parents, node, depth, vectors[0])
        add_bias(model.markov.rows, vectors, logits, 1)


@inner
def _rows_by_depth(model):
    """See `rows.rows_by_depth`."""
    return model.markov.kind == 0


@inner(error_model="numpy")
def _certainty(model, slot, depth, token):
    """What the head's confidence part says of the place behind a token of this depth."""
    markov = model.markov
    if len(markov.sure_place) == 0:
        return 1.0
    logit = markov.sure[slot, depth]
    for i in range(len(markov.sure_word)):
        logit += markov.words[token, i] * markov.sure_word[i]
    return 1.0 / (1.0 + np.exp(-np.float64(logit)))


class DepthRoom(NamedTuple):
    """The candidates of a depth, made when it opens. places: of the draft vocabulary.  ids: tokens.  probs: at their depth.  size, rest: [1] how many there
    are, and what all others have.  biased: probs behind a node.  rows: [r, C] of W2.  vector: [r].  logits, compact, order: of all.
    """

    places: Int[np.ndarray, " C"]
    ids: Int[np.ndarray, " C"]
    probs: Float[np.ndarray, " C"]
    size: Int[np.ndarray, " 1"]
    rest: Float[np.ndarray, " 1"]
    biased: Float[np.ndarray, " C"]
    rows: Float[np.ndarray, "r C"]
    vector: Float[np.ndarray, " r"]
    logits: Float[np.ndarray, " outputs"]
    compact: Float[np.ndarray, " D"]
    order: Int[np.ndarray, " D"]


@inner
def _depth_room(model, num_outputs, num_tokens, most):
    """See `rows.likely_room`."""
    rank = model.markov.words.shape[1] if model.markov.kind else 0
    count = min(CANDIDATES if rank else most, num_tokens)
    return DepthRoom(
        np.empty(count, np.int64),
        np.empty(count, np.int64),
        np.empty(count),
        np.zeros(1, np.int64),
        np.zeros(1),
        np.empty(count),
        np.empty((rank, count), _f32),
        np.empty(rank, _f32),
        np.empty(num_outputs, _f32),
        np.empty(num_tokens, _f32),
        np.empty(num_tokens, np.int32),
    )


@inner(error_model="numpy")
def _largest(values, count, places):
    """Places of the `count` largest values, in their order, the first of equals first; returns how many are positive."""
    size = 0
    for t in range(values.size):
        if values[t] <= 0.0 or (size == count and values[t] <= values[places[size - 1]]):
            continue
        size = min(size + 1, count)
        at = size - 1
        while at > 0 and values[places[at - 1]] < values[t]:
            places[at] = places[at - 1]
            at -= 1
        places[at] = t
    return size


@inner(error_model="numpy")
def _open_depth(sync, model, rules, b, slot, depth, room):
    """Make the candidates of a depth."""
    copy_row(model.logits[slot, depth], room.logits)
    draft_distribution(sync, room.logits, rules.bias[b], rules.samplings[b], room.compact, room.order)
    size = _largest(room.compact, room.places.size, room.places)
    total = 0.0
    ids = rules.outputs.ids
    for c in range(size):
        place = room.places[c]
        room.ids[c] = ids[place] if ids.size else place
        room.probs[c] = room.compact[place]
        total += room.probs[c]
        for i in range(len(room.rows)):
            room.rows[i, c] = model.markov.rows[i, place]
    room.size[0] = size
    room.rest[0] = max(1.0 - total, 0.0)


@inner(error_model="numpy")
def _add_candidate_bias(temperature, room):
    """Probabilities of the candidates once the bias of `room.vector` is in their logits; that of all others is taken for the mean of theirs."""
    size = room.size[0]
    inverse = 1.0 / max(temperature, 1e-6)
    biases = np.zeros(size)
    for i in range(room.vector.size):
        for c in range(size):
            biases[c] += np.float64(room.vector[i] * room.rows[i, c])
    top = biases.max() if size else 0.0
    mean = 0.0
    for c in range(size):
        mean += biases[c] / size
    total = room.rest[0] * np.exp(inverse * (mean - top))
    for c in range(size):
        room.biased[c] = room.probs[c] * np.exp(inverse * (biases[c] - top))
        total += room.biased[c]
    for c in range(size):
        room.biased[c] /= total


@inner(error_model="numpy")
def _depth_children(sync, model, rules, b, fed, node, depth, is_first, is_calibrated, room):
    """See `rows.likely_children`."""
    slot = fed.slots[b]
    if is_first:
        _open_depth(sync, model, rules, b, slot, depth, room)
    size = room.size[0]
    if model.markov.kind:
        bias_vectors(model.markov, slot, fed.tokens[b], fed.parents[b], node, depth, room.vector)
        _add_candidate_bias(rules.samplings[b].temperature, room)
    else:
        for c in range(size):
            room.biased[c] = room.probs[c]
    if is_calibrated:
        share = _certainty(model, slot, depth, fed.tokens[b, node])
        for c in range(size):
            room.biased[c] *= share
    return room.ids[:size], room.biased[:size]


FORETELLING[DepthArrays] = Foretelling(_rows_by_depth, _row, _certainty, _depth_room, _depth_children)


class DepthDistributions(CompiledProposals):
    """A draft model of `depths` distributions for each sequence, over the tokens `draft_ids`; see the module.

    target: whose vocabulary, context and number of slots it has.  bias: makes what drafted tokens add, of slots, depths and number of draft tokens; default nothing.
    """

    def __init__(
        self,
        target: Any,
        draft_ids: np.ndarray,
        depths: int,
        name: str,
        bias: Callable[[int, int, int], Markov] | None = None,
    ) -> None:
        self.target = target
        self.name = name
        self.depths = depths
        self.vocab_size = target.vocab_size
        self.draft_ids = draft_ids[draft_ids < target.vocab_size]
        outputs = whole(len(self.draft_ids))
        self.open_slots(target.max_model_len, target.max_num_seqs, context=0, bytes_per_token=0)
        logits = aligned(target.max_num_seqs, depths, outputs)
        self.cache_bytes = logits.nbytes
        added = (bias or partial(markov, {}, "none"))(len(logits), depths, len(self.draft_ids))
        self.arrays = DepthArrays(DepthSizes(outputs), DepthMemory(self._lengths), logits, added)

    @abstractmethod
    def know(self, slots: Sequence[int], states: Float[np.ndarray, "B F"]) -> None:
        """Compute `arrays.logits` of these slots from what the target told."""

    def append(self, token_ids: Mapping[int, Sequence[int]], hidden: Sequence[int]) -> list[RowAndStates]:
        """Nothing is read of texts; see `slots.SlotModel.append`."""
        return [(np.zeros(self.vocab_size, np.float32), []) for _ in token_ids]

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """There are no columns."""

    def score(
        self, slots: Sequence[int], tree: TokenTree, *, hidden: Sequence[int] = (), since: int = 0
    ) -> Scores:
        """Distributions of the nodes `since` .. N-1; see `core.Target.score`."""
        tokens, parents = tree.host
        B, N = tokens.shape
        first_nodes = np.full(B, since)
        node_ends = np.full(B, N)
        scored = tree.nodes_from(since)
        real = parents[:, since:] >= 0
        if since == 0:
            real[:, 0] = True
        logits = np.empty((int(real.sum()), self.arrays.sizes.outputs), np.float32)
        depth_forward(
            self.arrays, np.array(slots), tokens, parents, first_nodes, node_ends, first_nodes, logits
        )
        self.scored(slots, N)
        rows = np.full((B, N - since, self.vocab_size), -np.inf, np.float32)
        rows[real] = self.wide(logits)
        rows[~real] = 0
        return Scores(scored, rows)

    def check_tree(self, num_nodes: int, num_extra: int = 0) -> None:
        """Trees of any size: no row is run."""

    @property
    def offers(self) -> Needs:
        """Nothing beyond its distributions."""
        return Needs()

    def rows(
        self, logits: Float[np.ndarray, "B X D"], params: Sequence[SamplingParams]
    ) -> Float[np.ndarray, "B X V"]:
        """Distributions over all tokens, as tokens are drawn from them."""
        samplings, bias = draft_samplings(params, self.vocab_size, self.draft_ids)
        D = len(self.draft_ids)
        probs = np.zeros((*logits.shape[:2], self.vocab_size), np.float32)
        compact = np.empty(D, np.float32)
        for b in range(len(params)):
            for j in range(logits.shape[1]):
                with ROWS:
                    draft_distribution(
                        sync, logits[b, j].copy(), bias[b], samplings[b], compact, np.empty(D, np.int32)
                    )
                probs[b, j, self.draft_ids] = compact
        return probs
