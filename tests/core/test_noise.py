import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from polydraft.core import NoiseKey
from polydraft.errors import InvalidInputError
from polydraft.numerics.floats import BFLOAT16
from polydraft.sampling import categorical, noise
from polydraft.sampling.noise import Stream
from polydraft.sampling.softmax import softmax

LAST_BELOW_ONE = math.nextafter(1.0, 0.0)
KEYS = NoiseKey.of([0, -1, 2**63 - 1, 12345], [0, 7, 2**32 - 1, 1], [0, 2**32 - 1, 99, 4096])


def uniform_of(high: int, low: int) -> float:
    return ((high << 21) | (low >> 11)) / 2**53


# Published vectors of Philox4x32-10 (Random123): (key, counter) -> four words.
@pytest.mark.parametrize(
    ("seed", "counter", "words"),
    [
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (-1, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_uniforms_are_the_words_of_philox_4x32_10(seed, counter, words):
    block, position, stream, sample = counter
    drawn = [noise.uniform_at(seed, sample, position, stream, 2 * block + half) for half in (0, 1)]
    assert drawn == [uniform_of(*words[:2]), uniform_of(*words[2:])]


def test_uniforms_are_uniform_in_every_stream():
    key = NoiseKey.of([3], [0], [17])
    for stream in Stream:
        u = noise.uniforms(key, stream, 20_000)[0]
        assert u.min() >= 0
        assert u.max() < 1
        assert stats.kstest(u, "uniform").pvalue > 1e-4
        assert stats.chisquare(np.bincount((u * 1000).astype(int), minlength=1000)).pvalue > 1e-4


@pytest.mark.parametrize("along", ["stream", "seed", "sample", "position", "neighbour"])
def test_draws_whose_keys_differ_in_one_thing_are_independent(along):
    def draws(value: int) -> np.ndarray:
        key = NoiseKey.of(
            [value if along == "seed" else 5],
            [value if along == "sample" else 0],
            [value if along == "position" else 9],
        )
        start = value if along == "neighbour" else 0
        return noise.uniforms(key, Stream(value if along == "stream" else 0), 40_000, start=start)[0]

    table, _, _ = np.histogram2d(draws(0), draws(1), bins=20)
    assert stats.chi2_contingency(table).pvalue > 1e-4


def test_one_draw_is_the_same_alone_and_in_a_batch():
    for stream, start in ((Stream.DRAFT, 0), (Stream.EXTRA, 5)):
        batch = noise.uniforms(KEYS, stream, 6, start=start)
        rows = zip(KEYS.seed.tolist(), KEYS.sample.tolist(), KEYS.position.tolist(), strict=True)
        alone = [[noise.uniform_at(s, k, t, int(stream), start + i) for i in range(6)] for s, k, t in rows]
        assert batch.tolist() == alone


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 2048])
def test_clocks_are_bit_equal_alone_and_in_a_batch(vocab_size):
    batch = noise.clocks(KEYS, vocab_size)
    for b, (s, k, t) in enumerate(
        zip(KEYS.seed.tolist(), KEYS.sample.tolist(), KEYS.position.tolist(), strict=True)
    ):
        assert noise.clock_at(s, k, t, vocab_size - 1) == batch[b, -1].item()


def test_noise_does_not_depend_on_the_batch():
    order = np.array([2, 0, 3, 1])
    shuffled = NoiseKey(KEYS.seed[order], KEYS.sample[order], KEYS.position[order])
    assert np.array_equal(noise.clocks(shuffled, 64), noise.clocks(KEYS, 64)[order])
    assert np.array_equal(
        noise.uniforms(shuffled, Stream.STOP, 3), noise.uniforms(KEYS, Stream.STOP, 3)[order]
    )


def test_the_clock_of_a_token_does_not_depend_on_the_vocabulary():
    assert np.array_equal(noise.clocks(KEYS, 2049)[:, :33], noise.clocks(KEYS, 33))


def test_clocks_are_exponential_and_resolved_near_zero():
    e = noise.clocks(NoiseKey.of(range(8), [0] * 8, [0] * 8), 100_000).ravel()
    assert stats.kstest(e, "expon").pvalue > 1e-4
    edges = np.array([0, *2.0 ** np.arange(-14, 1), np.inf])
    expected = len(e) * -np.diff(np.exp(-edges))
    assert stats.chisquare(np.histogram(e, edges)[0], expected).pvalue > 1e-4


def test_clocks_are_positive_and_finite_for_every_word():
    full = np.uint64(2**32 - 1)
    assert noise._clock(full, full) == 2.0**-53
    assert noise._clock(np.uint64(0), np.uint64(0)) == pytest.approx(53 * math.log(2), rel=1e-15)


def test_clocks_are_the_logarithm_within_one_ulp():
    rng = np.random.default_rng(0)
    for k in [
        *rng.integers(0, 2**52, 2000).tolist(),
        *(2**52 - 2**j for j in range(52)),
        *(2**j for j in range(52)),
    ]:
        exact = -math.log((2 * k + 1) / 2**53)
        clock = noise._clock(np.uint64(k >> 20), np.uint64((k & 0xFFFFF) << 12))
        assert abs(clock - exact) <= math.ulp(exact)


def test_the_race_of_the_clocks_has_the_distribution_it_runs_on():
    p = np.array([0.5, 0.25, 0.125, 0.1, 0.025, 0.0])
    rounds = 20_000
    clocks = noise.clocks(NoiseKey.of([8] * rounds, [0] * rounds, range(rounds)), len(p))
    with np.errstate(divide="ignore"):
        winners = np.bincount((clocks / p).argmin(-1), minlength=len(p))
    assert winners[-1] == 0
    assert stats.chisquare(winners[:-1], rounds * p[:-1]).pvalue > 1e-4


@pytest.mark.parametrize("dtype", [np.float32, np.float64, BFLOAT16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 5, 128, 129, 1000])
def test_choose_has_exactly_the_distribution_when_u_is_scanned(dtype, vocab_size):
    counts = np.random.default_rng(vocab_size).integers(0, 4, vocab_size) + (vocab_size == 1)
    total = int(counts.sum())
    u = (np.arange(total) + 0.5).astype(np.float64) / total
    ids = categorical.choose(np.tile(counts.astype(dtype), (total, 1)), u)
    assert np.array_equal(np.bincount(ids, minlength=vocab_size), counts)


weights = st.lists(
    st.sampled_from([0.0, 5e-324, 1e-300, 1e-9, 0.1, 1 / 3, 1.0, 7e5]), min_size=1, max_size=300
)


@settings(max_examples=150, deadline=None)
@given(weights.filter(any), st.one_of(st.sampled_from([0.0, LAST_BELOW_ONE, 1.0]), st.floats(0, 1)))
def test_choose_never_takes_a_token_that_cannot_be(probs, u):
    row = np.array([probs], dtype=np.float64)
    draw = np.array([u], dtype=np.float64)
    assert probs[categorical.choose(row, draw)[0]] > 0
    assert probs[categorical.try_choose(row, draw)[0]] > 0


def test_choose_takes_the_first_and_last_possible_token_at_the_ends():
    p = np.tile(np.array([0.0] * 200 + [0.3, 0.3, 0.1] + [0.0] * 200), (3, 1))
    assert categorical.choose(p, np.array([0.0, LAST_BELOW_ONE, 1.0], dtype=np.float64)).tolist() == [
        200,
        202,
        202,
    ]


def test_choose_agrees_with_its_version_for_devices():
    rng = np.random.default_rng(0)
    p = softmax(rng.random((500, 777), np.float32) ** 8)
    u = rng.random(500)
    assert np.array_equal(categorical.choose(p, u), categorical.try_choose(p, u))


def test_choose_keeps_leading_dimensions():
    p = np.array([0.0, 1.0])
    assert (
        categorical.choose(np.broadcast_to(p, (3, 4, 2)), np.zeros((3, 4), np.float32)).tolist()
        == [[1] * 4] * 3
    )
    assert categorical.choose(p, np.array(0.5)).item() == 1


@pytest.mark.parametrize("row", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_choose_refuses_a_row_that_is_no_distribution(row):
    with pytest.raises(InvalidInputError, match="row 1"):
        categorical.choose(np.array([[0.5, 0.5], row]), np.array([0.5, 0.5]))
    assert categorical.try_choose(np.array([row]), np.array([0.5])).item() == -1


@pytest.mark.parametrize("start", [0, 3, 6])
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_first_arrivals_are_the_smallest_clocks_over_rates(size, start):
    rng = np.random.default_rng(size)
    for position in range(40):
        rates = rng.random(size) ** 8
        rates[rng.random(size) < 0.3] = 0
        rates[size // 2] = 0.5
        arrivals = np.where(
            rates > 0,
            noise.clocks(NoiseKey.of([3], [1], [position]), start + size)[0, start:] / rates,
            np.inf,
        )
        wanted = arrivals.argsort()[: int((rates > 0).sum())][:3]
        drawn = np.full(3, -1, np.int64)
        noise.first_arrivals(rates, 3, 1, position, drawn, start)
        assert drawn[: len(wanted)].tolist() == wanted.tolist()
        assert (drawn[len(wanted) :] == drawn[len(wanted) - 1]).all()
