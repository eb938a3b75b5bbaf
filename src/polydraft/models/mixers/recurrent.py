"""The memory of recurrent layers in a model's slots: a state of the committed text, what the tokens behind it left, and copies to go back to.

    state      what a layer stores of the first `folded` tokens of a slot, whole blocks of them
    pending    what each token behind those left for its layer, such as the inputs of a convolution: row `column - folded`
    fold       the rows of one block become part of the state
    border     tokens before the block of a row's own token, a multiple of BLOCK
    snapshot   a copy of a slot's state, which it is set back to where it must forget what was folded

A row reads the state at its border, and the pending rows of its path behind that. Where the border lies behind what is folded, within a prompt or a
tree, its layer folds the blocks of its path into a state beside the slot's. So a row's sums have one order, and its bits depend on its own tokens alone:
how many of them are committed, by which forward passes, and who is beside them changes nothing.

No forward pass writes a slot's state: a rejected node costs nothing, and the rows of an accepted path move to the front as keys and values do.
What was folded is forgotten by a snapshot; tokens behind it are then read again.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from polydraft.models.matrices.products import call_product, number_product
from polydraft.models.matrices.vectors import PANEL, aligned, give_back
from polydraft.models.mixers.cache import whole
from polydraft.models.slots import TREE_ROOM
from polydraft.numerics.compile_time import borrowed, inlined, inner

BLOCK = 32
"""Tokens of a block: a multiple of the tokens of a block of the KV cache on any processor."""
PENDING = BLOCK + 2 * TREE_ROOM
"""Rows of a slot: an unfinished block, tokens that were committed together since, and a tree."""
SNAPSHOT_TOKENS = 256
"""A snapshot is made each time that a text has grown by so many tokens: so many are read again at most."""
FORGOTTEN = -60.0
"""Sum of the logarithms of decays behind which a token has no weight: exp(-60) is 1e-26."""
PIECE = 64
"""Tokens that are read again in one forward pass."""
_ALL = np.iinfo(np.int64).max


class StateShape(NamedTuple):
    """What a kind of recurrent layer stores in a slot, float32.

    states: shapes of a layer's states.  pending: shapes of what one token leaves for a layer.
    sizes: what else its parts know of them.

    Example:
        >>> shape = StateShape(2, states=((3, 8),), pending=((8,),))
        >>> shape.state_bytes, shape.slot_bytes == 192 + 64 * (BLOCK + PIECE)
        (192, True)
    """

    layers: int
    states: tuple[tuple[int, ...], ...]
    pending: tuple[tuple[int, ...], ...]
    sizes: Any = None

    @property
    def state_bytes(self) -> int:
        """Of one slot's states in all layers."""
        return 4 * self.layers * sum(int(np.prod(shape)) for shape in self.states)

    @property
    def slot_bytes(self) -> int:
        """Of a slot's states, and of the pending rows that texts use; a large tree takes more."""
        return self.state_bytes + 4 * self.layers * (BLOCK + PIECE) * sum(
            int(np.prod(shape)) for shape in self.pending
        )

    def new_states(self, num_slots: int) -> tuple[np.ndarray, ...]:
        """[layers, slots, ...] each, of no text."""
        return tuple(aligned(self.layers, num_slots, *shape) for shape in self.states)

    def new_pending(self, num_slots: int) -> tuple[np.ndarray, ...]:
        """[layers, slots, PENDING, ...] each."""
        return tuple(aligned(self.layers, num_slots, PENDING, *shape) for shape in self.pending)


class StateKind(NamedTuple):
    """The recurrent layers of one kind. states, pending: of `StateShape`; states are zero where there is no text.

    fold: of a slot, from which pending row on a block becomes part of its states.
    """

    states: tuple[np.ndarray, ...]
    pending: tuple[np.ndarray, ...]
    fold: Callable[[int, int], None]


@inner
def pending_row(row, columns, folded, back):
    """The pending row of the token `back` before a row of `workspace.ROW` on its path, 0 being itself; -k for the k-th last token of the state.

    columns: the row's `seen_columns`.  folded: of its slot.
    """
    at = row.num_seen - 1 - back
    return columns[at] - folded if at >= 0 else row.length + at - folded


@inner
def border_of(row):
    """Tokens in the state that a row of `workspace.ROW` reads: the whole blocks before its own token."""
    return (row.length + row.num_seen - 1) // BLOCK * BLOCK


@inner
def border_column(row, columns, border):
    """The column of the last of so many tokens of a row's path, -1 of none: rows of a slot with the same one read the same state."""
    at = border - 1 - row.length
    return columns[at] if at >= 0 else border - 1


@inner
def block_places(row, columns, folded, border, places):
    """The pending rows of the block before a border on a row's path. places: [BLOCK]."""
    for i in range(BLOCK):
        at = border - BLOCK + i - row.length
        places[i] = (columns[at] if at >= 0 else row.length + at) - folded


@inner
def fold_begin(row, columns, folded, held, held_column):
    """Tokens in the state that folding up to a row's border goes on from: those of a state beside the slot's where it lies on the row's path, else
    `folded`. held, held_column: tokens in that state, and the column of the last of them."""
    is_on_path = folded < held <= border_of(row) and border_column(row, columns, held) == held_column
    return held if is_on_path else folded


class StateOrder(NamedTuple):
    """Rows of a slot by the state that they read, of each thread.

    rows: [threads, rows] those of one state side by side.  ends: [threads, rows] behind the last of each state.  columns, states: of `order_by_state`.
    """

    rows: np.ndarray
    ends: np.ndarray
    columns: np.ndarray
    states: np.ndarray


def state_order(threads: int, rows: int) -> StateOrder:
    """rows: of a slot that are in work at once."""
    return StateOrder(*(np.zeros((threads, rows), np.int64) for _ in StateOrder._fields))


@inner
def order_by_state(rows, columns, first, last, order, thread):
    """Bring rows first .. last-1, all of one slot, into the order of the states that they read, each behind those of its path; returns how many
    states these are."""
    places = order.rows[thread]
    ends = order.ends[thread]
    found = order.columns[thread]
    states = order.states[thread]
    num = np.int64(0)
    for t in range(first, last):
        column = border_column(rows[t], columns[t], border_of(rows[t]))
        s = num - 1
        while s >= 0 and found[s] != column:
            s -= 1
        if s < 0:
            s = num
            found[s] = column
            ends[s] = 0
            num += 1
        states[t - first] = s
        ends[s] += 1
    begin = 0
    for s in range(num):
        count = ends[s]
        ends[s] = begin
        begin += count
    for t in range(first, last):
        s = states[t - first]
        places[ends[s]] = t
        ends[s] += 1
    return num


class FoldScratch(NamedTuple):
    """Of each thread, to fold a block of rows into a state of one head, whose keys and updates are K and V wide.

    places: [threads, BLOCK] pending rows.  keys: [threads, K, BLOCK], by what is left of them.  updates: [threads, V / PANEL, BLOCK, PANEL].
    sums: [threads, K, V in whole panels] of their outer products.  product: address of the code that makes them.
    """

    places: np.ndarray
    keys: np.ndarray
    updates: np.ndarray
    sums: np.ndarray
    product: int


def fold_scratch(key_width: int, update_width: int, threads: int) -> FoldScratch:
    """Of so many threads."""
    width = whole(update_width)
    return FoldScratch(
        places=np.zeros((threads, BLOCK), np.int64),
        keys=aligned(threads, key_width, BLOCK),
        updates=aligned(threads, width // PANEL, BLOCK, PANEL),
        sums=aligned(threads, key_width, width),
        product=number_product(np.dtype(np.float32)),
    )


@borrowed
def put_update(scratch, thread, l, update):
    """The update of the l-th row of a block."""
    panels = scratch.updates[thread]
    for p in range(len(panels)):
        panel = panels[p, l]
        for i in range(min(PANEL, len(update) - p * PANEL)):
            panel[i] = update[p * PANEL + i]


@borrowed
def add_outer_products(scratch, thread):
    """sums = the outer products of a block's keys and updates, added."""
    keys = scratch.keys[thread]
    updates = scratch.updates[thread]
    sums = scratch.sums[thread]
    call_product(
        scratch.product,
        keys.ctypes.data,
        4 * BLOCK,
        updates.ctypes.data,
        4 * BLOCK * PANEL,
        len(updates),
        np.int64(BLOCK),
        sums.ctypes.data,
        4 * sums.shape[1],
        PANEL,
        len(keys),
    )


@inlined
def state_at_border(fold_head, memory, scratch, thread, layer, row, columns, head, held, held_column):
    """The state of a head that a row reads: the slot's, or where the border lies behind that, `scratch.state`, into which the blocks of the row's path
    are folded. fold_head: of a mixer, `_fold_head`.  held, held_column: see `fold_begin`, of `scratch.state`; returned as they are then."""
    folded = memory.folded[row.slot]
    border = border_of(row)
    behind = scratch.state[thread]
    state = memory.states[layer, row.slot, head]
    if border > folded:
        start = fold_begin(row, columns, folded, held, held_column)
        if start > folded:
            state = behind
        for done in range(start, border, BLOCK):
            block_places(row, columns, folded, done + BLOCK, scratch.fold.places[thread])
            fold_head(memory, scratch.fold, thread, layer, row.slot, head, state, behind)
            state = behind
        held = border
        held_column = border_column(row, columns, border)
    return state, held, held_column


@inlined
def fold_block(fold_head, memory, scratch, slot, first):
    """The block of a slot's rows that begins with the `first` becomes part of the states of all heads. fold_head: of a mixer, `_fold_head`."""
    thread = np.int64(0)
    places = scratch.places[thread]
    for l in range(BLOCK):
        places[l] = first + l
    for layer in range(memory.states.shape[0]):
        for head in range(memory.states.shape[2]):
            state = memory.states[layer, slot, head]
            fold_head(memory, scratch, thread, layer, slot, head, state, state)


class Snapshots:
    """Copies of slots' states by slot and length, in at most so many bytes; where there are more, those of the slot with most are thinned out.

    Example:
        >>> copies = Snapshots(2 * 8, 8)
        >>> for length in (256, 512, 768):
        ...     copies.add(0, length, (np.ones(2, np.float32),))
        >>> copies.last(0, 700)[0], copies.last(0, 768)[0], copies.last(1, 768)
        (512, 768, (0, ()))
    """

    def __init__(self, capacity_bytes: int, state_bytes: int) -> None:
        self._most = capacity_bytes // max(state_bytes, 1)
        self._of_slot: dict[int, dict[int, tuple[np.ndarray, ...]]] = {}

    def add(self, slot: int, length: int, states: tuple[np.ndarray, ...]) -> None:
        """Copy the states of a slot after so many tokens; the copy is never written again."""
        self._of_slot.setdefault(slot, {})[length] = states
        while sum(map(len, self._of_slot.values())) > self._most:
            self._thin(max(self._of_slot.values(), key=len))

    def _thin(self, copies: dict[int, tuple[np.ndarray, ...]]) -> None:
        """Drop the one that leaves the smallest gap, the last only where it is alone."""
        lengths = [0, *sorted(copies)]
        gaps = {lengths[i]: lengths[i + 1] - lengths[i - 1] for i in range(1, len(lengths) - 1)}
        del copies[min(gaps, key=lambda length: gaps[length]) if gaps else lengths[-1]]

    def last(self, slot: int, length: int) -> tuple[int, tuple[np.ndarray, ...]]:
        """The longest of a slot after at most so many tokens: its length and states; 0 and none where there is none."""
        copies = self._of_slot.get(slot, {})
        longest = max((count for count in copies if count <= length), default=0)
        return longest, copies.get(longest, ())

    def forget(self, slot: int, length: int = 0) -> None:
        """Drop those of a slot after more than so many tokens."""
        copies = self._of_slot.pop(slot, {})
        self._of_slot[slot] = {count: states for count, states in copies.items() if count <= length}

    def share(self, source: int, slot: int, length: int) -> None:
        """Give a slot those of another after at most so many tokens."""
        for count, states in self._of_slot.get(source, {}).copy().items():
            if count <= length:
                self.add(slot, count, states)


class RecurrentMemory:
    """The recurrent layers of a model with slots.

    kinds: of its layers.  lengths: [slots] committed tokens, the slots' own.  folded: [slots] tokens in the states, which forward passes read.
    snapshot_bytes: that snapshots may take.  read_again: run a slot's committed tokens begin .. end-1 through the layers once more.
    """

    def __init__(
        self,
        kinds: Sequence[StateKind],
        lengths: Int64[np.ndarray, " slots"],
        folded: Int64[np.ndarray, " slots"],
        snapshot_bytes: int,
        read_again: Callable[[int, int, int], None],
    ) -> None:
        self.kinds = tuple(kinds)
        self.folded = folded
        self._lengths = lengths
        self._read_again = read_again
        self._states = [states for kind in kinds for states in kind.states]
        self._pending = [rows for kind in kinds for rows in kind.pending]
        self.state_bytes = sum(states[:, 0].nbytes for states in self._states)
        self._snapshots = Snapshots(snapshot_bytes, self.state_bytes)
        self._read = np.full(len(lengths), _ALL)
        """Tokens whose rows are there; fewer than the length where the others are to be read again."""

    # What changes what is committed

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy the pending rows of columns within their slots; see `slots.SlotModel.move`."""
        read, written = (column["column"] - self.folded[column["slot"]] for column in (source, target))
        for rows in self._pending:
            rows[:, target["slot"], written] = rows[:, source["slot"], read]

    def cut(self, slot: int, length: int) -> None:
        """A slot forgets all tokens but so many."""
        self._snapshots.forget(slot, length)
        if length < self.folded[slot]:
            self._set_back(slot, *self._snapshots.last(slot, length))
        if length <= self._read[slot]:
            self._read[slot] = _ALL

    def copy(self, source: int, slot: int, length: int) -> None:
        """The first tokens of a slot into an empty one."""
        self._snapshots.share(source, slot, length)
        if length < self.folded[source] or length > self._read[source]:
            self._set_back(slot, *self._snapshots.last(slot, length))
            return
        folded = self.folded[slot] = self.folded[source]
        for states in self._states:
            states[:, slot] = states[:, source]
        for rows in self._pending:
            rows[:, slot, : length - folded] = rows[:, source, : length - folded]

    def release(self, slots: Sequence[int]) -> None:
        """Slots are empty."""
        for slot in slots:
            self.cut(slot, 0)

    def trim(self, slot: int) -> None:
        """Give the system back what an empty slot has taken."""
        for entries in (*self._states, *self._pending):
            for layer in entries:
                give_back(layer[slot])

    def _set_back(self, slot: int, length: int, copies: tuple[np.ndarray, ...]) -> None:
        """To a snapshot, or to no text: tokens behind it are to be read again."""
        for i, states in enumerate(self._states):
            states[:, slot] = copies[i] if copies else 0.0
        self.folded[slot] = self._read[slot] = length

    # Before a forward pass

    def settle(self, slots: Sequence[int]) -> None:
        """Make slots ready for a forward pass: what lacks is read again, whole blocks are folded. What lies behind committed tokens is lost."""
        index = np.asarray(slots, np.int64)
        lengths = self._lengths[index]
        due = (lengths - self.folded[index] >= BLOCK) | (self._read[index] < lengths)
        for slot in index[due].tolist():
            length = int(self._lengths[slot])
            while (begin := int(self._read[slot])) < length:
                self._fold(slot, begin)
                end = min(begin + PIECE, length)
                self._read_again(slot, begin, end)
                self._read[slot] = end
            self._read[slot] = _ALL
            self._fold(slot, length)

    def _fold(self, slot: int, length: int) -> None:
        """All whole blocks of so many tokens whose rows are there, one after the other, with a snapshot where one is due."""
        begin = int(self.folded[slot])
        whole = length // BLOCK * BLOCK
        for folded in range(begin, whole, BLOCK):
            for kind in self.kinds:
                kind.fold(slot, folded - begin)
            self.folded[slot] = folded + BLOCK
            if self.folded[slot] % SNAPSHOT_TOKENS == 0:
                self.take_snapshot(slot)
        if begin < whole:
            for rows in self._pending:
                rows[:, slot, : length - whole] = rows[:, slot, whole - begin : length - begin]

    # Snapshots

    def take_snapshot(self, slot: int) -> None:
        """Take a snapshot of a slot's states as they are, where there is none."""
        folded = int(self.folded[slot])
        if folded and self._snapshots.last(slot, folded)[0] < folded:
            self._snapshots.add(slot, folded, tuple(states[:, slot].copy() for states in self._states))

    def resumes(self, slot: int, length: int) -> int:
        """The most of the first `length` tokens of a slot behind which a text can go on without reading any of them again."""
        if self.folded[slot] <= length <= self._read[slot]:
            return length
        return self._snapshots.last(slot, length)[0]

    def states_after(self, slot: int, length: int) -> tuple[np.ndarray, ...] | None:
        """The states after so many tokens, never written again; None without a snapshot."""
        if length == self.folded[slot]:
            self.take_snapshot(slot)
        longest, states = self._snapshots.last(slot, length)
        return states if longest == length else None

    def write(self, slot: int, length: int, states: tuple[np.ndarray, ...]) -> None:
        """The first tokens of a slot were copied into it, and these are the states after them."""
        self._snapshots.add(slot, length, states)
        self._set_back(slot, length, states)
        self._read[slot] = _ALL

    def lacks(self, slot: int, begin: int) -> None:
        """Tokens from `begin` on were copied into a slot without what they left for recurrent layers: they are to be read again."""
        self._read[slot] = min(self._read[slot], begin)
