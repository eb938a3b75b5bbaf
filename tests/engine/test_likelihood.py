"""Log-likelihoods of given texts are those of transformers' model within rounding, in pieces, whatever runs beside them."""

import numpy as np
import pytest
import torch
import transformers as hf

from polydraft import Engine, SamplingParams
from polydraft.engine import texts
from polydraft.errors import CapacityError, InvalidInputError
from polydraft.models import load, pair
from polydraft.sampling.softmax import log_softmax
from tests.models.test_hybrids import made, text_of
from tests.support.closeness import assert_close

FOLDER = str(pair.draft_folder())
TEXT = "def add(a, b):\n    return a + b\n"


def engine(backend="compiled", max_num_seqs=2, **options):
    more = {"cache_dtype": "float32"} if backend == "compiled" else {"dtype": "float32"}
    model = load.load_model(
        FOLDER, device="cpu", max_num_seqs=max_num_seqs, max_model_len=600, backend=backend, **more
    )
    return Engine.of(
        model, tokenizer=load.load_tokenizer(FOLDER), drafter="ngram", keep_prefixes=True, **options
    )


@pytest.fixture(scope="module")
def reference():
    return hf.AutoModelForCausalLM.from_pretrained(FOLDER, dtype="float32")


def rows_of(reference, ids):
    with torch.no_grad():
        return log_softmax(reference(torch.tensor([ids])).logits[0].numpy())[:-1]


def told(fast, ids, top=0):
    future = fast.likelihood(ids, top)
    while not future.done():
        fast.step()
    first, *others = future.result(0)
    assert first is None and [entry.token_id for entry in others] == ids[1:]
    return others


@pytest.mark.parametrize("backend", ["compiled", "transformers"])
def test_log_likelihoods_are_those_of_transformers(reference, backend):
    fast = engine(backend)
    for text in (TEXT, TEXT * 40):  # the second is beyond a piece
        ids = fast.encode(text)[:530]
        found = told(fast, ids, 3)
        rows = rows_of(reference, ids)
        expected = np.take_along_axis(rows, np.array(ids[1:])[:, None], 1)[:, 0]
        assert_close(np.array([entry.logprob for entry in found]).astype(np.float64), expected)
        assert_close(
            np.array([list(entry.top.values()) for entry in found]).astype(np.float64),
            -np.sort(-rows, -1)[:, :3],
        )
    assert fast.num_free == 2


def test_ranks_and_alternatives_are_those_of_the_rows(reference):
    fast = engine()
    ids = fast.encode(TEXT)
    for entry, row in zip(told(fast, ids, 2), rows_of(reference, ids), strict=True):
        gap = np.sort(np.abs(row - row[entry.token_id]))[1]
        if gap > 1e-3:  # ranks of what rounding does not exchange
            assert entry.rank == int((row > row[entry.token_id]).sum()) + 1
        assert (entry.rank == 1) == (max(entry.top.values()) == entry.logprob)


def test_pieces_change_nothing(monkeypatch):
    ids = engine().encode(TEXT * 6)
    whole = [entry.logprob for entry in told(engine(), ids)]
    monkeypatch.setattr(texts, "MOST_LOGITS", 7 * engine().target.vocab_size)
    assert_close(np.array([entry.logprob for entry in told(engine(), ids)]), np.array(whole))


def test_what_was_scored_or_held_is_not_read_again():
    fast = engine()
    ids = fast.encode(TEXT * 4)
    params = SamplingParams(temperature=0, max_tokens=6)
    alone = fast.generate([ids], params)[0]
    for ask in (lambda f: f.likelihood(ids), lambda f: f.hold(ids)):
        other = engine()
        future = ask(other)
        while not future.done():
            other.step()
        found = other.generate([ids], params)[0]
        assert found.token_ids == alone.token_ids and found.stats.cached_tokens >= len(ids) - 2


def test_texts_are_scored_beside_those_that_generate():
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    alone = engine().generate(TEXT, params)[0].token_ids
    fast = engine(max_num_seqs=1)  # one slot, which they share in turns
    ids = fast.encode(TEXT * 20)
    future = fast.likelihood(ids)
    result = fast.submit(TEXT, params)
    while fast.has_unfinished_requests:
        fast.step()
    scored = np.array([entry.logprob for entry in future.result(0)[1:]])
    assert result.token_ids == alone and fast.num_free == 1
    np.testing.assert_allclose(
        scored, [entry.logprob for entry in told(engine(), ids)], rtol=1e-4, atol=1e-5 * np.abs(scored).max()
    )


def test_what_cannot_be_scored_is_refused():
    fast = engine()
    for ids, error in (([], InvalidInputError), ([-1], InvalidInputError), ([1] * 601, CapacityError)):
        with pytest.raises(error, match="given"):
            fast.likelihood(ids)
    assert told(fast, [5]) == []


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_layers_with_a_state_give_the_log_likelihoods_of_transformers(name):
    module, target = made(name, max_model_len=512)
    ids = text_of(300)
    found = told(Engine.of(target, drafter="none", eos_token_ids=[0]), ids)
    expected = np.take_along_axis(rows_of(module, ids), np.array(ids[1:])[:, None], 1)[:, 0]
    assert_close(np.array([entry.logprob for entry in found]).astype(np.float64), expected)
