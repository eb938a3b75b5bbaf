"""Embeddings over HTTP: the mean of the last states, of length one, in numbers or base64."""

import numpy as np
import openai
import pytest

TEXTS = ["def add(a, b):\n", "import os"]


def test_embeddings_are_the_mean_of_last_states_of_length_one(served):
    found = served.openai.embeddings.create(model="small", input=TEXTS)
    for text, data in zip(TEXTS, found.data, strict=True):
        ids = served.engine.encode(text)
        engine = served.engine
        future = engine.embed(ids)
        while not future.done():
            engine.step()
        mean = future.result()
        assert data.embedding == pytest.approx((mean / np.linalg.norm(mean)).tolist(), abs=1e-6)
    assert found.usage.total_tokens == sum(len(served.engine.encode(text)) for text in TEXTS)


def test_token_ids_floats_and_fewer_dimensions(served):
    ids = served.engine.encode(TEXTS[0])
    whole, part = (
        served.openai.embeddings.create(model="small", input=ids, encoding_format="float", **more)
        .data[0]
        .embedding
        for more in ({}, {"dimensions": 16})
    )
    cut = np.array(whole[:16])
    assert part == pytest.approx((cut / np.linalg.norm(cut)).tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"dimensions": 4096}, "the model has"),
        ({"input": []}, "input"),
        ({"input": "x" * 4000}, "context"),
        ({"input": ["x"] * 65}, "choices"),
    ],
    ids=str,
)
def test_wrong_requests_are_refused(served, more, said):
    with pytest.raises(openai.BadRequestError, match=said):
        served.openai.embeddings.create(**{"model": "small", "input": "x", **more})
