"""From logits to the distribution that is sampled: every sampling parameter, at every node, in the context of the node's own path.

The order is that of transformers' `generate`; presence and frequency penalties, which it lacks, are vLLM's (over output
tokens only) and follow the repetition penalty:

    structured_outputs, logit_bias, repetition_penalty, frequency_penalty and presence_penalty, min_tokens,
    temperature, top_k, top_p, min_p, softmax

    top_k  removes logits below the k-th largest; logits equal to it stay
    top_p  removes the smallest tokens while their summed mass is at most 1 - top_p, of equal logits the highest id first
    min_p  removes tokens below min_p times the largest probability

Temperature 0 is the point mass at the largest logit before the temperature, the lowest id among equals. One token or more
always stays. Arithmetic is in the precision of the logits, float32 or wider; sums of mass are in float64.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from polydraft.core import TokenTree
from polydraft.core import geometry as trees
from polydraft.core.params import Constraint, SamplingParams
from polydraft.errors import InvalidInputError
from polydraft.numerics.threads import ROWS, sync
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


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _on_rows(
    x: Float[Tensor, "B N V"], rows: list[int], change: Callable[[Tensor], Tensor]
) -> Float[Tensor, "B N V"]:
    """`change` applied to some rows of the batch; the others as they are."""
    if len(rows) == len(x):
        return change(x)
    if not rows:
        return x
    index = torch.tensor(rows).to(x.device, non_blocking=True)
    return x.index_copy(0, index, change(x[index]))


def _column(values: Sequence[float], like: Tensor) -> Float[Tensor, "B 1 1"]:
    return torch.tensor(list(values), dtype=like.dtype)[:, None, None].to(like.device, non_blocking=True)


def _penalise_(
    x: Float[Tensor, "N V"],
    below: Bool[Tensor, "N M"],
    tokens: list[int],
    context: Sequence[int],
    prompt_length: int,
    params: SamplingParams,
) -> None:
    """Repetition, frequency and presence penalties of one row, in place. below[n, m]: drafted token m is on the path of node n."""
    length = len(context)
    ids, place = torch.tensor([*context, *tokens], device=x.device).unique(return_inverse=True)
    in_prompt = place[:prompt_length].bincount(minlength=len(ids))
    committed = place[prompt_length:length].bincount(minlength=len(ids))
    drafted = below.to(x) @ torch.nn.functional.one_hot(place[length:], len(ids)).to(x.dtype)
    in_output = committed + drafted
    old = x[:, ids]
    repeated = torch.where(old < 0, old * params.repetition_penalty, old / params.repetition_penalty)
    new = torch.where(in_prompt + in_output > 0, repeated, old)
    new = new - params.frequency_penalty * in_output - params.presence_penalty * (in_output > 0)
    x.index_copy_(1, ids, new)


def _process_context(
    logits: Float[Tensor, "B N V"],
    tree: TokenTree,
    contexts: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    params: Sequence[SamplingParams],
    stop_ids: Sequence[int],
) -> Float[Tensor, "B N V"]:
    """Constraints, bias, penalties and min_tokens: all that depends on token ids."""
    x = logits.clone()
    for b, (context, prompt_length, row) in enumerate(zip(contexts, prompt_lengths, params, strict=True)):
        if isinstance(row.structured_outputs, Constraint):
            allowed = row.structured_outputs.allowed(context, tree.lists.tokens[b], tree.lists.parents[b])
            x[b].masked_fill_(torch.from_numpy(~allowed).to(x.device, non_blocking=True), -torch.inf)
        if row.logit_bias:
            bias = torch.tensor(list(row.logit_bias.values()), dtype=x.dtype).to(x.device, non_blocking=True)
            ids = torch.tensor(list(row.logit_bias)).to(x.device, non_blocking=True)
            x[b].index_add_(1, ids, bias.expand(x.shape[1], -1))
        if row.has_penalties:
            below = trees.ancestors(trees.subtree(tree, b))[0, :, 1:]
            nodes = len(below)
            _penalise_(x[b, :nodes], below, tree.tokens[b, 1:nodes].tolist(), context, prompt_length, row)
        missing = row.min_tokens - (len(context) - prompt_length)
        banned = [*stop_ids, *row.stop_token_ids]
        if missing > 0 and banned:
            early = (trees.depths(tree)[b] < missing).to(x.device)
            mask = torch.zeros(x.shape[-1], dtype=torch.bool, device=x.device)
            mask[banned] = True
            x[b].masked_fill_(early[:, None] & mask, -torch.inf)
    return x


def _top_k(x: Float[Tensor, "B N V"], top_k: list[int]) -> Float[Tensor, "B N V"]:
    counts = [min(k, x.shape[-1]) for k in top_k]
    largest = x.topk(max(counts), dim=-1).values
    last = torch.tensor(counts)[:, None, None].to(x.device, non_blocking=True) - 1
    return x.masked_fill(x < largest.gather(-1, last.expand(*x.shape[:-1], 1)), -torch.inf)


def _drop_tail_torch(x: Float[Tensor, "R V"], limits: Float[Tensor, " R"]) -> Float[Tensor, "R V"]:
    """The smallest tokens of each row whose summed mass is at most the row's limit are removed, by sorting all."""
    ordered, order = (part.flip(-1) for part in x.sort(dim=-1, descending=True, stable=True))
    drop = ordered.softmax(-1).cumsum(-1, dtype=torch.float64) <= limits[:, None]
    drop[:, -1] = False
    return x.masked_fill(drop.scatter(-1, order, drop), -torch.inf)


def _share(top_p: float, dtype: torch.dtype) -> float:
    """Of the mass that may go; masses that are equal up to rounding count as equal."""
    return 1 - top_p + torch.finfo(dtype).eps / 2 if top_p < 1 else 0.0


def _top_p(x: Float[Tensor, "B N V"], top_p: list[float]) -> Float[Tensor, "B N V"]:
    limits = torch.tensor([_share(p, x.dtype) for p in top_p], dtype=torch.float64).repeat_interleave(
        x.shape[1]
    )
    return _drop_tail_torch(x.flatten(0, 1), limits.to(x.device, non_blocking=True)).view_as(x)


def _min_p(x: Float[Tensor, "B N V"], min_p: list[float]) -> Float[Tensor, "B N V"]:
    probs = x.softmax(-1)
    return x.masked_fill(probs < _column(min_p, x) * probs.amax(-1, keepdim=True), -torch.inf)


def _temper(x: Float[Tensor, "B N V"], temperatures: list[float]) -> Float[Tensor, "B N V"]:
    if all(t in (0, 1) for t in temperatures):
        return x
    tiny = torch.finfo(x.dtype).tiny
    if any(0 < t < 1e-3 for t in temperatures):
        x = x - x.amax(-1, keepdim=True)  # the quotients could overflow
    return x / _column([max(t, tiny) if t else 1.0 for t in temperatures], x)


def _where(params: Sequence[SamplingParams], asks: Callable[[SamplingParams], bool]) -> list[int]:
    return [b for b, row in enumerate(params) if not row.greedy and asks(row)]


def _checked(x: Float[Tensor, "B N V"], tree: TokenTree) -> Float[Tensor, "B N V"]:
    """Refuse nodes without a finite largest logit; rows of padding may hold anything and become flat."""
    bad = ~x.amax(-1).isfinite()
    if not bad.any():
        return x
    where = (bad & tree.is_node.to(bad.device)).nonzero()
    if len(where):
        b, n = where[0].tolist()
        cause = "only -inf" if (x[b, n] == -torch.inf).all() else "NaN or +inf"
        raise InvalidInputError(
            f"logits of row {b}, node {n} hold {cause}; expected finite logits with at least one token allowed. "
            "Check the model's weights and precision, logit_bias, and min_tokens."
        )
    return x.masked_fill(bad[..., None], 0.0)


def _point_mass(x: Float[Tensor, "B N V"]) -> Float[Tensor, "B N V"]:
    largest = (
        torch.from_numpy(x.numpy().argmax(-1)) if x.device.type == "cpu" else x.argmax(-1)
    )  # torch's is ten times slower
    return torch.zeros_like(x).scatter_(-1, largest[..., None], 1.0)


def process(
    logits: Float[Tensor, "B N V"],
    tree: TokenTree,
    contexts: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    params: Sequence[SamplingParams],
    stop_ids: Sequence[int] = (),
    *,
    checked: bool = True,
) -> Float[Tensor, "B N V"]:
    """Processed logits, whose softmax is the distribution; at temperature 0 those before the temperature.

    contexts: all committed token ids of each row, root included; the path below the root is read from the tree.
    prompt_lengths: how many of them are the prompt.  stop_ids: the model's end-of-sequence ids, for min_tokens.
    checked: False for callers that look for faulty logits themselves; compiled parameters that need sound ones still check.

    Raises:
        InvalidInputError: a node whose logits hold NaN or +inf, or have no token left; it names the row.

    Example:
        >>> root = TokenTree.roots(torch.tensor([1]))
        >>> process(torch.tensor([[[1.0, 2.0, 3.0]]]), root, [[1]], [1], [SamplingParams(top_k=2, temperature=0.5)]).tolist()
        [[[-inf, 4.0, 6.0]]]
    """
    return _truncated(
        in_context(logits, tree, contexts, prompt_lengths, params, stop_ids), tree, params, checked
    )


def in_context(
    logits: Float[Tensor, "B N V"],
    tree: TokenTree,
    contexts: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    params: Sequence[SamplingParams],
    stop_ids: Sequence[int] = (),
) -> Float[Tensor, "B N V"]:
    """Logits in float32 or wider after all parameters that depend on token ids, before the temperature; arguments as for `process`.

    Example:
        >>> root, banned = TokenTree.roots(torch.tensor([1])), SamplingParams(logit_bias={0: -math.inf}, temperature=0.5)
        >>> in_context(torch.tensor([[[1.0, 2.0, 3.0]]]), root, [[1]], [1], [banned]).tolist()
        [[[-inf, 2.0, 3.0]]]
    """
    x = _wide(logits)
    if any(map(_depends_on_context, params)):
        x = _process_context(x, tree, contexts, prompt_lengths, params, stop_ids)
    return x


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
    x: Float[Tensor, "B N V"], tree: TokenTree, params: Sequence[SamplingParams], checked: bool
) -> Float[Tensor, "B N V"]:
    """What follows the parameters that depend on token ids."""
    if not any(map(_truncates, params)):
        x = _temper(x, [row.temperature for row in params])
        return (
            _checked(x, tree)
            if checked or (x.device.type == "cpu" and any(map(_depends_on_context, params)))
            else x
        )
    if x.device.type == "cpu" and x.dtype == torch.float32:
        return _truncated_here(x.contiguous(), tree, params)
    x = _temper(x, [row.temperature for row in params])
    rows = _where(params, _truncates)
    if checked or x.device.type == "cpu":
        x = _checked(x, tree)
    return _on_rows(x, rows, lambda part: _truncated_there(part, [params[b] for b in rows]))


def _truncated_there(x: Float[Tensor, "B N V"], params: list[SamplingParams]) -> Float[Tensor, "B N V"]:
    """By torch, on any device and in any precision."""

    def part(change: Callable[..., Tensor], values: list[float], off: float) -> Tensor:
        rows = [b for b, value in enumerate(values) if (value > off if off == 0 else value < off)]
        return _on_rows(x, rows, lambda some: change(some, [values[b] for b in rows]))

    x = part(_top_k, [row.top_k for row in params], 0)
    x = part(_top_p, [row.top_p for row in params], 1)
    return part(_min_p, [row.min_p for row in params], 0)


def _truncated_here(
    x: Float[Tensor, "B N V"], tree: TokenTree, params: Sequence[SamplingParams]
) -> Float[Tensor, "B N V"]:
    """By compiled code, several rows at a time."""
    temperatures = [row.temperature or 1.0 for row in params]
    if min(temperatures) < 1e-3:
        x = _temper(x, temperatures)
        temperatures = [1.0] * len(params)
    rules = [
        row.with_(temperature=temperature) if _truncates(row) else SamplingParams(temperature=temperature)
        for temperature, row in zip(temperatures, params, strict=True)
    ]
    samplings = samplings_of(rules).repeat(x.shape[1])
    out = torch.empty_like(x)
    with ROWS:
        sound = truncate(sync, x.flatten(0, 1).numpy(), out.flatten(0, 1).numpy(), samplings)
    return out if sound.all() else _checked(out, tree)


def distributions(
    logits: Float[Tensor, "B N V"],
    tree: TokenTree,
    contexts: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    params: Sequence[SamplingParams],
    stop_ids: Sequence[int] = (),
) -> Float[Tensor, "B N V"]:
    """The distributions that are sampled, one at every node; arguments and errors as for `process`.

    Example:
        >>> root = TokenTree.roots(torch.tensor([1, 1]))
        >>> both = [SamplingParams(temperature=0), SamplingParams()]
        >>> distributions(torch.tensor([[[2.0, 2.0, 0.0]]]).expand(2, 1, 3), root, [[1], [1]], [1, 1], both).tolist()
        [[[1.0, 0.0, 0.0]], [[0.468..., 0.468..., 0.063...]]]
    """
    return distributions_of(
        in_context(logits, tree, contexts, prompt_lengths, params, stop_ids), tree, params
    )


def distributions_of(
    x: Float[Tensor, "B N V"], tree: TokenTree, params: Sequence[SamplingParams]
) -> Float[Tensor, "B N V"]:
    """The distributions of logits that `in_context` has made; errors as for `process`.

    Example:
        >>> distributions_of(torch.zeros(1, 1, 2), TokenTree.roots(torch.tensor([1])), [SamplingParams()]).tolist()
        [[[0.5, 0.5]]]
    """
    if x.device.type == "cpu" and x.dtype == torch.float32:
        probs = torch.empty_like(x, memory_format=torch.contiguous_format)
        with ROWS:
            soften_rows(
                sync,
                x.flatten(0, 1).contiguous().numpy(),
                samplings_of(params).repeat(x.shape[1]),
                probs.flatten(0, 1).numpy(),
            )
        if not probs[..., 0].isnan().any():  # a row with a fault has no number at all
            return probs
    return soften(_checked(_truncated(x, tree, params, False), tree), params)


def draft_probs(
    logits: Float[Tensor, "B N V"],
    tree: TokenTree,
    contexts: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    params: Sequence[SamplingParams],
    stop_ids: Sequence[int] = (),
    *,
    since: int = 0,
) -> Float[Tensor, "B M V"]:
    """The same for a draft model, which may have logits of some tokens only: where none of them is allowed, no token has mass.

    since: logits are those of the nodes `since` and later.

    Example:
        >>> root = TokenTree.roots(torch.tensor([1]))
        >>> only = SamplingParams(logit_bias={0: -math.inf, 1: -math.inf})
        >>> draft_probs(torch.tensor([[[1.0, 2.0, -math.inf]]]), root, [[1]], [1], [only]).tolist()
        [[[0.0, 0.0, 0.0]]]
    """
    if not any(map(_depends_on_context, params)):
        part = TokenTree(tree.tokens[:, since:], tree.parents[:, since:])
        return distributions(logits, part, contexts, prompt_lengths, params, stop_ids)
    logits = torch.nn.functional.pad(
        logits, (0, 0, since, 0)
    )  # a path begins at the root: rows for all nodes
    x = _process_context(_wide(logits), tree, contexts, prompt_lengths, params, stop_ids)
    empty = ((x.amax(-1) == -torch.inf) & (logits.amax(-1) > -torch.inf))[..., None]
    return soften(_truncated(x.masked_fill(empty, 0.0), tree, params, True), params).masked_fill(empty, 0.0)[
        :, since:
    ]


def soften(processed: Float[Tensor, "B N V"], params: Sequence[SamplingParams]) -> Float[Tensor, "B N V"]:
    """The distributions of processed logits: softmax, and point masses at temperature 0.

    Example:
        >>> soften(torch.zeros(1, 1, 2), [SamplingParams()]).tolist()
        [[[0.5, 0.5]]]
    """
    greedy = [b for b, row in enumerate(params) if row.greedy]
    if len(greedy) == len(processed):
        return _point_mass(processed)
    p = processed.softmax(-1)
    if greedy:
        index = torch.tensor(greedy).to(p.device, non_blocking=True)
        p[index] = _point_mass(processed[index])
    return p
