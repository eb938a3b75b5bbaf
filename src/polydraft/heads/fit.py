"""Whether a head is for a model: by the sizes that its configuration and the model say, in the words of one refusal."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class ModelSizes(NamedTuple):
    """Of a model; None where nothing says it. num_layers: the number of its last state, too."""

    hidden_size: int | None
    vocab_size: int | None
    num_layers: int | None

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any]) -> "ModelSizes":
        """As a config.json says them."""
        inner = {**settings, **(settings.get("text_config") or {})}
        return cls(inner.get("hidden_size"), inner.get("vocab_size"), inner.get("num_hidden_layers"))


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of vLLM's speculators, whose layer's lie in a level of their own, in one; others as they are."""
    nested = settings.get("transformer_layer_config") or {}
    own = {name: settings[name] for name in ("architectures",) if name in settings}
    return {**settings, **nested, **own}


def misfit(settings: Mapping[str, Any], model: ModelSizes, layers: Sequence[int] = ()) -> str | None:
    """Why a head of this configuration is not for a model, or None. layers: whose states it reads.

    Example:
        >>> misfit({"hidden_size": 128, "vocab_size": 320}, ModelSizes(64, 320, None))
        "its states have hidden_size=128 numbers, the model's 64"
    """
    head = flat(settings)
    head |= head.get("text_config") or {}
    names = ("target_hidden_size", "backbone_hidden_size", "hidden_size")
    state_size = next((head[name] for name in names if head.get(name)), None)
    if state_size is not None and model.hidden_size is not None and state_size != model.hidden_size:
        return f"its states have hidden_size={state_size} numbers, the model's {model.hidden_size}"
    vocab_size = head.get("vocab_size")
    if vocab_size is not None and model.vocab_size is not None and vocab_size < model.vocab_size:
        return f"it knows vocab_size={vocab_size} tokens, the model {model.vocab_size}"
    if not model.num_layers:
        return None
    made_for = head.get("num_target_layers")
    if made_for is not None and made_for != model.num_layers:
        return f"it is for num_target_layers={made_for}, the model has {model.num_layers}"
    beyond = [layer for layer in layers if not 0 <= layer <= model.num_layers]
    if beyond:
        return (
            f"it reads the states of layers {list(layers)}, of {model.num_layers} layers {beyond[0]} is none"
        )
    return None
