"""Weights of one byte are read as the numbers that their scales make of them; what nothing explains, or nothing reads, is refused by name."""

import json

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from polydraft.errors import ModelLoadError
from polydraft.models.load import load_model
from polydraft.models.loading import checkpoint
from polydraft.models.store.scaled_weights import numbers_of
from tests.models.test_mixtures import unstacked
from tests.models.test_targets import FAMILY
from tests.models.tree_rounds import fresh, small_model
from tests.support.closeness import assert_close
from tests.support.tiny import GROUPED

TEXT = [3, 1, 4, 1, 5, 9, 2, 6]
FP8 = torch.float8_e4m3fn
WIDE = {**GROUPED, "hidden_size": 64, "intermediate_size": 80, "max_position_embeddings": 64}


def by_blocks(weight):
    """Codes and scales of blocks of 32 x 32; the last ones of a matrix are smaller."""
    shape = [-(-size // 32) for size in weight.shape]
    scales = torch.rand(shape) * 1e-2 + 1e-3
    spread = scales.repeat_interleave(32, 0)[: len(weight)].repeat_interleave(32, 1)[:, : weight.shape[1]]
    return {"": (weight / spread).clamp(-400, 400).to(FP8), "_scale_inv": scales}, spread


def by_row(weight):
    scales = weight.abs().amax(1, keepdim=True) / 400
    return {"": (weight / scales).to(FP8), "_scale": scales.bfloat16()}, scales.bfloat16().float()


def of_all(weight):
    scale = weight.abs().max() / 400
    return {"": (weight / scale).to(FP8), "_scale": scale}, scale


def in_integers(weight):
    scales = weight.abs().amax(1, keepdim=True) / 120
    return {"": (weight / scales).round().to(torch.int8), "_scale": scales}, scales


def with_zero_points(weight):
    codes, scales = in_integers(weight)
    return {**codes, "_zero_point": torch.full(scales.shape, 3, dtype=torch.int8)}, scales


WAYS = {
    "DeepSeek and Qwen": (
        by_blocks,
        {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"},
    ),
    "compressed-tensors, float8": (
        by_row,
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
    ),
    "compressed-tensors, int8": (
        in_integers,
        {"quant_method": "compressed-tensors", "format": "int-quantized"},
    ),
    "compressed-tensors, asymmetric": (
        with_zero_points,
        {"quant_method": "compressed-tensors", "format": "int-quantized"},
    ),
    "modelopt": (of_all, None),
    "modelopt, said": (of_all, {"quant_method": "modelopt", "quant_algo": "FP8"}),
}


def saved(folder, module, tensors, **more):
    module.config.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | more))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def in_codes(tmp_path, module, way, quantization, layout=dict):
    """A folder whose matrices in layers are codes, and one of their numbers."""
    codes = dict[str, torch.Tensor]()
    numbers = dict[str, torch.Tensor]()
    for name, weight in layout(
        {name: weight.clone() for name, weight in module.state_dict().items()}
    ).items():
        codes[name] = numbers[name] = weight
        if name.endswith("_proj.weight"):
            parts, scales = way(weight)
            codes |= {name + part: tensor.contiguous() for part, tensor in parts.items()}
            codes[name.replace("weight", "input_scale")] = torch.tensor(0.5)
            numbers[name] = (parts[""].float() - parts.get("_zero_point", torch.zeros(1)).float()) * scales
    more = {} if quantization is None else {"quantization_config": quantization}
    return saved(tmp_path / "codes", module, codes, **more), saved(tmp_path / "numbers", module, numbers)


def logits(folder, **options):
    return load_model(folder, device="cpu", max_num_seqs=1, **options).prefill([0], [TEXT]).logits[0, 0]


def of_numbers(folder):
    return fresh(hf.AutoModelForCausalLM.from_pretrained(folder), TEXT)[-1]


@pytest.mark.parametrize("name", WAYS)
def test_codes_with_scales_are_the_numbers_that_they_make(name, tmp_path):
    codes, numbers = in_codes(tmp_path, small_model(hf.LlamaConfig(**WIDE)), *WAYS[name])
    expected = of_numbers(numbers)
    assert_close(logits(codes, backend="compiled", cache_dtype="float32"), expected, 1e-4)
    assert_close(logits(codes, backend="transformers"), expected, 1e-4)


@pytest.mark.parametrize("layout", [dict, unstacked])
def test_codes_of_experts_are_read_one_by_one(layout, tmp_path):
    module = small_model(FAMILY["qwen3_moe"])
    codes, numbers = in_codes(tmp_path, module, by_blocks, WAYS["DeepSeek and Qwen"][1], layout)
    assert_close(logits(codes, backend="compiled", cache_dtype="float32"), of_numbers(numbers), 1e-4)


def test_scales_of_a_stack_are_those_of_its_matrices():
    random = np.random.default_rng(0)
    stack = random.integers(-128, 128, (3, 40, 64), np.int8)
    scales = random.random((3, 2, 2), np.float32)
    for e in range(3):
        assert np.array_equal(
            numbers_of(stack, scales, None, (1, 32, 32))[e], numbers_of(stack[e], scales[e], None, (32, 32))
        )


def whole(module):
    return {name: weight.clone() for name, weight in module.state_dict().items()}


LAYER = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("tensors", "quantization"),
    [
        ({f"{LAYER}.weight": torch.ones(64, 80).to(FP8)}, None),
        ({f"{LAYER}.weight": torch.ones(64, 80, dtype=torch.int8), f"{LAYER}.a": torch.ones(1)}, None),
        ({f"{LAYER}.weight": torch.ones(64, 80).to(FP8), f"{LAYER}.weight_scale": torch.ones(7, 3)}, None),
        (
            {
                f"{LAYER}.weight": torch.ones(64, 40, dtype=torch.uint8),
                f"{LAYER}.weight_scale": torch.ones(64, 5).to(FP8),
            },
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        ),
    ],
    ids=["no scale", "smoothquant", "a scale of another shape", "a method that nobody knows"],
)
@pytest.mark.parametrize("backend", ["auto", "transformers"])
def test_codes_that_nothing_explains_are_refused_by_name(tensors, quantization, backend, tmp_path):
    module = small_model(hf.LlamaConfig(**WIDE))
    more = {} if quantization is None else {"quantization_config": quantization}
    folder = saved(tmp_path, module, whole(module) | tensors, **more)
    with pytest.raises(
        ModelLoadError,
        match=rf"the weight '{LAYER}.weight' of .* is of type (F8_E4M3|I8|U8), and nothing says",
    ):
        load_model(folder, device="cpu", backend=backend)


@pytest.mark.parametrize(
    "name",
    ["score.weight", f"{LAYER}.weight_scale", "model.layers.0.self_attn.q_proj.bias", "model.layers.2.x"],
)
@pytest.mark.parametrize("backend", ["auto", "transformers"])
def test_tensors_that_nothing_reads_are_refused_by_name(name, backend, tmp_path):
    module = small_model(hf.LlamaConfig(**WIDE))
    folder = saved(tmp_path, module, whole(module) | {name: torch.ones(64)})
    with pytest.raises(ModelLoadError, match=f"nothing reads 1 tensors of .*'{name}'"):
        load_model(folder, device="cpu", backend=backend)


def test_buffers_of_older_versions_and_layers_that_predict_are_no_others(tmp_path):
    module = small_model(hf.LlamaConfig(**WIDE))
    others = (
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "mtp.norm.weight",
        "model.layers.2.eh_proj.weight",
        "model.layers.2.x",
    )
    folder = saved(tmp_path, module, whole(module) | {name: torch.ones(64) for name in others})
    for backend in ("compiled", "transformers"):
        assert_close(logits(folder, backend=backend), fresh(module, TEXT)[-1], 1e-2)


@pytest.mark.parametrize("backend", ["compiled", "transformers"])
def test_a_tensor_is_read_from_the_file_that_the_index_names(backend, tmp_path):
    module = small_model(hf.LlamaConfig(**WIDE))
    module.save_pretrained(tmp_path, max_shard_size="60KB")
    first, *_, last = sorted(tmp_path.glob("model-*.safetensors"))
    stale = {name: torch.zeros_like(weight) for name, weight in load_file(first).items()}
    save_file(load_file(last) | stale, last, {"format": "pt"})
    assert_close(logits(str(tmp_path), backend=backend, dtype="float32"), fresh(module, TEXT)[-1], 1e-2)


def test_files_that_are_not_used_refuse_no_folder(tmp_path):
    module = small_model(hf.LlamaConfig(**WIDE))
    module.save_pretrained(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert checkpoint.of_folder(tmp_path) is not None
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(
        ModelLoadError, match=r"no weights in safetensors format.*it has consolidated\.safetensors"
    ):
        load_model(str(tmp_path))
