"""Arrays of NumPy, PyTorch and JAX alike, by the array API standard (data-apis.org), and the few operations that it lacks.

Rules take arrays of one of these libraries and give back the same kind, on the same device. What is here beside the standard: arrays of
the host for compiled loops and the way back, and reading and writing by index along the last axis, as new arrays.
"""

from typing import Any

import numpy as np
from array_api_compat import array_namespace, device, is_jax_array, is_torch_array
from jaxtyping import Bool, Int

Array = Any
"""An array of NumPy, PyTorch or JAX."""

namespace = array_namespace
"""The functions of the standard for arrays of a kind."""


def is_on_host(x: Array) -> bool:
    """Whether `host` shares the memory of an array.

    Example:
        >>> is_on_host(np.zeros(2))
        True
    """
    if is_jax_array(x):
        return getattr(x.device, "platform", "cpu") == "cpu"
    return not is_torch_array(x) or x.device.type == "cpu"


def host(x: Array) -> np.ndarray:
    """The same numbers as a contiguous array of NumPy, which compiled loops take; shared where they lie in the host's memory so.

    Example:
        >>> host(np.arange(6).reshape(2, 3).T).flags.c_contiguous
        True
    """
    if type(x) is not np.ndarray and is_torch_array(x):
        x = _fetched(x.detach()).numpy()
    return np.ascontiguousarray(x) if np.ndim(x) else np.asarray(x)


def host_floats(x: Array) -> np.ndarray:
    """The same for compiled loops over float32 or float64: other formats of floating point become float32.

    Example:
        >>> host_floats(np.ones(2, np.float16)).dtype
        dtype('float32')
    """
    if type(x) is np.ndarray and x.dtype in _FLOATS:
        return np.ascontiguousarray(x)
    is_wide = str(x.dtype).endswith(("float32", "float64"))
    xp = namespace(x)
    return host(x if is_wide else xp.astype(x, xp.float32))


_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


def like(values: np.ndarray, x: Array) -> Array:
    """Values of the host as an array of the kind of x, on its device; their type stays.

    Example:
        >>> like(np.arange(2), np.zeros(3)).tolist()
        [0, 1]
    """
    if isinstance(x, np.ndarray):
        return values
    if is_torch_array(x):
        return _sent(values, x)
    return namespace(x).asarray(values, device=device(x))


def _sent(values: np.ndarray, x: Array) -> Array:
    """A tensor on the device of another, through pinned memory: without waiting for what the device does."""
    import torch

    tensor = torch.from_numpy(values if values.flags.writeable else values.copy())
    if x.device.type == "cpu":
        return tensor
    if x.device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(x.device, non_blocking=True)


def _fetched(x: Array) -> Array:
    """A tensor on the host once its device has made it, through pinned memory: what the device does after that is not waited for."""
    if x.device.type != "cuda":
        return x.cpu()
    import torch

    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    torch.cuda.current_stream(x.device).synchronize()
    return pinned


def double(x: Array) -> Array:
    """The same in float64."""
    xp = namespace(x)
    return xp.astype(x, xp.float64, copy=False)


def gather(x: Array, index: Int[Array, "*M n"]) -> Array:
    """x[..., index] along the last axis: row by row.

    Example:
        >>> gather(np.array([[0.5, 0.25, 0.25]]), np.array([[2, 0]])).tolist()
        [[0.25, 0.5]]
    """
    return namespace(x).take_along_axis(x, index, axis=-1)


def scatter(x: Array, index: Int[Array, "*M n"], values: Array | float) -> Array:
    """x with values written at an index along the last axis, row by row; where an index stands twice, one of its values.

    Example:
        >>> scatter(np.array([[1.0, 2.0, 3.0]]), np.array([[2, 0]]), 0.0).tolist()
        [[0.0, 2.0, 0.0]]
    """
    if is_torch_array(x):
        return x.scatter(-1, index, values)
    if is_jax_array(x):
        return x.at[_places(index)].set(values)
    written = x.copy()
    np.put_along_axis(written, index, values, axis=-1)
    return written


def scatter_add(x: Array, index: Int[Array, "*M n"], values: Array) -> Array:
    """x with values added at an index along the last axis, row by row, each of those that share one.

    Example:
        >>> scatter_add(np.zeros((1, 3)), np.array([[2, 2]]), np.array([[1.0, 0.5]])).tolist()
        [[0.0, 0.0, 1.5]]
    """
    if is_torch_array(x):
        return x.scatter_add(-1, index, values)
    if is_jax_array(x):
        return x.at[_places(index)].add(values)
    added = x.copy()
    np.add.at(added, _places(index), values)
    return added


def _places(index: Int[Array, "*M n"]) -> tuple[Array, ...]:
    """The index of every axis, for one along the last."""
    return (*np.ix_(*map(np.arange, index.shape))[:-1], index)


def put(x: Array, index: tuple[np.ndarray, ...], values: Array) -> Array:
    """x with x[index] = values, for arrays of whole numbers on the host; x is the caller's own, and written to where its library can.

    Example:
        >>> put(np.zeros((2, 2)), (np.array([0, 1]), np.array([1, 0])), np.array([0.5, 1.0])).tolist()
        [[0.0, 0.5], [1.0, 0.0]]
    """
    places = tuple(like(part, x) for part in index)
    if is_jax_array(x):
        return x.at[places].set(values)
    x[places] = values
    return x


def take(x: Array, *index: np.ndarray) -> Array:
    """x[index] for arrays of whole numbers on the host, which index the first axes together.

    Example:
        >>> take(np.array([[1, 2], [3, 4]]), np.array([0, 1]), np.array([1, 0])).tolist()
        [2, 3]
    """
    return x[tuple(like(part, x) for part in index)]


def first(mask: Bool[Array, "*M n"]) -> Int[Array, "*M"]:
    """Place of the first that is true along the last axis; 0 where none is.

    Example:
        >>> first(np.array([[False, True, True]])).tolist()
        [1]
    """
    xp = namespace(mask)
    return xp.argmax(xp.astype(mask, xp.int32), axis=-1)
