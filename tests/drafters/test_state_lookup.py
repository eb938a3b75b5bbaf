"""State-keyed lookup: the place with the most similar state is copied, where tokens alone do not say which."""

import numpy as np
import pytest

from polydraft.core import Budget, Outcome, Request, SamplingParams, Scores
from polydraft.core.geometry import chains
from polydraft.drafters.text.state_lookup import StateLookupDrafter, StateText
from polydraft.engine.api import Engine
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.models import pair
from polydraft.models.compiled.model import CompiledModel
from tests.drafters.sessions import models

TEXT = [7, 5, 1, 2, 8, 5, 3, 4, 9, 5]
"""5 stands three times; 1 2 follows it behind a 7, 3 4 behind an 8."""
EAST = np.array([1.0, 0.0])
NORTH = np.array([0.0, 1.0])


def text(*, last):
    """Its states: of 7 to the east, of 8 to the north, of the 9 before the last token as given."""
    states = np.zeros((9, 2))
    states[[0, 4, 8]] = EAST, NORTH, last
    found = StateText(TEXT, 0)
    found.tell(0, states)
    return found


def drafter(**options):
    return StateLookupDrafter(models()[0], **options)


@pytest.mark.parametrize(("last", "copied"), [(EAST, [1, 2]), (NORTH, [3, 4]), (3 * NORTH + EAST, [3, 4])])
def test_what_follows_the_most_similar_state_is_drafted(last, copied):
    tree = drafter().propose([text(last=last)], [Budget.grown(2, 2, 1)]).tree
    assert tree.tokens.tolist() == [[5, *copied]]


def test_further_places_open_further_paths_unless_they_are_too_far():
    both = drafter().propose([text(last=EAST)], [Budget.grown(4, 2, 2)]).tree
    assert sorted(both.tokens[0].tolist()) == [1, 2, 3, 4, 5]
    near = drafter(threshold=0.5).propose([text(last=EAST)], [Budget.grown(4, 2, 2)]).tree
    assert near.tokens.tolist() == [[5, 1, 2]]


def test_states_of_accepted_tokens_are_keys_of_later_ones():
    lookup = drafter()
    state = text(last=EAST)
    draft = lookup.propose([state], [Budget.grown(2, 2, 1)])
    hidden = {lookup.layer: np.array([[EAST, NORTH, EAST + NORTH]])}
    outcome = Outcome(np.array([[1, -1]]), np.array([1]), np.array([7]))
    scores = Scores(draft.tree, np.zeros((1, 3, 12), np.float32), hidden)
    (after,) = lookup.observe([state], outcome, scores)
    assert after.tokens == [*TEXT, 1, 7]
    assert after.keys[9:11].tolist() == [EAST.tolist(), NORTH.tolist()]


def test_a_token_that_is_new_has_no_draft():
    state = StateText([1, 2, 3], 0)
    assert drafter().propose([state], [Budget.grown(4, 4, 2)]).tree.tokens.tolist() == [[3]]
    assert state.nearest(4) == ([], [])


def test_tokens_ahead_of_the_prompt_are_copied_without_states():
    lookup = drafter()
    request = Request("r", (9, 5), SamplingParams(), seed=0, source_token_ids=(5, 6, 5))
    (state,) = lookup.start([request])
    read = Scores(chains([[9]]), np.zeros((1, 1, 12), np.float32), {lookup.layer: np.ones((1, 1, 2))})
    lookup.read([state], read)
    assert lookup.propose([state], [Budget.grown(1, 1, 1)]).tree.tokens.tolist() == [[5, 9]]


def test_what_cannot_be_is_refused():
    with pytest.raises(InvalidInputError, match="threshold=2"):
        drafter(threshold=2)
    with pytest.raises(IncompatibleError, match="layer=99"):
        drafter(layer=99)


def test_a_greedy_text_of_the_compiled_target_is_that_without_drafts():
    prompts = [prompt.text for prompt in pair.prompts()[:2]]
    greedy = SamplingParams(temperature=0, max_tokens=32)
    keyed = Engine.embedded(drafter="state-lookup", depth=4, max_num_seqs=2, max_model_len=512)
    plain = Engine.embedded(drafter="none", max_num_seqs=2, max_model_len=512)
    found = keyed.generate(prompts, greedy)
    assert isinstance(keyed.target, CompiledModel)
    assert [r.token_ids for r in found] == [r.token_ids for r in plain.generate(prompts, greedy)]
    assert sum(r.stats.accepted_tokens for r in found) > 0
    assert not any(r.stats.drafter_error for r in found)
