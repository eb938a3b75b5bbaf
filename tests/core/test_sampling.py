import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import generation as hf

from polydraft.core import NoiseKey, TokenTree
from polydraft.core import geometry as trees
from polydraft.core.params import SamplingParams
from polydraft.errors import InvalidInputError
from polydraft.numerics.threads import sync
from polydraft.sampling import categorical, noise, truncation
from polydraft.sampling import processing as sampling

V = 40
EOS = 3
PROMPT = [5, 6, 7, 5]
OUTPUT = [8, 8, 9]
TREE = trees.pad([([9, 1, 2, 1, 5, EOS], [-1, 0, 0, 1, 1, 4])])
PATHS = [[], [1], [2], [1, 1], [1, 5], [1, 5, EOS]]


def random_logits(seed: int, *shape: int, dtype: type = np.float64) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def reference(
    logits: np.ndarray, context: list[int], prompt_length: int, params: SamplingParams
) -> np.ndarray:
    """The distribution of one row by the processors of transformers, in the order of its `generate`."""
    processors = hf.LogitsProcessorList()
    if params.logit_bias:
        processors.append(
            hf.SequenceBiasLogitsProcessor({(i,): float(b) for i, b in params.logit_bias.items()})
        )
    if params.repetition_penalty != 1:
        processors.append(hf.RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if params.min_tokens:
        processors.append(
            hf.MinNewTokensLengthLogitsProcessor(
                prompt_length, params.min_tokens, [EOS, *params.stop_token_ids]
            )
        )
    if params.temperature not in (0, 1):
        processors.append(hf.TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k > 0 and params.temperature:
        processors.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1 and params.temperature:
        processors.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p > 0 and params.temperature:
        processors.append(hf.MinPLogitsWarper(params.min_p))
    scores = processors(torch.tensor([context]), torch.from_numpy(logits[None].copy()))
    if not params.temperature:
        return torch.nn.functional.one_hot(scores.argmax(-1), V)[0].numpy()
    return scores.softmax(-1)[0].numpy()


def distribution_of(
    logits: np.ndarray, params: SamplingParams, context: list[int] | None = None, prompt_length: int = 1
) -> np.ndarray:
    """The distribution of one row without a draft."""
    context = context or [0]
    return sampling.distributions(
        logits[None, None],
        TokenTree.roots(np.array([context[-1]])),
        [context],
        [prompt_length],
        [params],
        [EOS],
    )[0, 0]


CASES = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, repetition_penalty=2.5, top_k=3),
    SamplingParams(top_k=5),
    SamplingParams(top_k=10 * V),
    SamplingParams(top_p=0.8),
    SamplingParams(top_p=1e-9),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=1),
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(repetition_penalty=0.6),
    SamplingParams(logit_bias={1: 4.0, 30: -math.inf, 31: -2.0}),
    SamplingParams(min_tokens=5, stop_token_ids=[11, 12]),
    SamplingParams(
        temperature=1.4,
        top_k=20,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.3,
        logit_bias={2: 3.0, 8: -1.0},
        min_tokens=4,
    ),
]


@pytest.mark.parametrize("params", CASES, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_distributions_equal_those_of_transformers_at_every_node_of_a_tree(params, tied):
    for seed in range(8):
        logits = random_logits(seed, 1, len(PATHS), V)
        logits = logits.round() if tied else logits
        p = sampling.distributions(logits, TREE, [PROMPT + OUTPUT], [len(PROMPT)], [params], [EOS])[0]
        for n, path in enumerate(PATHS):
            distribution = p[n]
            expected = reference(logits[0, n], PROMPT + OUTPUT + path, len(PROMPT), params)
            if tied and params.top_p < 1:  # its sort leaves open which of equal logits goes first
                distribution = np.sort(distribution)
                expected = np.sort(expected)
            np.testing.assert_allclose(distribution, expected, rtol=0, atol=1e-12)


settings_of_a_request = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 7, 39, 100]),
    top_p=st.sampled_from([0.05, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.5]),
    repetition_penalty=st.sampled_from([0.8, 1.0, 1.5]),
    logit_bias=st.dictionaries(st.integers(0, V - 2), st.sampled_from([-5.0, 2.5, -math.inf]), max_size=4),
    min_tokens=st.sampled_from([0, 2, 9]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(settings_of_a_request, min_size=1, max_size=4), st.integers(0, 2**16))
def test_a_row_of_a_mixed_batch_is_the_distribution_that_it_has_alone(batch, seed):
    B = len(batch)
    logits = random_logits(seed, B, 1, V)
    roots = TokenTree.roots(np.full((B,), OUTPUT[-1]))
    together = sampling.distributions(logits, roots, [PROMPT + OUTPUT] * B, [len(PROMPT)] * B, batch, [EOS])
    for b, params in enumerate(batch):
        np.testing.assert_allclose(
            together[b, 0], reference(logits[b, 0], PROMPT + OUTPUT, len(PROMPT), params), rtol=0, atol=1e-12
        )
        assert np.array_equal(
            together[b, 0], distribution_of(logits[b, 0], params, PROMPT + OUTPUT, len(PROMPT))
        )


def test_presence_and_frequency_count_the_output_on_the_path_and_not_the_prompt():
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    logits = random_logits(0, 1, len(PATHS), V)
    processed = sampling.process(logits, TREE, [PROMPT + OUTPUT], [len(PROMPT)], [params])
    for n, path in enumerate(PATHS):
        for x in range(V):
            z = logits[0, n, x].item()
            count = (OUTPUT + path).count(x)
            if x in PROMPT + OUTPUT + path:
                z = z * 2 if z < 0 else z / 2
            assert processed[0, n, x].item() == pytest.approx(z - 0.25 * count - 0.5 * (count > 0), abs=1e-12)


@pytest.mark.parametrize("more", [{}, {"top_k": 40}, {"min_p": 0.1}, {"top_k": 3, "min_p": 1e-4}], ids=str)
@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 1e-9, 1.0])
def test_compiled_truncation_keeps_what_a_full_sort_keeps(top_p, more):
    params = [SamplingParams(top_p=top_p, **more)] * 3
    for spread in (0.0, 0.01, 1.0, 4.0, 30.0):
        logits = spread * random_logits(7, 3, 2, 5000, dtype=np.float32)
        logits[0, 0, ::3] = -np.inf
        slow = sampling._sorted_out(logits.reshape(6, 5000), params[0])
        fast = np.empty((6, 5000), np.float32)
        samplings = sampling.samplings_of(params).repeat(2)
        assert truncation.truncate(sync, logits.reshape(6, 5000), fast, samplings).all()
        assert np.array_equal(fast, slow)


def test_a_row_that_is_faulty_is_left_as_it_is_by_compiled_truncation():
    x = np.zeros((4, 50), np.float32)
    x[0, 7] = np.nan
    x[1, 7] = np.inf
    x[2] = -np.inf
    out = np.empty_like(x)
    samplings = sampling.samplings_of([SamplingParams(top_k=3, top_p=0.5)] * 4)
    assert truncation.truncate(sync, x, out, samplings).tolist() == [False, False, False, True]
    assert np.array_equal(out[:3], x[:3], equal_nan=True) and np.isinf(out[3]).any()


def test_top_p_keeps_the_smallest_set_with_that_mass():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    assert [
        int((distribution_of(logits, SamplingParams(top_p=p)) > 0).sum()) for p in (0.2, 0.5, 0.6, 0.81, 0.96)
    ] == [
        1,
        1,
        2,
        3,
        4,
    ]


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_p=1e-9)], ids=str)
def test_the_lowest_id_among_equals_is_kept(params):
    logits = np.zeros(V, np.float32)
    logits[[7, 9, 30]] = 2.0
    assert np.flatnonzero(distribution_of(logits, params)).tolist() == [7]


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-5])
def test_a_tiny_temperature_tends_to_the_greedy_distribution(temperature):
    logits = random_logits(1, V, dtype=np.float32) * 1e3
    assert np.array_equal(
        distribution_of(logits, SamplingParams(temperature=temperature)),
        distribution_of(logits, SamplingParams(temperature=0)),
    )


def test_min_tokens_counts_the_tokens_of_the_path():
    p = sampling.distributions(
        np.zeros((1, 6, V), np.float32),
        TREE,
        [PROMPT + OUTPUT],
        [len(PROMPT)],
        [SamplingParams(min_tokens=5)],
        [EOS],
    )
    assert (p[0, :, EOS] == 0).tolist() == [True, True, True, False, False, False]


def test_half_precision_logits_give_float32_distributions():
    logits = torch.from_numpy(random_logits(2, V)).bfloat16()
    p = distribution_of(logits, SamplingParams(temperature=0.5))
    assert p.dtype == torch.float32
    assert torch.allclose(p, (logits.float() / 0.5).softmax(-1), rtol=1e-5)


def test_inputs_are_not_modified():
    logits = random_logits(3, 1, 6, V)
    before = logits.copy()
    sampling.distributions(logits, TREE, [PROMPT + OUTPUT], [len(PROMPT)], [CASES[-1]], [EOS])
    assert np.array_equal(logits, before)


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.5, top_k=4)], ids=str
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused_by_row_and_node(params, value):
    logits = np.zeros((2, 3, V), np.float32)
    logits[1, 2, 8] = value
    chains = TokenTree.chain(np.ones((2, 3), np.int64))
    with pytest.raises(InvalidInputError, match=r"row 1, node 2 hold NaN or \+inf"):
        sampling.distributions(logits, chains, [[1], [1]], [1, 1], [params, params])


def test_a_row_with_every_token_banned_is_refused():
    with pytest.raises(InvalidInputError, match="row 0, node 0 hold only -inf"):
        distribution_of(np.zeros(2, np.float32), SamplingParams(logit_bias={0: -math.inf, 1: -math.inf}))


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.5, top_k=4)], ids=str
)
def test_padding_may_hold_anything_and_gets_a_distribution(params):
    padded = trees.pad([([1], [-1]), ([1, 2], [-1, 0])])
    logits = np.zeros((2, 2, V), np.float32)
    logits[0, 1] = math.nan
    p = sampling.distributions(logits, padded, [[1], [1]], [1, 1], [params, params])
    np.testing.assert_allclose(p.sum(-1), np.ones((2, 2), np.float32), rtol=1.3e-6, atol=1e-5)


@pytest.mark.parametrize(
    "params", [SamplingParams(logit_bias={V: 1.0}), SamplingParams(stop_token_ids=[-1])], ids=str
)
def test_ids_outside_the_vocabulary_are_refused(params):
    with pytest.raises(InvalidInputError, match=f"expected 0 <= id < {V}"):
        sampling.check_vocabulary(params, V)
    sampling.check_vocabulary(SamplingParams(logit_bias={V - 1: 1.0}, stop_token_ids=[0]), V)


def test_tokens_chosen_with_the_noise_follow_the_distribution():
    p = distribution_of(random_logits(5, V), SamplingParams(top_k=12, temperature=1.5))
    rounds = 20_000
    u = noise.uniforms(NoiseKey.of([1] * rounds, [0] * rounds, range(rounds)), noise.Stream.EXTRA, 1)[:, 0]
    counts = np.bincount(categorical.choose(np.tile(p, (rounds, 1)), u), minlength=V)
    possible = p > 0
    assert int(counts[~possible].sum()) == 0
    assert stats.chisquare(counts[possible], rounds * p[possible]).pvalue > 1e-4
