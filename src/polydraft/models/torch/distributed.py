"""A target that does not fit one device: tensor parallelism of transformers, one process for each device.

Megatron-LM, Shoeybi et al. 2019 (arXiv 1909.08053): a rank holds some heads of every attention and some columns of every other matrix, keys
and values of its own heads only, and two all-reduces a layer make its sums whole. Rank 0 is the caller's process, with engine, drafters and
verification. What changes a cache is called on every rank with the same arguments, so all of them hold the same columns after every step.
"""

import weakref
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed

from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.models.memory import fitting_length
from polydraft.models.slots import TREE_ROOM
from polydraft.models.store.gguf_parts import is_gguf
from polydraft.models.supported import check_rolls_back
from polydraft.models.torch.hf import HFTarget
from polydraft.models.torch.module import as_device, load_config, load_module
from polydraft.models.torch.ranks import Ranks

Method = TypeVar("Method", bound=Callable[..., Any])


def _everywhere(method: Method) -> Method:
    """The call on all ranks at once; what it calls in turn is each rank's own."""

    @wraps(method)
    def call(self: "ShardedTarget", *args: Any, **kwargs: Any) -> Any:
        ranks = self._ranks
        self._ranks = None
        try:
            if ranks is None:
                return method(self, *args, **kwargs)
            with ranks.calling(method.__name__, args, kwargs):
                return method(self, *args, **kwargs)
        finally:
            self._ranks = ranks

    return call  # pyright: ignore[reportReturnType]


class ShardedTarget(HFTarget):
    """A causal language model of transformers over several processes; see `HFTarget` for what it gives.

    place: folder of `save_pretrained`.  num_ranks: processes, this one among them; they end with `close`, with the target, or with this process.
    dtype, device: as of `folder.load_module`; on GPUs rank r takes the r-th one, on a CPU the ranks share its threads.

    One at a time in a process. cache_bytes: of one rank.

    Raises:
        IncompatibleError: no plan in transformers for this kind of model, a missing package, or a process that is one of a group already.
        InvalidInputError: a number of ranks that does not divide the heads, or more than there are GPUs.
        RankError: from any call, where a rank has died or hangs.

    Example:
        >>> from polydraft.models import pair
        >>> target = ShardedTarget(pair.target_folder(), num_ranks=3)
        Traceback (most recent call last):
        ...
        polydraft.errors.InvalidInputError: tensor_parallel=3 was given for a model of 4 attention heads, 2 of them for keys; expected a number that divides both: 2.
    """

    _ranks: Ranks | None = None

    def __init__(
        self,
        place: Path,
        *,
        num_ranks: int,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
    ) -> None:
        _check(place, num_ranks, as_device(device), max_model_len)
        options = {
            "place": place,
            "num_ranks": num_ranks,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
        }
        ranks = Ranks(
            type(self),
            num_ranks,
            as_device(device).type,
            max(1, torch.get_num_threads() // num_ranks),
            options,
        )
        self.close = weakref.finalize(self, ranks.end)
        try:
            self._begin(**options, begun=ranks.wait)
        except BaseException:
            self.close()
            raise
        self._ranks = ranks

    @classmethod
    def on_rank(cls, **options: Any) -> "ShardedTarget":
        """The part of a rank other than 0, which knows no others."""
        target = cls.__new__(cls)
        target._begin(**options)
        return target

    def _begin(
        self, place: Path, num_ranks: int, dtype: Any, *, begun: Callable[[], None], **sizes: Any
    ) -> None:
        """begun: called when the weights are read, before the first forward pass."""
        from transformers.distributed.configuration_utils import DistributedConfig

        module = load_module(place, dtype=dtype, distributed_config=DistributedConfig(tp_size=num_ranks))
        begun()
        self._num_ranks = num_ranks
        super().__init__(module, **sizes)
        self.weight_bytes //= num_ranks

    def open_slots(self, max_model_len: int | None, max_num_seqs: int, **sizes: Any) -> int:
        """See `slots.SlotModel.open_slots`; where nothing is given, as much context as fits on every rank."""
        device: torch.device = sizes["device"]
        sharing = self._num_ranks if device.type == "cpu" else 1
        every = sizes["bytes_per_token"] * max_num_seqs * sharing
        length = torch.tensor(
            max_model_len or fitting_length(sizes["context"], every, TREE_ROOM, device), device=device
        )
        distributed.all_reduce(length, distributed.ReduceOp.MIN)
        return super().open_slots(int(length), max_num_seqs, **sizes)

    block_tokens = 0  # each rank holds a part of the entries
    prefill = _everywhere(HFTarget.prefill)
    score = _everywhere(HFTarget.score)
    commit = _everywhere(HFTarget.commit)
    cut = _everywhere(HFTarget.cut)
    copy = _everywhere(HFTarget.copy)
    release = _everywhere(HFTarget.release)
    embed = _everywhere(HFTarget.embed)
    head = _everywhere(HFTarget.head)
    fresh = _everywhere(HFTarget.fresh)


def _check(place: Path, num_ranks: int, device: torch.device, max_model_len: int | None) -> None:
    request = f"tensor_parallel={num_ranks} was given"
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 2:
        raise InvalidInputError(
            f"{request}; expected a whole number of at least 2. Leave it out for one process."
        )
    if is_gguf(place):
        raise IncompatibleError(
            f"{request} for a GGUF file; expected a folder of safetensors, of which each rank reads its part."
        )
    if device.type == "cpu" and torch.cuda.is_available():
        raise IncompatibleError(
            f"{request} with device='cpu' on a machine with GPUs, which transformers takes. Leave the device out."
        )
    if device.type == "cuda" and num_ranks > torch.cuda.device_count():
        raise InvalidInputError(
            f"{request}, and there are {torch.cuda.device_count()} GPUs; expected at most one rank for each."
        )
    config = load_config(place)
    check_rolls_back(config, max_model_len)
    if not getattr(config, "base_model_tp_plan", None):
        raise IncompatibleError(
            f"{request} for a model of type {config.model_type!r}, for which transformers has no plan. Use a model of another kind, or one process."
        )
    heads = config.num_attention_heads
    for_keys = getattr(config, "num_key_value_heads", None) or heads
    if heads % num_ranks or for_keys % num_ranks:
        fitting = [str(n) for n in range(2, for_keys + 1) if heads % n == for_keys % n == 0]
        numbers = " or ".join(fitting) if fitting else "there is none, use one process"
        raise InvalidInputError(
            f"{request} for a model of {heads} attention heads, {for_keys} of them for keys; expected a number that divides both: {numbers}."
        )
    if find_spec("accelerate") is None:
        raise IncompatibleError(
            f"{request}, and accelerate is not installed. Install polydraft[distributed]."
        )
    try:
        from transformers.distributed.configuration_utils import DistributedConfig

        DistributedConfig(tp_size=num_ranks)
    except (ImportError, TypeError):
        raise IncompatibleError(
            f"{request}, which this version of transformers cannot do. Install polydraft[distributed] with Python 3.11 or newer."
        ) from None
