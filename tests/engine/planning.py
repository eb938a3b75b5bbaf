"""Plans of known costs, sequences and outcomes to feed them."""

import torch

from polydraft import SamplingParams
from polydraft.core import Outcome, Request
from polydraft.engine.acceptance import DEPTHS
from polydraft.engine.costs import FEATURES, RoundCosts
from polydraft.engine.plan import AdaptivePlan
from polydraft.engine.profile import Profile
from polydraft.engine.sequence import Sample, Sequence
from polydraft.engine.stopping import Stopper


def costs(drafting_at_all=0.0, **seconds):
    """Seconds of named features, all booked as scoring; a pass costs 1 where nothing is said, with drafts or without."""
    known = {"once": 1.0} | {name.replace("_", " "): value for name, value in seconds.items()}
    known["without drafts: once"] = known["once"]
    known["without drafts: batch"] = known.get("batch", 0.0) + known.get("rows", 0.0)
    known["without drafts: context"] = known.get("context", 0.0) + known.get("rows x context", 0.0)
    known["once"] += drafting_at_all
    assert set(known) <= set(FEATURES)
    zero = (0.0,) * len(FEATURES)
    return RoundCosts({"drafting": zero, "scoring": tuple(known.get(name, 0.0) for name in FEATURES), "other": zero})


def made(known, rates=0.7, **options):
    shape = (rates,) * DEPTHS if isinstance(rates, float) else rates
    return AdaptivePlan(Profile(known, shape), **options)


def sequences(count=1, length=10, **params):
    request = Request("r", (1,) * length, SamplingParams(**params), 0)
    stopper = Stopper(None, (1,), stop_ids=frozenset(), stop_strings=(), max_tokens=99, min_tokens=0, skip_special_tokens=True)
    return [Sequence(request, stopper, Sample(0, 0), [1] * length) for _ in range(count)]


def outcome(accepted):
    """The first nodes of a chain were kept."""
    return Outcome(torch.arange(1, accepted + 1)[None], torch.tensor([accepted]), torch.tensor([0]))
