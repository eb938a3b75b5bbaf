"""Of which architectures of GGUF files, that are not read here, the safetensors folders run: those that transformers has as causal language models."""

__all__ = ["TRANSFORMERS_TYPES", "instead_of"]

TRANSFORMERS_TYPES = {
    **{name: name for name in ("afmoe", "apertus", "arcee", "bitnet", "bloom", "cohere2", "dbrx", "dots1", "exaone4", "falcon")},
    **{name: name for name in ("glm4", "gpt2", "gptj", "granitemoe", "jamba", "lfm2", "llama4", "mamba", "mamba2")},
    **{name: name for name in ("minicpm3", "mpt", "nemotron", "nemotron_h", "olmo", "olmoe", "phimoe", "seed_oss")},
    **{name: name for name in ("stablelm",)},
    "command-r": "cohere",
    "deepseek2": "deepseek_v3",
    "ernie4_5": "ernie4_5",
    "ernie4_5-moe": "ernie4_5_moe",
    "exaone-moe": "exaone_moe",
    "falcon-h1": "falcon_h1",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "glm4moe": "glm4_moe",
    "gpt-oss": "gpt_oss",
    "gptneox": "gpt_neox",
    "granitehybrid": "granitemoehybrid",
    "jais2": "jais2",
    "kimi-linear": "kimi_linear",
    "lfm2moe": "lfm2_moe",
    "minimax-m2": "minimax_m2",
    "mistral3": "ministral3",
    "nemotron_h_moe": "nemotron_h",
    "phi2": "phi",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "starcoder": "gpt_bigcode",
}
"""By the names in GGUF files."""


def instead_of(architecture: str) -> str:
    """What to give instead of a GGUF file of an architecture that is not read.

    Example:
        >>> instead_of("lfm2")
        'Give its safetensors folder, which runs through transformers'
        >>> instead_of("clip")
        'Give another model: transformers has no causal language model of this kind either'
    """
    if architecture in TRANSFORMERS_TYPES:
        return "Give its safetensors folder, which runs through transformers"
    return "Give another model: transformers has no causal language model of this kind either"
