"""Training resumes exactly; batches are read once; distillation brings distributions together."""

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from polydraft.errors import InvalidInputError
from studies.embedded_pair.distil import distillation_loss, mixed_batches, sample_corpus
from studies.embedded_pair.rows import Phase, next_token_loss, shuffled_rows
from studies.training import train
from tests.support.tiny import llama_config

V = 64
PHASES = (Phase(4, 3, 8), Phase(2, 2, 16))


def tiny(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        llama_config(vocab_size=V, num_hidden_layers=1, tie_word_embeddings=True, max_position_embeddings=64)
    )


def stream(num_tokens: int = 400) -> np.ndarray:
    """A walk with memory: the next token is one of two that depend on the last."""
    rng = np.random.default_rng(0)
    tokens = [1]
    for _ in range(num_tokens - 1):
        tokens.append((tokens[-1] * 5 + rng.integers(2)) % V)
    return np.array(tokens, dtype=np.uint16)


def run(model, checkpoint, **options):
    batch = shuffled_rows(stream(), PHASES, seed=0)
    train(
        model,
        next_token_loss,
        batch,
        num_steps=6,
        warm_up=2,
        checkpoint=checkpoint,
        report=lambda line: None,
        **options,
    )
    return model


def test_an_interrupted_run_equals_an_unbroken_one_bit_for_bit(tmp_path):
    whole = run(tiny(), tmp_path / "whole.pt")
    run(tiny(), tmp_path / "broken.pt", stop_at=3)
    resumed = run(tiny(seed=9), tmp_path / "broken.pt")
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_every_row_is_read_once():
    tokens = np.arange(161, dtype=np.uint16)
    batch = shuffled_rows(tokens, PHASES, seed=3)
    inputs = torch.cat([batch(step)[:, :-1].flatten() for step in range(6)])
    assert inputs.sort().values.tolist() == list(range(160))
    assert all(torch.equal(batch(s)[:, 1:], batch(s)[:, :-1] + 1) for s in range(6))


def test_a_short_corpus_is_refused():
    with pytest.raises(InvalidInputError, match="expected at least 161"):
        shuffled_rows(np.zeros(160, dtype=np.uint16), PHASES, seed=0)


def test_distillation_brings_the_draft_closer_to_the_target(tmp_path):
    target = run(tiny(), tmp_path / "target.pt").eval()
    draft = tiny(seed=1)
    samples = sample_corpus(
        target,
        stream(),
        tmp_path / "samples.npy",
        num_rows=8,
        length=9,
        prompt_length=4,
        end_of_text_id=0,
        seed=0,
    )
    assert samples.shape == (8, 9)
    phases = (Phase(30, 1, 8),)
    batch = mixed_batches(shuffled_rows(stream(), phases, seed=0), samples, rows_per_batch=2, num_steps=30)
    assert batch(0).shape == (3, 9)
    loss = distillation_loss(target, tv_weight=0.5)
    before = loss(draft, batch(0)).item()
    train(
        draft,
        loss,
        batch,
        num_steps=30,
        warm_up=2,
        checkpoint=tmp_path / "draft.pt",
        report=lambda line: None,
    )
    assert loss(draft, batch(0)).item() < before / 2


def test_sampling_resumes_from_the_rows_it_has(tmp_path):
    options = {"length": 6, "prompt_length": 2, "end_of_text_id": 0, "seed": 0}
    whole = sample_corpus(tiny(), stream(), tmp_path / "a.npy", num_rows=512, **options)
    sample_corpus(tiny(), stream(), tmp_path / "b.npy", num_rows=256, **options)
    assert np.array_equal(sample_corpus(tiny(), stream(), tmp_path / "b.npy", num_rows=512, **options), whole)
