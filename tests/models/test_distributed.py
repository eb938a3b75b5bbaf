"""A target over two processes: the logits, texts and caches of one process, and an end that is clean whatever happens."""

import os
import signal
from datetime import timedelta
from time import perf_counter

import numpy as np
import pytest
import torch
import transformers as hf
from torch import distributed

from polydraft.core import TokenTree
from polydraft.core.geometry import pad
from polydraft.core.params import SamplingParams
from polydraft.engine.api import Engine
from polydraft.errors import CapacityError, IncompatibleError, InvalidInputError, ModelLoadError, RankError
from polydraft.models import load, pair
from polydraft.models.torch import distributed as sharded
from polydraft.models.torch.cache import SlotCache
from polydraft.models.torch.distributed import ShardedTarget
from polydraft.models.torch.hf import HFTarget
from tests.models.tree_rounds import ARCHITECTURES, Play, outcome, small_model
from tests.support.closeness import assert_close

pytest.importorskip("accelerate")
pytest.importorskip("transformers.distributed")


class Probe(ShardedTarget):
    """Shows what every rank holds, and fails where it is told to."""

    def _columns(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = self._cache.row(slot)
        length = int(self.lengths[slot])
        held = torch.stack([x[:, row, :length] for x in self._cache._stacks]).contiguous()
        parts = [torch.empty_like(held) for _ in range(self._num_ranks)]
        distributed.all_gather(parts, held)
        lengths = [torch.empty(self.max_num_seqs, dtype=torch.int64) for _ in parts]
        distributed.all_gather(lengths, torch.from_numpy(np.array(self.lengths)))
        return torch.cat(parts, 3), torch.stack(lengths)

    def _stumble(self) -> None:
        if distributed.get_rank():
            raise MemoryError("no room for a part")
        distributed.barrier()

    def _forget(self, slots, outcome) -> None:
        """A commit that rank 1 makes without rolling back: it keeps the first columns of a tree, whichever path was accepted."""
        if distributed.get_rank():
            self.appended(slots, outcome.host.num_accepted + 1)
        else:
            self.commit(slots, outcome)

    _columns.__name__ = "columns"
    _stumble.__name__ = "stumble"
    _forget.__name__ = "forget"
    columns, stumble, forget = map(sharded._everywhere, (_columns, _stumble, _forget))


def folder(tmp_path_factory, name="llama"):
    model = small_model(ARCHITECTURES[name])
    place = tmp_path_factory.mktemp(name)
    model.save_pretrained(place)
    return model, place


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """One model and its target over two ranks for all tests of this file; one that has ended is started again."""
    model, place = folder(tmp_path_factory)
    running: list[Probe] = []

    def target() -> Probe:
        if not (running and running[-1].close.alive):
            running.append(Probe(place, num_ranks=2, max_num_seqs=8))
        return running[-1]

    yield model, target, running
    for each in running:
        each.close()


@pytest.fixture
def two(started):
    return started[0], started[1]()


@pytest.fixture
def game(two):
    model, target = two
    yield Play(model, target)
    target.release(range(8))


def test_logits_equal_one_process_over_random_rounds_with_joins_and_rollbacks(game):
    assert game.rounds_with_joins(16) < 1e-4


def test_all_ranks_hold_the_columns_of_one_process_after_rollbacks_and_forks(two, game):
    model, target = two
    one = Play(model, HFTarget(model, max_num_seqs=8))
    for each in (game, one):
        each.join(0, 1, 2)
        for accept in ("some", "none", "all", "some"):
            each.round(accept)
        each.target.cut(1, 3)
        each.target.copy(0, 5, int(each.target.lengths[0]) - 1)
    for slot in (0, 1, 2, 5):
        held, lengths = target.columns(slot)
        row = one.target._cache.row(slot)
        length = int(one.target.lengths[slot])
        expected = torch.stack([x[:, row, :length] for x in one.target._cache._stacks])
        assert_close(held, expected)
        assert (lengths == torch.from_numpy(np.array(one.target.lengths))).all()


def test_all_that_a_target_offers_is_that_of_one_process(two, game):
    model, target = two
    one = HFTarget(model, max_num_seqs=8)
    text = [3, 1, 4, 1, 5]
    tree = pad([([9, 2, 6], [-1, 0, 0])])
    made = []
    for each in (target, one):
        prefill = each.prefill([0], [text], hidden=(0, 1, 2))
        scores = each.score([0], tree, hidden=(1,))
        states = [
            prefill.hidden[2],
            each.embed(np.array(text)),
            each.head(prefill.hidden[2]),
            each.fresh(text),
        ]
        made.append([prefill.logits, scores.logits, scores.hidden[1], *states])
    for ours, theirs in zip(*made, strict=True):
        assert_close(ours, theirs)
    assert target.offers == one.offers


def test_a_rank_that_does_not_roll_back_shows_in_the_logits(game):
    for commit, least, most in ((game.target.forget, 1e-2, torch.inf), (game.target.commit, 0, 1e-4)):
        game.join(0)
        game.target.score([0], pad([([game.texts[0][-1], 5, 9], [-1, 0, 0])]))
        commit([0], outcome([[2]], [3]))
        game.texts[0] += [9, 3]
        assert least <= game.next_error([0]) < most
        game.leave(0)


def test_what_is_refused_on_every_rank_leaves_them_together(game):
    with pytest.raises(CapacityError):
        game.target.prefill([0], [[1] * 1000])
    with pytest.raises(CapacityError):
        game.target.score([99], TokenTree.roots(np.array([1])))
    game.join(0)
    assert game.round("all") < 1e-4


@pytest.fixture
def interruptible():
    """Ctrl-C raises, also where whoever started the tests had it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_within_a_pass_comes_at_its_end(game, monkeypatch, interruptible):
    game.join(0)
    append = game.target.append

    def interrupted(*given):
        signal.raise_signal(signal.SIGINT)
        return append(*given)

    monkeypatch.setattr(game.target, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        game.target.prefill([1], [[5, 6]])
    monkeypatch.undo()
    game.texts[1] = [5, 6, 7]
    assert game.next_error([0, 1]) < 1e-4


def test_a_second_target_is_refused_while_one_runs(two, tmp_path):
    two[0].save_pretrained(tmp_path)
    with pytest.raises(IncompatibleError, match="close the other target first"):
        ShardedTarget(tmp_path, num_ranks=2)


def test_a_rank_that_fails_says_why_and_its_target_has_ended(two):
    target = two[1]
    with pytest.raises(RankError, match="rank 1 says MemoryError: no room for a part"):
        target.stumble()
    with pytest.raises(RankError, match="no room for a part"):
        target.prefill([0], [[1]])
    target.close()


@pytest.fixture
def alone(started):
    """No ranks run."""
    for each in started[2]:
        each.close()
    assert not distributed.is_initialized()


def test_greedy_text_is_that_of_one_process_and_a_killed_rank_ends_it_in_bounded_time(alone):
    params = [SamplingParams(temperature=0, max_tokens=12, n=n) for n in (1, 2)]
    prompts = ["def add(a, b):\n", "import os\nimport"]
    one = Engine.embedded(backend="transformers", depth=4).generate(prompts, params)
    engine = Engine.embedded(tensor_parallel=2, depth=4)
    assert engine.summary()["backend"] == "ShardedTarget"
    two = engine.generate(prompts, params)
    assert [s.token_ids for r in one for s in r.samples] == [s.token_ids for r in two for s in r.samples]
    assert sum(r.stats.accepted_tokens for r in two) > 0
    os.kill(engine.target._ranks._processes[0].pid, signal.SIGKILL)
    start = perf_counter()
    with pytest.raises(RankError, match="rank 1 has died"):
        engine.generate(prompts, params)
    assert perf_counter() - start < 30
    assert not distributed.is_initialized()


@pytest.mark.slow
def test_a_rank_that_hangs_is_given_up(two):
    target = two[1]
    distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=2), distributed.group.WORLD)
    (process,) = target._ranks._processes
    os.kill(process.pid, signal.SIGSTOP)
    start = perf_counter()
    with pytest.raises(RankError, match="prefill"):
        target.prefill([0], [[1]])
    assert perf_counter() - start < 30
    assert process.returncode is not None
    target.close()


def test_bad_numbers_of_ranks_and_models_without_a_plan_are_refused_before_anything_starts(
    tmp_path_factory, monkeypatch
):
    place = pair.target_folder()
    for given, message in (
        (1, "at least 2"),
        (True, "whole number"),
        (3, "divides both: 2"),
        (64, "divides both: 2"),
    ):
        with pytest.raises(InvalidInputError, match=f"tensor_parallel={given} .*{message}"):
            load.load_model(str(place), tensor_parallel=given)
    _, gpt2 = folder(tmp_path_factory, "gpt2")
    with pytest.raises(IncompatibleError, match="'gpt2', for which transformers has no plan"):
        load.load_model(str(gpt2), tensor_parallel=2)
    for option in ({"quantization": "int8"}, {"cache_dtype": "bfloat16"}, {"backend": "compiled"}):
        with pytest.raises(IncompatibleError, match="over several devices"):
            load.load_model(str(place), tensor_parallel=2, **option)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(IncompatibleError, match="torchrun"):
        load.load_model(str(place), tensor_parallel=2)
    monkeypatch.undo()
    monkeypatch.setattr(sharded, "find_spec", lambda name: None)
    with pytest.raises(IncompatibleError, match=r"polydraft\[distributed\]"):
        load.load_model(str(place), tensor_parallel=2)


def test_a_cache_of_layers_on_several_devices_is_that_of_one():
    model = small_model(ARCHITECTURES["llama"])
    devices = [torch.device("cpu"), torch.device("cpu", 0)]  # two that differ by name and share memory
    game = Play(model, HFTarget(model, max_num_seqs=4))
    held = game.target._cache
    game.target._cache = SlotCache(held.shapes, 4, held.num_columns, devices)
    assert len(game.target._cache._pairs) == 2
    game.join(0, 1, 2, 3)
    errors = [game.round(accept) for accept in ("some", "none", "all", "some", "some")]
    game.leave(1)
    game.target.copy(0, 1, 3)
    game.texts[1] = [*game.texts[0][:3], 7]
    assert max(*errors, *(game.round("some") for _ in range(3)), game.next_error([3, 0, 1])) < 1e-4


def test_a_device_map_places_modules_and_a_layer_on_disk_is_read_in_its_turn(tmp_path):
    model = small_model(ARCHITECTURES["llama"])
    model.save_pretrained(tmp_path)
    whole = {
        "model.embed_tokens": "cpu",
        "model.rotary_emb": "cpu",
        "model.norm": "cpu",
        "lm_head": "cpu",
        "model.layers.0": "cpu",
    }
    for places in ("auto", {"": "cpu"}, whole | {"model.layers.1": "disk"}):
        game = Play(model, load.load_model(str(tmp_path), device_map=places, max_num_seqs=4))
        game.join(0, 1, 2)
        assert max(game.round(accept) for accept in ("some", "none", "all")) < 1e-4
    assert next(game.target.model.model.layers[1].parameters()).device.type == "meta"


def test_device_maps_that_cannot_be_are_refused():
    place = str(pair.target_folder())
    for options, kind, message in (
        ({"tensor_parallel": 2}, InvalidInputError, "one of the two"),
        ({"device": "cpu"}, InvalidInputError, "names devices"),
        ({"backend": "compiled"}, IncompatibleError, "over several devices"),
    ):
        with pytest.raises(kind, match=message):
            load.load_model(place, device_map="auto", **options)
    with pytest.raises(ModelLoadError, match="could not be loaded"):
        load.load_model(place, device_map={"": "nowhere"})


def test_weights_that_are_not_whole_are_refused_and_no_rank_stays(alone, tmp_path):
    hf.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, vocab_size=61).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="no weights"):
        ShardedTarget(tmp_path, num_ranks=2)
    assert not distributed.is_initialized()
