"""The choice between drafters: by what each promises, from the past only, with a rule that is exact for each."""

import pytest
import torch

from polydraft import Engine, SamplingParams
from polydraft.core import DraftSampling
from polydraft.drafters.choice import Choice
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.drafters.text.lookahead import LookaheadDrafter
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.engine.speculation import Menu, Speculation
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.policy import switch
from polydraft.policy.adaptive import AdaptivePolicy
from polydraft.policy.switch import ChoicePolicy
from tests.engine.tables import TableModel, law, p_value, plain_greedy
from tests.exactness.runs import every_run
from tests.policy.planning import OnlyWalks, costs
from tests.policy.planning import known as profile


def policies(*rates):
    return [AdaptivePolicy(profile(costs(0.02, 0.02), r)) for r in rates]


def made(rates=(0.6, 0.6), *, seqs=4, V=7, fit=0.7, **model):
    target = TableModel(max_num_seqs=seqs, V=V, **model)
    small = TableModel(seed=1, max_num_seqs=seqs, V=V, **model)
    small.logits = fit * target.logits + (1 - fit) * small.logits
    arms = Choice({"model": ModelDrafter(small), "ngram": NgramDrafter()})
    return Engine(target, Menu(target, Speculation(arms, arms.rule(), ChoicePolicy(arms, policies(*rates)))))


def sources(sample):
    return {o.source for o in sample.origins} - {"target"}


def test_each_law_gets_its_best_rule():
    rule = made().verifier
    assert {law: r.info.name for law, r in rule.rules.items()} == {
        DraftSampling.IID: "greedy_traversal",
        DraftSampling.POINT_MASS: "match",
    }
    assert rule.info.lossless


def test_greedy_output_is_the_tables_whoever_drafts():
    results = made().generate([[1, 2, 3], [4], [5, 5, 0, 1]], SamplingParams(temperature=0, max_tokens=40))
    for prompt, result in zip([[1, 2, 3], [4], [5, 5, 0, 1]], results, strict=True):
        assert result.token_ids == plain_greedy(TableModel(), prompt, 40)
        assert result.stats.drafter_error is None


def test_the_law_of_several_rounds_is_kept_by_the_fused_walks():
    both = made((0.4, 0.5), seqs=8, V=3, dtype=torch.float32)
    both.verifier = OnlyWalks(both.verifier)
    assert p_value(both, [1, 2], 3, 600) > 1e-3
    shown = both.generate([[1, 2]], SamplingParams(max_tokens=40, n=8, seed=1))[0].samples
    assert {"model", "ngram"} <= set().union(*map(sources, shown))


def test_the_better_drafter_does_the_work_and_the_other_is_tried_again():
    params = SamplingParams(seed=3, max_tokens=300)
    fits = made(fit=1.0, max_model_len=400).generate([[1, 2]], params)[0]
    assert fits.stats.tokens_per_step > 2
    by = [o.source for o in fits.samples[0].origins]
    assert by.count("model") > 20 * max(1, by.count("ngram"))
    cycle = made(fit=0.0, rates=(0.7, 0.1), V=40, sharp=6.0, max_model_len=400)  # too many tokens for a tree to hold them all
    cycle.policy.time = lambda seconds: None  # by the costs that are given, whatever the clock says
    loop = cycle.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=300))[0]
    by = [o.source for o in loop.samples[0].origins]
    assert by.count("ngram") > 5 * by.count("model")


def test_arms_that_sat_out_draft_as_fresh_readers_of_the_text():
    both = made(rates=(0.6, 0.6))
    for _ in both.stream([1, 2, 3], SamplingParams(seed=2, max_tokens=40)):
        for s in both._running:
            if s.drafting and s.num_read == len(s.token_ids):
                model = s.state.states[0]
                assert s.state.unread[0][0] == model.context[-1]
                assert [*model.context, *s.state.unread[0][1:]] == s.token_ids
                assert [*s.state.states[1].tokens, *s.state.unread[1][1:]] == s.token_ids


def test_one_profile_and_one_seed_give_one_text_whatever_ran_before():
    params, first, second = SamplingParams(seed=4, max_tokens=40), made(), made()
    second.generate([[3, 3]], SamplingParams(seed=9, max_tokens=30))
    assert first.generate([[1, 2]], params)[0].token_ids == second.generate([[1, 2]], params)[0].token_ids


def test_drafters_are_named_together_and_each_policy_learns_of_its_own_rounds(monkeypatch):
    monkeypatch.setenv("POLYDRAFT_CACHE", "off")
    target, small = TableModel(max_num_seqs=4), TableModel(seed=1, max_num_seqs=4)
    engine = Engine.of(target, draft_model=small, drafter="model,ngram", drafter_options={"ngram": {"max_ngram": 3}})
    assert engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=12))[0].token_ids == plain_greedy(
        target, [1, 2, 3], 12
    )
    assert any(p.live.costs != p.profile.costs for p in engine.policy.policies)
    assert engine.summary()["drafter"] == "model,ngram"


def test_what_cannot_be_chosen_between_is_refused_with_advice():
    target, small = TableModel(), TableModel(seed=1)
    with pytest.raises(InvalidInputError, match="share its slots"):
        Choice({"model": ModelDrafter(small), "model:top_k": ModelDrafter(small, "top_k")})
    with pytest.raises(InvalidInputError, match="name one drafter"):
        Engine.of(target, draft_model=small, drafter=["model", "ngram"], depth=3)
    with pytest.raises(IncompatibleError, match="Use it alone"):
        Choice({"lookahead": LookaheadDrafter(), "ngram": NgramDrafter()})


class Peeking(Choice):
    """Wrong: looks at the model's draft, and takes the copy instead where that begins with token 0."""

    def propose(self, states, budgets):
        self.current = 0
        draft = super().propose(states, budgets)
        if draft.tree.num_nodes > 1 and (draft.tree.tokens[:, 1] == 0).all():
            self.current = 1
            draft = super().propose(states, budgets)
        return draft


def with_copies():
    return {"model": ModelDrafter(TableModel(2, seed=1)), "ngram": NgramDrafter()}


def with_its_most_probable_trees():
    model = ModelDrafter(TableModel(2, seed=1))
    return {"model": model, "model:top_k": model.sibling("top_k")}


ARMS = [with_copies, with_its_most_probable_trees]


def enumerated(kind, arms, monkeypatch):
    """Two arms on tables of two tokens in float64, arms of which each is tried every second round: the engine's exact law of four tokens, and who drafted."""
    monkeypatch.setattr(switch, "FIRST_WAIT", 1)
    monkeypatch.setattr(switch, "LONGEST_WAIT", 1)
    torch.set_default_dtype(torch.float64)
    try:
        target, found, used = TableModel(2), torch.zeros(2, 2, 2, 2), set[tuple[str, ...]]()
        made = arms()

        def run():
            chosen = kind(made)
            chosen_policies = policies(0.6, 0.6)
            engine = Engine(target, Menu(target, Speculation(chosen, chosen.rule(), ChoicePolicy(chosen, chosen_policies))))
            return engine.generate([[0, 1, 0, 1]], SamplingParams(max_tokens=4, seed=0))[0].samples[0]

        for probability, sample in every_run(run, monkeypatch):
            found[tuple(sample.token_ids)] += probability
            used.add(tuple(o.source for o in sample.origins))
        return (found - law(target, [0, 1, 0, 1], 4)).abs(), used
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("arms", ARMS)
def test_the_law_of_every_run_of_several_rounds_is_exactly_the_tables(arms, monkeypatch):
    error, used = enumerated(Choice, arms, monkeypatch)
    assert error.max() < 1e-12
    assert any(set(arms()) <= set(sources) for sources in used)


@pytest.mark.parametrize("arms", ARMS)
def test_a_choice_made_after_a_look_at_the_draft_is_not_exact(arms, monkeypatch):
    error, _ = enumerated(Peeking, arms, monkeypatch)
    assert error.sum() / 2 > 1e-2


def test_kinds_of_one_model_share_its_slots_and_its_cache():
    target, small = (TableModel(seed=s, max_num_seqs=2) for s in (0, 1))
    small.logits = 0.7 * target.logits + 0.3 * small.logits
    both = Engine.of(target, draft_model=small, drafter="model,model:top_k")
    for policy in both.policy.policies:
        policy.open(profile(rate=0.6))
    rounds = 0
    for _ in both.stream([1, 2, 3], SamplingParams(seed=2, max_tokens=40)):
        for s in both._running:
            (state,) = s.state.states.values()
            assert [*state.context, *s.state.unread[0][1:]] == s.token_ids
            cached = small.texts[state.slot]
            assert cached[: len(state.context) - len(state.pending)] == list(state.context[: -len(state.pending)])
            rounds += 1
    assert rounds > 5 and both._running == [] and both.drafter.arms[0].slots.num_free == 2
    shown = both.generate([[1, 2], [3]], SamplingParams(temperature=0, max_tokens=30))
    assert [r.token_ids for r in shown] == [plain_greedy(target, p, 30) for p in ([1, 2], [3])]
