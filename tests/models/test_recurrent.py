"""What recurrent layers keep of a slot is that of its committed tokens alone, whatever was appended, accepted, rejected, cut, copied or released."""

import random

import numpy as np
import pytest

from polydraft.models.mixers.recurrent import BLOCK, SNAPSHOT_TOKENS, RecurrentMemory, StateKind, StateShape
from polydraft.models.slots import COLUMN

SLOTS = 3
DECAY = 0.9
SHAPE = StateShape(2, states=((1,),), pending=((1,),))


class Text:
    """Slots of one number that decays and grows by each token: S <- DECAY S + token, in each of two layers."""

    def __init__(self, snapshots=100):
        self.lengths = np.zeros(SLOTS, np.int64)
        self.folded = np.zeros(SLOTS, np.int64)
        self.tokens = np.zeros((SLOTS, 4096))
        (self.states,) = SHAPE.new_states(SLOTS)
        (self.rows,) = SHAPE.new_pending(SLOTS)
        kind = StateKind((self.states,), (self.rows,), self.fold)
        capacity = snapshots * SHAPE.state_bytes
        self.memory = RecurrentMemory([kind], self.lengths, self.folded, capacity, self.read)
        self.num_read = 0

    def fold(self, slot, first):
        for row in range(first, first + BLOCK):
            self.states[:, slot] = DECAY * self.states[:, slot] + self.rows[:, slot, row]

    def read(self, slot, begin, end):
        """A pass over tokens behind the first `begin`."""
        assert self.folded[slot] <= begin and begin - self.folded[slot] < BLOCK
        self.rows[:, slot, begin - self.folded[slot] : end - self.folded[slot], 0] = self.tokens[
            slot, begin:end
        ]
        self.num_read += end - begin

    def append(self, slot, count):
        self.memory.settle([slot])
        length = int(self.lengths[slot])
        self.tokens[slot, length : length + count] = np.random.default_rng(length).normal(size=count)
        self.read(slot, length, length + count)
        self.lengths[slot] += count

    def accept(self, slot, path, nodes):
        """Score so many nodes and commit some of them."""
        self.append(slot, nodes)
        length = self.lengths[slot] = self.lengths[slot] - nodes
        source, target = (
            np.array([(slot, length + node) for node in some], COLUMN) for some in (path, range(len(path)))
        )
        self.tokens[slot, target["column"]] = self.tokens[slot, source["column"]]
        self.memory.move(source, target)
        self.lengths[slot] += len(path)

    def cut(self, slot, length):
        self.lengths[slot] = length
        self.memory.cut(slot, length)

    def copy(self, source, slot, length):
        self.tokens[slot, :length] = self.tokens[source, :length]
        self.lengths[slot] = length
        self.memory.copy(source, slot, length)

    def check(self):
        self.memory.settle(range(SLOTS))
        for slot, length in enumerate(self.lengths.tolist()):
            expected = 0.0
            state = self.states[:, slot, 0].astype(float)
            for token in self.tokens[slot, :length]:
                expected = DECAY * expected + token
            for row in range(length - int(self.folded[slot])):
                state = DECAY * state + self.rows[:, slot, row, 0]
            assert self.folded[slot] == length // BLOCK * BLOCK
            np.testing.assert_allclose(state, expected, atol=1e-4)


@pytest.fixture
def text():
    return Text()


def test_bytes_are_those_of_the_memory_of_a_slot():
    shape = StateShape(3, states=((4, 5), (7,)), pending=((6,), (2,)))
    rows = sum(memory[:, :, 0].nbytes for memory in shape.new_pending(1))
    assert shape.state_bytes == sum(memory.nbytes for memory in shape.new_states(1))
    assert (shape.slot_bytes - shape.state_bytes) % rows == 0


@pytest.mark.parametrize("snapshots", [100, 3, 0])
def test_states_are_those_of_the_committed_tokens_whatever_happens_to_them(snapshots):
    text = Text(snapshots)
    choose = random.Random(snapshots)
    for _ in range(400):
        slot, other = choose.sample(range(SLOTS), 2)
        length = int(text.lengths[slot])
        action = choose.randrange(10)
        if action < 4:
            text.append(slot, choose.randint(1, 200))
        elif action < 7:
            text.accept(slot, sorted(choose.sample(range(20), choose.randint(1, 6))), 20)
        elif action == 7:
            text.cut(slot, choose.randint(0, length))
        elif action == 8:
            text.cut(other, 0)
            text.copy(slot, other, choose.randint(0, length))
        else:
            text.cut(slot, max(0, length - choose.randint(0, 40)))
        if length > 3000:
            text.cut(slot, 0)
        text.check()


def test_a_cut_of_unfolded_tokens_reads_nothing_again(text):
    text.append(0, 3 * BLOCK + 20)
    text.memory.settle([0])
    read = text.num_read
    text.cut(0, 3 * BLOCK)
    text.check()
    assert text.num_read == read


def test_a_deeper_cut_reads_what_lies_behind_the_last_snapshot(text):
    for _ in range(20):
        text.append(0, 64)
    read = text.num_read
    length = 2 * SNAPSHOT_TOKENS + 50
    assert text.memory.resumes(0, length) == 2 * SNAPSHOT_TOKENS
    text.cut(0, length)
    text.check()
    assert text.num_read - read == 50


def test_a_kept_end_of_a_prompt_is_gone_back_to(text):
    text.append(0, 100)
    text.memory.settle([0])
    text.memory.take_snapshot(0)
    text.append(0, 100)
    text.memory.settle([0])
    assert text.memory.resumes(0, 110) == 3 * BLOCK
    assert text.memory.resumes(0, 90) == 0


def test_states_that_are_copied_out_begin_another_text(text):
    text.append(0, SNAPSHOT_TOKENS)
    states = text.memory.states_after(0, SNAPSHOT_TOKENS)
    assert states is None  # nobody has folded them yet
    text.memory.settle([0])
    states = text.memory.states_after(0, SNAPSHOT_TOKENS)
    text.tokens[1, :SNAPSHOT_TOKENS] = text.tokens[0, :SNAPSHOT_TOKENS]
    text.lengths[1] = SNAPSHOT_TOKENS
    text.memory.lacks(1, 0)
    text.memory.write(1, SNAPSHOT_TOKENS, states)
    read = text.num_read
    text.check()
    assert text.num_read == read


def test_tokens_without_rows_are_read_before_the_next_pass(text):
    text.append(0, 40)
    text.tokens[0, 40:104] = 1.0
    text.lengths[0] = 104
    text.memory.lacks(0, 40)
    text.check()
    assert text.num_read == 104
