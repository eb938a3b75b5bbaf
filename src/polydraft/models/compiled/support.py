"""Which models and options have compiled code, and the numbers that all parts of a compiled model know."""

import numpy as np

from polydraft.errors import InvalidInputError
from polydraft.models.loading.checkpoint import Checkpoint, why_not_compiled
from polydraft.models.matrices.kernels import ERF_GELU, GELU, RELU2, SILU, XIELU
from polydraft.models.matrices.products import FORMATS
from polydraft.models.memory import CPU
from polydraft.models.mixers.layer import Weights, is_set
from polydraft.models.mixers.workspace import Sizes
from polydraft.models.networks import NETWORKS
from polydraft.models.rotary import head_width
from polydraft.numerics.threads import MAX_THREADS

ACTIVATIONS = {
    "silu": SILU,
    "gelu_pytorch_tanh": GELU,
    "gelu_new": GELU,
    "gelu": ERF_GELU,
    "relu2": RELU2,
    "xielu": XIELU,
}
QUANTIZATIONS = (None, *(name for name in FORMATS if name != "float32"))


def check_options(quantization: str | None, activations: str | None, threads: int | None) -> None:
    """Raise InvalidInputError where an option of `CompiledModel` is out of range."""
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise InvalidInputError(f"threads={threads} was given; expected 1 to {MAX_THREADS}, or None.")
    if quantization not in QUANTIZATIONS:
        raise InvalidInputError(
            f"quantization={quantization!r} was given; expected one of {', '.join(map(repr, QUANTIZATIONS))}."
        )
    if activations not in (None, "int8", "float32"):
        raise InvalidInputError(f"activations={activations!r} was given; expected 'int8', 'float32' or None.")


def why_unsupported(source: Checkpoint) -> str | None:
    """Why a model is not covered, or None if it is."""
    config = source.config
    if reason := why_not_compiled(config):
        return reason
    if str(source.device) != CPU or str(source.dtype).removeprefix("torch.") != "float32":
        return f"it is {source.dtype} on {source.device}, and the compiled path is float32 on a CPU"
    architecture = NETWORKS[config.model_type]
    activation = architecture.spec(config).activation
    has_other_bias = getattr(config, "mlp_bias", False) and not architecture.feed_forward.has_bias(config)
    if activation not in ACTIVATIONS or has_other_bias:
        return f"its feed-forward is not one of {', '.join(ACTIVATIONS)} without biases"
    if (
        not is_set(architecture.attention.out_bias, config)
        and "model.layers.0.self_attn.o_proj.bias" in source.outlines
    ):
        return "its attention output has a bias"
    if config.num_attention_heads % config.num_key_value_heads:
        return f"its {config.num_attention_heads} heads are no multiple of its {config.num_key_value_heads} groups of keys and values"
    sizes = (
        config.hidden_size,
        architecture.feed_forward.width(config),
        config.num_attention_heads * head_width(config),
    )
    if any(size % 8 for size in sizes):
        return f"its widths {sizes} are not all multiples of 8"
    return None


def sizes_of(source: Checkpoint, weights: Weights) -> Sizes:
    """The sizes of a model. weights: packed ones."""
    config = source.config
    network = source.architecture
    spec = network.spec(config)
    return Sizes(
        heads=config.num_attention_heads,
        groups=config.num_key_value_heads,
        width=head_width(config),
        inner=int(max(weights.inners, default=network.feed_forward.width(config))),
        outputs=weights.head.outputs,
        epsilon=np.float32(spec.epsilon),
        attention_scale=np.float32(spec.attention_scale),
        embedding_scale=np.float32(spec.embedding_scale),
        residual_scale=np.float32(spec.residual_scale),
        logit_scale=np.float32(spec.logit_scale),
        attention_cap=np.float32(spec.attention_cap),
        logit_cap=np.float32(spec.logit_cap),
        activation=ACTIVATIONS[spec.activation],
        gated=network.attention.output_gate,
        value_norm=network.attention.value_norm,
        ungated=not network.feed_forward.has_gate,
        centred=spec.centred,
    )
