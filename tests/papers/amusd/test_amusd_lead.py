"""AMUSD's shared state, proven over every order of events: float64 distributions for sampled chains, the very tokens for races and greedy decoding."""

import random

import numpy as np
import pytest

from polydraft.errors import InvalidInputError
from polydraft.papers.amusd.lead import Item, Lead
from polydraft.testing import Tables
from tests.papers.amusd.leads import (
    Case,
    Quarters,
    Worker,
    after,
    distribution,
    orders,
    race_case,
    reachable,
    target_distribution,
)
from tests.papers.amusd.simulator import simulate

LENGTH = 4


def worst(case, events=7):
    """Largest distance to the target's distribution over all orders of so many events."""
    expected = target_distribution(case.tables, LENGTH)
    return max(
        abs(distribution(case, worlds, LENGTH) - expected).sum() / 2 for worlds in orders(case, events)
    )


@pytest.mark.parametrize("rule", ["speculative", "block", "match"])
@pytest.mark.parametrize(("cap", "depth"), [(3, 2), (2, 2), (3, 3)])
def test_a_sampled_chain_keeps_the_distribution_in_every_order_of_events(rule, cap, depth):
    assert worst(Case(Tables(2, 0), rule, cap, depth)) < 1e-12


@pytest.mark.parametrize("rule", ["speculative", "block"])
def test_the_distribution_is_kept_where_the_order_depends_on_published_tokens(rule):
    """Whoever schedules may look at all tokens that were published and at who is busy, and at nothing else."""
    case = Case(Tables(2, 6), rule)
    expected = target_distribution(case.tables, LENGTH)
    for number in range(12):
        worlds = case.begin()
        found = 0.0
        turn = 0
        while worlds:  # each until its text is long enough: to give up waiting tokens for what they are would change the distribution

            def event(world, number=number, turn=turn):
                seen = (
                    tuple(world.lead.text),
                    tuple(i.token for i in world.lead.ring),
                    world.drafting is None,
                    world.verifying is None,
                )
                return random.Random(f"{number} {turn} {seen}").choice("ddv")

            worlds = after(case, worlds, event)
            turn = turn + 1
            done = {key: each for key, each in worlds.items() if len(each[0].path) >= LENGTH}
            found = found + distribution(case, done, LENGTH)
            worlds = {key: each for key, each in worlds.items() if key not in done}
        assert abs(found - expected).max() < 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_a_race_gives_the_very_tokens_in_every_order_of_events(seed):
    tables = Tables(3, seed)
    case, plain = race_case(tables, seed, cap=3, depth=2)
    states = reachable(case, 4)
    assert len(states) > 100
    assert all(world.path == plain(len(world.path)) for world in states)


def test_greedy_text_is_the_targets_in_every_order_of_events():
    tables = Tables(3, 7)

    def best(which, path):
        return int(np.argmax(tables.row(which, path)))

    def judge(path, items):
        tokens = [best("p", path)]
        for item in items:
            if item.token != tokens[-1]:
                break
            tokens.append(best("p", (*path, *tokens)))
        return tuple(tokens), len(tokens) - 1

    states = reachable(Case(tables, draw=lambda path, _: best("q", path), judge=judge), 6)
    for world in states:
        assert all(token == best("p", world.path[:n]) for n, token in enumerate(world.path))


class StaleAccepted(Lead):
    """Takes a token of an older epoch in the next place, and says the row of that place."""

    def publish(self, items):
        for item in items:
            if item.epoch != self.epoch:
                path = tuple([*self.text, *(i.token for i in self.ring)][1:])
                item = Item(item.token, path, self.epoch, len(self.text) + len(self.ring))
                self.acknowledged = self.epoch
            super().publish([item])


class NotAcknowledged(Worker):
    """Goes on behind its own old text after a rollback, and says the rows of the new one."""

    def drawn(self, world, step, text):
        return world.own if len(world.own) >= len(text) else text


class RowOfAnotherEpoch(Worker):
    """Says the row that the place had in the first epoch: that of a text of zeros."""

    def reported(self, world, step, text):
        return text if step.epoch == 0 else (0,) * len(text)


class TokenDecides(Worker):
    """Lets a token wait only where the draft was sure of it, so how long the lead grows depends on the token."""

    def publishes(self, token, row):
        return row[token] > 0.4


class PositionNoise(Worker):
    """Draws a place again with the noise that it had in an earlier epoch."""

    position_noise = True


class Unbounded(Lead):
    """Drafts whatever the cap says."""

    @property
    def room(self):
        return 1

    def publish(self, items):
        cap = self.cap
        self.cap = 100
        super().publish(items)
        self.cap = cap


WRONG = {
    "stale epoch accepted": {"lead": StaleAccepted},
    "rollback not acknowledged": {"worker": NotAcknowledged()},
    "q row of another epoch": {"worker": RowOfAnotherEpoch()},
    "a lead that depends on the token": {"worker": TokenDecides()},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_variants_change_the_distribution(name):
    assert worst(Case(Tables(2, 0), **WRONG[name]), 8) > 0.003


@pytest.mark.parametrize("order", ["ddddddvvddddddvv", "ddddddvvddddvv"])
def test_noise_keyed_by_place_instead_of_epoch_changes_the_distribution_of_a_block_rule(order):
    tables = Quarters(2, 0)
    for worker, holds in ((Worker(), True), (PositionNoise(), False)):
        case = Case(tables, "block", 3, 3, worker)
        worlds = case.begin()
        for event in order:
            worlds = after(case, worlds, event)
        distance = abs(distribution(case, worlds, LENGTH) - target_distribution(tables, LENGTH)).sum() / 2
        assert distance < 1e-12 if holds else distance > 0.003


def test_an_unbounded_lead_is_seen():
    with pytest.raises(AssertionError, match="beyond its cap"):
        list(orders(Case(Tables(2, 0), lead=Unbounded), 12))


def test_an_item_of_an_older_epoch_is_dropped():
    lead = Lead([0], cap=4)
    step = lead.next()
    lead.publish([Item(1, None, 0, 1), Item(2, None, 0, 2)])
    lead.take(2)
    lead.verified([1, 3], accepted=1)
    lead.publish([Item(3, None, step.epoch, 3)])
    assert (lead.epoch, len(lead.ring), lead.counts.stale) == (1, 0, 1)
    lead.publish([Item(3, None, 1, 3)])  # of this epoch, which nobody has acknowledged
    assert (len(lead.ring), lead.counts.stale) == (0, 2)
    lead.acknowledge(1)
    lead.publish([Item(3, None, 1, 3)])
    assert [item.token for item in lead.ring] == [3]


def test_nothing_is_drafted_behind_an_end_or_beyond_the_longest_text():
    lead = Lead([0], cap=4, ends={9}, longest=4)
    lead.publish([Item(9, None, 0, 1), Item(1, None, 0, 2)])
    assert [item.token for item in lead.ring] == [9]
    assert lead.next() is None
    other = Lead([0], cap=4, longest=3)
    assert other.next().room == 2


@pytest.mark.parametrize("cap", [0, -1, 1.5, True])
def test_a_cap_below_one_is_refused(cap):
    with pytest.raises(InvalidInputError, match="expected at least 1"):
        Lead([0], cap)


def test_the_simulator_gives_the_races_tokens_at_every_ratio_of_costs_and_delay():
    tables = Tables(3, 1)
    case, plain = race_case(tables, 1)
    for ratio in (0.01, 0.3, 1.0, 2.5, 40.0):
        for number in range(4):
            chance = random.Random(number)
            lead = Lead([0], cap=4)
            simulate(
                lead,
                lambda text, start: (case.draw(tuple(text[1:]), len(text)), tuple(text[1:])),
                lambda text, items: case.judge(tuple(text[1:]), tuple(items)),
                draft_seconds=lambda: ratio * chance.uniform(0.2, 1.8),  # noqa: B023
                verify_seconds=lambda n: chance.uniform(0.2, 1.8),  # noqa: B023
                length=20,
                depth=3,
                min_lead=number % 3,
            )
            assert tuple(lead.text[1:]) == plain(len(lead.text) - 1)
