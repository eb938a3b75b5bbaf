"""What requests share, they learn of texts as far as these were emitted, and no further."""

import pytest

from polydraft import Engine, FixedPolicy, SamplingParams
from polydraft.core import Budget
from polydraft.core.geometry import chain
from polydraft.methods.registry import verifier
from polydraft.papers.lookahead.phrase_pool import PhrasePool
from polydraft.papers.trigram.drafter import TrigramDrafter, TrigramStore
from tests.engine.tables import TableModel
from tests.papers.lookahead.test_phrases import Dull


def of_phrases():
    pool = PhrasePool(2)
    drafter = Dull(TableModel(seed=1, max_num_seqs=6), length=2, pool=pool)
    return drafter, lambda: [(token, *phrase) for token in range(7) for phrase in pool.latest(token)]


def of_trigrams():
    store = TrigramStore(1000)
    return TrigramDrafter(store=store), lambda: [
        (key >> 32, key & 0xFFFFFFFF) for key in store.to_arrays()["key"].tolist()
    ]


@pytest.mark.parametrize("made", [of_phrases, of_trigrams])
def test_nothing_behind_a_stop_is_learnt(made):
    for seed in range(28):
        drafter, learnt = made()
        engine = Engine.of(
            TableModel(),
            drafter=drafter,
            verifier=verifier("match"),
            policy=FixedPolicy(Budget.fixed(chain(4))),
        )
        params = SamplingParams(temperature=0.4, max_tokens=30, seed=seed, n=3, stop_token_ids=[seed % 7])
        results = engine.generate([[1, 2, 1, 2, 3], [3, 3, 3, 1]], params)
        texts = [[*r.prompt_token_ids, *s.token_ids] for r in results for s in r.samples]
        for found in learnt():
            assert any(found == tuple(text[i : i + len(found)]) for text in texts for i in range(len(text)))
