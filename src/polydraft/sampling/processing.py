"""From logits to the distribution that is sampled: every sampling parameter, at every node, in the context of the node's own path.

The order is that of transformers' `generate`; presence and frequency penalties, which it lacks, are vLLM's (over output
tokens only) and follow the repetition penalty:

    structured_outputs, logit_bias, repetition_penalty, frequency_penalty and presence_penalty, min_tokens,
    temperature, top_k, top_p, min_p, softmax

    top_k  removes logits below the k-th largest; logits equal to it stay
    top_p  removes the smallest tokens while their summed mass is at most 1 - top_p, of equal logits the highest id first
    min_p  removes tokens below min_p times the largest probability

Temperature 0 is the point mass at the largest logit before the temperature, the lowest id among equals. One token or more
always stays. Arithmetic is in the precision of the logits, float32 or wider; sums of mass are in float64. It is done on the
host: float32 by compiled code, float64 by NumPy. Logits may be arrays of PyTorch or JAX, too; results are of their kind.
"""

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import numpy as np
from jaxtyping import Bool, Float

from polydraft.core import TokenTree
from polydraft.core import geometry as trees
from polydraft.core.arrays import Array, host, host_floats, like
from polydraft.core.params import Constraint, SamplingParams, WeightedConstraint
from polydraft.errors import InvalidInputError
from polydraft.numerics.threads import ROWS, sync
from polydraft.sampling.softmax import softmax
from polydraft.sampling.truncation import SAMPLING, soften_rows, truncate


def _depends_on_context(params: SamplingParams) -> bool:
    """Whether token ids matter, those of the path or any."""
    return bool(
        params.has_penalties
        or params.logit_bias
        or params.min_tokens
        or params.structured_outputs is not None
    )


def _truncates(params: SamplingParams) -> bool:
    """Whether tokens are removed; the largest logit, which greedy decoding takes, always stays."""
    return not params.greedy and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0)


def check_vocabulary(params: SamplingParams, vocab_size: int, stop_ids: Sequence[int] = ()) -> None:
    """Refuse token ids that the model does not have, and bans that leave none.

    stop_ids: the model's end-of-sequence ids, for min_tokens.

    Raises:
        InvalidInputError: an id of `logit_bias` or `stop_token_ids` outside [0, vocab_size), or all ids banned at the first token.

    Example:
        >>> check_vocabulary(SamplingParams(stop_token_ids=[9]), vocab_size=10)
    """
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        bad = [i for i in ids if not 0 <= i < vocab_size]
        if bad:
            raise InvalidInputError(
                f"{name} names token id {bad[0]}; expected 0 <= id < {vocab_size}. Take ids of this model's tokenizer."
            )
    banned = {i for i, bias in params.logit_bias.items() if bias == -math.inf}
    early = {*stop_ids, *params.stop_token_ids} if params.min_tokens else set[int]()
    if len(banned | early) >= vocab_size:
        raise InvalidInputError(
            f"logit_bias bans {len(banned)} ids and min_tokens={params.min_tokens} {len(early - banned)} more, all {vocab_size} of the model; "
            "expected at least one token allowed. Ban fewer."
        )


Rest = ParamSpec("Rest")


def _on_arrays_of_any_kind(
    change: Callable[Concatenate[np.ndarray, Rest], np.ndarray],
) -> Callable[Concatenate[Array, Rest], Any]:
    """A function of logits on the host, in float32 or float64, for arrays of any library: its results are of their kind."""

    @wraps(change)
    def changed(logits: Array, *args: Rest.args, **options: Rest.kwargs) -> Any:
        return like(change(host_floats(logits), *args, **options), logits)

    return changed


def _penalise_(
    x: Float[np.ndarray, "N V"],
    tree: TokenTree,
    b: int,
    context: Sequence[int],
    prompt_length: int,
    params: SamplingParams,
) -> None:
    """Repetition, frequency and presence penalties of batch row b, in place."""
    below = host(trees.ancestors(trees.subtree(tree, b)))[0, :, 1:]  # drafted tokens on the path of each node
    x = x[: len(below)]
    tokens = tree.lists.tokens[b][1 : len(below)]
    length = len(context)
    ids, place = np.unique([*context, *tokens], return_inverse=True)
    in_prompt = np.bincount(place[:prompt_length], minlength=len(ids))
    committed = np.bincount(place[prompt_length:length], minlength=len(ids))
    is_token = place[length:, None] == np.arange(len(ids))
    in_output = committed + below.astype(x.dtype) @ is_token.astype(x.dtype)
    old = x[:, ids]
    repeated = np.where(old < 0, old * params.repetition_penalty, old / params.repetition_penalty)
    new = np.where(in_prompt + in_output > 0, repeated, old)
    x[:, ids] = new - params.frequency_penalty * in_output - params.presence_penalty * (in_output > 0)


def _ban_early_(x: Float[np.ndarray, "N V"], is_early: Bool[np.ndarray, " N"], banned: list[int]) -> None:
    """No mass for these tokens at early nodes, in place."""
    if banned:
        x[np.ix_(np.flatnonzero(is_early), np.array(banned))] = -np.inf


def _process_context(
    logits: Float[np.ndarray, "B N V"],
    tree: TokenTree,
    contexts: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    params: Sequence[SamplingParams],
    stop_ids: Sequence[int],
) -> Float[np.ndarray, "B N V"]:
    """Constraints, bias, penalties, min_tokens and weights: all that depends on token ids."""
    x = logits.copy()
    for b, (context, prompt_length, row) in enumerate(zip(contexts, prompt_lengths, params, strict=True)):
        if isinstance(row.structured_outputs, Constraint):
            allowed = row.structured_outputs.allowed(context, tree.lists.tokens[b], tree.lists.parents[b])
            np.copyto(x[b], -np.inf, where=~allowed)
        if row.logit_bias:
            x[b][:, list(row.logit_bias)] += np.array(list(row.logit_bias.values()), x.dtype)
        if row.has_penalties:
            _penalise_(x[b], tree, b, context, prompt_length, row)
        missing = row.min_tokens - (len(context) - prompt_length)
        if missing > 0:
            _ban_early_(x[b], host(trees.depths(tree))[b] < missing, [*stop_ids, *row.stop_token_ids])
        if isinstance(row.structured_outputs, WeightedConstraint):
            weights = row.structured_outputs.log_weights(context, tree.lists.tokens[b], tree.lists.parents[b])
            x[b] += (row.temperature * weights).astype(x.dtype)  # which is divided by the temperature
    return x


def _without_tail(x: Float[np.ndarray, "N V"], limit: float) -> Float[np.ndarray, "N V"]:
    """The smallest tokens of each row whose summed mass is at most the limit are removed, by sorting all."""
    order = np.argsort(-x, axis=-1, kind="stable")[:, ::-1]
    masses = np.take_along_axis(softmax(x), order, -1)
    drop = np.cumsum(masses, -1, dtype=np.float64) <= limit
    drop[:, -1] = False
    removed = np.empty_like(drop)
    np.put_along_axis(removed, order, drop, -1)
    return np.where(removed, -np.inf, x)


def _sorted_out(x: Float[np.ndarray, "N V"], params: SamplingParams) -> Float[np.ndarray, "N V"]:
    """The same by sorting, in the precision of the logits."""
    V = x.shape[-1]
    if 0 < params.top_k < V:
        last = np.partition(x, V - params.top_k)[:, V - params.top_k, None]
        x = np.where(x < last, -np.inf, x)
    if params.top_p < 1:  # masses that are equal up to rounding count as equal
        x = _without_tail(x, 1 - params.top_p + float(np.finfo(x.dtype).eps) / 2)
    if params.min_p > 0:
        probs = softmax(x)
        x = np.where(probs < params.min_p * probs.max(-1, keepdims=True), -np.inf, x)
    return x


def _temper(x: Float[np.ndarray, "B N V"], temperatures: list[float]) -> Float[np.ndarray, "B N V"]:
    if all(t in (0, 1) for t in temperatures):
        return x
    tiny = float(np.finfo(x.dtype).tiny)
    divisors = np.array([max(t, tiny) if t else 1.0 for t in temperatures], x.dtype)
    with np.errstate(invalid="ignore"):  # of padding, which may hold anything
        if any(0 < t < 1e-3 for t in temperatures):
            x = x - x.max(-1, keepdims=True)  # the quotients could overflow
        return x / divisors[:, None, None]


def _checked(x: Float[np.ndarray, "B N V"], tree: TokenTree) -> Float[np.ndarray, "B N V"]:
    """Refuse nodes without a finite largest logit; rows of padding may hold anything and become flat."""
    bad = ~np.isfinite(x.max(-1))
    if not bad.any():
        return x
    where = np.argwhere(bad & host(tree.is_node))
    if len(where):
        b, n = where[0].tolist()
        cause = "only -inf" if (x[b, n] == -np.inf).all() else "NaN or +inf"
        raise InvalidInputError(
            f"logits of row {b}, node {n} hold {cause}; expected finite logits with at least one token allowed. "
            "Check the model's weights and precision, logit_bias, and min_tokens."
        )
    return np.where(bad[..., None], 0.0, x).astype(x.dtype, copy=False)


def _point_mass(x: Float[np.ndarray, "B N V"]) -> Float[np.ndarray, "B N V"]:
    probs = np.zeros_like(x)
    np.put_along_axis(probs, x.argmax(-1)[..., None], 1.0, -1)
    return probs


@_on_arrays_of_any_kind
def process(
    logits: Float[np.ndarray, "B N V"],
    tree: TokenTree,
    contexts: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    params: Sequence[SamplingParams],
    stop_ids: Sequence[int] = (),
    *,
    checked: bool = True,
) -> Float[np.ndarray, "B N V"]:
    """Processed logits, whose softmax is the distribution; at temperature 0 those before the temperature.

    contexts: all committed token ids of each row, root included; the path below the root is read from the tree.
    prompt_lengths: how many of them are the prompt.  stop_ids: the model's end-of-sequence ids, for min_tokens.
    checked: False for callers that look for faulty logits themselves; compiled parameters that need sound ones still check.

    Raises:
        InvalidInputError: a node whose logits hold NaN or +inf, or have no token left; it names the row.

    Example:
        >>> root = TokenTree.roots(np.array([1]))
        >>> process(np.array([[[1.0, 2.0, 3.0]]]), root, [[1]], [1], [SamplingParams(top_k=2, temperature=0.5)]).tolist()
        [[[-inf, 4.0, 6.0]]]
    """
    x = in_context(logits, tree, contexts, prompt_lengths, params, stop_ids)
    return _truncated(x, tree, params, checked)


@_on_arrays_of_any_kind
def in_context(
    logits: Float[np.ndarray, "B N V"],
    tree: TokenTree,
    contexts: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    params: Sequence[SamplingParams],
    stop_ids: Sequence[int] = (),
) -> Float[np.ndarray, "B N V"]:
    """Logits in float32 or wider after all parameters that depend on token ids, before the temperature; arguments as for `process`.

    Example:
        >>> root, banned = TokenTree.roots(np.array([1])), SamplingParams(logit_bias={0: -math.inf}, temperature=0.5)
        >>> in_context(np.array([[[1.0, 2.0, 3.0]]]), root, [[1]], [1], [banned]).tolist()
        [[[-inf, 2.0, 3.0]]]
    """
    if any(map(_depends_on_context, params)):
        return _process_context(logits, tree, contexts, prompt_lengths, params, stop_ids)
    return logits


def samplings_of(params: Sequence[SamplingParams]) -> np.ndarray:
    """Temperature, top_k, top_p and min_p of every row, as compiled code takes them: [B] of `truncation.SAMPLING`.

    Example:
        >>> samplings_of([SamplingParams(top_p=0.9)])["top_p"].tolist()
        [0.9]
    """
    most = 1 << 31  # more tokens than a vocabulary has: a larger number would not fit the field
    return np.array(
        [(row.temperature, min(max(row.top_k, 0), most), row.top_p, row.min_p, 0.0) for row in params],
        SAMPLING,
    )


def _truncated(
    x: Float[np.ndarray, "B N V"], tree: TokenTree, params: Sequence[SamplingParams], checked: bool
) -> Float[np.ndarray, "B N V"]:
    """What follows the parameters that depend on token ids."""
    if any(map(_truncates, params)) and x.dtype == np.float32:
        return _truncated_by_compiled_code(x, tree, params)
    x = _temper(x, [row.temperature for row in params])
    if checked or any(_truncates(row) or _depends_on_context(row) for row in params):
        x = _checked(x, tree)
    if not any(map(_truncates, params)):
        return x
    rows = zip(x, params, strict=True)
    return np.stack([_sorted_out(part, row) if _truncates(row) else part for part, row in rows])


def _truncated_by_compiled_code(
    x: Float[np.ndarray, "B N V"], tree: TokenTree, params: Sequence[SamplingParams]
) -> Float[np.ndarray, "B N V"]:
    """Several rows at a time, in float32."""
    temperatures = [row.temperature or 1.0 for row in params]
    if min(temperatures) < 1e-3:
        x = _temper(x, temperatures)
        temperatures = [1.0] * len(params)
    rules = [
        row.with_(temperature=temperature) if _truncates(row) else SamplingParams(temperature=temperature)
        for temperature, row in zip(temperatures, params, strict=True)
    ]
    samplings = samplings_of(rules).repeat(x.shape[1])
    out = np.empty_like(x)
    with ROWS:
        sound = truncate(sync, x.reshape(-1, x.shape[-1]), out.reshape(-1, x.shape[-1]), samplings)
    return out if sound.all() else _checked(out, tree)


@_on_arrays_of_any_kind
def distributions(
    logits: Float[np.ndarray, "B N V"],
    tree: TokenTree,
    contexts: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    params: Sequence[SamplingParams],
    stop_ids: Sequence[int] = (),
) -> Float[np.ndarray, "B N V"]:
    """The distributions that are sampled, one at every node; arguments and errors as for `process`.

    Example:
        >>> root = TokenTree.roots(np.array([1, 1]))
        >>> both = [SamplingParams(temperature=0), SamplingParams()]
        >>> distributions(np.array([[[2.0, 2.0, 0.0]]] * 2), root, [[1], [1]], [1, 1], both).tolist()
        [[[1.0, 0.0, 0.0]], [[0.468..., 0.468..., 0.063...]]]
    """
    x = in_context(logits, tree, contexts, prompt_lengths, params, stop_ids)
    return distributions_of(x, tree, params)


@_on_arrays_of_any_kind
def distributions_of(
    x: Float[np.ndarray, "B N V"], tree: TokenTree, params: Sequence[SamplingParams]
) -> Float[np.ndarray, "B N V"]:
    """The distributions of logits that `in_context` has made; errors as for `process`.

    Example:
        >>> distributions_of(np.zeros((1, 1, 2)), TokenTree.roots(np.array([1])), [SamplingParams()]).tolist()
        [[[0.5, 0.5]]]
    """
    if x.dtype == np.float32:
        probs = _softened(x, params)
        if not np.isnan(probs[..., 0]).any():  # a row with a fault has no number at all
            return probs
    return soften(_checked(_truncated(x, tree, params, False), tree), params)


def _softened(x: Float[np.ndarray, "B N V"], params: Sequence[SamplingParams]) -> Float[np.ndarray, "B N V"]:
    """Distributions of logits in float32 by compiled code, NaN where a row is faulty."""
    probs = np.empty_like(x)
    samplings = samplings_of(params).repeat(x.shape[1])
    with ROWS:
        soften_rows(sync, x.reshape(-1, x.shape[-1]), samplings, probs.reshape(-1, x.shape[-1]))
    return probs


@_on_arrays_of_any_kind
def draft_probs(
    logits: Float[np.ndarray, "B M V"],
    tree: TokenTree,
    contexts: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    params: Sequence[SamplingParams],
    stop_ids: Sequence[int] = (),
    *,
    since: int = 0,
) -> Float[np.ndarray, "B M V"]:
    """The same for a draft model, which may have logits of some tokens only: where none of them is allowed, no token has mass.

    since: logits are those of the nodes `since` and later.

    Example:
        >>> root = TokenTree.roots(np.array([1]))
        >>> only = SamplingParams(logit_bias={0: -math.inf, 1: -math.inf})
        >>> draft_probs(np.array([[[1.0, 2.0, -math.inf]]]), root, [[1]], [1], [only]).tolist()
        [[[0.0, 0.0, 0.0]]]
    """
    if not any(map(_depends_on_context, params)):
        part = tree.nodes_from(since)
        return distributions_of(logits, part, params)
    B, M, V = logits.shape
    every = np.zeros((B, since + M, V), logits.dtype)  # a path begins at the root: rows for all nodes
    every[:, since:] = logits
    x = _process_context(every, tree, contexts, prompt_lengths, params, stop_ids)
    empty = (x.max(-1) == -np.inf) & (every.max(-1) > -np.inf)
    x[empty] = 0.0
    probs = soften(_truncated(x, tree, params, True), params)
    probs[empty] = 0.0
    return probs[:, since:]


@_on_arrays_of_any_kind
def soften(
    processed: Float[np.ndarray, "B N V"], params: Sequence[SamplingParams]
) -> Float[np.ndarray, "B N V"]:
    """The distributions of processed logits: softmax, and point masses at temperature 0.

    Example:
        >>> soften(np.zeros((1, 1, 2)), [SamplingParams()]).tolist()
        [[[0.5, 0.5]]]
    """
    greedy = np.array([row.greedy for row in params])
    if processed.dtype == np.float32:
        return _softened(
            processed, [SamplingParams(temperature=0.0 if row.greedy else 1.0) for row in params]
        )
    p = softmax(processed)
    p[greedy] = _point_mass(processed[greedy])
    return p
