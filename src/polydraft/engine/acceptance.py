"""How well drafts fit, by depth: estimated for each sequence from its own rounds, with decay, around a prior.

    a_d = (kept_d + strength m_d) / (seen_d + strength);  m_0 = prior_0, and m_d carries a_(d-1) on along the prior's shape

A chain, and any draft without a law, is counted: seen_d rounds that came down to depth d and had a draft there, kept_d of them
kept it. That is what the rule keeps, whichever it is, costs next to nothing, and is done in every round. Where iid paths part, what is kept is not that of one draft, and some of the
rounds are looked at:

    W_d  chance that block verification keeps the first path down to depth d: W_0 = 1, W <- min(1, W p/q), W p without a q
    o_d  its mean over the next draft: sum min(q, W p) (W P(children) without a q), so that E[o_d] = E[W_(d+1)]
    kept_d += o_d,  seen_d += W_d

Block verification keeps a chain down to depth d with probability W_d given its tokens (Sun et al. 2024, arXiv 2403.10444), so
the products of a_0, a_1, ... predict its tokens per call, without the noise of coins and of the last draft. So is the prior measured.
A rule that keeps less of several paths (or more) is followed by `gain`: accepted tokens over predicted ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float
from torch import Tensor

from polydraft.core import Draft, Outcome, TreeShape
from polydraft.engine.tree_search import chances, expected
from polydraft.verifiers.fast.rows import compiled, highest, soften

__all__ = ["DEPTHS", "EVERY_ROUND", "Acceptance", "by_depth", "count", "expected_tokens", "look", "tokens_by_depth"]

DEPTHS = 16
"""Depths told apart; deeper ones count as the last."""
LEAST = 0.02
"""Chances to get there below this are not looked at: a row costs as much to read as any other."""
STRENGTH = 16.0
"""Rounds that the prior counts for at every depth. With 8 chat lost 3%, on as many texts and modelled seconds; other workloads differed by 1% at most."""
DECAY = 0.85
"""What is left of a round after the next. Texts change: with recorded rounds of five workloads 0.8 to 0.9 chose best, 0.98 lost 1% to 8%."""
FAILING, FLOOR = 0.8, 0.5
"""What each further round in a row whose first draft fails leaves of the prior's strength, and its least: it must not hold out against a text that nothing fits."""
EVERY_ROUND = 8
"""Rounds of several paths that are all looked at; of later ones every fourth is, as a look costs 5% of a round of the embedded pair."""
CHILDREN = 8
"""Most children of a node whose chances are told apart where a tree by position is predicted."""
HAVING, HAVING_DECAY = 1.0, 0.95
"""Rounds for which a drafter is taken to have something to draft before it was asked, and what is left of a round after the next."""
TRUST = 80.0
"""Predicted tokens that weigh as much as the belief that a rule keeps the overlap."""


@dataclass
class Acceptance:
    """One sequence's running record. kept, seen: [DEPTHS] weighted overlaps and weights.

    predicted, accepted: drafted tokens, with decay.  pause: rounds of the last wait.  waiting: rounds left.
    due: a probe follows the wait.  before: `rate` at the last probe.  rounds: that drafted since the last probe.
    folded: rounds that were counted or looked at.  failed: of them, the last in a row that kept nothing; halved by one that kept something.
    depth: of the chain that is drafted so far, 0 for another shape or none.
    asked, had: rounds in which a draft was asked for, and in which there was one, with decay.
    """

    kept: np.ndarray = field(default_factory=lambda: np.zeros(DEPTHS))
    seen: np.ndarray = field(default_factory=lambda: np.zeros(DEPTHS))
    predicted: float = 0.0
    accepted: float = 0.0
    pause: int = 0
    waiting: int = 0
    due: bool = False
    before: float = 1.0
    rounds: int = 0
    folded: int = 0
    failed: int = 0
    depth: int = 0
    asked: float = 0.0
    had: float = 0.0

    def fold(self, num_accepted: int) -> None:
        """Take note that a round was counted or looked at."""
        self.folded += 1
        self.failed = self.failed // 2 if num_accepted else self.failed + 1

    def ask(self, had: bool) -> None:
        """Take note that a draft was asked for, and whether there was one."""
        self.asked, self.had = HAVING_DECAY * self.asked + 1.0, HAVING_DECAY * self.had + had

    def share(self, expected: float) -> float:
        """Of the rounds in which a draft is asked for, those in which there is one. expected: before any was."""
        return (self.had + HAVING * expected) / (self.asked + HAVING)

    @property
    def gain(self) -> float:
        """Accepted over predicted tokens, drawn to 1 while there are few; hardly above: overlaps rise by themselves where texts are easy."""
        return min(max((self.accepted + TRUST) / (self.predicted + TRUST), 0.2), 1.1)

    @property
    def rate(self) -> float:
        """Acceptance of first drafts as seen, without the prior."""
        return float(self.kept[0] / self.seen[0]) if self.seen[0] > 0 else 0.0

    def fade(self, factor: float) -> None:
        """Let the past count for less."""
        self.kept *= factor
        self.seen *= factor
        self.predicted *= factor
        self.accepted *= factor


@compiled
def by_depth(kept: np.ndarray, seen: np.ndarray, prior: np.ndarray, gain: float, failed: float, out: np.ndarray) -> None:
    """out[d] = a_d; see the module."""
    before, expected = prior[0], prior[0]
    for d in range(out.size):
        if d > 0:
            expected = min(max(1.0 - (1.0 - before) * (1.0 - prior[d]) / max(1.0 - prior[d - 1], 1e-6), 0.0), 0.999)
        strength = max(STRENGTH * FAILING**failed, FLOOR) if d == 0 else STRENGTH
        before = (kept[d] + strength * expected) / (seen[d] + strength)
        out[d] = before
    for d in range(out.size):
        out[d] = min(out[d] * gain, 0.999)


@compiled
def tokens_by_depth(acceptance: np.ndarray, width: int, trunk: int, short: int, out: np.ndarray) -> None:
    """out[d] = tokens per call of `width` iid paths down to depth d, from the acceptance of one draft by depth.

    trunk: tokens of one path before they part.  short: depth of the paths after the first, 0 where they are as deep.

    A chain: 1 + a_0 + a_0 a_1 + ...  With K paths a rejection 1 - a becomes (1 - a)^(1 + 0.53 log2 K) where they part and
    (1 - a)^(1 + 0.08 log2 K) below, where mostly one path is left: a fit to the block efficiency of greedy traversal on the
    embedded pair (K = 1 to 4, depths 1 to 8, three temperatures; within 5%).
    Short paths are tried where nothing of the deep one is kept: to what the chain keeps they add, with probability
    (1 - a_0) (1 - (1 - a_0)^(0.30 log2 K)), a chain whose acceptance is that of K draws, as where paths agree at first it is a
    later draw that is tried again (lengths 2 to 8 and 1 to 3, likewise; their share within 0.05 tokens).
    """
    octaves = np.log2(float(width))
    out[0] = reached = 1.0
    again = 0.0
    for d in range(out.size - 1):
        a = acceptance[min(d, acceptance.size - 1)]
        missed = max(1.0 - a, 1e-12)
        if width > 1 and d >= trunk and short == 0:
            a = 1.0 - np.exp((1.0 + (0.53 if d == trunk else 0.08) * octaves) * np.log(missed))
        reached *= a
        out[d + 1] = out[d] + reached
        if d < short:
            again = missed * (1.0 - missed ** (0.30 * octaves)) if d == 0 else again * (1.0 - missed ** (1.0 + 0.53 * octaves))
            out[d + 1] += again


def expected_tokens(
    acceptance: np.ndarray, width: int, depth: int, trunk: int = 0, short: int = 0, parents: Sequence[int] = ()
) -> float:
    """Tokens per call of `width` iid paths down to `depth`, see `tokens_by_depth`, or of the tree by position of these parents.

    Example:
        >>> round(expected_tokens(np.full(4, 0.5), 1, 4), 4)
        1.9375
    """
    if parents:
        chance = np.empty((acceptance.size, CHILDREN))
        chances(acceptance, chance)
        return float(expected(chance, np.array(parents, np.int64)))
    out = np.empty(depth + 1)
    tokens_by_depth(acceptance, width, trunk, short, out)
    return float(out[depth])


@compiled
def _predicted(rates, parents, has_law):
    """The accepted tokens that these rates promise of a draft of paths, or of children without a law."""
    N = len(parents)
    width, trunk, depth, node, nodes = 1, 0, 0, 0, 0
    for n in range(1, N):
        nodes += parents[n] >= 0
        if parents[n] == node:
            if width == 1:
                for m in range(n + 1, N):
                    width += parents[m] == node
                trunk = depth
            node, depth = n, depth + 1
    tokens_of = np.empty(depth + 1)
    end = (nodes - depth) // (width - 1) if has_law and width > 1 and trunk == 0 else depth  # of the paths after the first
    tokens_by_depth(rates, width, trunk, end if 0 < end < depth else 0, tokens_of)
    return tokens_of[depth] - 1.0


@compiled
def _look(logits, q, tokens, parents, rows, has_law, by_position, greedy, prior, failed, kept, seen):
    """Add one row's overlaps along its first path; returns the accepted tokens that the record predicted."""
    N, V = logits.shape
    rates = np.empty(kept.size)
    by_depth(kept, seen, prior, 1.0, failed, rates)
    if by_position:
        chance = np.empty((rates.size, CHILDREN))
        chances(rates, chance)
        predicted = expected(chance, parents) - 1.0
    else:
        predicted = _predicted(rates, parents, has_law)
    p = np.empty(V, np.float32)
    node, reached = 0, 1.0
    for d in range(N):
        child = -1
        for n in range(node + 1, N):
            if parents[n] == node:
                child = n
                break
        if child < 0:
            return predicted
        if greedy:
            top = highest(logits[node])
            total, first = 1.0, True
            for t in range(V):
                p[t] = np.float32(1.0) if first and logits[node, t] == top else np.float32(0.0)
                first = first and p[t] == 0
        else:
            total = soften(logits[node], p)
        if not total > 0.0:
            return predicted
        weight = np.float32(reached)
        if weight < LEAST:
            return predicted
        scale, overlap = np.float32(1.0 / total), np.float32(0.0)
        x = tokens[child]
        if has_law:
            law = q[rows[child]]
            part = scale * weight
            for t in range(V):
                overlap += min(p[t] * part, law[t])
            ratio = p[x] * scale / law[x] if law[x] > 0 else np.float32(0.0)
        else:
            for n in range(node + 1, N):
                copied = False
                for m in range(node + 1, n):
                    copied |= parents[m] == node and tokens[m] == tokens[n]
                if parents[n] == node and not copied:
                    overlap += p[tokens[n]] * scale * weight
            ratio = p[x] * scale
        at = min(d, kept.size - 1)
        kept[at] += min(overlap, weight)
        seen[at] += weight
        reached = min(1.0, reached * ratio)
        node = child
    return predicted


@compiled
def _count(parents, path, accepted, has_law, decay, kept, seen):
    """Add a round that kept `accepted` nodes of a row's tree, `path`; False, and nothing is added, where paths drawn from a law part."""
    end, goes_on = path[accepted - 1] if accepted > 0 else 0, False
    for n in range(1, parents.size):
        if has_law and 0 <= parents[n] < n - 1:
            return False
        goes_on |= parents[n] == end
    for d in range(kept.size):
        kept[d] *= decay
        seen[d] *= decay
    for d in range(accepted + goes_on):
        at = min(d, kept.size - 1)
        seen[at] += 1.0
        kept[at] += 1.0 if d < accepted else 0.0
    return True


def count(records: Sequence[Acceptance], draft: Draft, outcome: Outcome) -> list[int]:
    """Fold a round into the record of each sequence that drafted; returns rows whose paths part, where `look` should be called instead."""
    if draft.tree.num_nodes == 1:
        return []
    parents, has_law = draft.tree.host[1], draft.probs is not None
    paths, accepted, _ = outcome.host
    looked = list[int]()
    for b, r in enumerate(records):
        if parents[b, 1] != 0:
            continue
        r.rounds += 1
        if _count(parents[b], paths[b], accepted[b], has_law, DECAY, r.kept, r.seen):
            r.fold(accepted[b])
        elif r.rounds <= EVERY_ROUND or r.rounds % 4 == 0:
            looked.append(b)
    return looked


def look(
    records: Sequence[Acceptance],
    draft: Draft,
    processed: Float[Tensor, "B N V"],
    greedy: Sequence[bool],
    priors: Sequence[np.ndarray],
    outcome: Outcome,
    *,
    rows: Sequence[int],
    decay: float = DECAY,
) -> None:
    """Fold a round's overlaps into the records of some rows: far dearer than counting, and more is learnt from a round.

    processed: the target's logits, processed but for temperature 0.  greedy: rows at temperature 0.
    priors: of each row, [DEPTHS] acceptance before anything was seen.  decay: of what was seen before.
    """
    tokens, parents = draft.tree.host
    x = processed.float().cpu().contiguous().numpy()
    q = x if draft.probs is None else draft.probs.float().cpu().contiguous().numpy()
    sources = draft.rows.cpu().contiguous().numpy()
    has_law, by_position, accepted = draft.probs is not None, draft.shape is TreeShape.BY_POSITION, outcome.num_accepted.tolist()
    for b in rows:
        r = records[b]
        r.fade(decay)
        tree = tokens[b], parents[b], sources[b], has_law, by_position
        r.predicted += _look(x[b], q[b], *tree, greedy[b], priors[b], r.failed, r.kept, r.seen)
        r.fold(accepted[b])
        r.accepted += accepted[b]
