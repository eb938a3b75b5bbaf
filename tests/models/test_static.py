"""The static path equals transformers in every bucket, and its pass asks nothing of the host."""

import random

import numpy as np
import pytest
import torch
import transformers as hf

from polydraft.errors import CapacityError, IncompatibleError, InvalidInputError
from polydraft.models.slots import TREE_ROOM
from polydraft.models.static import llama as static
from polydraft.models.static.llama import StaticLlama
from polydraft.models.static.table import Rows, fields, filled, length_of, visible
from polydraft.models.static.weights import Layer
from polydraft.tree import ancestors, pad
from tests.models.tree_rounds import ARCHITECTURES, Play, V, fresh, outcome, small_model
from tests.other_device import OneDevice, moved
from tests.support.closeness import assert_close


def play(name="llama", max_num_seqs=8, **options):
    model = small_model(ARCHITECTURES[name], **options)
    return Play(model, StaticLlama(model, max_num_seqs=max_num_seqs))


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 100])
def test_every_bucket_equals_transformers(rows, num_slots):
    game = play(max_num_seqs=5)
    game.join(*range(num_slots))
    chance = random.Random(rows)
    sizes = [rows, *(chance.randint(1, rows) for _ in range(num_slots - 1))]
    parents = [[-1, *(chance.randrange(n) for n in range(1, size))] for size in sizes]
    tokens = [[game.texts[s][-1], *(game.token() for _ in range(1, size))] for s, size in enumerate(sizes)]
    logits = game.target.score(range(num_slots), pad(list(zip(tokens, parents, strict=True)))).logits
    for b, size in enumerate(sizes):
        for n in {0, size // 2, size - 1}:
            path, m = [], n
            while m > 0:
                path.append(tokens[b][m])
                m = parents[b][m]
            assert_close(logits[b, n], fresh(game.model, game.texts[b] + path[::-1])[-1])


class Overwritten:
    """Stands in for a CUDA graph where there is none: a fixed place for what it is given, run anew into the same memory at each call."""

    def __init__(self, run, given, pool):
        self.run, self.given = run, given.clone()
        run(self.given)

    def __call__(self, given):
        self.given.copy_(given)
        return self.run(self.given)


@pytest.fixture
def captured(monkeypatch):
    """A target with graphs for up to 8 rows, and what its passes were: whether a graph's, and the table's shape."""
    monkeypatch.setattr(static, "Replay", Overwritten)
    game, seen = play(max_num_seqs=6), []
    game.target.graphed = True
    over = game.target._over_trees
    monkeypatch.setattr(
        game.target, "_over_trees", lambda table, *more: seen.append((more[-1] == TREE_ROOM, len(table))) or over(table, *more)
    )
    found, left = None, []
    found = game.target.capture(8, hidden=(1,), progress=left.append)
    assert found.graphs == len(left) == len(seen) and left == list(range(found.graphs, 0, -1))
    seen.clear()
    return game, seen


def test_graphs_are_captured_of_every_batch_and_width_and_leave_the_slots_alone(captured):
    game, _ = captured
    assert set(game.target._graphs) == {(S, T) for S in (1, 2, 4, 6) for T in (1, 2, 4, 8)}
    game.join(0, 1)
    before = game.target._cache.clone()
    assert game.target.capture(4) == game.target.captured, "they are there already"
    game.target.capture(8, hidden=(1, 2))
    spare = torch.arange(6) * game.target._columns + game.target._columns - 1
    same = (game.target._cache == before).flatten(3).all(-1).all(0).all(0)
    assert same.index_fill(0, spare, True).all()
    assert game.next_error([0, 1]) < 1e-4


def test_rounds_by_graphs_are_right_and_none_is_captured_on_the_way(captured):
    game, seen = captured
    game.join(*range(6))
    errors = [game.round(accept) for accept in ("some", "all", "none", "some")]
    game.leave(3)
    errors.append(game.round("some"))
    assert max(errors) < 1e-4
    assert {graph for graph, _ in seen} >= {True} and len(game.target._graphs) == 16


def test_what_a_graph_gave_outlives_the_next_pass(captured):
    game, _ = captured
    game.join(0, 1)
    tree = pad([([game.texts[0][-1], 5, 9], [-1, 0, 0])])
    scores = game.target.score([0], tree, hidden=(1,))
    logits, state = scores.logits.clone(), scores.hidden[1].clone()
    game.target.score([1], pad([([game.texts[1][-1], 7, 8], [-1, 0, 0])]), hidden=(1,))
    assert torch.equal(scores.logits, logits) and torch.equal(scores.hidden[1], state)


def test_what_was_not_captured_runs_without_a_graph(captured):
    game, seen = captured
    game.join(0)
    game.target.score([0], pad([([game.texts[0][-1], 5], [-1, 0])]), hidden=(0,))
    game.target.score([0], pad([([game.texts[0][-1], *[5] * 8], [-1, *range(8)])]))
    assert [graph for graph, _ in seen] == [False, False]


def test_a_lone_sequence_in_the_last_slot_is_a_batch_of_one(captured):
    game, seen = captured
    game.join(5)
    assert game.next_error([5]) < 1e-4
    assert seen == [(True, 1)]


def test_a_subset_of_the_slots_leaves_the_scratch_of_the_others_alone():
    game = play(max_num_seqs=3)
    game.join(0, 1, 2)
    trees = [pad([([game.texts[s][-1], 5, 9], [-1, 0, 0])]) for s in (0, 1, 2)]
    for slot in (0, 2, 1):
        game.target.score([slot], trees[slot])
    game.target.commit([0, 1, 2], outcome([[2], [1], [2]], [3, 3, 3]))
    for slot, token in enumerate((9, 5, 9)):
        game.texts[slot] += [token, 3]
    assert game.next_error([2, 0, 1]) < 1e-4


def test_prompts_of_many_chunks_and_of_one_token_equal_a_fresh_pass():
    model, chance = small_model(ARCHITECTURES["llama"]), random.Random(1)
    target = StaticLlama(model, max_num_seqs=3)
    texts = [[chance.randrange(V) for _ in range(n)] for n in (600, TREE_ROOM, 1)]
    logits = target.prefill([2, 0, 1], texts).logits[:, 0]
    for b, text in enumerate(texts):
        assert_close(logits[b], fresh(model, text)[-1])


def test_a_full_sequence_beside_a_new_one_keeps_both_right():
    model, chance = small_model(ARCHITECTURES["llama"]), random.Random(2)
    target = StaticLlama(model, max_num_seqs=2)
    full, new = [chance.randrange(V) for _ in range(640)], [chance.randrange(V) for _ in range(TREE_ROOM)]
    target.prefill([0], [full[:-1]])
    logits = target.prefill([0, 1], [full[-1:], new]).logits[:, 0]
    assert_close(logits[0], fresh(model, full)[-1])
    assert_close(logits[1], fresh(model, new)[-1])


def test_fusing_leaves_the_module_as_it_was_and_holds_nothing_twice():
    model = small_model(ARCHITECTURES["qwen2"])
    before = fresh(model, [1, 2, 3])
    target = StaticLlama(model, max_num_seqs=1)
    assert torch.equal(fresh(model, [1, 2, 3]), before)
    assert model.model.layers[0].self_attn.q_proj.weight.data_ptr() == target._layers[0].qkv.data_ptr()


def test_half_precision_models_give_float32_logits_near_the_true_ones():
    model = small_model(ARCHITECTURES["llama"])
    exact = fresh(model, [1, 2, 3])[-1]
    logits = StaticLlama(model.to(torch.bfloat16)).prefill([0], [[1, 2, 3]]).logits[0, 0]
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().max() < 0.1 * exact.abs().max()


def test_what_a_node_sees_is_its_ancestors():
    chance = random.Random(3)
    for size in (1, 13, 200):
        tree = pad([([0] * size, [-1, *(chance.randrange(n) for n in range(1, size))]) for _ in range(5)])
        nodes = torch.arange(size).expand(5, -1).numpy()
        table = filled((8, 256), np.arange(5), np.zeros(5, np.int64), Rows(nodes, nodes, nodes, tree.host[1]))
        assert torch.equal(visible(fields(torch.from_numpy(table)).sees, size)[:5, :size], ancestors(tree))


def test_overflow_and_what_is_not_covered_are_refused_with_the_reason():
    target = StaticLlama(small_model(ARCHITECTURES["llama"]), max_model_len=8, max_num_seqs=2)
    with pytest.raises(CapacityError, match="0 to 1"):
        target.prefill([2], [[1]])
    with pytest.raises(CapacityError, match="holds 8"):
        target.prefill([0], [[1] * 9])
    with pytest.raises(CapacityError, match=str(TREE_ROOM)):
        target.score([0], pad([([1] * (TREE_ROOM + 1), [-1] + [0] * TREE_ROOM)]))
    with pytest.raises(InvalidInputError, match="no tokens"):
        target.prefill([0], [[]])
    with pytest.raises(IncompatibleError, match="SiLU"):
        StaticLlama(hf.LlamaForCausalLM(hf.LlamaConfig(**{**ARCHITECTURES["llama"].to_dict(), "hidden_act": "gelu"})))


@pytest.mark.parametrize("hidden", [(), (0, 2)])
def test_a_pass_never_waits_for_the_host_nor_mixes_devices(hidden):
    target = play("qwen3", max_num_seqs=4).target
    target._layers = [Layer(*map(moved, layer)) for layer in target._layers]
    for name in ("_cache", "_embed", "_head", "_norm", "_cos", "_sin"):
        setattr(target, name, moved(getattr(target, name)))
    table = torch.empty(2, length_of(8), dtype=torch.int64, device="meta")
    with OneDevice(sends=False), torch.inference_mode():
        logits, *states = target._over_trees(table, hidden, None, target._columns, TREE_ROOM)
        assert (logits.device.type, logits.shape) == ("meta", (2, 8, V))
        assert [x.shape for x in states] == [(2, 8, 32)] * len(hidden)
        with pytest.raises(RuntimeError, match="meta tensors"):
            table.sum().item()
        with pytest.raises(RuntimeError, match="cpu and meta"):
            table.gather(1, torch.zeros(2, 1, dtype=torch.int64))
