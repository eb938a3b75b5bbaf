"""polydraft: language models generate faster with several drafts per step, and what they generate does not change.

Names are imported when they are first used, so that `import polydraft` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_WHERE = {
    "Budget": "core",
    "Draft": "core",
    "Method": "core",
    "Needs": "core",
    "NoiseKey": "core",
    "Offers": "core",
    "Outcome": "core",
    "Request": "core",
    "DraftSampling": "core",
    "TokenTree": "core",
    "TreeShape": "core",
    "SamplingParams": "core.params",
    "StructuredOutputs": "core.params",
    "AsyncEngine": "engine.asynchronous",
    "Engine": "engine.api",
    "FixedPolicy": "policy.fixed",
    "AdaptivePolicy": "policy.adaptive",
    "Profile": "policy.profile",
    "citation": "methods.papers",
    "custom_generate": "integrations.transformers",
    "verify": "verifiers",
    "PolydraftError": "errors",
}

__all__ = [*sorted(_WHERE), "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from polydraft.core import (
        Budget,
        Draft,
        DraftSampling,
        Method,
        Needs,
        NoiseKey,
        Outcome,
        Request,
        TokenTree,
        TreeShape,
    )
    from polydraft.core.methods import Offers
    from polydraft.core.params import SamplingParams, StructuredOutputs
    from polydraft.engine.api import Engine
    from polydraft.engine.asynchronous import AsyncEngine
    from polydraft.errors import PolydraftError
    from polydraft.integrations.transformers import custom_generate
    from polydraft.methods.papers import citation
    from polydraft.policy.adaptive import AdaptivePolicy
    from polydraft.policy.fixed import FixedPolicy
    from polydraft.policy.profile import Profile
    from polydraft.verifiers import verify


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(f"polydraft.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'polydraft' has no attribute {name!r}; it offers {', '.join(__all__)}")


def __dir__() -> list[str]:
    return list(__all__)
