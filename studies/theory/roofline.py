"""When drafts stop paying as batches grow: seconds of a pass from what a device computes and reads.

After the roofline of Williams, Waterman & Patterson 2009 (doi 10.1145/1498765.1498785): a pass is bound by arithmetic or by memory.

    B  sequences      n  rows of each in a pass      c  tokens of context      F  operations a second      M  bytes a second

    seconds(B, n, c) = max( B n (2 P + 4 c A) / F,   (b P + B c k) / M )
    P  parameters, b bytes each      A  attention's width over all layers      k  bytes of keys and values of a token

Weights are read once for all rows, so at B = 1 rows are nearly free; from B n > b F / (2 M) rows on they cost arithmetic. A sequence's cache is read once
for all of its rows: with long contexts drafts pay in large batches too (Chen et al. 2024, MagicDec, arXiv 2408.11049). The formula has no launches, no
communication and no sampling: it says where the limit is, and engines are below it.
"""

from dataclasses import dataclass

from polydraft.errors import InvalidInputError
from polydraft.theory.speed import tokens_of_chain


@dataclass(frozen=True)
class Device:
    """operations, num_bytes: a second, as reached, not as advertised.  dollars: an hour."""

    operations: float
    num_bytes: float
    dollars: float = 0.0


@dataclass(frozen=True)
class Shape:
    """A model. parameters: read in a pass, bytes_each of them.  attention: layers x heads x width of a head.  cache_bytes: of a token."""

    parameters: float
    bytes_each: float
    attention: float
    cache_bytes: float


def pass_seconds(device: Device, model: Shape, *, batch: int, rows: int = 1, context: int = 0) -> float:
    """Of one pass.

    Raises:
        InvalidInputError: sizes that are not positive.

    Example:
        >>> device, model = Device(100.0, 10.0), Shape(parameters=50.0, bytes_each=2.0, attention=1.0, cache_bytes=1.0)
        >>> [pass_seconds(device, model, batch=1, rows=n) for n in (1, 10, 20)]  # bound by its weights, then by arithmetic
        [10.0, 10.0, 20.0]
    """
    if batch < 1 or rows < 1 or context < 0 or device.operations <= 0 or device.num_bytes <= 0:
        raise InvalidInputError(
            f"batch={batch}, rows={rows}, context={context} on {device} were given; expected positive sizes."
        )
    arithmetic = batch * rows * (2 * model.parameters + 4 * context * model.attention)
    memory = model.parameters * model.bytes_each + batch * context * model.cache_bytes
    return max(arithmetic / device.operations, memory / device.num_bytes)


def batched_rate(
    device: Device, target: Shape, draft: Shape, *, batch: int, context: int, depth: int, acceptance: float
) -> float:
    """Tokens a second of all sequences, each of which drafts a chain of `depth` with a draft model; 0 is plain decoding.

    acceptance: of a drafted token, the same at every depth and independent.

    Example:
        >>> device, model = Device(1e3, 10.0), Shape(50.0, 2.0, 0.0, 0.0)
        >>> batched_rate(device, model, Shape(5.0, 2.0, 0.0, 0.0), batch=1, context=0, depth=2, acceptance=1.0)
        0.25
    """
    drafting = pass_seconds(device, draft, batch=batch, context=context) * depth
    scoring = pass_seconds(device, target, batch=batch, rows=depth + 1, context=context)
    return batch * tokens_of_chain(acceptance, depth) / (drafting + scoring)


def best_chain(
    device: Device,
    target: Shape,
    draft: Shape,
    *,
    batch: int,
    context: int,
    acceptance: float,
    most: int = 16,
) -> tuple[int, float]:
    """The depth with most tokens a second, and how many times plain decoding that is; (0, 1.0) where drafts do not pay.

    Example:
        >>> device, target, draft = Device(1e3, 10.0), Shape(50.0, 2.0, 0.0, 0.0), Shape(5.0, 2.0, 0.0, 0.0)
        >>> [best_chain(device, target, draft, batch=b, context=0, acceptance=0.8)[0] for b in (1, 20, 400)]
        [6, 4, 0]
    """
    rates = [
        batched_rate(device, target, draft, batch=batch, context=context, depth=depth, acceptance=acceptance)
        for depth in range(most + 1)
    ]
    depth = rates.index(max(rates))
    return depth, rates[depth] / rates[0]
