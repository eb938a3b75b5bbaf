"""What an engine is asked for in the wrong words is refused in ours: what was given, what was expected."""

import numpy as np
import pytest
import torch

from polydraft import Budget, Engine, FixedPolicy, Request, SamplingParams
from polydraft.core import geometry as tree
from polydraft.errors import CapacityError, InvalidInputError
from tests.engine.tables import TableModel

SHORT = SamplingParams(max_tokens=2, temperature=0)


def asked(**options):
    return Engine.of(TableModel(), draft_model=TableModel(seed=1), **options)


@pytest.fixture(scope="module")
def engine():
    return asked(depth=2)


@pytest.mark.parametrize(
    "prompts", [None, 3, [["a"]], [1.5, 2], [1, "a"], [[1], None], b"x", {1: 2}, torch.tensor(1)], ids=repr
)
def test_a_prompt_that_is_neither_text_nor_token_ids_is_refused(engine, prompts):
    with pytest.raises(InvalidInputError, match="expected text, or whole numbers: token ids"):
        engine.generate(prompts, SHORT)
    assert not engine.has_unfinished_requests


@pytest.mark.parametrize(
    "prompts",
    [[1, 2], (1, 2), np.array([1, 2]), [[1, 2]], [np.array([1, 2])], [torch.tensor([1, 2])]],
    ids=repr,
)
def test_token_ids_may_come_in_any_sequence(engine, prompts):
    (result,) = engine.generate(prompts, SHORT)
    assert result.prompt_token_ids == [1, 2]


@pytest.mark.parametrize("params", [{"max_tokens": 2}, {}, 3, 0, "x", [{"max_tokens": 2}], [None]], ids=repr)
def test_parameters_that_are_no_sampling_params_are_refused(engine, params):
    with pytest.raises(InvalidInputError, match="expected a SamplingParams"):
        engine.generate([1, 2], params)
    with pytest.raises(InvalidInputError, match="expected a SamplingParams"):
        next(engine.stream([1, 2], params))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"prompt_token_ids": ("a",)},
            r"prompt_token_ids=\('a',\) was given in a request; expected whole numbers",
        ),
        ({"prompt_token_ids": (1.5,)}, "prompt_token_ids="),
        ({"prompt_token_ids": 5}, "prompt_token_ids=5"),
        ({"prompt_token_ids": None}, "prompt_token_ids=None"),
        ({"source_token_ids": [None]}, "source_token_ids="),
        ({"id": ["a"]}, r"id=\['a'\] was given in a request; expected a string"),
        ({"params": {"max_tokens": 2}}, "expected a SamplingParams"),
        ({"seed": None}, "seed=None"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 1 << 63}, "seed="),
        ({"sample": -1}, r"sample=-1 was given in a request; expected a whole number in \[0, 2\*\*32\)"),
        ({"sample": 1 << 32}, "sample="),
        ({"sample": 0.0}, "sample=0.0"),
    ],
    ids=lambda x: repr(x) if isinstance(x, dict) else "",
)
def test_requests_of_the_wrong_types_are_refused(changed, said):
    with pytest.raises(InvalidInputError, match=said):
        Request(**{"id": "a", "prompt_token_ids": (1, 2), "params": SHORT, "seed": 0} | changed)


@pytest.mark.parametrize("ids", [[1, 2], np.array([1, 2]), torch.tensor([1, 2])], ids=repr)
def test_a_request_takes_token_ids_in_any_sequence(engine, ids):
    request = Request("a", ids, SHORT, np.int64(3))
    assert request.prompt_token_ids == (1, 2) and {type(token) for token in request.prompt_token_ids} == {int}
    engine.add_request(request)
    assert engine.step()[0].token_ids


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"depth": "4"}, "depth='4' was given; expected at least 1, a whole number"),
        ({"num_paths": 2.5}, "num_paths=2.5 was given"),
        ({"drafter": 3}, "drafter=3 was given; expected a name of `polydraft methods`"),
        ({"drafter": ["model", 3]}, "drafter=\\['model', 3\\] was given"),
        ({"drafter": []}, "drafter=\\[\\] was given"),
        ({"drafter": "mixture:"}, "'mixture:' was given; expected a kind after the colon"),
        ({"drafter": "model: "}, "'model: ' was given; expected a kind"),
        ({"drafter": "model,ngram"}, "mixture:ngram,suffix"),
        ({"verifier": 3}, "verifier=3 was given; expected a name"),
        ({"policy": 3}, "policy=3 was given; expected 'adaptive'"),
    ],
    ids=lambda x: repr(x) if isinstance(x, dict) else "",
)
def test_parts_of_the_wrong_kind_are_refused(options, said):
    with pytest.raises(InvalidInputError, match=said):
        asked(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 8, "num_paths": 256},
        {"depth": 4, "num_paths": 500},
        {"depth": 256},
        {"policy": FixedPolicy(Budget.fixed(tree.chain(256)))},
        {"policy": FixedPolicy(Budget.fixed(tree.paths(2, 200, trunk=100)))},
    ],
    ids=lambda options: f"{options}"[:40],
)
def test_more_drafted_tokens_than_a_pass_takes_are_refused(options):
    with pytest.raises(CapacityError, match="expected at most 255, the rows of one forward pass"):
        asked(**options)


def test_as_many_drafted_tokens_as_a_pass_takes_are_planned():
    assert asked(depth=5, num_paths=51).policy.budget.max_nodes == 255


def test_a_draft_that_fills_the_pass_leaves_further_nodes_out():
    prompt = [[5] * 40]
    params = SamplingParams(max_tokens=300, temperature=0)
    fast, plain = (Engine.embedded(drafter=name, depth=255, max_num_seqs=1) for name in ("lookahead", "none"))
    (result,) = fast.generate(prompt, params)
    assert result.token_ids == plain.generate(prompt, params)[0].token_ids
    assert result.stats.drafter_error is None and len(result.stats.drafted_by_depth) > 244
