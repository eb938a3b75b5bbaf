"""Texts of a rounded hybrid are those of plain decoding, token by token: with drafts, beside others, behind kept prefixes, and by the race with a seed.

On processors of AVX-512 also where a matrix unit reads their prompts, which is emulated.
"""

import random
from contextlib import nullcontext
from functools import cache

import pytest
import torch
import transformers as hf

from polydraft.core import Budget, SamplingParams
from polydraft.core.geometry import chain, paths
from polydraft.engine.api import Engine
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.matrices.vectors import LANES
from polydraft.policy.fixed import FixedPolicy
from tests.support.emulated_unit import emulated

VOCAB = 4096
SLOTS = 6
CONFIG = hf.Qwen3_5TextConfig(
    vocab_size=VOCAB,
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    max_position_embeddings=1024,
    pad_token_id=0,
)
GREEDY = SamplingParams(temperature=0, max_tokens=40, logprobs=0, ignore_eos=True)
SAMPLED = [
    SamplingParams(temperature=1.0, max_tokens=40, logprobs=0, seed=seed, ignore_eos=True)
    for seed in range(SLOTS)
]
BEGINNING = random.Random(0).choices(range(1, VOCAB), k=270)
PROMPTS = [
    [*BEGINNING[: 45 * n], *random.Random(n).choices(range(1, VOCAB), k=5 + 11 * n)] for n in range(SLOTS)
]


@pytest.fixture(scope="module", autouse=True, params=["vectors", *(["matrix unit"] if LANES == 16 else [])])
def processor(request):
    with emulated() if request.param == "matrix unit" else nullcontext():
        yield


@cache
def module():
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(CONFIG).eval()
    for name, weight in model.named_parameters():
        mean = -4.0 if name.endswith("dt_bias") else 1.0  # of decays that a text is remembered behind
        torch.nn.init.normal_(weight, 0.0, 0.1) if weight.ndim > 1 else torch.nn.init.normal_(
            weight, mean, 0.1
        )
    return model


def model(quantization="int4"):
    return CompiledModel(module(), max_num_seqs=SLOTS, quantization=quantization, cache_dtype="bfloat16")


def engine(drafter=None, *, keep_prefixes=False, **options):
    draft_model = model("int8") if drafter else None
    return Engine.of(
        model(), drafter=drafter, draft_model=draft_model, keep_prefixes=keep_prefixes, **options
    )


def fixed(parents):
    """Drafts of one shape in every step."""
    return {"policy": FixedPolicy(Budget.fixed(parents))}


DRAFTS = [
    ("model:chain", {}),
    ("model:chain", fixed(chain(9))),
    ("model:paths", fixed(paths(3, 5))),
    ("model:top_k", {}),
]


def texts(engine, params, prompts=PROMPTS):
    """Tokens with their log-probabilities, whose last bits show a difference long before it changes a token."""
    return [
        [(t.token_id, t.logprob) for t in result.samples[0].logprobs]
        for result in engine.generate(prompts, params)
    ]


@pytest.fixture(scope="module")
def greedy(processor):
    plain = engine()
    return [text for prompt in PROMPTS for text in texts(plain, GREEDY, [prompt])]


@pytest.fixture(scope="module")
def sampled(processor):
    return texts(engine(verifier="race"), SAMPLED)


def test_greedy_texts_beside_others_are_those_of_plain_decoding_alone(greedy):
    assert texts(engine(), GREEDY) == greedy


@pytest.mark.parametrize(("drafter", "options"), DRAFTS)
def test_greedy_texts_with_drafts_are_those_of_plain_decoding_alone(greedy, drafter, options):
    assert texts(engine(drafter, **options), GREEDY) == greedy


def test_greedy_texts_behind_kept_prefixes_are_those_of_plain_decoding_without(greedy):
    kept = engine(keep_prefixes=True, prefix_cache_bytes=1 << 28)
    for _ in range(2):
        assert [text for prompt in PROMPTS for text in texts(kept, GREEDY, [prompt])] == greedy


@pytest.mark.parametrize(("drafter", "options"), [(None, {}), DRAFTS[0]])
def test_greedy_texts_behind_kept_answers_are_those_behind_answers_that_are_read(greedy, drafter, options):
    follow_ups = [
        [*prompt, *(token for token, _ in answer), *other[:20]]
        for prompt, answer, other in zip(PROMPTS, greedy, PROMPTS[::-1], strict=True)
    ]
    kept = engine(drafter, keep_prefixes=True, prefix_cache_bytes=1 << 28, **options)
    for prompt, follow_up in zip(PROMPTS, follow_ups, strict=True):
        texts(kept, GREEDY, [prompt])
        assert texts(kept, GREEDY, [follow_up]) == texts(engine(), GREEDY, [follow_up])


@pytest.mark.parametrize(("drafter", "options"), [*DRAFTS[:2], ("model:coupled", fixed(paths(3, 5)))])
def test_a_seed_gives_the_text_of_plain_sampling_by_the_race(sampled, drafter, options):
    assert texts(engine(drafter, verifier="race", **options), SAMPLED) == sampled
