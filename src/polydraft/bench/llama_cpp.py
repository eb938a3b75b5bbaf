"""llama.cpp as a contender, through the `xllamacpp` wheel; and the GGUF files that it reads, of models of transformers, as its converter writes them."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from polydraft.bench.compare import Contender, Prompts, Run, Timer
from polydraft.core import SamplingParams
from polydraft.errors import IncompatibleError
from polydraft.models.torch.door import logits_of_text
from polydraft.sampling.softmax import log_softmax

Tokenizer = Callable[[Any], None]
"""Adds a vocabulary to a `gguf.GGUFWriter`."""


def write_gguf(model: Any, tokenizer: Any, path: Path, kind: str = "F32") -> None:
    """Write a Llama model of transformers with a byte-level BPE tokenizer.

    kind: of the matrices, "F32", "BF16", "Q8_0" or "Q4_1"; the rest is float32.

    Raises:
        IncompatibleError: another architecture.
    """
    if model.config.model_type != "llama":
        raise IncompatibleError(
            f"a {model.config.model_type!r} model was given; llama.cpp files are written for 'llama' models only."
        )
    write_model(
        path,
        model,
        kind,
        tokenizer=lambda writer: _write_tokenizer(writer, tokenizer, model.config.vocab_size),
    )


def quantized(weight: np.ndarray, kind: str) -> np.ndarray:
    """A weight in the blocks of a number format that the `gguf` package makes."""
    import gguf

    return gguf.quantize(weight, gguf.GGMLQuantizationType[kind])


def write_model(
    path: Path,
    model: Any,
    kind: str | Callable[[str], str] = "F32",
    *,
    architecture: str | None = None,
    tokenizer: Tokenizer | None = None,
    rope_factors: np.ndarray | None = None,
    without: Collection[str] = (),
    more: Iterable[tuple[str, np.ndarray]] = (),
    quantize: Callable[[np.ndarray, str], np.ndarray] = quantized,
    **settings: str | int | float,
) -> None:
    """Write a model; matrices are of number format `kind`, or of what it returns for their names in the file.

    architecture: as the file names it; None: that of the model.  rope_factors: one for each rotated pair.
    without, more: tensors to leave out and to add.  quantize: from a weight and a number format to blocks.
    settings: metadata of the architecture, a dot written as two underscores.
    """
    import gguf

    config = model.config
    if architecture is None:
        architecture = _architecture_of(config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(path.stem)
    file_type = f"{'ALL' if kind == 'F32' else 'MOSTLY'}_{kind}"
    if file_type in gguf.LlamaFileType.__members__:
        writer.add_file_type(gguf.LlamaFileType[file_type])
    _write_sizes(writer, architecture, config)
    _write_settings(writer, architecture, settings)
    if tokenizer is not None:
        tokenizer(writer)
    weights = {name: weight.float().numpy() for name, weight in model.state_dict().items()}
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    tensors = [(name, weight) for name, weight in [*weights.items(), *more] if name not in without]
    _write_tensors(writer, architecture, config, tensors, kind, quantize)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _architecture_of(model_type: str) -> str:
    """A type of transformers' as files name it."""
    return str({"mistral": "llama", "gemma3_text": "gemma3"}.get(model_type, model_type))


def _write_settings(writer: Any, architecture: str, settings: Mapping[str, str | int | float]) -> None:
    for key, value in settings.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{architecture}.{key.replace('__', '.')}", value)


def _write_tensors(
    writer: Any,
    architecture: str,
    config: Any,
    tensors: Iterable[tuple[str, np.ndarray]],
    kind: str | Callable[[str], str],
    quantize: Callable[[np.ndarray, str], np.ndarray],
) -> None:
    """By their names in the file; what is no matrix is float32."""
    import gguf

    names: Any = gguf.get_tensor_name_map(number_of(architecture), config.num_hidden_layers)
    for name, weight in tensors:
        name_in_file = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        converted = np.ascontiguousarray(_converted(architecture, config, name, weight))
        stored = (kind(name_in_file) if callable(kind) else kind) if converted.ndim > 1 else "F32"
        writer.add_tensor(
            name_in_file, quantize(converted, stored), raw_dtype=gguf.GGMLQuantizationType[stored]
        )


def number_of(architecture: str) -> Any:
    """The `gguf.MODEL_ARCH` of an architecture's name."""
    import gguf

    return next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)


def _write_sizes(writer: Any, architecture: str, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ropes = config.rope_parameters
    writer.add_rope_dimension_count(int(width * (ropes.get("partial_rotary_factor") or 1)))
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(ropes.get("rope_theta") or ropes["full_attention"]["rope_theta"])
    if getattr(config, "sliding_window", None) and architecture in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def _converted(architecture: str, config: Any, name: str, weight: np.ndarray) -> np.ndarray:
    """A weight as llama.cpp's converter changes it."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2]
    if (
        architecture in ("llama", "smollm3", "granite") and part in heads
    ):  # the two halves of a rotation lie side by side
        halves = weight.reshape(heads[part], 2, weight.shape[0] // heads[part] // 2, -1)
        return halves.swapaxes(1, 2).reshape(weight.shape)
    return weight + 1 if architecture.startswith("gemma") and "norm" in name else weight


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
        named = (
            []
            if isinstance(templates, str)
            else [{"name": name, "template": text} for name, text in templates.items()]
        )
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
        params.n_ctx = context
        params.n_parallel = parallel
        params.n_gpu_layers = 0
        params.verbosity = -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
        if exact:
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        if lookup is not None:
            params.speculative.types = [
                xllamacpp.common_speculative_type[f"COMMON_SPECULATIVE_TYPE_{lookup}"]
            ]
        if draft is not None:
            chosen = params.speculative.draft
            chosen.mparams.path = str(draft)
            chosen.n_max = draft_length
            chosen.cpuparams.n_threads = chosen.cpuparams_batch.n_threads = num_threads
            params.speculative.types = [
                xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE
            ]
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
        ours = log_softmax(logits_of_text(judge, prompt))[-1]
        worst = max(
            abs(entry["logprob"] - float(ours[entry["id"]])) for entry in top if entry["logprob"] > -20
        )
        if worst > 1e-3:  # not the same model
            raise IncompatibleError(
                f"llama.cpp's log-probabilities differ from transformers' by {worst:.2g} on the same prompt."
            )
        return worst

    def contender(self, name: str, temperature: float) -> Contender:
        """As a contender. Token ids come only with log-probabilities: the same seed is asked again outside the timed call."""

        def generate(prompts: Prompts, params: SamplingParams) -> Run:
            if len(prompts) != 1:
                raise IncompatibleError("llama.cpp is measured with one sequence at a time; use --batch 1.")
            prompt = list(prompts[0])
            timer = Timer()
            text = self.stream(prompt, params, timer.arrive)
            timed = timer.run([])
            again = self.server.handle_completions(self.request(prompt, params, n_probs=1))["choices"][0]
            if again["text"] != text:
                raise IncompatibleError(
                    "llama.cpp gave another text for the same seed; its tokens cannot be checked."
                )
            return replace(timed, outputs=[[entry["id"] for entry in again["logprobs"]["content"]]])

        return Contender(name, self.drafter, None, temperature, generate)
