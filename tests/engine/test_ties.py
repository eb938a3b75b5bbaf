"""In bfloat16 greedy texts part at near ties; with `tie_margin` drafts and batches change no token."""

import pytest
import torch

from polydraft.core import SamplingParams
from polydraft.engine.api import Engine
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.models.torch.hf import HFTarget
from tests.engine.tables import TableModel
from tests.models.tree_rounds import ARCHITECTURES, V, fresh, small_model
from tests.support.closeness import assert_close

PROMPTS = [[(7 * i + 3 * j * j) % V for j in range(2 + i % 5)] for i in range(12)]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
MARGIN = 0.5


def target(seqs):
    return HFTarget(
        small_model(ARCHITECTURES["llama"]).to(torch.bfloat16), max_num_seqs=seqs, max_model_len=64
    )


def results(margin, *, drafts):
    drafted = (
        {"draft_model": target(8), "drafter": "model:chain", "depth": 4} if drafts else {"drafter": None}
    )
    return Engine.of(target(8 if drafts else 1), tie_margin=margin, **drafted).generate(PROMPTS, GREEDY)


def texts(margin, *, drafts):
    return [r.token_ids for r in results(margin, drafts=drafts)]


def test_bfloat16_texts_are_the_same_with_drafts_and_without():
    """They part without the option, unless a processor rounds a row of one and rows of several alike."""
    assert texts(MARGIN, drafts=True) == texts(MARGIN, drafts=False)


def test_near_ties_are_counted():
    few, many = (sum(r.stats.near_ties for r in results(margin, drafts=True)) for margin in (1e-9, MARGIN))
    assert 0 <= few < many < 32 * len(PROMPTS), "in bfloat16 two logits may be equal"


def test_a_fresh_pass_is_the_model_itself():
    text = PROMPTS[7]
    model = small_model(ARCHITECTURES["llama"])
    assert_close(HFTarget(model, max_num_seqs=1).fresh(text), fresh(model, text)[-1])


def test_rows_beyond_the_margin_are_not_scored_again():
    few, many = (Engine.of(target(1), drafter=None, tie_margin=margin) for margin in (1e-9, 1e9))
    for engine in (few, many):
        engine.generate(PROMPTS[0], GREEDY)
    assert many.target.passes - few.target.passes >= 28


def test_sampled_requests_are_left_alone():
    engine = Engine.of(target(1), drafter=None, tie_margin=1e9)
    engine.generate(PROMPTS[0], SamplingParams(max_tokens=6, seed=1, ignore_eos=True))
    assert engine.target.passes <= 7


def test_a_margin_that_means_nothing_is_refused():
    with pytest.raises(InvalidInputError, match="tie_margin=0"):
        Engine.of(target(1), drafter=None, tie_margin=0)
    with pytest.raises(IncompatibleError, match="TableModel"):
        Engine.of(TableModel(), drafter=None, tie_margin=0.1)
