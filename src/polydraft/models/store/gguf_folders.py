"""Of which architectures of GGUF files, that are not read here, the safetensors folders run: those that transformers has as causal language models,
as models of pictures and text, whose language models run, or as encoder-decoders that are run."""

TRANSFORMERS_TYPES = {
    **{
        name: name
        for name in (
            "afmoe",
            "apertus",
            "arcee",
            "bitnet",
            "bloom",
            "cohere2",
            "dbrx",
            "dots1",
            "exaone4",
            "falcon",
        )
    },
    **{name: name for name in ("glm4", "gpt2", "gptj", "granitemoe", "jamba", "llama4", "mamba", "mamba2")},
    **{
        name: name
        for name in ("minicpm3", "mpt", "nemotron", "olmo", "olmoe", "phimoe", "seed_oss", "stablelm")
    },
    "command-r": "cohere",
    "ernie4_5": "ernie4_5",
    "ernie4_5-moe": "ernie4_5_moe",
    "exaone-moe": "exaone_moe",
    "glm-dsa": "glm_moe_dsa",
    "gemma3n": "gemma3n_text",
    "gptneox": "gpt_neox",
    "hunyuan-dense": "hunyuan_v1_dense",
    "hunyuan-moe": "hunyuan_v1_moe",
    "jais2": "jais2",
    "kimi-linear": "kimi_linear",
    "mimo2": "mimo_v2_flash",
    "minimax-m2": "minimax_m2",
    "phi2": "phi",
    "qwen2vl": "qwen2_vl",
    "qwen3vl": "qwen3_vl",
    "qwen3vlmoe": "qwen3_vl_moe",
    "starcoder": "gpt_bigcode",
    "t5": "t5",
}
"""By the names in GGUF files."""


def instead_of(architecture: str) -> str:
    """What to give instead of a GGUF file of an architecture that is not read.

    Example:
        >>> instead_of("olmoe")
        'Give its safetensors folder, which runs through transformers'
        >>> instead_of("clip")
        'Give another model: its folder would not run either, as transformers has no language model of this kind'
    """
    if architecture in TRANSFORMERS_TYPES:
        return "Give its safetensors folder, which runs through transformers"
    return "Give another model: its folder would not run either, as transformers has no language model of this kind"
