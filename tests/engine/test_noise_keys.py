"""Prompts of one call have noise of their own: what one shows a policy says nothing of another's draws."""

from collections import Counter

import pytest
from scipy.stats import chi2

from polydraft import Budget, Engine, Request, SamplingParams
from polydraft.errors import InvalidInputError
from polydraft.policy.fixed import Policy
from tests.engine.tables import TableModel, distribution, table_engine

FREE = SamplingParams(max_tokens=12, seed=4)


def test_identical_prompts_of_a_call_differ_and_each_is_repeated_alone_by_its_number():
    made = table_engine().generate([[1, 2]] * 3, FREE.with_(n=2))
    texts = [[s.token_ids for s in r.samples] for r in made]
    assert len({tuple(t) for both in texts for t in both}) == 6
    for result, both in zip(made, texts, strict=True):
        (again,) = table_engine().generate(
            [1, 2], SamplingParams(max_tokens=12, n=2, seed=result.seed), first_index=result.index
        )
        assert [s.token_ids for s in again.samples] == both
        assert [s.index for s in again.samples] == [0, 1]


def test_the_first_prompt_of_a_call_has_the_key_of_a_request_by_itself():
    first = table_engine().generate([[1, 2], [3]], FREE)[0]
    engine = table_engine()
    sample = engine.add_request(Request("a", (1, 2), FREE, FREE.seed))
    while engine.has_unfinished_requests:
        engine.step()
    assert sample.token_ids == first.token_ids


def test_numbers_of_prompts_beyond_the_noise_are_refused():
    with pytest.raises(InvalidInputError, match="first_index=65535 and 2 prompts"):
        table_engine().generate([[1], [2]], first_index=65_535)


class Follows(Policy):
    """A batch's policy that keeps the contract: the short prompt's second round drafts unless the long prompt began with token 0."""

    def budgets(self, sequences):
        began = {
            s.sample.index: s.sample.token_ids[0]
            for s in sequences
            if s.num_prompt_tokens == 2 and s.sample.token_ids
        }
        return [
            Budget.grown(
                *(1, 1)
                if s.num_prompt_tokens == 1 and s.sample.token_ids and began[s.sample.index]
                else (0, 0)
            )
            for s in sequences
        ]


def p_of_the_short_prompt(apart, count=300):
    """Chi-square of its first two tokens; apart: whether the prompts have noise of their own."""
    target, small = (
        TableModel(V=3, sharp=0.3, max_num_seqs=2 * count) for _ in range(2)
    )  # whose drafts are right
    engine = Engine.of(target, draft_model=small, drafter="model:chain", policy=Follows())
    short = []
    for i, prompt in enumerate([(0, 1), (2,)]):
        for j in range(count):
            request = Request(f"{i}-{j}", prompt, SamplingParams(max_tokens=4), 7, 65_536 * i * apart + j)
            short.append(engine.add_request(request))
    for _ in range(3):
        engine.step()
    seen = Counter(tuple(s.token_ids[:2]) for s in short[count:])
    expected = (distribution(target, (2,), 2) * count).tolist()
    return chi2.sf(
        sum((seen[x, y] - e) ** 2 / e for x, row in enumerate(expected) for y, e in enumerate(row)), 8
    )


def test_a_policy_that_looks_at_the_batch_does_not_bias_prompts_of_one_seed():
    assert p_of_the_short_prompt(apart=True) > 1e-3


def test_with_shared_noise_the_same_policy_is_found_biased():
    assert p_of_the_short_prompt(apart=False) < 1e-9
