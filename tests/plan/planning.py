"""Plans of known costs, sequences and outcomes to feed them."""

import numpy as np
import torch

from polydraft import SamplingParams
from polydraft.core import Outcome, Request
from polydraft.engine.sequence import Sample, Sequence
from polydraft.engine.stopping import Stopper
from polydraft.plan.acceptance import DEPTHS
from polydraft.plan.costs import Charges, RoundCosts, Work
from polydraft.plan.plan import AdaptivePlan
from polydraft.plan.profile import Profile
from polydraft.plan.sizes import NOTHING, paths

LOGITS = torch.zeros(1, 1, 5)
"""Processed logits, which plans leave aside."""


def costs(drafting_at_all=0.0, **seconds):
    """Seconds of what a round is charged for, all booked as scoring; a pass costs 1 where nothing is said, with drafts or without."""
    known = Charges(**{"once": 1.0} | seconds)
    plain = {
        "plain_once": known.once,
        "plain_sequences": known.sequences + known.rows,
        "plain_context": known.context + known.rows_context,
    }
    return RoundCosts.whole(known._replace(once=known.once + drafting_at_all, **plain))


def work(sizes, contexts):
    """Of a round. sizes: (paths, depth[, trunk]) of each sequence."""
    return Work.of([paths(*size) if size[1] else NOTHING for size in sizes], contexts)


def made(known, rates=0.7, **options):
    shape = (rates,) * DEPTHS if isinstance(rates, float) else tuple(rates)
    return AdaptivePlan(Profile(known, shape), **options)


def sequences(count=1, length=10, **params):
    request = Request("r", (1,) * length, SamplingParams(**params), 0)
    stopper = Stopper(None, (1,), stop_ids=frozenset(), stop_strings=(), max_tokens=99, min_tokens=0, skip_special_tokens=True)
    return [Sequence(request, stopper, Sample(0, 0), [1] * length) for _ in range(count)]


def shown(plan, s, rate, rounds=1e9):
    """Let a sequence have shown this acceptance, at every depth or by depth, in so many rounds."""
    record = plan.course(s).record
    record.kept[:], record.seen[:] = rounds * np.asarray(rate), rounds
    record.counted += 1


def outcome(accepted):
    """The first nodes of a chain were kept."""
    return Outcome(torch.arange(1, accepted + 1)[None], torch.tensor([accepted]), torch.tensor([0]))


class OnlyWalks:
    """A rule that has its walk and no verdict."""

    def __init__(self, rule):
        self.info, self.walk = rule.info, rule.walk

    def __call__(self, draft, target_probs):
        raise AssertionError("the walk did not apply")
