"""Where in a batch of trees there is something to try, worked out on the host and sent to the device in one table: for `device_tree`."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from polydraft import tree
from polydraft.core import Draft, TokenTree, TreeShape
from polydraft.staging import sent


@dataclass(frozen=True)
class Level:
    """Contexts of one depth that have as few or as many draws, where the rows are.

    context: [M] their places among all B N nodes.  child, token: [M, W] first copies and tokens of the draws, in the order of their
    tries, padded with -1.  row: [M, W] of all B R rows, what each was drawn from, 0 where from none.  group: [M, W] of greedy traversal:
    draws that share their weight.
    """

    context: Int[Tensor, " M"]
    child: Int[Tensor, "M W"]
    token: Int[Tensor, "M W"]
    row: Int[Tensor, "M W"]
    group: Int[Tensor, "M W"]


@dataclass(frozen=True)
class Contexts:
    """Where in a batch of trees there is something to try. levels: from the root down.

    place: [B, N] number of a context with several draws among all such; -1 for those with one, -2 for those with none.
    within: [B, N, N] context m is n or above n.  chain: [B] rows that are one path.
    """

    levels: list[Level]
    place: Int[Tensor, "B N"]
    within: Bool[Tensor, "B N N"]
    chain: Bool[Tensor, " B"]
    num_several: int

    @classmethod
    def of(cls, draft: Draft, draws: np.ndarray, single: bool, device: torch.device) -> "Contexts":
        """draws: [B, N, W] nodes at each context in the order of their tries, padded with -1.  single: whether one draw is a case of its own."""
        tokens, parents = draft.tree.host
        B, N, _ = draws.shape
        R = 0 if draft.probs is None else draft.probs.shape[1]
        first, depth, rows = (
            x.cpu().numpy() for x in (tree.first_copies(draft.tree), tree.depths(draft.tree), draft.rows.contiguous())
        )
        counts, height = (draws >= 0).sum(-1), _groups(draft, draws)
        place = np.full((B, N), -2)
        parts, sizes = [np.zeros(0, np.int64)], list[tuple[int, int]]()
        number = 0
        for d in range(max(int(depth.max()), 0)):
            for b, v in _cases((depth == d) & (counts > 0), counts, single):
                W = int(counts[b, v].max())
                here = draws[b, v, :W]
                real, at = here >= 0, np.maximum(here, 0)
                beside = b[:, None]
                child, token = (np.where(real, x, -1) for x in (beside * N + first[beside, at], tokens[beside, at]))
                row = np.where(real, beside * R + np.maximum(rows[beside, at], 0), beside * R)
                group = np.where(real, height[b, v, :W], -1)
                parts += [b * N + v, *(x.ravel() for x in (child, token, row, group))]
                sizes.append((len(b), W))
                if W > 1 or not single:
                    place[b, v] = number + np.arange(len(b))
                    number += len(b)
                else:
                    place[b, v] = -1
        above = np.where(parents >= 0, np.take_along_axis(first, np.maximum(parents, 0), 1), -1)
        chain = ((parents == np.arange(-1, N - 1)) | (parents < 0)).all(1)
        within = tree.ancestors(TokenTree.of(tokens, above))
        facts = sent(torch.from_numpy(np.concatenate([*parts, place.ravel(), chain])), device)
        return cls(
            list(_levels(facts, sizes)),
            facts[-B * (N + 1) : -B].view(B, N),
            sent(within, device),
            facts[-B:] > 0,
            number,
        )


def _cases(here: Bool[np.ndarray, "B N"], counts: np.ndarray, single: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Contexts (b, v) of one depth: those with one draw, those with more."""
    kinds = [here & (counts == 1), here & (counts > 1)] if single else [here]
    for kind in kinds:
        if kind.any():
            b, v = np.nonzero(kind)
            yield b, v


def _levels(facts: Int[Tensor, " L"], sizes: list[tuple[int, int]]) -> Iterator[Level]:
    begin = 0
    for M, W in sizes:
        context, begin = facts[begin : begin + M], begin + M
        yield Level(context, *(facts[begin + i * M * W : begin + (i + 1) * M * W].view(M, W) for i in range(4)))
        begin += 4 * M * W


def _groups(draft: Draft, draws: np.ndarray) -> np.ndarray:
    """[B, N, W]: number of the run of neighbours in draw order that go on equally deep; all 0 where all trees do."""
    groups = np.zeros(draws.shape, np.int64)
    if draft.shape not in (TreeShape.RAGGED, TreeShape.BY_POSITION):
        return groups
    parents = draft.tree.host[1]
    height = np.zeros(parents.shape, np.int64)
    for n in range(parents.shape[1] - 1, 0, -1):
        b = np.flatnonzero(parents[:, n] >= 0)
        height[b, parents[b, n]] = np.maximum(height[b, parents[b, n]], 1 + height[b, n])
    at = np.take_along_axis(height[:, None], np.maximum(draws, 0), 2)
    groups[..., 1:] = (at[..., 1:] != at[..., :-1]).cumsum(-1)
    return groups
