"""Models with recurrent layers beside attention: every node of a tree, every cut and copy, and texts with drafts are those of a fresh pass."""

import json
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from scipy.stats import chi2

from polydraft.core import Budget, SamplingParams
from polydraft.core.geometry import chain, pad, paths
from polydraft.engine.api import Engine
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.load import load_model
from polydraft.models.loading.gguf import GgufWeights
from polydraft.models.prefix_cache import PrefixCache
from polydraft.models.slot_pool import Slots
from polydraft.models.torch.module import module_of_file
from polydraft.policy.fixed import FixedPolicy
from polydraft.sampling.softmax import softmax
from tests.models.small_types import small_config
from tests.models.tree_rounds import V, branch, fresh, outcome, small_model
from tests.support.closeness import assert_close
from tests.support.tiny import GROUPED

KINDS = {
    "lfm2": ("conv", "full_attention"),
    "lfm2_moe": ("conv", "full_attention"),
    "granitemoehybrid": ("linear_attention", "full_attention"),
    "qwen3_5_text": ("linear_attention", "full_attention"),
    "qwen3_next": ("linear_attention", "full_attention"),
}
"""Kinds of layers of hybrids, those of attention behind the others."""
SIZES = {name: size for name, size in GROUPED.items() if name not in ("vocab_size", "num_hidden_layers")}
HYBRIDS = {
    "lfm2": lambda vocab: hf.Lfm2Config(
        vocab_size=vocab,
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        block_auto_adjust_ff_dim=False,
        conv_bias=True,
        max_position_embeddings=1024,
        pad_token_id=0,
        **SIZES,
    ),
    "granite": lambda vocab: hf.GraniteMoeHybridConfig(
        vocab_size=vocab,
        num_hidden_layers=3,
        layer_types=["mamba", "attention", "mamba"],
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=40,
        position_embedding_type="nope",
        max_position_embeddings=1024,
        pad_token_id=0,
        **SIZES,
    ),
    "granite without experts": lambda vocab: hf.GraniteMoeHybridConfig(
        vocab_size=vocab,
        num_hidden_layers=2,
        layer_types=["mamba", "attention"],
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=8,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=40,
        mamba_proj_bias=True,
        position_embedding_type="rope",
        max_position_embeddings=1024,
        pad_token_id=0,
        **SIZES,
    ),
    "falcon": lambda vocab: hf.FalconH1Config(
        vocab_size=vocab,
        num_hidden_layers=2,
        mamba_d_ssm=64,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=2,
        max_position_embeddings=1024,
        pad_token_id=0,
        mamba_proj_bias=True,
        projectors_bias=True,
        embedding_multiplier=1.5,
        lm_head_multiplier=0.5,
        key_multiplier=0.75,
        attention_in_multiplier=1.25,
        attention_out_multiplier=0.8,
        ssm_in_multiplier=1.2,
        ssm_out_multiplier=0.7,
        ssm_multipliers=[1.1, 0.9, 1.3, 0.6, 1.4],
        mlp_multipliers=[1.2, 0.8],
        **SIZES,
    ),
    "lfm2_moe": lambda vocab: hf.Lfm2MoeConfig(
        vocab_size=vocab,
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        num_dense_layers=1,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        max_position_embeddings=1024,
        pad_token_id=0,
        **SIZES,
    ),
    "qwen3_5": lambda vocab: hf.Qwen3_5TextConfig(
        vocab_size=vocab,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        max_position_embeddings=1024,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
        **SIZES,
    ),
}
EVERY = pytest.mark.parametrize("name", HYBRIDS)
ORACLE = Path(__file__).parent / "oracle_gguf"
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def made(name, vocab=V, seed=0, **options):
    model = small_model(HYBRIDS[name](vocab), seed)
    return model, CompiledModel(model, **{"max_num_seqs": 4, "cache_dtype": "float32", **options})


def text_of(count, seed=0, vocab=V):
    return random.Random(seed).choices(range(vocab), k=count)


PROMPTS = [text_of(size, size) for size in (3, 60, 140)]


@cache
def greedy_texts(name):
    """What transformers writes behind the prompts."""
    model = made(name)[0]
    texts = [list(prompt) for prompt in PROMPTS]
    for _ in range(GREEDY.max_tokens):
        for text in texts:
            text.append(int(fresh(model, text)[-1].argmax()))
    return [text[-GREEDY.max_tokens :] for text in texts]


def after(target, slot, token=7):
    return target.score([slot], pad([([token], [-1])])).logits[0, 0]


def test_a_folder_whose_weights_have_multipliers_is_the_model_of_transformers(tmp_path):
    model, _ = made("falcon")
    model.save_pretrained(tmp_path)
    target = load_model(
        str(tmp_path), backend="compiled", max_num_seqs=1, max_model_len=128, cache_dtype="float32"
    )
    text = text_of(20)
    assert_close(target.prefill([0], [text]).logits[0, 0], fresh(model, text)[-1])


@EVERY
def test_every_node_of_a_random_tree_has_the_logits_of_its_path(name):
    model, target = made(name)
    choose = random.Random(3)
    for size in (1, 8, 70):
        text = text_of(43, size)
        parents = [-1, *(choose.randrange(max(0, n - 5), n) for n in range(1, size))]
        tokens = text_of(size, size + 1)
        target.prefill([1], [text])
        logits = target.score([1], pad([(tokens, parents)])).logits[0]
        for node in range(size):
            assert_close(
                logits[node], fresh(model, text + [tokens[n] for n in (0, *branch(parents, node))])[-1]
            )
        target.release([1])


@EVERY
def test_a_tree_that_grows_in_several_passes_and_pieces_of_prompts_beside_it_have_the_same_logits(name):
    model, target = made(name)
    texts = {slot: text_of(50 + slot, slot) for slot in (2, 0)}
    parents = [-1, 0, 0, 1, 2, 2, 4]
    tokens = text_of(7, 9)
    target.prefill([*texts], [*texts.values()])
    for since, end in ((0, 1), (1, 3), (3, 6), (6, 7)):
        grown = target.score([*texts], pad([(tokens[:end], parents[:end])] * 2), since=since).logits
        for b, text in enumerate(texts.values()):
            for node in range(since, end):
                path = [tokens[n] for n in (0, *branch(parents, node))]
                assert_close(grown[b, node - since], fresh(model, [*text, *path])[-1])
    target.commit([*texts], outcome([[2, 4, 6], [1]], [7, 7]))
    for slot, path in ((2, [0, 2, 4, 6]), (0, [0, 1])):
        texts[slot] += [tokens[node] for node in path]
    piece = text_of(150, 5)
    scores, _ = target.score_mixed([*texts], pad([([7], [-1])] * 2), {1: piece})
    for b, text in enumerate(texts.values()):
        assert_close(scores.logits[b, 0], fresh(model, [*text, 7])[-1])
    assert_close(after(target, 1), fresh(model, [*piece, 7])[-1])


@EVERY
def test_logits_have_the_same_bits_on_any_number_of_threads(name):
    parents = [-1]
    choose = random.Random(4)
    parents += [choose.randrange(max(0, n - 5), n) for n in range(1, 40)]
    logits = list[torch.Tensor]()
    for threads in (1, 3):
        target = made(name, threads=threads)[1]
        target.prefill([0], [text_of(90)])
        logits.append(target.score([0], pad([(text_of(40, 1), parents)])).logits)
    assert np.array_equal(*logits)


@EVERY
def test_rounded_weights_are_near_those_that_are_not(name):
    _, exact = made(name)
    _, rounded = made(name, quantization="int8")
    logits = [target.prefill([0], [text_of(70)]).logits for target in (exact, rounded)]
    assert 0 < np.abs(logits[0] - logits[1]).max() < 0.2 * np.abs(logits[0]).max()


@EVERY
def test_a_cut_or_a_copy_to_any_length_is_as_good_as_a_text_of_that_length(name):
    model, target = made(name)
    text = text_of(600)
    for slot, length in ((1, 599), (2, 301), (3, 31)):
        target.release([0, slot])
        target.prefill([0], [text])
        target.copy(0, slot, length)
        assert_close(after(target, slot), fresh(model, [*text[:length], 7])[-1])
        target.cut(0, length - 20)
        assert_close(after(target, 0), fresh(model, [*text[: length - 20], 7])[-1])


@EVERY
def test_a_slot_without_a_text_forgets_the_one_before(name):
    model, target = made(name)
    target.prefill([0], [text_of(100)])
    target.release([0])
    assert_close(after(target, 0), fresh(model, [7])[-1])


@EVERY
def test_a_text_begins_from_the_prefix_cache_where_states_were_kept(name):
    model, target = made(name)
    cache = PrefixCache(target, 1 << 30)
    slots = Slots(target)
    text = text_of(520)
    slot = slots.take()
    target.prefill([slot], [text])
    cache.store(slot, text)
    slots.give_back(slot)
    for other, length in ((text, 512), ([*text[:300], *text_of(200, 1)], 256), (text[:255], 0)):
        target.release([0])
        cache.load(0, other)
        assert target.lengths[0] == cache.length(other) == length
        target.prefill([0], [other[length:]])
        assert_close(after(target, 0), fresh(model, [*other, 7])[-1])


@EVERY
def test_states_count_in_the_memory_of_slots_and_of_the_prefix_cache(name):
    _, target = made(name)
    _, twice = made(name, max_num_seqs=8)
    assert target.state_bytes > 0
    assert (
        target.cache_bytes
        > 4 * target.state_bytes + target.lengths.size * target.max_model_len * target.bytes_per_token
    )
    assert twice.cache_bytes == 2 * target.cache_bytes
    text = text_of(256)
    cache = PrefixCache(target, target.block_tokens * target.bytes_per_token)
    target.prefill([0], [text])
    cache.store(0, text)
    assert cache.num_bytes <= cache.capacity_bytes


@EVERY
@pytest.mark.parametrize(
    "options",
    [
        {"drafter": "ngram", "depth": 4},
        {"drafter": "suffix", "policy": FixedPolicy(Budget.fixed(chain(4)))},
        {"drafter": "model:paths", "verifier": "block", "policy": FixedPolicy(Budget.fixed(chain(5)))},
        {
            "drafter": "model:paths",
            "verifier": "greedy_traversal",
            "policy": FixedPolicy(Budget.fixed(paths(3, 4))),
        },
        {"drafter": "model:top_k", "depth": 4},
    ],
    ids=lambda options: "-".join(str(x) for x in options.values() if isinstance(x, str)),
)
def test_greedy_texts_are_those_of_transformers_with_drafts_of_every_kind(name, options):
    _, target = made(name)
    draft = {"draft_model": made(name, seed=1)[1]} if "model" in options["drafter"] else {}
    results = Engine.of(target, keep_prefixes=False, **options, **draft).generate(PROMPTS, GREEDY)
    assert [list(result.token_ids) for result in results] == greedy_texts(name)
    assert sum(r.stats.drafted_tokens for r in results) > 20


@EVERY
def test_the_distribution_over_rounds_is_the_targets(name):
    vocab = 8
    count = 1024
    length = 2
    model, target = made(name, vocab, max_num_seqs=256)
    draft = made(name, vocab, seed=1, max_num_seqs=256)[1]
    engine = Engine.of(
        target, draft_model=draft, drafter="model:paths", policy=FixedPolicy(Budget.fixed(paths(2, 2)))
    )
    prompt = text_of(37, 2, vocab)
    result = engine.generate(
        [prompt], SamplingParams(n=count, max_tokens=length, seed=5, ignore_eos=True, temperature=1.5)
    )[0]
    seen = np.zeros(vocab**length)
    for sample in result.samples:
        seen[sum(token * vocab**i for i, token in enumerate(reversed(sample.token_ids)))] += 1
    rows = [
        softmax(fresh(model, [*prompt, *more])[-1].astype(np.float64) / 1.5)
        for more in ([], *([t] for t in range(vocab)))
    ]
    expected = count * (rows[0][:, None] * np.stack(rows[1:])).ravel()
    common = expected > 5
    grouped = [np.append(x[common], x[~common].sum()) for x in (seen, expected)]
    statistic = ((grouped[0] - grouped[1]) ** 2 / grouped[1].clip(min=1e-9)).sum()
    assert chi2.sf(float(statistic), int(common.sum())) > 1e-3


@EVERY
@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_texts_that_share_a_beginning_say_the_same(name, drafter):
    _, target = made(name)
    shared = Engine.of(target, drafter=drafter, keep_prefixes=True, prefix_cache_bytes=1 << 28)
    alone = Engine.of(made(name)[1], drafter=drafter, keep_prefixes=False)
    beginning = text_of(300)
    prompts = [[*beginning[: 300 - 20 * i], *text_of(30, i)] for i in range(8)]
    expected = [r.token_ids for r in alone.generate(prompts, GREEDY)]
    for _ in range(2):
        results = [shared.generate([prompt], GREEDY)[0] for prompt in prompts]
        assert [r.token_ids for r in results] == expected
    assert sum(r.stats.cached_tokens for r in results) > 1500
    again = shared.generate([[*prompts[0], *results[0].token_ids, 5]], GREEDY)[0]
    assert again.token_ids == alone.generate([[*prompts[0], *results[0].token_ids, 5]], GREEDY)[0].token_ids


@pytest.mark.parametrize("name", ["lfm2", "lfm2moe", "granitehybrid", "falcon-h1"])
def test_a_file_and_the_folder_that_transformers_saves_are_the_same_model(name, tmp_path):
    file = str(ORACLE / f"{name}.gguf")
    module_of_file(GgufWeights.of(file)).save_pretrained(tmp_path)
    case = json.loads((ORACLE / f"{name}.json").read_text(encoding="utf-8"))["cases"][2]
    models = [
        load_model(place, backend="compiled", max_num_seqs=1, max_model_len=128)
        for place in (file, str(tmp_path))
    ]
    logits = [model.prefill([0], [case["prompt"] + case["ids"]]).logits for model in models]
    assert np.array_equal(*logits)


def test_folders_that_have_the_weights_of_a_key_head_together_are_read():
    """Matrices of Qwen3-Next; experts make small differences larger."""
    config = hf.Qwen3NextConfig(
        vocab_size=V,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        max_position_embeddings=1024,
        **SIZES,
    )
    model = small_model(config)
    target = CompiledModel(model, max_num_seqs=1, cache_dtype="float32")
    text = text_of(60)
    target.prefill([0], [text])
    assert_close(after(target, 0), fresh(model, [*text, 7])[-1], share=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attends", [False, True])
def test_hybrids_of_one_kind_of_layers_run(kind, attends, tmp_path):
    config = small_config(kind)
    text = [5, 9, 4, 9, 5, 7, 2, 7, 5, 1, 5, 3, 11, 8]
    config.layer_types = [KINDS[kind][attends]] * 4
    module = small_model(config)
    module.save_pretrained(tmp_path)
    exact = {"cache_dtype": "float32"} if attends else {}
    target = load_model(str(tmp_path), device="cpu", max_num_seqs=2, **exact)
    assert isinstance(target, CompiledModel) is attends
    assert_close(target.prefill([0], [text]).logits[0, 0], fresh(module, text)[-1], 1e-4)
    target.release([0])
