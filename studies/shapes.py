"""Models of true sizes with random weights, cut to some of their layers: what a pass costs here and in llama.cpp, on the same GGUF file.

rows      a pass over so many tokens of a text behind a context: drafts are scored so; llama.cpp reads a prompt of so many tokens
prompt    512 tokens
engines   llama.cpp by its wheel, `xllamacpp`; ik_llama.cpp by `ik-llama-cpp-python`, where it is installed and knows the model
seconds   of one thread's processor time, with more threads of the wall's: the smallest of all rounds. Engines are measured by turns, each in a process
          of its own

Nothing is drawn but codes: scales are such that weights have mean 0 and keep the size of what goes through them, so that rows choose experts of their own.
The vocabulary is cut as the layers are, so that the head has its share of a token.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from math import prod
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, process_time
from typing import Annotated, Any

import numpy as np
import typer

from polydraft.bench.record import csv_table, markdown_table, write_texts
from polydraft.errors import unknown_name
from studies import timing
from studies.options import Quick, write_json

ROWS = (1, 2, 4, 6, 8, 16)
SHOWN = ("plain", "1 rows", "4 rows", "8 rows", "prompt")
"""Of the page; the others are in the CSV file."""
PROMPT = 512
CONTEXT = 64
TOKENS = 24
PIECE = 1 << 24
"""Bytes of codes that are drawn; larger tensors repeat them."""
Tensor = tuple[str, tuple[int, ...], str]
"""Name, shape as of transformers, number format."""


@dataclass(frozen=True)
class Shape:
    """A model's sizes. layers: of the whole one.  keys: metadata without the architecture's name; a list has a number a layer.  kinds: of layers, tensors
    of one, without `blk.N.`.  pattern: kind of each layer, repeated.  head: number formats of embedding and output; without the second they are tied.
    norm: name of the last one.  outer: tensors beside layers and head.  of_layers: the shape of so many layers and such a vocabulary, where others than
    the first layers are taken."""

    architecture: str
    layers: int
    vocabulary: int
    hidden: int
    keys: dict[str, Any]
    kinds: tuple[tuple[Tensor, ...], ...]
    head: tuple[str, ...] = ("Q4_K", "Q6_K")
    pattern: tuple[int, ...] = (0,)
    norm: str = "output_norm"
    outer: tuple[Tensor, ...] = ()
    of_layers: "Callable[[int, int], Shape] | None" = None

    def cut(self, layers: int) -> "Shape":
        """Of so many layers, with as much of the vocabulary."""
        vocabulary = max(self.vocabulary * layers // self.layers // 256 * 256, 512)
        if self.of_layers is not None:
            return self.of_layers(layers, vocabulary)
        keys = {key: value[:layers] if isinstance(value, list) else value for key, value in self.keys.items()}
        return replace(self, layers=layers, vocabulary=vocabulary, keys=keys)

    def tensors(self) -> Iterator[Tensor]:
        """All of them."""
        yield "token_embd.weight", (self.vocabulary, self.hidden), self.head[0]
        yield f"{self.norm}.weight", (self.hidden,), "F32"
        yield from self.outer
        if len(self.head) > 1:
            yield "output.weight", (self.vocabulary, self.hidden), self.head[1]
        for number in range(self.layers):
            for name, shape, kind in self.kinds[self.pattern[number % len(self.pattern)]]:
                yield f"blk.{number}.{name}", shape, kind


def attention(
    hidden: int, heads: int, groups: int, width: int, kinds: Sequence[str], *, bias: bool = False
) -> list[Tensor]:
    """Norm and products of attention. kinds: of q and k, of v, of the output."""
    outputs = {
        "attn_q": heads * width,
        "attn_k": groups * width,
        "attn_v": groups * width,
        "attn_output": hidden,
    }
    formats = {"attn_q": kinds[0], "attn_k": kinds[0], "attn_v": kinds[1], "attn_output": kinds[2]}
    tensors: list[Tensor] = [("attn_norm.weight", (hidden,), "F32")]
    for name, rows in outputs.items():
        tensors.append(
            (f"{name}.weight", (rows, heads * width if name == "attn_output" else hidden), formats[name])
        )
        tensors += [(f"{name}.bias", (rows,), "F32")] if bias else []
    return tensors


def experts(hidden: int, inner: int, count: int, kinds: Sequence[str], *, bias: bool = False) -> list[Tensor]:
    """A router, and stacks of experts. kinds: of gate and up, and of down."""
    shapes = {
        "ffn_gate_exps": (inner, hidden),
        "ffn_up_exps": (inner, hidden),
        "ffn_down_exps": (hidden, inner),
    }
    tensors: list[Tensor] = [("ffn_gate_inp.weight", (count, hidden), "F32")]
    for name, shape in shapes.items():
        tensors.append((f"{name}.weight", (count, *shape), kinds[name == "ffn_down_exps"]))
        tensors += [(f"{name}.bias", (count, shape[0]), "F32")] if bias else []
    return tensors + ([("ffn_gate_inp.bias", (count,), "F32")] if bias else [])


def dense(hidden: int, inner: int, kinds: Sequence[str]) -> list[Tensor]:
    """A gated feed-forward and its norm. kinds: of gate and up, and of down."""
    gates = [(f"ffn_{name}.weight", (inner, hidden), kinds[0]) for name in ("gate", "up")]
    return [*gates, ("ffn_down.weight", (hidden, inner), kinds[1])]


def vectors(size: int, *names: str) -> list[Tensor]:
    """Norms, or other vectors, of a width."""
    return [(f"{name}.weight", (size,), "F32") for name in names]


def delta_net(
    hidden: int, key_heads: int, value_heads: int, width: int, kinds: Sequence[str]
) -> list[Tensor]:
    """A gated delta net. kinds: of its first products, and of the last."""
    inner = value_heads * width
    convolved = (2 * key_heads + value_heads) * width
    products = {"attn_qkv": convolved, "attn_gate": inner, "ssm_alpha": value_heads, "ssm_beta": value_heads}
    return [
        *vectors(hidden, "attn_norm"),
        *((f"{name}.weight", (rows, hidden), kinds[0]) for name, rows in products.items()),
        ("ssm_out.weight", (hidden, inner), kinds[1]),
        ("ssm_conv1d.weight", (convolved, 4), "F32"),
        *(
            ("ssm_a", (value_heads,), "F32"),
            ("ssm_dt.bias", (value_heads,), "F32"),
            ("ssm_norm.weight", (width,), "F32"),
        ),
    ]


def qwen35(
    layers: int, hidden: int, heads: int, groups: int, inner: int, key_heads: int, value_heads: int
) -> Shape:
    """A dense Qwen3.5: three gated delta nets, then attention of heads of 256 numbers with a gate each."""
    behind = (*vectors(hidden, "post_attention_norm"), *dense(hidden, inner, ("Q4_K", "Q6_K")))
    whole = [
        t for t in attention(hidden, heads, groups, 256, ("Q4_K", "Q6_K", "Q4_K")) if t[0] != "attn_q.weight"
    ]
    gated = ("attn_q.weight", (2 * heads * 256, hidden), "Q4_K")
    return Shape(
        "qwen35",
        layers,
        248_320,
        hidden,
        _keys(4096, hidden, heads, groups, 256, inner, 1e7)
        | {
            "rope.dimension_count": 64,
            "rope.dimension_sections": (11, 11, 10, 0),
            "full_attention_interval": 4,
        }
        | {
            "ssm.conv_kernel": 4,
            "ssm.state_size": 128,
            "ssm.group_count": key_heads,
            "ssm.time_step_rank": value_heads,
        }
        | {"ssm.inner_size": value_heads * 128},
        (
            (*delta_net(hidden, key_heads, value_heads, 128, ("Q4_K", "Q4_K")), *behind),
            (gated, *whole, *vectors(256, "attn_q_norm", "attn_k_norm"), *behind),
        ),
        ("Q6_K",),
        (0, 0, 0, 1),
    )


def _keys(
    context: int, hidden: int, heads: int, groups: int, width: int, inner: int, base: float, **more: Any
) -> dict[str, Any]:
    return {
        "context_length": context,
        "embedding_length": hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": groups,
        "attention.key_length": width,
        "attention.value_length": width,
        "feed_forward_length": inner,
        "rope.freq_base": base,
        "attention.layer_norm_rms_epsilon": 1e-6,
        **more,
    }


def gemma4(layers: int, vocabulary: int, hidden: int = 1536, inner: int = 6144, inputs: int = 256) -> Shape:
    """Gemma 4 E2B: 20 of 35 layers attend to keys and values of others, with wider feed-forwards; every fifth has no window, and heads of 512 numbers."""
    shared = layers * 4 // 7
    own = layers - shared
    is_wide = [layer % 5 == 4 or layer in (own - 1, layers - 1) for layer in range(layers)]
    is_shared = [layer >= own for layer in range(layers)]

    def kind(width: int, shares: bool) -> tuple[Tensor, ...]:
        whole = attention(hidden, 8, 1, width, ("Q4_K", "Q6_K", "Q4_K"))
        absent = ("attn_k.weight", "attn_v.weight") if shares else ()
        return (
            *(tensor for tensor in whole if tensor[0] not in absent),
            *vectors(width, "attn_q_norm", *(() if shares else ("attn_k_norm",))),
            *vectors(hidden, "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm"),
            *dense(hidden, inner * (2 if shares else 1), ("Q4_K", "Q6_K")),
            ("inp_gate.weight", (inputs, hidden), "Q4_K"),
            ("proj.weight", (hidden, inputs), "Q4_K"),
            *vectors(1, "layer_output_scale"),
        )

    return Shape(
        "gemma4",
        layers,
        vocabulary,
        hidden,
        _keys(4096, hidden, 8, 1, 512, inner, 1e6)
        | {
            "feed_forward_length": [inner * (2 if shares else 1) for shares in is_shared],
            "rope.freq_base_swa": 1e4,
            "final_logit_softcapping": 30.0,
            "attention.sliding_window": 512,
            "attention.shared_kv_layers": shared,
            "embedding_length_per_layer_input": inputs,
            "attention.sliding_window_pattern": [not wide for wide in is_wide],
            "attention.key_length_swa": 256,
            "attention.value_length_swa": 256,
            "rope.dimension_count": 512,
            "rope.dimension_count_swa": 256,
        },
        (kind(256, False), kind(512, False), kind(256, True), kind(512, True)),
        ("Q6_K",),
        tuple(2 * shares + wide for shares, wide in zip(is_shared, is_wide, strict=True)),
        outer=(
            ("rope_freqs.weight", (256,), "F32"),
            ("per_layer_token_embd.weight", (vocabulary, layers * inputs), "Q6_K"),
            ("per_layer_model_proj.weight", (layers * inputs, hidden), "Q8_0"),
            ("per_layer_proj_norm.weight", (inputs,), "F32"),
        ),
        of_layers=gemma4,
    )


def latent_attention(
    hidden: int, heads: int, query_rank: int, rank: int, turned: int, plain: int, value: int
) -> list[Tensor]:
    """Norm and products of latent attention, in the formats of published files of four bits."""
    return [
        *vectors(hidden, "attn_norm"),
        *vectors(rank, "attn_kv_a_norm"),
        *vectors(query_rank, "attn_q_a_norm"),
        ("attn_q_a.weight", (query_rank, hidden), "Q4_K"),
        ("attn_q_b.weight", (heads * (plain + turned), query_rank), "Q4_K"),
        ("attn_kv_a_mqa.weight", (rank + turned, hidden), "Q8_0"),
        ("attn_k_b.weight", (heads, rank, plain), "Q8_0"),
        ("attn_v_b.weight", (heads, value, rank), "Q8_0"),
        ("attn_output.weight", (hidden, heads * value), "Q4_K"),
    ]


def glm_flash() -> Shape:
    """GLM-4.7 Flash: latent attention in all layers, experts in all but the first."""
    hidden = 2048
    latent = (*latent_attention(hidden, 20, 768, 512, 64, 192, 256), *vectors(hidden, "ffn_norm"))
    shared = [
        (name.replace(".", "_shexp."), shape, kind)
        for name, shape, kind in dense(hidden, 1536, ("Q4_K", "Q6_K"))
    ]
    mixture = (*experts(hidden, 1536, 64, ("Q4_K", "Q6_K")), ("exp_probs_b.bias", (64,), "F32"), *shared)
    keys = _keys(4096, hidden, 20, 1, 576, 10_240, 1e6) | {
        "attention.value_length": 512,
        "attention.q_lora_rank": 768,
        "attention.kv_lora_rank": 512,
        "attention.key_length_mla": 256,
        "attention.value_length_mla": 256,
        "rope.dimension_count": 64,
        "leading_dense_block_count": 1,
        "vocab_size": 154_880,
        "expert_count": 64,
        "expert_used_count": 4,
        "expert_gating_func": 2,
        "expert_feed_forward_length": 1536,
        "expert_shared_count": 1,
        "expert_weights_scale": 1.8,
        "expert_weights_norm": True,
    }
    kinds = (*latent, *dense(hidden, 10_240, ("Q4_K", "Q6_K"))), (*latent, *mixture)
    return Shape("deepseek2", 47, 154_880, hidden, keys, kinds, pattern=(0, *[1] * 46))


SHAPES = {
    "gemma-4-e2b": gemma4(35, 262_144),
    "glm-4.7-flash": glm_flash(),
    "qwen3-30b-a3b": Shape(
        "qwen3moe",
        48,
        151_936,
        2048,
        _keys(4096, 2048, 32, 4, 128, 6144, 1e6)
        | {"expert_count": 128, "expert_used_count": 8, "expert_feed_forward_length": 768},
        (
            (
                *attention(2048, 32, 4, 128, ("Q4_K", "Q6_K", "Q4_K")),
                *(*vectors(128, "attn_q_norm", "attn_k_norm"), *vectors(2048, "ffn_norm")),
                *experts(2048, 768, 128, ("Q4_K", "Q6_K")),
            ),
        ),
    ),
    "gpt-oss-20b": Shape(
        "gpt-oss",
        24,
        201_088,
        2880,
        _keys(4096, 2880, 64, 8, 64, 2880, 150_000.0)
        | {
            "expert_count": 32,
            "expert_used_count": 4,
            "expert_feed_forward_length": 2880,
            "attention.sliding_window": 128,
        }
        | {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        },
        (
            (
                *attention(2880, 64, 8, 64, ("Q8_0", "Q8_0", "Q8_0"), bias=True),
                *(*vectors(64, "attn_sinks"), *vectors(2880, "post_attention_norm")),
                *experts(2880, 2880, 32, ("MXFP4", "MXFP4"), bias=True),
            ),
        ),
        ("Q8_0", "Q8_0"),
    ),
    "qwen3.5-0.8b": qwen35(24, 1024, 8, 2, 3584, 16, 16),
    "qwen3.5-4b": qwen35(32, 2560, 16, 4, 9216, 16, 32),
    "gemma-3-1b": Shape(
        "gemma3",
        26,
        262_144,
        1152,
        _keys(4096, 1152, 4, 1, 256, 6912, 1e6) | {"attention.sliding_window": 512},
        (
            (
                *attention(1152, 4, 1, 256, ("Q8_0", "Q8_0", "Q4_K")),
                *(
                    *vectors(256, "attn_q_norm", "attn_k_norm"),
                    *vectors(1152, "post_attention_norm", "ffn_norm", "post_ffw_norm"),
                ),
                *dense(1152, 6912, ("Q8_0", "Q4_K")),
            ),
        ),
        ("Q8_0",),
    ),
    "lfm2-1.2b": Shape(
        "lfm2",
        16,
        65_536,
        2048,
        {
            k: v
            for k, v in _keys(4096, 2048, 32, 8, 64, 8192, 1e6).items()
            if "length" not in k or not k.startswith("attention")
        }
        | {
            "attention.head_count_kv": [0, 0, 8, 0, 0, 8, 0, 0, 8, 0, 8, 0, 8, 0, 8, 0],
            "vocab_size": 65_536,
            "shortconv.l_cache": 3,
        },
        (
            (
                *vectors(2048, "attn_norm", "ffn_norm"),
                *(
                    ("shortconv.in_proj.weight", (6144, 2048), "Q4_K"),
                    ("shortconv.out_proj.weight", (2048, 2048), "Q4_K"),
                ),
                *(("shortconv.conv.weight", (2048, 3), "F32"), *dense(2048, 8192, ("Q4_K", "Q6_K"))),
            ),
            (
                *attention(2048, 32, 8, 64, ("Q4_K", "Q6_K", "Q4_K")),
                *(
                    *vectors(64, "attn_q_norm", "attn_k_norm"),
                    *vectors(2048, "ffn_norm"),
                    *dense(2048, 8192, ("Q4_K", "Q6_K")),
                ),
            ),
        ),
        ("Q6_K",),
        (0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 1, 0, 1, 0, 1, 0),
        "token_embd_norm",
    ),
    "tiny": Shape(
        "qwen3moe",
        2,
        512,
        256,
        _keys(2048, 256, 4, 2, 64, 512, 1e6)
        | {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 256},
        (
            (
                *attention(256, 4, 2, 64, ("Q4_K", "Q6_K", "Q4_K")),
                *(*vectors(64, "attn_q_norm", "attn_k_norm"), *vectors(256, "ffn_norm")),
                *experts(256, 256, 8, ("Q4_K", "Q6_K")),
            ),
        ),
    ),
}
"""By the names that users know; formats are those of the published files of four bits."""


def _halves(block: np.ndarray, at: int, value: float) -> None:
    block[:, at : at + 2] = np.array([value], np.float16).view(np.uint8)


def _blocks(kind: str, count: int, inputs: int, rng: np.random.Generator) -> np.ndarray:
    """Random blocks whose weights have mean 0 and a deviation of inputs^-1/2."""
    size = {"Q4_K": 144, "Q6_K": 210, "Q8_0": 34, "MXFP4": 17}[kind]
    deviation = inputs**-0.5
    block = rng.integers(0, 256, (count, size), np.uint8)
    if kind == "Q4_K":  # all scales 32 and all least weights 30 times a factor: 32 d (code - 7.5)
        block[:, 4:8] = 2 << 6 | 32
        block[:, 8:12] = 1 << 6 | 30
        block[:, 12:16] = 14 << 4
        _halves(block, 0, deviation / 32 / 4.61)
        _halves(block, 2, 8 * deviation / 32 / 4.61)
    elif kind == "Q6_K":
        block[:, 192:208] = rng.choice(np.array([32, 224], np.uint8), (count, 16))
        _halves(block, 208, deviation / 32 / 18.5)
    elif kind == "Q8_0":
        _halves(block, 0, deviation / 73.9)
    else:
        block[:, 0] = 127 + round(np.log2(deviation / 5.4 * 2))
    return block


def _numbers(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if name == "rope_freqs.weight":  # a quarter of the pairs rotates
        return np.where(np.arange(*shape) < shape[0] // 4, 1, 1e30).astype(np.float32)
    if "norm" in name or "output_scale" in name:
        return np.ones(shape, np.float32)
    if name.endswith("ssm_a"):
        return -rng.uniform(0.01, 4, shape).astype(np.float32)
    return (
        rng.standard_normal(shape) * (0.1 if len(shape) < 2 or "bias" in name else 2 * shape[-1] ** -0.5)
    ).astype(np.float32)


def write_shape(shape: Shape, file: Path) -> Path:
    """Write a model of this shape, tensor after tensor."""
    import gguf

    writer = gguf.GGUFWriter(file, shape.architecture)
    writer.add_block_count(shape.layers)
    for key, value in shape.keys.items():
        value = shape.vocabulary if key == "vocab_size" else value
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }.get(type(value), writer.add_array)
        add(f"{shape.architecture}.{key}", value)
    printed = [
        *range(33, 127),
        *range(161, 173),
        *range(174, 256),
    ]  # GPT-2's letters for bytes: others are 256 and what follows
    letters = [chr(k) for k in printed] + [chr(256 + k) for k in range(256 - len(printed))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*letters, "ab", *(f"<{k}>" for k in range(shape.vocabulary - 257))])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(shape.vocabulary - 1)
    kinds = gguf.GGMLQuantizationType
    for name, size, kind in shape.tensors():
        in_block, num_bytes = gguf.GGML_QUANT_SIZES[kinds[kind]]
        dtype = np.dtype(np.float32) if kind == "F32" else np.dtype(np.uint8)
        own = size if kind == "F32" else (*size[:-1], size[-1] // in_block * num_bytes)
        writer.add_tensor_info(name, own, dtype, prod(own) * dtype.itemsize, kinds[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    for name, size, kind in shape.tensors():
        if kind == "F32":
            writer.write_tensor_data(_numbers(name, size, rng))
            continue
        in_block, num_bytes = gguf.GGML_QUANT_SIZES[kinds[kind]]
        count = prod(size) // in_block
        blocks = _blocks(kind, min(count, PIECE // num_bytes), size[-1], rng)
        writer.write_tensor_data(np.resize(blocks, (count, num_bytes)).reshape(*size[:-1], -1))
    writer.close()
    return file


def clock(threads: int) -> timing.Clock:
    """A neighbour on the machine does not count where one thread works; threads that wait for each other have only the wall's time in common."""
    return process_time if threads == 1 else perf_counter


@dataclass
class Ours:
    """A file here, on some threads."""

    file: str
    threads: int
    text: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        from polydraft.models.load import load_model

        self.target = load_model(
            self.file, max_num_seqs=1, max_model_len=PROMPT + CONTEXT + TOKENS + 64, threads=self.threads
        )

    def prompt(self, token_ids: list[int]) -> float:
        self.target.release([0])
        return timing.seconds(lambda: self.target.prefill([0], [token_ids]), clock(self.threads))

    def rows(self, token_ids: list[int]) -> float:
        """Behind a context, which stays as it is."""

        from polydraft.core import TokenTree

        if int(self.target.lengths[0]) != CONTEXT:
            self.target.release([0])
            self.target.prefill([0], [self.text[:CONTEXT]])
        tree = TokenTree.chain(np.array([token_ids], np.int64))
        return timing.seconds(lambda: self.target.score([0], tree), clock(self.threads))

    def plain(self, token_ids: list[int]) -> float:
        return min(self.rows([token]) for token in token_ids[:TOKENS])


@dataclass
class Peer:
    """The same file in llama.cpp, through its server's completions; what a request takes beside its passes is in its figures."""

    file: str
    threads: int
    text: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        from polydraft.bench.llama_cpp import LlamaCpp

        self.server = LlamaCpp(
            Path(self.file), exact=False, num_threads=self.threads, context=PROMPT + CONTEXT + TOKENS + 64
        )

    def _request(self, token_ids: list[int], num_tokens: int) -> float:
        from polydraft.core import SamplingParams

        body = self.server.request(token_ids, SamplingParams(temperature=0, max_tokens=num_tokens))
        return timing.seconds(lambda: self.server.server.handle_completions(body), clock(self.threads))

    def prompt(self, token_ids: list[int]) -> float:
        return self._request(token_ids, 1)

    def rows(self, token_ids: list[int]) -> float:
        return self._request(token_ids, 1)

    def plain(self, token_ids: list[int]) -> float:
        prompt = self.text[:CONTEXT]
        return (self._request(prompt, TOKENS + 1) - self._request(prompt, 1)) / TOKENS


@dataclass
class IkPeer:
    """The same file in ik_llama.cpp, by forward passes of its context."""

    file: str
    threads: int
    text: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        from ik_llama_cpp import _internals  # pyright: ignore[reportMissingImports]

        self.library: Any = _internals
        self.model = _internals.IkModel(self.file)
        self.context = _internals.IkContext(
            self.model, n_ctx=PROMPT + CONTEXT + TOKENS + 64, n_threads=self.threads
        )

    def _behind(self, start: int, token_ids: list[int]) -> float:
        batch = self.library.make_batch_range(token_ids, pos_start=start)

        def decode() -> None:
            assert self.context.decode(batch) == 0
            self.context.get_logits(-1)[0]

        return timing.seconds(decode, clock(self.threads))

    def prompt(self, token_ids: list[int]) -> float:
        self.context.kv_cache_clear()
        return self._behind(0, token_ids)

    def rows(self, token_ids: list[int]) -> float:
        self.prompt(self.text[:CONTEXT])
        return self._behind(CONTEXT, token_ids)

    def plain(self, token_ids: list[int]) -> float:
        self.prompt(self.text[:CONTEXT])
        return min(self._behind(CONTEXT + n, [token]) for n, token in enumerate(token_ids[:TOKENS]))


ENGINES: dict[str, type[Ours] | type[Peer] | type[IkPeer]] = {"polydraft": Ours, "llama.cpp": Peer}
if find_spec("ik_llama_cpp"):
    ENGINES["ik_llama.cpp"] = IkPeer


def _serve(connection: Connection, engine: str, file: str, threads: int, text: list[int]) -> None:
    """One round of all measurements at each message."""
    measured_one = ENGINES[engine](file, threads)
    measured_one.text = text
    measured_one.prompt(text[:8])
    while connection.recv():
        figures = {f"{rows} rows": measured_one.rows(text[7 : 7 + rows]) for rows in ROWS}
        figures |= {"plain": measured_one.plain(text[100:]), "prompt": measured_one.prompt(text[:PROMPT])}
        connection.send(figures)


def measured(
    file: Path, vocabulary: int, *, threads: int = 1, rounds: int = 3
) -> dict[str, dict[str, float]]:
    """Engine -> what -> seconds, the smallest of some rounds by turns."""
    text = np.random.default_rng(1).integers(256, vocabulary - 1, PROMPT + 64).tolist()
    best: dict[str, dict[str, float]] = {name: {} for name in ENGINES}
    context = get_context("spawn")
    workers = dict[str, tuple[Any, Any]]()
    for name in ENGINES:
        here, there = context.Pipe()
        worker = context.Process(target=_serve, args=(there, name, str(file), threads, text))
        worker.start()
        there.close()
        workers[name] = here, worker
    for _ in range(rounds):
        for name, (here, _) in [*workers.items()]:
            try:
                here.send(True)
                figures = here.recv()
            except (EOFError, BrokenPipeError):  # its message is above: it does not know the model
                del best[name], workers[name]
                continue
            best[name] = {
                what: min(seconds, best[name].get(what, seconds)) for what, seconds in figures.items()
            }
    for here, worker in workers.values():
        here.send(False)
        worker.join()
    return best


def table(figures: dict[str, dict[str, float]], kinds: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of some kinds of forward passes."""
    ours, *peers = figures
    head = ["forward pass", *(f"{name}, ms" for name in figures), *(f"{peer} / {ours}" for peer in peers)]
    rows = [
        [
            kind,
            *(f"{1e3 * seconds[kind]:.1f}" for seconds in figures.values()),
            *(f"{figures[peer][kind] / figures[ours][kind]:.2f}" for peer in peers),
        ]
        for kind in kinds
    ]
    return head, rows


def main(
    name: Annotated[str, typer.Argument(help="Of `SHAPES`.")] = "qwen3-30b-a3b",
    layers: Annotated[int, typer.Option(help="Layers that are written.")] = 4,
    threads: Annotated[int, typer.Option()] = 1,
    folder: Annotated[
        Path, typer.Option(help="Where the file is written; one that is there is taken.")
    ] = Path("build/shapes"),
    quick: Quick = False,
) -> None:
    """Write a model of true sizes and time its passes beside llama.cpp's."""
    if name not in SHAPES:
        raise unknown_name("shape", name, SHAPES)
    shape = SHAPES["tiny" if quick else name].cut(2 if quick else layers)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{'tiny' if quick else name}-{shape.layers}.gguf"
    if not file.exists():
        write_shape(shape, file)
    output = folder / f"{file.stem}-threads-{threads}"
    figures = measured(file, shape.vocabulary, threads=threads, rounds=1 if quick else 3)
    write_json(
        {"shape": name, "layers": shape.layers, "threads": threads, "seconds": figures},
        output.with_suffix(".json"),
    )
    every = ["plain", *(f"{rows} rows" for rows in ROWS), "prompt"]
    write_texts({output.with_suffix(".csv"): csv_table(*table(figures, every))})
    typer.echo(markdown_table(*table(figures, SHOWN)))


if __name__ == "__main__":
    typer.run(main)
