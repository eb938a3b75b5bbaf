"""The study of guessed drafts: with guesses there are fewer forward passes for the same text."""

from polydraft import Engine, SamplingParams
from studies.guessed_drafts import answered


def test_an_answer_with_guesses_has_the_same_text_and_fewer_passes_of_the_draft_model():
    engine = Engine.embedded(max_num_seqs=1, drafter="model:chain", depth=4)
    ids = tuple(engine.encode("import os\nimport sys\nimport os\nimport sys\nimport os\n"))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    some, none = (answered(engine, ids, params, 0, guesses=guesses) for guesses in (True, False))
    assert some["tokens"] == none["tokens"] == 24 and some["drafts"] == none["drafts"] > 0
    assert some["passes"] < none["passes"] and some["drafting"] > 0
