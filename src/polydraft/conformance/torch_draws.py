"""Torch's own draws, answered by a source of uniforms: see `tensors`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from polydraft.conformance.branching import Branches
from polydraft.errors import InvalidInputError


class ScriptedDraws(TorchFunctionMode):
    """While it is active, functions that draw give what the source says."""

    def __init__(self, source: Branches) -> None:
        super().__init__()
        self.source = source

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.rand:
            size = args[0] if args and not isinstance(args[0], int) else options.get("size", args)
            return Uniforms(self.source.random(tuple(size)))
        if func in (torch.rand_like, Tensor.uniform_):
            return Uniforms(self.source.random(tuple(args[0].shape)))
        if func is Tensor.exponential_:
            return ExponentialClocks(self.source, torch.ones(args[0].shape, dtype=torch.float64))
        if func in (torch.multinomial, Tensor.multinomial):
            return self._chosen(*args, **options)
        return func(*args, **options)

    def _chosen(self, rows: Tensor, num_samples: int = 1, **options: Any) -> Tensor:
        if num_samples != 1:
            raise InvalidInputError(f"num_samples={num_samples} was asked of torch.multinomial; expected 1.")
        flat = rows.reshape(-1, rows.shape[-1]).double().numpy()
        chosen = [self.source.choice(len(row), p=row) for row in flat]
        return torch.tensor(chosen).reshape(*rows.shape[:-1], 1)


class Uniforms:
    """Uniforms in the shape of a tensor."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Of tensors that stand before it: a comparison, or an operation that keeps it a uniform."""
        name = MIRRORED.get(func)
        if name is None or kwargs:
            raise InvalidInputError(
                f"{func.__name__} was asked of uniforms; expected comparisons, sums and products."
            )
        one, other = args
        return getattr(one, name[0])(other) if isinstance(one, Uniforms) else getattr(other, name[1])(one)

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.values.shape)

    def _compared(self, other: Any, compare: Callable[[Any, Any], bool]) -> Tensor:
        numbers = np.asarray(other.detach().double().cpu().numpy() if isinstance(other, Tensor) else other)
        pairs = np.broadcast_arrays(self.values, numbers)
        answers = [
            bool(compare(u, float(number)))
            for u, number in zip(pairs[0].ravel(), pairs[1].ravel(), strict=True)
        ]
        return torch.tensor(answers).reshape(pairs[0].shape)

    def __lt__(self, other: Any) -> Tensor:
        return self._compared(other, lambda u, number: u < number)

    def __gt__(self, other: Any) -> Tensor:
        return self._compared(other, lambda u, number: u > number)

    __le__ = __lt__
    __ge__ = __gt__

    def _with(self, other: Any, change: Callable[[Any, Any], Any]) -> "Uniforms":
        numbers = np.asarray(other.detach().double().cpu().numpy() if isinstance(other, Tensor) else other)
        pairs = np.broadcast_arrays(self.values, numbers)
        changed = np.empty(pairs[0].shape, object)
        for index in np.ndindex(changed.shape):
            changed[index] = change(pairs[0][index], float(pairs[1][index]))
        return Uniforms(changed)

    def __mul__(self, other: Any) -> "Uniforms":
        return self._with(other, lambda u, number: u * number)

    def __truediv__(self, other: Any) -> "Uniforms":
        return self._with(other, lambda u, number: u / number)

    def __add__(self, other: Any) -> "Uniforms":
        return self._with(other, lambda u, number: u + number)

    def __sub__(self, other: Any) -> "Uniforms":
        return self._with(other, lambda u, number: u - number)

    __rmul__ = __mul__
    __radd__ = __add__

    def __getitem__(self, index: Any) -> "Uniforms":
        values = self.values[index.numpy() if isinstance(index, Tensor) else index]
        return Uniforms(values if isinstance(values, np.ndarray) else np.array(values, object))

    def reshape(self, *shape: int) -> "Uniforms":
        return Uniforms(self.values.reshape(*shape))

    view = reshape

    def to(self, *args: Any, **options: Any) -> "Uniforms":
        return self


MIRRORED: Mapping[Any, tuple[str, str]] = {
    torch.lt: ("__lt__", "__gt__"),
    torch.le: ("__le__", "__ge__"),
    torch.gt: ("__gt__", "__lt__"),
    torch.ge: ("__ge__", "__le__"),
    Tensor.lt: ("__lt__", "__gt__"),
    Tensor.le: ("__le__", "__ge__"),
    Tensor.gt: ("__gt__", "__lt__"),
    Tensor.ge: ("__ge__", "__le__"),
    Tensor.mul: ("__mul__", "__mul__"),
    Tensor.add: ("__add__", "__add__"),
}
"""Functions of torch -> the same with uniforms first, and with them last."""


class ExponentialClocks:
    """rate / E for exponential clocks E, or E / rate: the first arrival is a draw by rates."""

    def __init__(self, source: Branches, rates: Tensor, *, inverse: bool = False) -> None:
        self.source = source
        self.rates = rates
        self.inverse = inverse

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Of rows before it: rates divided by clocks, or multiplied by inverse ones."""
        row, clocks = args
        divided = func in (torch.div, Tensor.div, Tensor.div_, Tensor.__truediv__) and not clocks.inverse
        multiplied = func in (torch.mul, Tensor.mul, Tensor.mul_) and clocks.inverse
        if not (divided or multiplied):
            raise InvalidInputError(f"{func.__name__} was asked of clocks; expected a row over them.")
        return ExponentialClocks(clocks.source, row.double() * clocks.rates, inverse=True)

    def reciprocal(self) -> "ExponentialClocks":
        return ExponentialClocks(self.source, self.rates, inverse=not self.inverse)

    def argmax(self, dim: int = -1, **options: Any) -> Tensor:
        """Of inverse clocks, along the last axis."""
        if not self.inverse or dim not in (-1, self.rates.ndim - 1):
            raise InvalidInputError(
                "argmax was asked of clocks; expected a row over them, along its last axis."
            )
        flat = self.rates.reshape(-1, self.rates.shape[-1]).numpy()
        chosen = [self.source.choice(len(row), p=row) for row in flat]
        return torch.tensor(chosen).reshape(self.rates.shape[:-1])
