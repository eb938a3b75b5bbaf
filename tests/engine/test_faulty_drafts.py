"""A drafter that breaks its contract loses its request's drafts, by name and value; the text is that of plain decoding."""

from dataclasses import replace

import numpy as np
import pytest

from polydraft import Engine, SamplingParams
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.errors import DrafterWarning
from tests.engine.tables import TableModel, plain_greedy

PROMPTS = [(1, 2, 3), (4, 5), (3, 3, 1)]


def massless(draft):
    probs = draft.probs.copy()
    probs[0, draft.rows[0, 1], draft.tree.tokens[0, 1]] = 0.0
    return replace(draft, probs=probs)


def no_distribution(draft):
    probs = draft.probs.copy()
    probs[0, draft.rows[0, 1]] *= 2.0
    return replace(draft, probs=probs)


FAULTS = {
    r"draft.rows\[0, 1\] = 5000 was given; expected 0 to": lambda d: replace(
        d, rows=d.rows + 5000 * (d.rows >= 0)
    ),
    r"draft.rows\[0, 1\] = -1 was given; expected 0 to": lambda d: replace(
        d, rows=np.where(d.rows != d.rows[0, 1], d.rows, -1)
    ),
    r"draft.probs = None was given for a draft with draft sampling IID": lambda d: replace(d, probs=None),
    r"draft.probs\[0, 0, \d+\] = 0.0 was given for token": massless,
    r"draft.probs\[0, 0\] sums to 2; expected 1": no_distribution,
    r"draft.probs: float64 of shape \(1, 1, 3\) was given; expected shape \(1, any, ": lambda d: replace(
        d, probs=d.probs[:, :1, :3]
    ),
}


class Faulty(ModelDrafter):
    """Breaks the drafts of odd seeds."""

    def propose(self, states, budgets):
        draft = super().propose(states, budgets)
        return self.fault(draft) if any(s.request.seed % 2 for s in states) else draft


@pytest.mark.parametrize("message", FAULTS)
@pytest.mark.parametrize("verifier", ["block", "speculative", "match"])
def test_a_faulty_draft_is_refused_before_it_is_verified(message, verifier):
    target = TableModel()
    drafter = Faulty(TableModel(seed=1), "chain")
    drafter.fault = FAULTS[message]
    fast = Engine.of(target, drafter=drafter, verifier=verifier, depth=3)
    params = [SamplingParams(temperature=0, max_tokens=8, seed=s) for s in (0, 1, 2)]
    with pytest.warns(DrafterWarning, match=message):
        results = fast.generate(PROMPTS, params)
    assert [r.token_ids for r in results] == [plain_greedy(target, p, 8) for p in PROMPTS]
    assert [r.stats.drafter_error is None for r in results] == [True, False, True]
