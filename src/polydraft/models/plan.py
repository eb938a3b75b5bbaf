"""What is known of a model before its weights are read: where it lies, who runs it, and which options are refused for it."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from polydraft.config import ModelConfig
from polydraft.errors import IncompatibleError, InvalidInputError, check_installed
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.loading.checkpoint import Checkpoint, checkpoint_of
from polydraft.models.memory import CPU
from polydraft.models.networks.base import UncompiledError
from polydraft.models.store.hub import located
from polydraft.models.store.store import opened_folder
from polydraft.numerics.processor import has_gpu_driver

PACKAGES = {
    "gptq": "gptqmodel",
    "awq": "gptqmodel",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed_tensors",
}
"""That transformers reads weights of these methods with."""


class ModelPlan(NamedTuple):
    """config: what was asked for.  name, place: how it was named, and where it lies.

    files: its weights as they are stored, where the compiled path takes them from there.  why_left: why it does not, where it is meant to.
    """

    config: ModelConfig
    name: str
    place: Path
    files: Checkpoint | None = None
    why_left: str | None = None

    @classmethod
    def of(cls, name: str, config: ModelConfig) -> "ModelPlan":
        """Of a name as of `hub.located`; what is not here is fetched.

        Raises:
            ModelLoadError: the folder is missing, incomplete, corrupt or no language model that is known.
            InvalidInputError, IncompatibleError: options that do not go together, or not here.

        Example:
            >>> from polydraft.models import pair
            >>> plan = ModelPlan.of(str(pair.draft_folder()), ModelConfig())
            >>> plan.is_spread, plan.files is not None, plan.why_left
            (False, True, None)
        """
        plan = cls(config, name, located(name))
        if plan.is_spread:
            plan._check_spread()
            return plan._through_torch("over several devices")
        if config.backend not in ("auto", "compiled") or not _means_compiled(config.dtype, config.device):
            return plan._through_torch("as asked")
        try:
            files = checkpoint_of(plan.place)
        except UncompiledError as left:
            return plan._replace(why_left=str(left))._through_torch(str(left))
        if reason := CompiledModel.why_unsupported(files):
            return plan._replace(why_left=reason)._through_torch(reason)
        return plan._replace(files=files)

    def _through_torch(self, reason: str) -> "ModelPlan":
        """The same, where torch is installed.

        Raises:
            IncompatibleError: it is not; says what adds it.
        """
        asked = f"{self.name!r} runs through transformers ({reason})"
        check_installed(asked, "torch", "transformers", extra="torch")
        self._check_quantization(reason)
        return self

    def _check_quantization(self, reason: str) -> None:
        """Refuse codes that transformers reads with another package, where that is not here.

        Raises:
            IncompatibleError: naming both.
        """
        if not self.place.is_dir() or (store := opened_folder(self.place)).scalings:
            return
        quantization = store.settings.get("quantization_config")
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        package = PACKAGES.get(str(method))
        if package is not None and find_spec(package) is None:
            raise IncompatibleError(
                f"the weights of {self.name!r} are codes of {method} ({reason}), which transformers reads with {package}, and that is not installed. "
                "Give the folder of the model in bfloat16, or a GGUF file of it."
            )

    @property
    def is_spread(self) -> bool:
        """Whether it runs in several processes, or on several devices of this one."""
        return self.config.tensor_parallel is not None or self.config.device_map is not None

    @property
    def sizes(self) -> dict[str, Any]:
        """Of its cache."""
        return {"max_model_len": self.config.max_model_len, "max_num_seqs": self.config.max_num_seqs}

    @property
    def compiled_options(self) -> dict[str, Any]:
        """Of a compiled model."""
        return {**self.sizes, **self._choices, "threads": self.config.threads}

    @property
    def _choices(self) -> dict[str, str | None]:
        """Options that the compiled path alone has."""
        names = ("quantization", "activations", "cache_dtype")
        return {name: getattr(self.config, name) for name in names}

    def refuse_choices(self, reason: str) -> None:
        """Refuse options of the compiled path, where the model runs through torch. reason: why it does.

        Raises:
            IncompatibleError: naming the option.
        """
        choices = self._choices
        if self.is_spread and self.config.backend not in ("auto", "transformers"):
            choices["backend"] = self.config.backend
        for option, value in choices.items():
            if value is not None:
                raise IncompatibleError(
                    f"{option}={value!r} was asked for {self.name!r}, which runs through torch ({reason}); only the compiled path has it. Leave it out."
                )

    def _check_spread(self) -> None:
        """Refuse what several devices do not have."""
        self.refuse_choices("over several devices")
        num_ranks = self.config.tensor_parallel
        device_map = self.config.device_map
        if num_ranks is not None and device_map is not None:
            raise InvalidInputError(
                f"tensor_parallel={num_ranks} and device_map={device_map!r} were given; expected one of the two. Drop the other."
            )
        if num_ranks is None and self.config.device is not None:
            raise InvalidInputError(
                f"device={self.config.device!r} was given beside device_map={device_map!r}, which names devices. Drop one."
            )
        if num_ranks is None and find_spec("accelerate") is None:
            raise IncompatibleError(
                f"device_map={device_map!r} was given, and accelerate is not installed. Install polydraft[distributed]."
            )


def _means_compiled(dtype: Any, device: Any) -> bool:
    """Whether a device and a number format are those of compiled models: a CPU, which is the default where no GPU is, and float32 there."""
    if dtype is None and (device == CPU or (device is None and not has_gpu_driver())):
        return True
    if find_spec("torch") is None:
        return device in (None, CPU) and dtype in (None, "float32")
    import torch

    from polydraft.models.torch.module import as_device, as_dtype

    meant = as_device(device)
    return meant.type == CPU and as_dtype(dtype, meant) == torch.float32
