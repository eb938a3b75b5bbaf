import math
from dataclasses import FrozenInstanceError

import pytest

from polydraft.core.params import SamplingParams
from polydraft.errors import InvalidInputError, PolydraftError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("stop", ("",)),
        ("n", 0),
        ("n", 65_537),
        ("n", 1.5),
        ("max_tokens", 2.5),
        ("max_tokens", "8"),
        ("max_tokens", True),
        ("min_tokens", 0.5),
        ("top_k", 3.0),
        ("temperature", "hot"),
        ("temperature", None),
        ("logprobs", 1.5),
        ("repetition_penalty", 1e10),
        ("presence_penalty", 1e308),
        ("frequency_penalty", -1e39),
        ("logit_bias", {1: 3e38}),
        ("logit_bias", {1: 1e300}),
        ("logit_bias", {1.5: 1.0}),
        ("logit_bias", [1, 2]),
        ("stop", 5),
        ("stop_token_ids", 5),
        ("stop_token_ids", ["a"]),
        ("logprobs", -1),
        ("logprobs_mode", "both"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_name_value_and_advice(field, value):
    with pytest.raises(InvalidInputError, match=rf"^{field}=.* was given; expected .*\. \w+"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.0},
        {"top_p": 1e-9},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 10**9},
        {"min_p": 1.0},
        {"logit_bias": {1: -math.inf}},
        {"max_tokens": None, "min_tokens": 10**6},
        {"min_tokens": 3, "max_tokens": 3},
        {"logprobs": 0},
    ],
)
def test_values_at_the_borders_are_accepted(values):
    params = SamplingParams(**values)
    assert all(getattr(params, name) == value for name, value in values.items())


def test_more_min_tokens_than_max_tokens_are_refused():
    with pytest.raises(InvalidInputError, match="Lower min_tokens or raise max_tokens"):
        SamplingParams(min_tokens=4, max_tokens=3)


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[1, 2]).stop_token_ids == (1, 2)


def test_a_changed_copy_is_checked_again_and_the_original_stays():
    params = SamplingParams(top_k=5)
    assert params.with_(temperature=0).greedy
    assert params.temperature == 1
    with pytest.raises(InvalidInputError):
        params.with_(top_p=2)
    with pytest.raises(FrozenInstanceError):
        params.top_k = 6  # type: ignore[misc]


@pytest.mark.parametrize("field", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_each_penalty_makes_the_distribution_depend_on_the_context(field):
    assert SamplingParams(**{field: 1.5}).has_penalties
    assert not SamplingParams().has_penalties


def test_a_refusal_is_both_of_our_family_and_a_value_error():
    with pytest.raises(PolydraftError):
        SamplingParams(n=0)
    with pytest.raises(ValueError, match="n=0"):
        SamplingParams(n=0)
