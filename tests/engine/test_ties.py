"""In bfloat16 greedy texts part at near ties; with `tie_margin` drafts and batches change no token."""

import pytest
import torch

from polydraft.core import SamplingParams
from polydraft.engine.api import Engine
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.models.hf import HFTarget
from tests.engine.tables import TableModel
from tests.models.tree_rounds import ARCHITECTURES, V, small_model

PROMPTS = [[(7 * i + 3 * j * j) % V for j in range(2 + i % 5)] for i in range(12)]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
MARGIN = 0.5


def target(seqs):
    return HFTarget(small_model(ARCHITECTURES["llama"]).to(torch.bfloat16), max_num_seqs=seqs, max_model_len=64)


def texts(margin, *, drafts):
    drafted = {"draft_model": target(8), "drafter": "model:chain", "depth": 4} if drafts else {"drafter": None}
    engine = Engine.of(target(8 if drafts else 1), tie_margin=margin, **drafted)
    return [r.token_ids for r in engine.generate(PROMPTS, GREEDY)]


def test_bfloat16_texts_part_without_the_option_and_agree_with_it():
    assert texts(None, drafts=True) != texts(None, drafts=False)
    assert texts(MARGIN, drafts=True) == texts(MARGIN, drafts=False)


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
