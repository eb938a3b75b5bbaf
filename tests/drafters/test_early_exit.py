"""The target's first layers as its drafter: one cache, one set of weights, and the law of the target."""

from collections import Counter

import pytest
import torch
from scipy.stats import chi2

from polydraft import Engine, SamplingParams
from polydraft.core import Budget
from polydraft.drafters.base import Parts
from polydraft.drafters.heads.early_exit import EarlyExitDrafter
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.tree import chain
from polydraft.verifiers import pairing
from tests.drafters import layered
from tests.drafters.sessions import requests
from tests.engine.tables import TableModel

INFO = EarlyExitDrafter.methods[0]
PROMPTS = [[1, 2, 3, 1, 2], [4], [0, 0, 1, 0, 0]]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
KINDS = ("paths", "chain", "without_replacement", "greedy_plus_one", "top_k", "coupled", "listed")


@pytest.fixture(scope="module")
def plain():
    return [r.token_ids for r in layered.engine(None, {}).generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("rule", pairing.fitting(INFO))
def test_greedy_text_is_the_targets_with_every_verifier(rule, plain):
    results = layered.engine("early-exit", {"layer": 2}, rule).generate(PROMPTS, GREEDY)
    assert [r.token_ids for r in results] == plain
    assert [r.stats.drafter_error for r in results] == [None] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_the_targets_with_every_kind_of_draft(kind, plain):
    results = layered.engine("early-exit", {"layer": 3, "kind": kind}).generate(PROMPTS, GREEDY)
    assert [r.token_ids for r in results] == plain
    assert sum(r.stats.accepted for r in results) > 0
    assert [r.stats.drafter_error for r in results] == [None] * 3


@pytest.mark.parametrize("rule", pairing.fitting(INFO))
def test_the_law_of_a_text_is_the_targets_with_every_verifier(rule):
    """Chi-square of two tokens in the middle of a text, with rounds before."""
    model, count, start = layered.target(V=3, seqs=128), 4, [1, 2, 1, 0]
    samples = (
        layered.engine("early-exit", {"layer": 2}, rule, model=model)
        .generate([start], SamplingParams(max_tokens=count, n=127, seed=5, temperature=1.2))[0]
        .samples
    )
    expected = layered.law(model, start, count, 1.2).sum((0, 1)).flatten() * len(samples)
    seen = Counter(s.token_ids[2] * 3 + s.token_ids[3] for s in samples)
    observed = torch.tensor([float(seen[i]) for i in range(9)], dtype=torch.float64)
    assert chi2.sf(float(((observed - expected) ** 2 / expected).sum()), 8) > 1e-4


def test_a_sampled_text_has_the_very_bits_of_its_logits_without_drafts():
    """Rows of the target have the same bits with and without drafts in its columns."""
    model = layered.target()
    params = SamplingParams(max_tokens=24, seed=3, logprobs=0)
    drafted = layered.engine("early-exit", {"layer": 1, "kind": "coupled"}, model=model).generate(PROMPTS, params)
    plain = layered.engine(None, {}, "race", model=model).generate(PROMPTS, params)
    for a, b in zip(drafted, plain, strict=True):
        assert a.token_ids == b.token_ids
        assert [t.logprob for t in a.samples[0].logprobs] == [t.logprob for t in b.samples[0].logprobs]


def test_laws_are_those_of_the_layers_below_the_exit():
    """Against the module of transformers: its states behind layer E, its norm and its head."""
    module, model = layered.module(), layered.target()
    drafter = EarlyExitDrafter.build(Parts(model, None, None, ()), layer=2)
    (request,) = requests([1, 2, 3, 4])
    (state,) = started(drafter, model, [[1, 2, 3, 4]])
    draft = drafter.propose([state], [Budget.fixed(chain(3))])
    text = torch.tensor([[*request.prompt_token_ids, *draft.tree.tokens[0, 1:].tolist()]])
    with torch.no_grad():
        states = module.model(text, output_hidden_states=True).hidden_states[2]
        expected = module.lm_head(module.model.norm(states)).softmax(-1)
    torch.testing.assert_close(draft.probs[0], expected[0, 3:6], atol=1e-5, rtol=1e-4)
    assert (expected[0, 3] - expected[0, 4]).abs().sum() > 0.05, "laws that differ"


def started(drafter, model, texts):
    from dataclasses import replace

    for slot, text in enumerate(texts):
        model.release([slot])
        if text[:-1]:
            model.prefill([slot], [text[:-1]])
    return drafter.start([replace(r, slot=slot) for slot, r in enumerate(requests(*texts))])


def test_an_exit_behind_nearly_all_layers_is_the_target_where_the_last_one_does_nothing():
    """E = L accepts everything; here layer L adds nothing, so that E = L - 1 has the target's own laws."""
    module = layered.module()
    with torch.no_grad():
        module.model.layers[-1].self_attn.o_proj.weight.zero_()
        module.model.layers[-1].mlp.down_proj.weight.zero_()
    from polydraft.models.compiled.llama import CompiledLlama

    model = CompiledLlama(module, max_num_seqs=4, max_model_len=64)
    made = layered.engine("early-exit", {"layer": 3}, "speculative", num_paths=1, model=model)
    result = made.generate(PROMPTS[:1], SamplingParams(max_tokens=41, seed=1))[0]
    assert result.stats.accepted == result.stats.drafted


def test_nothing_is_run_but_the_drafted_rows_and_no_weight_is_copied():
    """Committed tokens are never run through the first layers again: a proposal costs its own nodes that have children."""
    model = layered.target()
    made = layered.engine("early-exit", {"layer": 2}, num_paths=1, depth=3, model=model)
    net = made.drafter.model
    assert net.weight_bytes == 0
    assert net.arrays.target.weights.qkv.ctypes.data == model.arrays.weights.qkv.ctypes.data
    assert net.arrays.memory.keys.ctypes.data == model.arrays.memory.keys.ctypes.data
    result = made.generate([[1, 2, 3] * 8], SamplingParams(max_tokens=30, seed=1))[0]
    assert 0 < net.passes <= 3 * result.stats.target_calls
    assert net.cache_bytes == 0


@pytest.mark.parametrize("layer", [0, 4, 9, -1])
def test_a_layer_that_is_none_below_the_last_is_refused(layer):
    with pytest.raises(InvalidInputError, match="expected one of 1 to 3"):
        layered.engine("early-exit", {"layer": layer})


def test_targets_without_compiled_layers_are_refused():
    with pytest.raises(IncompatibleError, match="backend='compiled'"):
        Engine.of(TableModel(), drafter="early-exit", drafter_options={"layer": 1})
    with pytest.raises(InvalidInputError, match="expected one of them"):
        layered.engine("early-exit", {})


def test_requests_of_unknown_slots_are_refused():
    drafter = EarlyExitDrafter.build(Parts(layered.target(), None, None, ()), layer=2)
    with pytest.raises(IncompatibleError, match="slot"):
        drafter.start(requests([1, 2]))


def test_a_saved_state_drafts_as_it_did():
    model = layered.target()
    drafter = EarlyExitDrafter.build(Parts(model, None, None, ()), layer=2)
    (state,) = started(drafter, model, [[1, 2, 3, 4]])
    from dataclasses import replace

    other = drafter.restore(replace(requests([1, 2])[0], slot=0), drafter.snapshot(state))
    one, two = (drafter.propose([s], [Budget.fixed(chain(3))]) for s in (state, other))
    assert torch.equal(one.tree.tokens, two.tree.tokens)
