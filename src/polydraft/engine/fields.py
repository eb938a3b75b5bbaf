"""The keyword arguments of engines, for editors and type checkers; `python -m tests.docs.tables` writes this file from `polydraft.config`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from polydraft.core import Decoding, Drafter, Target, Verifier
from polydraft.policy.fixed import Policy
from polydraft.policy.profile import Profile


class SpeculationFields(TypedDict, total=False):
    """Fields of `polydraft.config.SpeculationConfig`."""

    drafter: str | Drafter | None
    """Drafter: a name of `polydraft methods`, none, or auto. Default: 'auto'."""
    verifier: str | Verifier
    """Verification method: a name of `polydraft methods`, or auto. Default: 'auto'."""
    depth: int | None
    """Speculation length: drafted tokens along a path (tokens, >= 1). Default: chosen by the speculation policy."""
    num_paths: int | None
    """Number of drafted paths a step (>= 1). Default: chosen by the speculation policy."""
    head: str | Path | None
    """Folder of a draft head, or OWNER/NAME of the hub; see `polydraft train`."""
    index: str | Path | None
    """File of `polydraft index build` for retrieval-based drafting."""
    draft_tree: str | None
    """Draft tree of every step, as the number of children of a token at each depth, such as 3,2,1. Default: paths that part at the last committed token."""
    drafter_options: Mapping[str, Any] | None
    """Further option of the drafter, NAME=VALUE; may be repeated."""
    offered: Sequence[str]
    """Further drafter that requests may name; may be repeated."""
    policy: str | Policy | None
    """Speculation policy: adaptive, fixed, or an object. Default: adaptive, fixed with a draft shape."""
    profile: str | Path | Profile | None
    """File of `polydraft tune --save`: costs and acceptance rates for the speculation policy. Default: measured after the first answer."""
    max_step_ms: float | None
    """Maximum time of a step, to which drafts and the pieces of joining prompts are cut (ms, >= 0.01). Default: what makes the most tokens a second."""
    asynchronous: bool
    """Asynchronous drafting: the draft model runs ahead on another core or device. Default: False."""
    lead_cap: int | None
    """Maximum lead of the draft model with --asynchronous (tokens). Default: the drafter's own."""
    decoding: str | Decoding | None
    """Decoding method: a name of `polydraft methods`, sampled exactly in place of the target distribution. Default: the target distribution."""
    amateur: str | Target | None
    """Weaker model of contrastive decoding, named like --model. Default: the draft model."""
    alpha: float | None
    """Plausibility threshold of contrastive decoding, relative to the most likely token, 0 to 1. Default: the method's own."""
    beta: float | None
    """Weight of the amateur in contrastive decoding, >= 0. Default: the method's own."""
    decoding_options: Mapping[str, Any] | None
    """Further option of the decoding method, NAME=VALUE; may be repeated."""


class EngineFields(SpeculationFields, total=False):
    """Fields of `polydraft.config.EngineConfig`, but for the model."""

    draft_model: str | Path | None
    """Draft model: a smaller model with the same vocabulary, named like --model. Default: the one listed with the target, if any."""
    dtype: str | Any | None
    """Data type of the weights and activations, such as float32 or bfloat16. Default: float32 on a CPU, the checkpoint's own on a GPU."""
    device: str | Any | None
    """Device, such as cpu or cuda. Default: the first GPU, else the CPU."""
    backend: Literal["auto", "compiled", "transformers"]
    """Backend: compiled (most architectures, on a CPU), transformers (any model and device) (auto, compiled, transformers). Default: 'auto'."""
    quantization: Literal["int8", "int4", "bfloat16"] | None
    """Weight quantization of the target model, compiled backend; changes the output distribution (int8, int4, bfloat16). Default: the format of the checkpoint."""
    activations: Literal["int8", "float32"] | None
    """Float32 activations with quantized weights of a GGUF file; slower. Default: 8 bits a block."""
    cache_dtype: Literal["bfloat16", "float32", "q8_0"] | None
    """Data type of the target's KV cache, compiled backend; q8_0 takes a quarter of float32 (bfloat16, float32, q8_0). Default: bfloat16, with --exact float32."""
    threads: int | None
    """Number of CPU threads of the compiled backend (>= 1). Default: idle physical cores, one for small models."""
    tensor_parallel: int | None
    """Number of processes that share the target's weights (>= 1). Default: one process."""
    device_map: Mapping[str, Any] | str | None
    """Devices of the target's modules, as in transformers. Default: one device."""
    max_model_len: int | None
    """Maximum length of prompt plus output (tokens, >= 1). Default: the context of the model."""
    max_num_seqs: int
    """Maximum number of sequences in a batch (>= 1). Default: 8."""
    further_draft_models: Sequence[str]
    """Further draft models, which draft a path each beside the first."""
    draft_quantization: Literal["int8", "int4", "bfloat16", "file"] | None
    """Weight quantization of the draft model; does not change the output distribution (int8, int4, bfloat16, file). Default: int4 for a GGUF file of more bits, else the format of the checkpoint."""
    draft_vocabulary: int | None
    """Number of vocabulary entries, from the first, that the draft model drafts beside special tokens and those of the text; 0 for all; does not change the output distribution (tokens, >= 0). Default: 32,768, compiled backend, where that is at most half of the vocabulary."""
    prefix_cache_bytes: int | None
    """Maximum memory of the prefix cache beside the slots (bytes, >= 0). Default: an eighth of the free memory, at most 8 GiB."""
    prefix_cache_file: str | Path | Path | None
    """File in which the prefix cache outlives restarts: read at the start, written now and then and when the server ends. Default: none."""
    tie_margin: float | None
    """Low precision: margin below which greedy near ties are decided by a forward pass of their own (logits). Default: off."""
