"""The embedded target and a few texts of it, to train on."""

import numpy as np
import pytest

from polydraft import Engine, SamplingParams
from polydraft.train import conversations
from polydraft.train.conversations import TrainingText


@pytest.fixture(scope="package")
def engine():
    return Engine.embedded(draft_model=None, drafter=None, max_num_seqs=8, max_model_len=512)


@pytest.fixture(scope="package")
def written(engine, tmp_path_factory):
    """Texts of the target, as a shard."""
    path = tmp_path_factory.mktemp("texts") / "00000.npz"
    prompts = [[engine.target.bos_token_id or 0]] * 16
    results = engine.generate(
        prompts, SamplingParams(max_tokens=96, seed=5, temperature=0.7, ignore_eos=True)
    )
    conversations.save_shard(path, [TrainingText(np.array([0, *r.token_ids]), 1) for r in results])
    return path
