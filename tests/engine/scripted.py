"""Engines on tables whose budgets are told by the seeds, and the drafts that they make."""

from polydraft import Engine
from polydraft.policy.fixed import Policy
from tests.engine.tables import TableModel


class Script(Policy):
    """Of these budgets the one of the request's seed, in every round."""

    def __init__(self, budgets):
        self.told = budgets

    def budgets(self, sequences):
        return [self.told[s.request.seed] for s in sequences]


def engine(policy, drafter="model", **options):
    target, small = (TableModel(5, seed=seed, max_num_seqs=8) for seed in (0, 1))
    return Engine.of(target, draft_model=small, drafter=drafter, policy=policy, **options)


def shapes_of(fast, monkeypatch):
    """Shapes of the drafts as they come."""
    seen = []
    propose = fast.drafter.propose
    monkeypatch.setattr(fast.drafter, "propose", lambda *given: seen.append(propose(*given)) or seen[-1])
    return seen
