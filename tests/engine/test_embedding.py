"""An embedding is the mean of the last states of transformers' model, whatever runs beside it."""

import asyncio

import numpy as np
import pytest
import torch
import transformers as hf

from polydraft import AsyncEngine, Engine, SamplingParams
from polydraft.core import Needs
from polydraft.errors import BusyError, CapacityError, IncompatibleError, InvalidInputError
from polydraft.models import load, pair
from tests.engine.tables import TableModel
from tests.support.closeness import assert_close

FOLDER = str(pair.draft_folder())
TEXT = "def add(a, b):\n    return a + b\n"


class WithoutStates(TableModel):
    offers = Needs()


def engine(max_num_seqs=2):
    model = load.load_model(
        FOLDER, device="cpu", max_num_seqs=max_num_seqs, max_model_len=600, cache_dtype="float32"
    )
    return Engine.of(model, tokenizer=load.load_tokenizer(FOLDER), drafter="ngram", keep_prefixes=True)


def expected(ids):
    with torch.no_grad():
        states = hf.AutoModelForCausalLM.from_pretrained(FOLDER, dtype="float32")(
            torch.tensor([ids]), output_hidden_states=True
        ).hidden_states
    return states[-1][0].double().mean(0).numpy()


def embedded(fast, *texts):
    futures = [fast.embed(ids) for ids in texts]
    while fast.has_unfinished_requests:
        fast.step()
    return [future.result(0) for future in futures]


def test_an_embedding_is_the_mean_of_the_last_states_of_transformers():
    fast = engine()
    texts = [fast.encode(TEXT), fast.encode(TEXT * 40)[:530]]  # beyond a piece
    for ids, found in zip(texts, embedded(fast, *texts), strict=True):
        assert_close(found.astype(np.float64), expected(ids))


def test_embeddings_and_texts_beside_each_other_are_what_they_are_alone():
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    alone = engine().generate(TEXT, params)[0].token_ids
    fast = engine(max_num_seqs=1)  # one slot, which they share in turns
    future = fast.embed(fast.encode(TEXT * 30))
    result = fast.submit(TEXT, params)
    while fast.has_unfinished_requests:
        fast.step()
    again = fast.generate(TEXT, params)[0].token_ids
    assert result.token_ids == again == alone and fast.num_free == 1
    assert_close(future.result(0).astype(np.float64), expected(fast.encode(TEXT * 30)))


def test_one_that_nobody_wants_or_that_fails_gives_its_slot_back(monkeypatch):
    fast = engine()
    unwanted = fast.embed(fast.encode(TEXT * 40))
    fast.step()
    assert fast.num_free == 1
    unwanted.cancel()
    monkeypatch.setattr(fast.target, "prefill", lambda *a, **k: 1 / 0)
    failing = fast.embed(fast.encode(TEXT))
    while fast.has_unfinished_requests:
        fast.step()
    assert isinstance(failing.exception(0), ZeroDivisionError) and fast.num_free == 2


def test_what_cannot_be_embedded_is_refused():
    fast = engine()
    for ids, error in (([], InvalidInputError), ([-1], InvalidInputError), ([1] * 601, CapacityError)):
        with pytest.raises(error, match="given"):
            fast.embed(ids)
    with pytest.raises(IncompatibleError, match="no embeddings"):
        Engine.of(WithoutStates(5, seed=0), drafter=None).embed([1])


def test_an_engine_that_closes_refuses_what_waits():
    async def main():
        fast = engine()
        async with AsyncEngine(fast) as running:
            (vector,) = await running.embed([fast.encode(TEXT)])
            asyncio.get_running_loop().call_later(0.02, running.engine.abort_all)
            running._closing = True
        with pytest.raises(BusyError):
            await running.embed([[1]])
        return vector

    assert np.isfinite(asyncio.run(main())).all()
