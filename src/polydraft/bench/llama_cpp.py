"""llama.cpp as a contender, through the `xllamacpp` wheel, on a GGUF file that is written here from a transformers model."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polydraft.bench.compare import Contender, Prompts, Run, Timer
from polydraft.core import SamplingParams
from polydraft.errors import IncompatibleError

LOGIT_TOLERANCE = 1e-3
"""Largest difference of log-probabilities to transformers that counts as the same model."""


def _interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key projection in llama.cpp's order: the two halves of a rotation side by side."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(model: Any, tokenizer: Any, path: Path, kind: str = "F32") -> None:
    """Write a Llama model of transformers with a byte-level BPE tokenizer as a GGUF file.

    kind: of the matrices, "F32", "BF16", "Q8_0" or "Q4_1"; the rest is float32.

    Raises:
        IncompatibleError: another architecture.
    """
    import gguf

    config = model.config
    if config.model_type != "llama":
        raise IncompatibleError(f"a {config.model_type!r} model was given; llama.cpp files are written for 'llama' models only.")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(path.stem)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    _write_tokenizer(writer, tokenizer, config.vocab_size)
    names: Any = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = tensor.float().numpy()
        for ending, count in heads.items():
            weight = _interleaved(weight, count) if name.endswith(ending) else weight
        stored = gguf.GGMLQuantizationType[kind if weight.ndim == 2 else "F32"]
        data = gguf.quants.quantize(np.ascontiguousarray(weight), stored)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_tokenizer(writer: Any, tokenizer: Any, vocab_size: int) -> None:
    import gguf

    tokens = [f"<unused{i}>" for i in range(vocab_size)]
    for token, i in tokenizer.get_vocab().items():
        tokens[i] = token
    special = set(tokenizer.all_special_ids)
    kinds = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(vocab_size)]
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    if tokenizer.eos_token_id is not None:
        writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)
    if templates := tokenizer.chat_template:
        named = [] if isinstance(templates, str) else [{"name": name, "template": text} for name, text in templates.items()]
        writer.add_chat_template(named or templates)


class LlamaCpp:
    """A llama.cpp server inside this process. server: as `xllamacpp` has it.

    model, draft: GGUF files; with a draft it speculates with the given number of drafted tokens.
    lookup: or by a type of its speculation that needs no draft, such as "NGRAM_SIMPLE".
    parallel, context: sequences at a time, and tokens of all their places; 0 is the model's.
    exact: float32 keys and values without flash attention, which computes in float16; else its own defaults.
    """

    def __init__(
        self,
        model: Path,
        draft: Path | None = None,
        *,
        lookup: str | None = None,
        exact: bool = True,
        num_threads: int = 1,
        draft_length: int = 4,
        parallel: int = 1,
        context: int = 0,
    ) -> None:
        import xllamacpp as engine

        xllamacpp: Any = engine
        self.drafter = "model" if draft is not None else lookup
        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_ctx, params.n_parallel, params.n_gpu_layers, params.verbosity = context, parallel, 0, -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
        if exact:
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        if lookup is not None:
            params.speculative.types = [xllamacpp.common_speculative_type[f"COMMON_SPECULATIVE_TYPE_{lookup}"]]
        if draft is not None:
            chosen = params.speculative.draft
            chosen.mparams.path, chosen.n_max = str(draft), draft_length
            chosen.cpuparams.n_threads = chosen.cpuparams_batch.n_threads = num_threads
            params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        self.server = xllamacpp.Server(params)

    def request(self, prompt: list[int], params: SamplingParams, **more: Any) -> dict[str, Any]:
        """Body of a completion."""
        return {
            "prompt": prompt,
            "n_predict": params.max_tokens,
            "temperature": params.temperature,
            "samplers": ["temperature"],
            "seed": (params.seed or 0) % 2**32,
            "ignore_eos": True,
            "cache_prompt": False,
            **more,
        }

    def stream(self, prompt: list[int], params: SamplingParams, arrive: Callable[[], None]) -> str:
        """Continue a prompt; `arrive` is called at each token. Returns the text."""
        pieces: list[str] = []

        def deliver(answer: dict[str, Any]) -> None:
            if answer["choices"][0]["finish_reason"] is None:
                arrive()
            pieces.append(answer["choices"][0]["text"])

        self.server.handle_completions(self.request(prompt, params, stream=True), deliver)
        return "".join(pieces)

    def check_logits(self, judge: Any, prompt: list[int]) -> float:
        """Largest difference of log-probabilities to transformers after a prompt.

        Raises:
            IncompatibleError: it is too large for the same model.
        """
        size = int(judge.config.vocab_size)
        request_body = self.request(prompt, SamplingParams(temperature=0, max_tokens=1), n_probs=size)
        answer = self.server.handle_completions(request_body)
        top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        with torch.inference_mode():
            ours = judge(torch.tensor([prompt])).logits[0, -1].double().log_softmax(-1)
        worst = max(abs(entry["logprob"] - float(ours[entry["id"]])) for entry in top if entry["logprob"] > -20)
        if worst > LOGIT_TOLERANCE:
            raise IncompatibleError(f"llama.cpp's log-probabilities differ from transformers' by {worst:.2g} on the same prompt.")
        return worst

    def contender(self, name: str, temperature: float) -> Contender:
        """As a contender. Token ids come only with log-probabilities: the same seed is asked again outside the timed call."""

        def generate(prompts: Prompts, params: SamplingParams) -> Run:
            if len(prompts) != 1:
                raise IncompatibleError("llama.cpp is measured with one sequence at a time; use --batch 1.")
            prompt, timer = list(prompts[0]), Timer()
            text = self.stream(prompt, params, timer.arrive)
            timed = timer.run([])
            again = self.server.handle_completions(self.request(prompt, params, n_probs=1))["choices"][0]
            if again["text"] != text:
                raise IncompatibleError("llama.cpp gave another text for the same seed; its tokens cannot be checked.")
            return replace(timed, outputs=[[entry["id"] for entry in again["logprobs"]["content"]]])

        return Contender(name, self.drafter, None, temperature, generate)
