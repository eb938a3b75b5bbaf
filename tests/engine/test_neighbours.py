"""What runs beside a request with a seed changes none of its tokens, log-probabilities and drafts: a fuzz over requests of all kinds."""

import random

import numpy as np
import pytest

from polydraft import Engine, Request, SamplingParams, StructuredOutputs
from polydraft.core import Budget, Draft
from polydraft.errors import InvalidInputError
from polydraft.policy.profile import Profile
from tests.engine.tables import TableModel
from tests.policy.planning import costs

PROMPTS = ["def area(r):\n", "import os\n", "x = 1\n" * 9, "return", '{"x": ["a"]}\n' * 4]
KINDS = [
    {},
    {"top_p": 0.8},
    {"temperature": 0.0, "presence_penalty": 0.8},
    {"logit_bias": {65: 5.0}},
    {"structured_outputs": StructuredOutputs(json={"type": "object"})},
    {"structured_outputs": StructuredOutputs(regex="[a-z ]{30,60}")},
]


def requests(engine, seed):
    """A request with a seed, and one to three to run beside it, each with the step at which it comes."""
    draw = random.Random(seed)

    def asked(name, step, **fields):
        ids = tuple(engine.tokenizer.encode(draw.choice(PROMPTS)))
        params = SamplingParams(
            **{"max_tokens": 40, "ignore_eos": True, "seed": seed, "logprobs": 0, **draw.choice(KINDS)}
        )
        return step, Request(name, ids, params, draw.randrange(99), **fields)

    first = asked("first", 0)
    names = [None, None, *engine.menu.names, "none"]
    beside = [
        asked(str(i), draw.choice((0, 0, 9)), drafter=draw.choice(names)) for i in range(draw.randint(1, 3))
    ]
    return first, beside


def served(engine, *asked):
    """The first request's tokens, their log-probabilities and the tokens that were drafted for it, by depth."""
    waiting = list(asked)
    step = 0
    samples = {}
    while waiting or engine.has_unfinished_requests:
        for _, request in [entry for entry in waiting if entry[0] <= step]:
            samples[request.id] = engine.add_request(request)
        waiting = [entry for entry in waiting if entry[0] > step]
        step = step + 1
        engine.step()
    sample = samples["first"]
    return (
        sample.token_ids,
        [t.logprob for t in sample.logprobs],
        sample.stats.drafted_by_depth,
        sample.stats.drafter_error,
    )


def made(drafter, offered):
    engine = Engine.embedded(
        max_num_seqs=4, drafter=drafter, offered=offered, profile=Profile.of(costs(0.2, 0.1))
    )
    engine.policy.time = lambda seconds: None  # by the costs that are given, whatever the clock says
    return engine


@pytest.mark.parametrize(
    ("drafter", "offered"),
    [
        ("auto", ["ngram"]),
        ("model:top_k", ["model:coupled"]),
        ("mixture:ngram,model:top_k", ["model:coupled"]),
    ],
)
def test_a_seeded_text_is_what_it_is_alone_whatever_runs_beside_it(drafter, offered):
    engine = made(drafter, offered)
    for seed in range(4):
        first, beside = requests(engine, seed)
        alone = served(engine, first)
        assert served(engine, first, *beside) == alone and alone[3] is None, seed


def test_a_neighbour_with_a_form_that_drafts_nothing_in_a_step_takes_no_confidence_from_others():
    engine = made("auto", [])
    params = SamplingParams(max_tokens=50, ignore_eos=True, seed=3, logprobs=0)
    first, beside = (tuple(engine.tokenizer.encode(prompt)) for prompt in (PROMPTS[3], PROMPTS[4]))
    bound = 0, Request("beside", beside, params.with_(**KINDS[5]), 3)
    plain = 0, Request("first", first, params, 3)
    assert served(engine, plain, bound) == served(engine, plain)


def test_rows_without_drafts_beside_drafts_say_nothing_and_take_nothing():
    drafter = Engine.embedded(max_num_seqs=2).drafter
    states = drafter.start([Request(str(i), (1, 2, 3), SamplingParams(), i) for i in range(2)])
    drawn = drafter.propose(states[:1], [Budget.fixed((-1, 0, 1))])
    both = Draft.scatter([[1], [0]], [drawn, Draft.bare(np.array([3]))])
    assert (
        np.array_equal(both.confidence[1], drawn.confidence[0]) and both.confidence[0].tolist() == [1.0] * 3
    )


def test_a_batch_in_which_no_tree_grows_is_a_batch_of_bare_roots():
    drafter = Engine.embedded(max_num_seqs=2, drafter="model:top_k").drafter
    states = drafter.start([Request(str(i), (1, 2, 3), SamplingParams(), i) for i in range(2)])
    assert drafter.propose(states, [Budget.grown(0, 0)] * 2).tree.tokens.tolist() == [[3], [3]]


def test_drafters_of_one_draft_model_take_their_slots_from_one_place():
    engine = Engine.embedded(drafter="mixture:ngram,model:top_k", offered=["model:coupled"])
    assert engine.menu.find("model:coupled").drafter.slots is engine.drafter.sources[1].slots
    with pytest.raises(InvalidInputError, match="expected one such"):
        Engine.embedded(drafter="mixture:model:top_k,model:chain")


def test_requests_that_are_decoded_plainly_share_a_forward_pass():
    engine = Engine.of(TableModel(seed=0), draft_model=TableModel(seed=1))
    for number in range(3):
        engine.add_request(Request(str(number), (1, 2), SamplingParams(max_tokens=9), number, drafter="none"))
    engine.step()
    before = engine.target.passes
    engine.step()
    assert engine.target.passes == before + 1
