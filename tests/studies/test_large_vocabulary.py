"""What a step costs outside of its forward passes is measured for every drafter, with the verifier that auto takes."""

from polydraft.methods import registry
from polydraft.verifiers.pairing import best_for
from studies.large_vocabulary import BUDGETS, PARAMS, csv_of, measured, page


def test_every_kind_of_draft_model_is_measured_with_the_verifier_of_auto():
    rows = measured(1024, steps=6)
    methods = {info.name: info for info in registry.drafter("model").methods}
    assert sorted(row[0] for row in rows) == sorted([*methods] * 2)
    assert all(verifier in (best_for(methods[drafter]), "block") for drafter, verifier, *_ in rows)
    assert {num_rows for *_, num_rows, _ in rows} == {4, 7, 8} and all(len(cells) == len(PARAMS) for *_, cells in rows)
    assert csv_of({1: rows, 2: rows}).count("\n") == 1 + 2 * len(rows) * len(PARAMS) and len(rows) == 2 * len(BUDGETS)
    assert page({1: rows, 2: rows}).count("\n| `model") == len(BUDGETS)
