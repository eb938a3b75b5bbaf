"""Weights of experts are found under every name and in every layout that folders, modules and files have them in; what does not fit is named."""

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from polydraft.core import Budget, SamplingParams
from polydraft.core.geometry import pad, paths
from polydraft.engine.api import Engine
from polydraft.errors import CapacityError, ModelLoadError
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.compiled.weights import packed_weights
from polydraft.models.load import load_model
from polydraft.models.loading import checkpoint
from polydraft.models.loading.gguf import GgufWeights
from polydraft.models.mixers.experts.names import Experts
from polydraft.models.torch.module import module_of_file
from polydraft.models.torch.module_weights import of_module
from polydraft.policy.fixed import FixedPolicy
from tests.models.small_types import small_config
from tests.models.test_targets import FAMILY
from tests.models.tree_rounds import fresh, small_model
from tests.support.closeness import assert_close
from tests.support.tiny import llama_config

FILES = Path(__file__).parent / "oracle_gguf"
NAMES = ("qwen3_moe", "qwen3_moe with a dense layer", "mixtral", "qwen2_moe", "gpt_oss", "glm4_moe")


def unstacked(weights):
    """Experts one by one, as transformers 4 named them."""
    single = {}
    for name, weight in weights.items():
        layer, _, part = name.partition(".mlp.experts.")
        for e, matrix in enumerate(weight if part in ("gate_up_proj", "down_proj") else ()):
            halves = (
                zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
                if part == "gate_up_proj"
                else [(part, matrix)]
            )
            single |= {
                f"{layer}.mlp.experts.{e}.{module}.weight": half.contiguous() for module, half in halves
            }
    return {name: w for name, w in weights.items() if ".mlp.experts." not in name} | single


def of_mixtral(weights):
    """As Mixtral's own folders name them."""
    renamed = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "mlp.": "block_sparse_moe."}
    single = unstacked(weights)
    for ours, theirs in renamed.items():
        single = {name.replace(ours, theirs): w for name, w in single.items()}
    return single


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_has_the_weights_of_its_module(tmp_path, name):
    module = small_model(FAMILY[name])
    module.save_pretrained(tmp_path)
    ours = checkpoint.of_folder(tmp_path)
    theirs = of_module(module)
    assert {expert for expert in ours.outlines if ".experts.1." in expert}
    for weight in ours.outlines:
        assert np.array_equal(ours.read(weight), theirs.read(weight)), weight


@pytest.mark.parametrize(
    ("name", "layout"), [("qwen3_moe", unstacked), ("qwen2_moe", unstacked), ("mixtral", of_mixtral)]
)
def test_folders_whose_experts_are_not_stacked_are_read(tmp_path, name, layout):
    module = small_model(FAMILY[name])
    module.save_pretrained(tmp_path)
    stacked = {name: weight.clone() for name, weight in module.state_dict().items()}
    save_file(layout(stacked), tmp_path / "model.safetensors", {"format": "pt"})
    assert not any("gate_up_proj" in weight for weight in load_file(tmp_path / "model.safetensors"))
    ours = checkpoint.of_folder(tmp_path)
    theirs = of_module(module)
    for weight in ours.outlines:
        assert np.array_equal(ours.read(weight), theirs.read(weight)), weight


@pytest.mark.parametrize(("kind", "count"), [("mixtral", 2), ("mixtral", 11), ("lfm2_moe", 66)])
def test_experts_under_their_old_names_are_read_however_many_they_are(tmp_path, kind, count):
    config = small_config(kind)
    config.num_local_experts = config.num_experts = count
    module = small_model(config)
    module.save_pretrained(tmp_path)
    old = of_mixtral(
        {
            name.replace("feed_forward.experts", "mlp.experts"): w.clone()
            for name, w in module.state_dict().items()
        }
    )
    if config.tie_word_embeddings:
        del old["lm_head.weight"]
    if kind == "lfm2_moe":
        old = {name.replace("block_sparse_moe.", "feed_forward."): weight for name, weight in old.items()}
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    ours = checkpoint.of_folder(tmp_path)
    theirs = of_module(module)
    assert f"model.layers.3.mlp.experts.{count - 1}.up_proj.weight" in ours.outlines
    for weight in ours.outlines:
        assert np.array_equal(ours.read(weight), theirs.read(weight)), weight


def test_a_file_whose_experts_do_not_fit_is_refused_by_name():
    def refused(said, change):
        file = GgufWeights.of(FILES / "qwen3moe.gguf")
        change(file.store)
        with pytest.raises(ModelLoadError, match=said):
            checkpoint.of_file(file)

    refused(
        "4 experts by its settings, and 8 in its tensor 'blk.0.ffn_gate_exps.weight'",
        lambda f: f.metadata.update({"qwen3moe.expert_count": 4}),
    )
    refused("it chooses 9 of 8 experts", lambda f: f.metadata.update({"qwen3moe.expert_used_count": 9}))
    refused("no tensor 'blk.1.ffn_down_exps.weight'", lambda f: f.tensors.pop("blk.1.ffn_down_exps.weight"))
    refused("no tensor 'blk.2.ffn_gate_inp.weight'", lambda f: f.tensors.pop("blk.2.ffn_gate_inp.weight"))
    refused(
        "'blk.0.ffn_gate_exps.weight' has the shape",
        lambda f: f.metadata.update({"qwen3moe.expert_feed_forward_length": 16}),
    )


@pytest.mark.parametrize("layout", [dict, unstacked])
def test_a_folder_with_more_experts_than_it_says_is_refused_by_name(tmp_path, layout):
    module = small_model(FAMILY["qwen3_moe"])
    module.save_pretrained(tmp_path)
    save_file(
        layout({n: w.clone() for n, w in module.state_dict().items()}),
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"num_experts": 4, "num_local_experts": 4}))
    with pytest.raises(
        ModelLoadError,
        match=r"'model.layers.0.mlp.gate.weight' are of shape \(6, 32\), and its config.json expects \(4, 32\)",
    ):
        load_model(str(tmp_path), device="cpu", max_num_seqs=1)


def test_a_mixture_whose_groups_do_not_hold_the_chosen_experts_is_a_fault():
    assert Experts(8, 4, 16, (True,), groups=4, best_groups=2).fault is None
    for groups, best in ((3, 1), (4, 1), (4, 5), (0, 1)):
        assert "groups" in Experts(8, 4, 16, (True,), groups=groups, best_groups=best).fault


def test_a_mixture_that_memory_does_not_hold_is_refused_with_both_numbers(monkeypatch):
    """Numbers in float16 are held in float32."""
    file = FILES / "qwen3moe.gguf"
    for share, fits in ((3, True), (1.5, False)):
        monkeypatch.setattr(
            "polydraft.models.memory.available_bytes",
            lambda device, share=share: share * file.stat().st_size,
        )
        with (
            nullcontext()
            if fits
            else pytest.raises(
                CapacityError, match=r"take 0\.00 GiB in its own format, and 0\.00 GiB of memory are free"
            )
        ):
            packed_weights(checkpoint.of_file(GgufWeights.of(file)), 64, None)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_are_rounded_and_routers_are_not(quantization):
    file = str(FILES / "qwen3moe.gguf")
    exact, rounded = (
        load_model(file, max_num_seqs=1, max_model_len=64, quantization=q) for q in (None, quantization)
    )
    ours = rounded.weights.experts
    theirs = exact.weights.experts
    assert ours.gate_up.nbytes < theirs.gate_up.nbytes / 3
    assert np.array_equal(ours.router.matrix(1, 8, 64), theirs.router.matrix(1, 8, 64))
    assert 0 < rounded.quantization_error < 0.1


def test_dense_models_compile_no_code_of_experts():

    CompiledModel(small_model(FAMILY["mixtral"]), max_num_seqs=1, cache_dtype="float32")
    from polydraft.models.mixers.experts import parts as experts

    before = [len(code.signatures) for code in (experts.choose_code, experts.multiply_code)]
    CompiledModel(small_model(llama_config()), max_num_seqs=1, cache_dtype="float32")
    assert [len(code.signatures) for code in (experts.choose_code, experts.multiply_code)] == before


@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss"])
def test_bits_of_a_mixture_depend_neither_on_threads_nor_on_other_rows(name):
    module = small_model(FAMILY[name])
    text = np.random.default_rng(3).integers(0, 61, 150).tolist()
    one, *others = (CompiledModel(module, max_num_seqs=2, threads=n, cache_dtype="float32") for n in (1, 3))
    for _ in range(4):
        read = one.prefill([0, 1], [text, text[:9]]).logits
        assert all(np.array_equal(read, fast.prefill([0, 1], [text, text[:9]]).logits) for fast in others)
        tree = pad([(text[:9], [-1, 0, 1, 1, 3, 0, 5, 2, 7]), ([7, 8], [-1, 0])])
        scored = one.score([0, 1], tree).logits
        assert all(np.array_equal(scored, fast.score([0, 1], tree).logits) for fast in others)
        assert np.array_equal(one.score([1], pad([([7, 8], [-1, 0])])).logits[0], scored[1, :2])
        for fast in (one, *others):
            fast.release([0, 1])


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_drafts_leave_the_text_of_a_mixture_as_it_is(name):
    target, draft = (
        load_model(
            str(FILES / f"{name}.gguf"),
            quantization=kind,
            max_num_seqs=2,
            max_model_len=160,
            cache_dtype="float32",
        )
        for kind in (None, "int4")
    )
    case = json.loads((FILES / f"{name}.json").read_text(encoding="utf-8"))["cases"][1]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    trees = FixedPolicy(Budget.fixed(paths(2, 3)))
    for options in ({"drafter": None}, {"drafter": "model:paths", "draft_model": draft, "policy": trees}):
        result = Engine.of(target, **options).generate([case["prompt"]], params)[0]
        assert result.token_ids == case["ids"]
    assert result.stats.drafted_tokens > 20


def test_a_file_and_a_folder_of_gpt_oss_are_one_model(tmp_path):
    file = str(FILES / "gpt-oss.gguf")
    module_of_file(GgufWeights.of(file)).save_pretrained(tmp_path)
    case = json.loads((FILES / "gpt-oss.json").read_text(encoding="utf-8"))["cases"][2]
    models = [
        load_model(place, backend="compiled", max_num_seqs=1, max_model_len=128)
        for place in (file, str(tmp_path))
    ]
    ours, theirs = (model.prefill([0], [case["prompt"] + case["ids"]]).logits for model in models)
    assert np.array_equal(ours, theirs)


def folder_in_blocks(folder):
    """A folder of gpt-oss as its authors publish it, and its module with the numbers of these blocks, as transformers makes them."""
    module = small_model(FAMILY["gpt_oss"])
    rng = np.random.default_rng(0)
    weights = {name: weight.clone() for name, weight in module.state_dict().items()}
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        blocks = torch.from_numpy(rng.integers(0, 256, (experts, outputs, -(-inputs // 32), 16), np.uint8))
        scales = torch.from_numpy(rng.integers(120, 126, blocks.shape[:3], np.uint8))
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        module.get_parameter(name).data = numbers.reshape(experts, -1, outputs)
    module.config.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "mxfp4"}
    }
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return module


def test_the_blocks_of_gpt_oss_own_folders_are_taken_bit_for_bit(tmp_path):
    module = folder_in_blocks(tmp_path)
    ours = checkpoint.of_folder(tmp_path)
    theirs = of_module(module)
    for name in ours.outlines:
        assert np.array_equal(ours.read(name), theirs.read(name)), name
    exact, rounded = (
        load_model(str(tmp_path), max_num_seqs=1, activations=kind, cache_dtype="float32")
        for kind in ("float32", None)
    )
    assert exact.weights.experts.gate_up.formats == rounded.weights.experts.down.formats == {"MXFP4"}
    logits = exact.prefill([0], [[3, 1, 4, 1, 5]]).logits[0, 0]
    expected = fresh(module, [3, 1, 4, 1, 5])[-1]
    assert_close(logits, expected, 1e-4)
