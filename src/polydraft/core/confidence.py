"""Confidence of a draft model in a drafted token, and the chance that such a token is accepted.

    confidence   the probability of the token in the row that it was drawn from; of a draft at temperature 0 in the softmax at temperature 1
    bins         ten, one unit of log-odds each, from below -4 to above 4: edges at .018, .047, .12, .27, .5, .73, .88, .953, .982
    acceptance   of each bin, counted while the engine runs (`policy.acceptance`); before that the identity
    reach        of a node: the product of the acceptances along its path, an estimate of the chance that the node is accepted

A drawn token of small probability q is accepted with min(1, p / q), which does not fall with q: below the middle of the first bin its acceptance is that
bin's. A token that is chosen for its rank is accepted with p, which does. With the second for both, chains at temperature 1 ended behind unlikely tokens:
.95 of the best chain's speed on the embedded pair, where tokens of q = .002 are accepted with .63, and 1.00 without (`studies.policy.contexts`).

On a Qwen2.5-Coder pair (1.5B and 0.5B, T = 1, 706 drafted tokens) the log loss of an acceptance is .523 without confidence, .430 with
bins of max q, .428 with the entropy of q, .411 with q of the drawn token.
"""

import math

from polydraft.numerics.compiled_code import njit

BINS = 10
_LOWEST = -BINS / 2
IDENTITY = tuple(1.0 / (1.0 + math.exp(-(_LOWEST + 0.5 + b))) for b in range(BINS))
"""Acceptance of each bin where confidence is taken at its word: that at the middle of the bin."""


@njit(cache=True)
def _log_odds(confidence):
    c = min(max(confidence, 1e-9), 1.0 - 1e-9)
    return math.log(c / (1.0 - c))


@njit(cache=True)
def bin_of(confidence):
    """The bin of a confidence.

    Example:
        >>> bin_of(0.001), bin_of(0.6), bin_of(1.0)
        (0, 5, 9)
    """
    return min(max(math.floor(_log_odds(confidence) - _LOWEST), 0), BINS - 1)


@njit(cache=True)
def acceptance_at(confidence, acceptance):
    """Acceptance of a drawn token: linear in log-odds between the middles of the bins, that of the first and the last bin beyond.

    acceptance: [BINS] of each bin.

    Example:
        >>> round(acceptance_at(0.5, IDENTITY), 2), round(acceptance_at(0.0, IDENTITY), 2)
        (0.5, 0.01)
    """
    at = max(_log_odds(confidence) - _LOWEST - 0.5, 0.0)
    below = min(int(at), BINS - 2)
    part = min(at - below, 1.0)
    return (1.0 - part) * acceptance[below] + part * acceptance[below + 1]


@njit(cache=True)
def ranked_acceptance_at(confidence, acceptance):
    """The same of a token that is chosen for its rank: proportional to the confidence below the middle of the first bin.

    Example:
        >>> round(ranked_acceptance_at(0.5, IDENTITY), 2), round(ranked_acceptance_at(0.0, IDENTITY), 4)
        (0.5, 0.0)
    """
    return acceptance_at(confidence, acceptance) * min(max(confidence, 0.0) / IDENTITY[0], 1.0)
