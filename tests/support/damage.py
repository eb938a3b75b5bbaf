"""Files as others may leave them: bits flipped, ends cut off, values that cannot be; and a process of its own to read them in."""

import copy
import faulthandler
import json
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random
from typing import Any

from polydraft.errors import PolydraftError

NUMBERS = (
    -1,
    0,
    1,
    2,
    63,
    65,
    1 << 20,
    10**9,
    1 << 32,
    1 << 63,
    10**30,
    -(10**9),
    0.5,
    -0.5,
    1e308,
    float("inf"),
    float("nan"),
)
ODD = (
    None,
    True,
    False,
    *NUMBERS,
    "",
    "x",
    "\ud800",
    "F64",
    "dynamic",
    [],
    [1],
    [[]],
    [0, "x"],
    {},
    {"a": 1},
)


def flipped(data: bytes, rng: Random, first: int | None = None) -> bytes:
    """With one bit the other way; first: among so many bytes."""
    at = rng.randrange(8 * min(len(data), first or len(data)))
    changed = bytearray(data)
    changed[at // 8] ^= 1 << at % 8
    return bytes(changed)


def cut(data: bytes, rng: Random) -> bytes:
    """Without its end."""
    return data[: rng.randrange(len(data))]


def _places(value: Any, at: tuple = ()) -> Iterator[tuple]:
    yield at
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _places(value[key], (*at, key))


def mutated(value: Any, rng: Random) -> Any:
    """JSON data with one entry removed, renamed or replaced by something odd."""
    changed = copy.deepcopy(value)
    *above, key = rng.choice([place for place in _places(value) if place])
    holder = changed
    for step in above:
        holder = holder[step]
    old = holder.pop(key)
    way = rng.random()
    if way < 0.1:
        return changed
    new = rng.choice([odd for odd in ODD if repr(odd) != repr(old)])
    if isinstance(holder, list):
        holder.insert(key, new)
    elif way < 0.2:
        holder[f"{key}s"] = old
    else:
        holder[key] = new
    return changed


def mutated_json(text: bytes, rng: Random) -> bytes:
    """The same of a file of JSON; sometimes only its text is damaged."""
    if rng.random() < 0.2:
        return rng.choice((flipped, cut))(text, rng)
    return json.dumps(mutated(json.loads(text), rng)).encode()


def read_apart(cases: Iterator[tuple[str, Callable[[], object]]], seconds: int = 60) -> list[str]:
    """Run every case in a child, where a crash is seen and named; the names of those that raised a PolydraftError.

    Any other error, a crash and a hang are failures.
    """
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told)
        signal.alarm(seconds)
        status = 1
        try:
            faulthandler.disable()
            for name, case in cases:
                os.write(tells, f"{name}\0".encode())
                try:
                    case()
                except PolydraftError:
                    os.write(tells, b"refused\0")
            status = 0
        except BaseException:
            os.write(tells, traceback.format_exc().encode(errors="replace") + b"\0")
        finally:
            os._exit(status)
    os.close(tells)
    with os.fdopen(told, "rb") as pipe:
        lines = pipe.read().decode().split("\0")[:-1]
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, (
        f"{'a crash of signal ' + str(-status) if status < 0 else 'an error'} at {lines[-1 if status < 0 else -2]}: {lines[-1]}"
    )
    return [name for name, after in pairwise(lines) if after == "refused"]
