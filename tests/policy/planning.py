"""Policies of known costs, sequences and outcomes to feed them."""

import numpy as np

from polydraft import SamplingParams
from polydraft.core import Outcome, Request
from polydraft.engine.sequence import Sample, Sequence
from polydraft.engine.stopping import Stopper
from polydraft.policy.acceptance import FIRST, NEXT, UNKNOWN
from polydraft.policy.adaptive import AdaptivePolicy
from polydraft.policy.costs import Costs
from polydraft.policy.marginal import foreseen
from polydraft.policy.profile import Profile

LOGITS = np.zeros((1, 1, 5), np.float32)
"""Processed logits, which policies leave aside."""


def costs(row=0.02, step=0.02, start=0.0):
    """A pass of one row costs 1."""
    return Costs.of({1: 1.0, 4: 1.0 + 3 * row, 8: 1.0 + 7 * row}, draft_start=start, draft_step=step)


def known(prices=None, rate=None):
    """A profile. rate: acceptance of every token, whatever the confidence in it."""
    prices = prices or costs()
    rates = UNKNOWN if rate is None else (rate,) * len(UNKNOWN)
    mode = rates, foreseen(rates[FIRST], rates[NEXT], prices)
    return Profile(prices, mode, mode)


def made(prices=None, rate=None):
    return AdaptivePolicy(known(prices, rate))


def sequences(count=1, length=10, **params):
    request = Request("r", (1,) * length, SamplingParams(**params), 0)
    stopper = Stopper(
        None,
        (1,),
        stop_ids=frozenset(),
        stop_strings=(),
        max_tokens=99,
        min_tokens=0,
        skip_special_tokens=True,
    )
    return [Sequence(request, stopper, Sample(0, 0), [1] * length) for _ in range(count)]


def outcome(accepted):
    """The first nodes of a chain were kept."""
    return Outcome(np.arange(1, accepted + 1)[None], np.array([accepted]), np.array([0]))


class OnlyWalks:
    """A rule that has its walk and no verdict."""

    def __init__(self, rule):
        self.info = rule.info
        self.walk = rule.walk

    def __call__(self, draft, target_probs):
        raise AssertionError("the walk did not apply")
