"""Of which architectures of GGUF files, that are not read here, the safetensors folders run: those that transformers has as causal language models,
as models of pictures and text, whose language models run, or as encoder-decoders that are run."""

TRANSFORMERS_TYPES = {
    **{
        name: name
        for name in ("afmoe", "bitnet", "dbrx", "gptj", "jamba", "llama4", "mamba", "mamba2", "minicpm3")
    },
    "gemma3n": "gemma3n_text",
    "glm-dsa": "glm_moe_dsa",
    "kimi-linear": "kimi_linear",
    "mimo2": "mimo_v2_flash",
    "qwen3vlmoe": "qwen3_vl_moe",
    "t5": "t5",
}
"""By the names in GGUF files."""


def instead_of(architecture: str) -> str:
    """What to give instead of a GGUF file of an architecture that is not read.

    Example:
        >>> instead_of("jamba")
        'Give its safetensors folder, which runs through transformers'
        >>> instead_of("clip")
        'Give another model: its folder would not run either, as transformers has no language model of this kind'
    """
    if architecture in TRANSFORMERS_TYPES:
        return "Give its safetensors folder, which runs through transformers"
    return "Give another model: its folder would not run either, as transformers has no language model of this kind"
