"""Granite 3's mixtures (https://github.com/ibm-granite/granite-3.0-language-models): Granite with experts, some with one of all rows beside them."""

from dataclasses import replace
from typing import Any

from polydraft.models.mixers.experts.names import MixtureWeights
from polydraft.models.networks.base import Network
from polydraft.models.networks.granite import DEFAULTS, SCALES, scaled_spec
from polydraft.models.networks.granite_hybrid import ROUTERS, STACKS, mixture, stack
from polydraft.models.networks.settings import everywhere, local_experts
from polydraft.models.store.gguf_header import GgufHeader

SHARED_WIDTH = "expert_shared_feed_forward_length"


def settings(file: GgufHeader) -> dict[str, Any]:
    return {**{name: file.number(key) for name, key in SCALES.items()}, **local_experts(file)}


def settings_shared(file: GgufHeader) -> dict[str, Any]:
    return settings(file) | {"shared_intermediate_size": file.count(SHARED_WIDTH)}


MOE_DEFAULTS = {**DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2}

GRANITE_MOE = Network(
    "granitemoe",
    "granitemoe",
    scaled_spec,
    interleaved=True,
    experts=MixtureWeights(everywhere, names=ROUTERS, stack=stack, stacks=STACKS),
    settings=settings,
    reads_file=lambda file: not file.setting(SHARED_WIDTH),
    defaults=MOE_DEFAULTS,
)
GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    model_type="granitemoeshared",
    experts=MixtureWeights(mixture, names=ROUTERS, stack=stack, stacks=STACKS),
    settings=settings_shared,
    reads_file=lambda file: bool(file.setting(SHARED_WIDTH)),
    defaults={**MOE_DEFAULTS, "shared_intermediate_size": 0},
)
