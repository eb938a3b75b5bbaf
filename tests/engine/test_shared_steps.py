"""One request's reading holds no other's step: beside drafts, for a second sequence, and where a drafter begins anew."""

from polydraft import Engine, FixedPolicy, Request, SamplingParams
from polydraft.core import Budget
from polydraft.core.geometry import chain
from polydraft.engine import reader
from polydraft.engine.loop import Loop
from polydraft.models.compiled.model import CompiledModel
from polydraft.policy.costs import Costs
from polydraft.policy.course import LONGER
from polydraft.policy.profile import Profile
from tests.engine.test_needs import Collector
from tests.support.reading import read_counts

DEAR = Costs.of({1: 1.0, 4: 1.1, 8: 1.4, 16: 2.5}, draft_start=0.05, draft_step=0.08)
"""Rows behind the fourth cost their arithmetic, as on two cores."""
NEGATIVE = "x = 1\n# a line that says little\n" * 9
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def priced_loop(monkeypatch, drafter):
    """A loop of the embedded pair whose clock counts what DEAR says of forward passes and draft steps; rows and prompt tokens of each pass."""
    engine = Engine.embedded(max_num_seqs=8, threads=1, drafter=drafter, profile=Profile.of(DEAR))
    passes = []
    now = [0.0]
    target = engine.target
    assert isinstance(target, CompiledModel)
    score = target.score
    score_mixed = target.score_mixed

    def scored(slots, tree, **options):
        passes.append((int(tree.is_node.sum()), 0))
        now[0] += DEAR.rows(passes[-1][0])
        return score(slots, tree, **options)

    def mixed(slots, tree, pieces, **options):
        passes.append((int(tree.is_node.sum()), sum(map(len, pieces.values()))))
        now[0] += DEAR.rows(sum(passes[-1]))
        return score_mixed(slots, tree, pieces, **options)

    monkeypatch.setattr(target, "score", scored)
    monkeypatch.setattr(target, "score_mixed", mixed)
    if engine.drafter is not None:
        propose = engine.drafter.propose

        def proposed(states, budgets):
            now[0] += DEAR.drafting(max(budget.max_depth for budget in budgets), len(states))
            return propose(states, budgets)

        monkeypatch.setattr(engine.drafter, "propose", proposed)
        monkeypatch.setattr(engine.policy, "time", lambda seconds: None)
    return Loop(target, engine.menu, clock=lambda: now[0]), passes, engine.encode


def joined(loop, passes, encode):
    """Texts of a loop of eight, the first of which drafts nothing and five of which join; the longest step in which a prompt is read."""
    prompts = [f"def f{n}(x):\n    return x + {n}\n" * (1 if n < 3 else 4) for n in range(8)]
    samples = []
    longest = 0.0
    for number, prompt in enumerate(prompts):
        budget = Budget.fixed((-1,)) if number == 0 else None
        samples.append(
            loop.add_request(Request(str(number), tuple(encode(prompt)), GREEDY, number, budget=budget))
        )
        for _ in range(12 if number == 2 else 3):
            begin = len(passes)
            start = loop._clocks.steps()
            loop.step()
            if any(riding for _, riding in passes[begin:]) and number > 2:
                longest = max(longest, loop._clocks.steps() - start)
    while loop.has_unfinished_requests:
        loop.step()
    return [sample.token_ids for sample in samples], longest


def test_steps_that_read_prompts_beside_drafts_take_little_more_than_beside_plain_decoding(monkeypatch):
    texts, plain = joined(*priced_loop(monkeypatch, None))
    same, drafting = joined(*priced_loop(monkeypatch, "model"))
    assert same == texts and drafting <= LONGER * plain


def test_second_sequences_are_read_in_pieces_and_once_for_all_samples(monkeypatch):
    monkeypatch.setattr(reader.Reader, "room", lambda self, *_: 30)
    options = {
        "drafter": None,
        "max_num_seqs": 6,
        "decoding": "guidance",
        "decoding_options": {"negative": NEGATIVE},
    }

    def answered(beside):
        engine = Engine.embedded(**options)
        ids = engine.encode(NEGATIVE)
        first = engine.add_request(Request("first", (1, 2, 3), GREEDY, 0)) if beside else None
        engine.step()
        counts = read_counts(engine.target, monkeypatch)
        late = [engine.add_request(Request("late", tuple(ids[::-1]), GREEDY, 0, j)) for j in range(2)]
        while engine.has_unfinished_requests:
            engine.step()
        return counts, 2 * len(ids) - 2, [sample.token_ids for sample in late], first

    counts, total, texts, first = answered(beside=True)
    assert (
        max(counts) <= 30 and sum(counts) == total and first is not None and first.finish_reason == "length"
    )
    assert answered(beside=False)[2] == texts


def test_a_drafter_that_failed_has_its_texts_read_anew_in_pieces_and_goes_on(monkeypatch):
    drafter = Collector(fail=(4,))
    engine = Engine.embedded(max_num_seqs=2, drafter=drafter, policy=FixedPolicy(Budget.fixed(chain(3))))
    prompt = engine.encode(NEGATIVE)
    plain = Engine.embedded(max_num_seqs=2, drafter=None).generate([prompt, prompt[9:]], GREEDY)
    samples = [
        engine.add_request(Request(str(n), tuple(ids), GREEDY, n))
        for n, ids in enumerate([prompt, prompt[9:]])
    ]
    engine.step()
    for bound in ("ALONE_FIRST", "ALONE_MIN"):
        monkeypatch.setattr(reader, bound, 40)
    monkeypatch.setattr(reader, "ALONE_SECONDS", 0.0)
    counts = read_counts(engine.target, monkeypatch)
    while engine.has_unfinished_requests:
        engine.step()
    assert [sample.token_ids for sample in samples] == [result.token_ids for result in plain]
    assert not any(sample.stats.drafter_error for sample in samples) and drafter.told > 6
    assert max(counts) <= 40 and sum(counts) > 2 * len(prompt)
