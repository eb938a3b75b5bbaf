"""The study of what a move must not change sees one weight that changed, and nothing where nothing did."""

from polydraft.models import pair
from polydraft.models.load import load_model
from studies import unchanged


def draft_model():
    return load_model(str(pair.draft_folder()), max_num_seqs=1, max_model_len=64, backend="compiled")


def test_two_loads_of_a_model_have_one_digest_and_one_changed_number_has_another():
    model = draft_model()
    before = unchanged.weights_digest(draft_model())
    assert unchanged.weights_digest(model) == before
    model.weights.norm[0] += 1
    assert unchanged.weights_digest(model) != before


def test_cases_that_differ_or_are_absent_are_named():
    before = {"texts": {"a": "1", "b": "2"}}
    after = {"texts": {"a": "1", "c": "3"}}
    assert unchanged.differences(before, after) == [
        ("texts", "b", "2 -> absent"),
        ("texts", "c", "absent -> 3"),
    ]


def test_numbered_requests_are_of_many_kinds():
    params = [unchanged.drawn_params(number) for number in range(60)]
    assert {p.temperature for p in params} == {0, 0.7, 1.0}
    assert (
        any(p.stop for p in params)
        and any(p.structured_outputs for p in params)
        and any(p.n == 2 for p in params)
    )
