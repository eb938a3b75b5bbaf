"""Who decides a row depends on how it was drafted and on its temperature, by what its verifier declares."""

import pytest

from polydraft import SamplingParams
from polydraft.methods.registry import verifier
from polydraft.verifiers import greedy
from polydraft.verifiers.deciding import Deciders
from polydraft.verifiers.match import match

GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams()
OWN = "its own"


@pytest.mark.parametrize(
    ("name", "at_zero", "bare"),
    [("block", greedy.walk, match.walk), ("race", greedy.walk, OWN), ("typical", OWN, OWN)],
)
def test_a_row_is_decided_by_what_its_verifier_declares(name, at_zero, bare):
    rule = verifier(name)
    deciders = Deciders.of(rule)
    own = getattr(rule, "walk", None)
    walks = [at_zero, at_zero, match.walk, bare, OWN]
    rows = [
        (GREEDY, False, False),
        (GREEDY, False, True),
        (SAMPLED, True, True),
        (SAMPLED, False, True),
        (SAMPLED, False, False),
    ]
    chosen = [deciders.of_row(params, copied=copied, bare=is_bare) for params, copied, is_bare in rows]
    expected = [own if walk is OWN else walk for walk in walks]
    assert [decider.walk for decider in chosen] == expected
    assert [decider.verifier is rule for decider in chosen] == [
        at_zero is OWN,
        at_zero is OWN,
        False,
        True,
        True,
    ]
