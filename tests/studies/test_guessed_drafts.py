"""The study of guessed drafts: what is recorded, and how a chain is walked with guesses."""

from polydraft import Engine, SamplingParams
from studies.guessed_drafts import Chain, Guesser, Recorder, figures, row_seconds, walked

SURE = dict.fromkeys(range(1, 10), 1.0)
FREE = [1.0] * 4


def test_a_pass_ends_at_the_first_wrong_guess_and_the_chain_at_its_depth():
    text = (5, 6, 7, 8, 9, 5)
    assert walked(Guesser(), Chain(text, (6, 7, 8), 3, 3), SURE, FREE) == [3]
    assert walked(Guesser(), Chain(text, (6, 1, 2), 3, 3), SURE, FREE) == [3, 1]
    assert walked(Guesser(), Chain(text, (6, 7, 8), 3, 3), dict.fromkeys(SURE, 0.0), FREE) == [1, 1, 1]
    assert walked(Guesser([(1, 3, 4, 2)]), Chain((1, 3), (4, 2), 8, 2), SURE, FREE) == [3]


def test_what_is_saved_is_what_passes_cost_less():
    draft = Chain((5, 6, 7, 8, 9, 5), (6, 7, 8, 9), 4, 4)
    row = figures([(Guesser(), draft)], [1.0, 1.0, 1.0, 1.2], {"drafting": 3.0, "scoring": 5.0}, 2)
    assert (row.passes, row.with_guesses, row.rows) == (4.0, 1.0, 4.0)
    assert abs(row.saved - 3 / 8 * (4 - 1.2) / 4) < 1e-9


def test_chains_of_the_model_alone_are_recorded():
    engine = Engine.embedded(max_num_seqs=1, drafter="model:chain", depth=3)
    recorder = Recorder(engine.drafter)
    (result,) = engine.generate(["import os\n"], SamplingParams(temperature=0, max_tokens=12))
    assert result.stats.steps >= len(recorder.chains) > 0
    assert all(draft.passes == len(draft.tokens) == 3 for draft in recorder.chains[:-3])
    assert row_seconds(engine.drafter, engine.encode("import os\nimport sys\n"), 2).shape == (2, 4)
