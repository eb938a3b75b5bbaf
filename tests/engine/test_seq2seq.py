"""Encoder-decoders in the engine: transformers' greedy texts token for token, the sampled distribution by enumeration, in every kind of batch."""

import json
from itertools import product

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from polydraft import Engine, SamplingParams
from polydraft.cli.main import app
from polydraft.core import Request
from polydraft.errors import CapacityError, IncompatibleError, InvalidInputError, ModelLoadError
from polydraft.models.torch.hf import HFTarget
from polydraft.models.torch.seq2seq import Seq2SeqTarget
from polydraft.sampling.softmax import softmax
from studies.seq2seq.teacher import make_tokenizer
from tests.exactness.runs import every_run
from tests.models.encoder_decoders import EOS, START, V, fresh, generated, small
from tests.models.tree_rounds import ARCHITECTURES, small_model

SOURCES = [[5, 9, 5, 9, 5, 1], [7], [3, 14, 15, 9, 2, 6, 5, 3, 5, 8, 9, 7, 1], [40, 41, 40, 41], [9, 9, 1]]
GREEDY = SamplingParams(temperature=0, max_tokens=14)


def engine(name, drafter, dtype=torch.float64, slots=3, **options):
    target = Seq2SeqTarget(small(name, dtype), max_num_seqs=slots)
    draft = None
    if drafter and drafter.startswith(("model", "phrases")):
        draft = Seq2SeqTarget(small(name, dtype, seed=1), max_num_seqs=slots)
        torch.manual_seed(2)
        for ours, theirs in zip(
            draft.model.parameters(), target.model.parameters(), strict=True
        ):  # drafts that are often right
            ours.data = theirs.data + 0.02 * torch.randn_like(theirs)
    return Engine.of(target, drafter=drafter, draft_model=draft, eos_token_ids=[EOS], **options)


def wanted(made, source, count=14):
    found = generated(made.target.model, source, count)
    return found[: found.index(EOS) + 1] if EOS in found else found


def cut(ids):
    """Without the end token, which the engine leaves out."""
    return ids[:-1] if ids and ids[-1] == EOS else ids


DRAFTERS = [None, "ngram", "lookahead", "phrases", "model", "model:top_k"]


@pytest.mark.parametrize(
    ("name", "drafter"),
    [*(("t5", d) for d in DRAFTERS), ("bart", "model"), ("marian", "model"), ("marian", "suffix")],
)
def test_greedy_texts_are_those_of_transformers_while_sources_join_and_leave(name, drafter):
    made = engine(name, drafter, depth=3 if drafter else None)
    results = made.generate(SOURCES, GREEDY)
    assert [cut(r.token_ids) for r in results] == [cut(wanted(made, source)) for source in SOURCES]
    assert not any(r.stats.drafter_error for r in results)
    if drafter and drafter.startswith("model"):
        assert sum(r.stats.accepted_tokens for r in results) > 6


def test_a_text_drafter_copies_from_the_source():
    made = engine("t5", "ngram", depth=3)
    first = generated(made.target.model, SOURCES[0], 20)
    made.generate([SOURCES[0]], GREEDY)
    state = made.drafter.start([Request("r", (START,), GREEDY, 0, source_token_ids=tuple(first))])[0]
    assert list(state.tokens) == [*first, START]


@pytest.mark.parametrize(
    ("name", "drafter", "verifier", "num_paths"),
    [
        ("t5", "model:without_replacement", "auto", 2),
        ("t5", "ngram", "match", 1),
        ("bart", "model", "greedy_traversal", 2),
        ("marian", "model", "block", 1),
    ],
)
def test_sampled_texts_have_the_distribution_of_the_models_rows(
    name, drafter, verifier, num_paths, monkeypatch
):
    """Three tokens of which two are possible each, over all noise, against the product of the rows of fresh passes in float64."""
    source = [7, 3, 7, 3, 1]
    few = (3, 7)
    made = engine(
        name, drafter, verifier=verifier, depth=1 if "without" in drafter else 2, num_paths=num_paths
    )
    bans = {t: -float("inf") for t in range(V) if t not in few}
    params = SamplingParams(max_tokens=3, seed=0, logit_bias=bans, temperature=2.0)
    found = np.zeros((V, V, V))
    for probability, (result,) in every_run(lambda: made.generate([source], params), monkeypatch):
        found[tuple(result.token_ids)] += probability
    distribution = np.zeros((V, V, V))
    for ids in product(few, repeat=3):
        rows = fresh(made.target.model, source, [START, *ids[:-1]])[:, list(few)] / 2.0
        distribution[ids] = np.prod(
            [softmax(row)[few.index(t)].item() for row, t in zip(rows, ids, strict=True)]
        )
    assert np.abs(found - distribution).sum() < 1e-6


def test_samples_of_one_source_differ_and_share_its_reading():
    made = engine("bart", "model", slots=4)
    made.target.passes = 0
    read = []
    encode = made.target.encode
    made.target.encode = lambda slots, sources: (read.append(list(sources)), encode(slots, sources))
    (result,) = made.generate([SOURCES[2]], SamplingParams(n=4, seed=1, max_tokens=12))
    assert len(read) == 1 and len({tuple(s.token_ids) for s in result.samples}) > 1
    assert result.prompt_token_ids == SOURCES[2] and result.stats.prompt_tokens == len(SOURCES[2])


def test_an_interrupted_step_reads_the_source_again():
    made = engine("t5", None)
    results = [made.submit(source, GREEDY) for source in SOURCES[:3]]
    for _ in range(4):
        made.step()
    score = made.target.score
    made.target.score = lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        made.step()
    made.target.score = score
    while made.has_unfinished_requests:
        made.step()
    assert [cut(r.token_ids) for r in results] == [cut(wanted(made, source)) for source in SOURCES[:3]]


def test_what_does_not_fit_is_refused():
    made = engine("bart", None)
    with pytest.raises(CapacityError, match="a source of 97 tokens"):
        made.generate([[3] * 97], GREEDY)
    with pytest.raises(InvalidInputError, match="empty"):
        made.generate([[]], GREEDY)
    with pytest.raises(InvalidInputError, match="empty source"):
        made.add_request(Request("r", (START,), GREEDY, 0))
    with pytest.raises(InvalidInputError, match=f"token id {V} was given"):
        made.generate([[V]], GREEDY)
    with pytest.raises(IncompatibleError, match="tie_margin"):
        engine("bart", None, tie_margin=0.1)
    causal = HFTarget(small_model(ARCHITECTURES["llama"]), max_num_seqs=1)
    with pytest.raises(IncompatibleError, match="one of target and draft model is an encoder-decoder"):
        Engine.of(made.target, draft_model=causal)
    with pytest.raises(InvalidInputError, match="without an encoder"):
        Engine.of(causal, drafter=None).add_request(Request("r", (3,), GREEDY, 0, source_token_ids=(4,)))


def test_a_folder_is_recognised_by_the_engine_and_the_command_line(tmp_path):
    torch.manual_seed(0)
    model = small("t5")
    tokenizer = make_tokenizer(["ab ba abba"] * 3, 280)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    source = tokenizer("abba ba")["input_ids"]
    wanted = cut(generated(model, source, 8))
    result = Engine.from_pretrained(str(tmp_path), depth=2).generate("abba ba", GREEDY.with_(max_tokens=8))[0]
    assert (result.prompt_token_ids, cut(result.token_ids)) == (source, wanted) and source[-1] == EOS
    asked = [
        "generate",
        "abba ba",
        "--model",
        str(tmp_path),
        "--temperature",
        "0",
        "--max-tokens",
        "8",
        "--drafter",
        "none",
        "--json",
    ]
    printed = CliRunner().invoke(app, asked)
    assert cut(json.loads(printed.stdout)["samples"][0]["token_ids"]) == wanted, printed.output
    (tmp_path / "generation_config.json").unlink()
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(said | {"decoder_start_token_id": None, "bos_token_id": None})
    )
    with pytest.raises(ModelLoadError, match="no decoder start token"):
        Engine.from_pretrained(str(tmp_path))
