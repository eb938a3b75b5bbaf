"""One owner of slots: lengths, cuts, copies and commits are the same for every backend, and so are the ids that end a text."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers as hf

from polydraft.core import SamplingParams, TokenTree
from polydraft.core.geometry import pad
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.engine.api import Engine
from polydraft.models import load, pair
from polydraft.models.loading import checkpoint
from polydraft.models.slot_pool import Slots
from polydraft.models.slots import TREE_ROOM, special_ids
from polydraft.models.torch.hf import HFTarget
from polydraft.models.torch.own_cache import OwnCacheTarget
from tests.engine.tables import TableModel
from tests.models.tree_rounds import ARCHITECTURES, fresh, outcome, small_model
from tests.support.closeness import assert_close
from tests.support.tiny import compiled

KINDS = [HFTarget, compiled, OwnCacheTarget]
EVERY = pytest.mark.parametrize("kind", KINDS)
TEXT = [5, 9, 2, 7, 7, 1, 3, 8, 4, 6]


def made(kind, slots=3):
    model = small_model(ARCHITECTURES["llama"])
    return model, kind(model, max_num_seqs=slots)


def after(target, slot, token):
    return target.score([slot], TokenTree.roots(np.array([token]))).logits[0, 0]


@EVERY
def test_lengths_are_read_and_not_assigned(kind):
    _, target = made(kind)
    target.prefill([0], [TEXT])
    with pytest.raises(ValueError, match="read-only"):
        target.lengths[0] = 3
    assert target.lengths.tolist() == [10, 0, 0]


@EVERY
def test_a_cut_forgets_what_lies_behind(kind):
    model, target = made(kind)
    target.prefill([1], [TEXT])
    target.cut(1, 4)
    assert target.lengths.tolist() == [0, 4, 0]
    assert_close(after(target, 1, 11), fresh(model, [*TEXT[:4], 11])[-1])
    with pytest.raises(AssertionError):
        target.cut(1, 5)


@EVERY
def test_a_copied_prefix_is_as_good_as_one_that_was_read(kind):
    model, target = made(kind)
    target.prefill([1], [TEXT])
    target.copy(1, 2, 6)
    target.copy(1, 0, 10)
    target.release([1])
    assert target.lengths.tolist() == [10, 0, 6]
    target.prefill([2], [[12, 13]])
    assert_close(after(target, 2, 11), fresh(model, [*TEXT[:6], 12, 13, 11])[-1])
    assert_close(after(target, 0, 11), fresh(model, [*TEXT, 11])[-1])


@EVERY
def test_a_commit_takes_a_score_of_its_very_nodes(kind):
    _, target = made(kind)
    target.prefill([0, 1], [TEXT, TEXT])
    nothing = outcome([[]], [3])
    second = outcome([[2]], [3])
    with pytest.raises(AssertionError, match="without a score"):
        target.commit([0], nothing)
    target.score([0], pad([([1, 5], [-1, 0])]))
    with pytest.raises(AssertionError, match="without a score"):
        target.commit([1], nothing)
    with pytest.raises(AssertionError, match="without a score"):
        target.commit([0], second)
    assert target.lengths.tolist() == [10, 10, 0]
    target.commit([0], outcome([[1]], [3]))
    with pytest.raises(AssertionError, match="without a score"):
        target.commit([0], nothing)
    for undo in (lambda: target.cut(1, 9), lambda: target.prefill([1], [[3]]), lambda: target.release([1])):
        target.score([1], TokenTree.roots(np.array([1])))
        undo()
        with pytest.raises(AssertionError, match="without a score"):
            target.commit([1], nothing)


@EVERY
def test_a_batch_is_committed_as_each_of_its_rows(kind):
    model, target = made(kind)
    target.prefill([2, 0], [TEXT[:3], TEXT])
    rows = [([1, 5, 9, 6], [-1, 0, 0, 2]), ([1, 5], [-1, 0])]
    target.score([2, 0], pad(rows))
    target.commit([2, 0], outcome([[2, 3], []], [3, 3]))
    assert target.lengths.tolist() == [11, 0, 6]
    assert_close(after(target, 2, 3), fresh(model, [*TEXT[:3], 1, 9, 6, 3])[-1])
    assert_close(after(target, 0, 3), fresh(model, [*TEXT, 1, 3])[-1])


@pytest.mark.parametrize("kind", ["paths", "top_k", "coupled", "listed", "systematic"])
def test_a_proposal_leaves_a_tree_that_can_be_committed(kind):
    small, target = (compiled(small_model(ARCHITECTURES["llama"], seed), max_num_seqs=2) for seed in (1, 0))
    drafter = ModelDrafter(small, kind)
    engine = Engine.of(target, drafter=drafter, depth=4, num_paths=2)
    engine.generate([TEXT, [3]], SamplingParams(seed=1, max_tokens=30))
    assert (
        all(small.lengths.tolist()) and drafter.slots.num_free == 2
    )  # each keeps what a text that begins alike shares


@pytest.mark.parametrize(
    "settings", [hf.GenerationConfig(bos_token_id=5), hf.GenerationConfig(eos_token_id=[3, 4]), None]
)
def test_every_backend_derives_the_ids_that_end_and_begin_a_text_alike(tmp_path, settings):
    config = ARCHITECTURES["llama"]
    model = small_model(type(config)(**{**config.to_dict(), "eos_token_id": 7, "bos_token_id": 1}))
    if settings is not None:
        model.generation_config = settings
    model.save_pretrained(tmp_path)
    if settings is None:
        (tmp_path / "generation_config.json").unlink()
    files = checkpoint.of_folder(str(tmp_path))
    found = [(t.eos_token_ids, t.bos_token_id) for t in (kind(model, max_num_seqs=1) for kind in KINDS)]
    found.append(special_ids(files))
    expected = (
        ([7], 1) if settings is None else ([7], 5) if settings.bos_token_id == 5 else ([3, 4], 1)
    )  # each from where it is
    assert found == [expected] * (len(KINDS) + 1)


def test_a_slot_that_someone_else_emptied_keeps_nothing():
    model = TableModel(V=5, max_num_seqs=1)
    slots = Slots(model)
    slot = slots.take()
    model.prefill([slot], [[1, 2, 3]])
    slots.give_back(slot, [1, 2, 3])
    model.release([slot])
    assert slots.take([1, 2, 3, 4]) == slot
    assert model.lengths[slot] == 0


def test_texts_that_only_begin_alike_are_kept_side_by_side_and_the_oldest_leaves():
    model = TableModel(V=5, max_num_seqs=3)
    slots = Slots(model)
    alike = [4] * 20
    texts = [[*alike, *[i] * 40] for i in (1, 2, 3, 0)]

    def known(text):
        slot = slots.take(text)
        found = int(model.lengths[slot])
        if text[found:]:
            model.prefill([slot], [text[found:]])
        slots.give_back(slot, text)
        return found

    assert [known(text) for text in texts[:3]] == [0, 20, 20]  # the beginning is copied
    assert [known([*text, 1, 1]) for text in texts[:3]] == [60] * 3
    assert known(texts[3]) == 20  # no slot is empty: that of the first text is taken
    assert [known(texts[2][:50]), known(texts[1]), known(texts[0])] == [50, 60, 20]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_cache_takes_memory_as_tokens_are_written():
    def resident() -> int:
        fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    load.load_model(str(pair.draft_folder()))  # what loading itself takes is there
    before = resident()
    target = load.load_model(str(pair.draft_folder()), max_num_seqs=256)
    assert target.cache_grows and target.cache_bytes > 128 << 20
    assert resident() - before < target.cache_bytes / 16
    target.prefill(range(16), [[5] * 900] * 16)
    written = 16 * 900 * target.cache_bytes / (256 * (target.max_model_len + TREE_ROOM))
    assert 0.8 * written < resident() - before < 0.8 * written + target.cache_bytes / 16
