"""A head is told the hidden states of a prompt as the target reads it, alone or beside others: its drafts are the same, and nothing is read twice."""

from polydraft import Engine, Request, SamplingParams
from tests.heads import oracle
from tests.support.reading import read_counts

KIND = "eagle3-deepspec"
PROMPT = tuple(3 + n % 50 for n in range(150))
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def drafted(beside, monkeypatch):
    """The trees of a prompt that begins alone, or beside a running text, and how many tokens were read in all."""
    engine = Engine.of(oracle.target(KIND, "compiled"), head=str(oracle.folder(KIND)), depth=3)
    counts = read_counts(engine.target, monkeypatch)
    if beside:
        engine.add_request(Request("running", PROMPT[:5], GREEDY, 1))
        engine.step()
        engine.step()
    sample = engine.add_request(Request("long", PROMPT, GREEDY, 5))
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    assert sample.stats.drafter_error is None and sample.stats.drafted_tokens > 9
    trees = [output.tree for output in outputs if output.request_id == "long"]
    return [(tree.token_ids, tree.path) for tree in trees if tree is not None], sum(counts)


def test_a_head_drafts_behind_a_prompt_that_joins_others_what_it_drafts_alone(monkeypatch):
    alone, num_read = drafted(False, monkeypatch)
    beside, num_read_beside = drafted(True, monkeypatch)
    assert beside == alone and len(alone) > 3
    assert (num_read, num_read_beside) == (len(PROMPT) - 1, len(PROMPT) - 1 + len(PROMPT[:5]) - 1)
