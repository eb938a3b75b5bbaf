"""Training drafters of all kinds: they learn, runs are taken up again, and what cannot be trained is refused."""

import ast
import json
import math
import signal
import subprocess
import sys
import time
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import Table, parquet

from polydraft import Engine, SamplingParams
from polydraft.errors import IncompatibleError, InvalidInputError, ModelLoadError, UnknownNameError
from polydraft.train import conversations, loop
from polydraft.train.conversations import TrainingText
from polydraft.train.loop import TrainingOptions
from polydraft.train.run import draft_vocabulary, train_drafter

QUICK = {"minutes": 5, "unroll": 2, "draft_vocab": 512, "batch": 8, "window": 64, "lr": 0.02}


@pytest.mark.parametrize("kind", ["eagle", "medusa", pytest.param("mtp", marks=pytest.mark.slow)])
def test_what_was_trained_foretells_more_than_what_was_not(engine, written, tmp_path, kind):
    options = QUICK
    short = {}
    said = list[str]()
    for name, steps in (("fresh", 1), ("trained", 64)):
        chosen = TrainingOptions.of(kind, **options, max_steps=steps)
        short[name] = train_drafter(engine, kind, tmp_path / name, chosen, data=[written], report=said.append)
    fresh, trained = (short[name]["acceptance"] for name in ("fresh", "trained"))
    assert trained[0] > fresh[0] + 0.01, (fresh, trained)
    assert sum(trained) > sum(fresh) + 0.03, (fresh, trained)
    card = json.loads((tmp_path / "trained" / "card.json").read_text())
    assert card["tokens"] == 16 * 97
    assert card["kind"] == kind
    assert any("MB" in line for line in said)
    again = train_drafter(
        engine, kind, tmp_path / "trained", TrainingOptions.of(kind, **options, max_steps=65), data=[written]
    )
    assert abs(again["acceptance"][0] - trained[0]) < 0.1, "it goes on from its checkpoint"
    begun = TrainingOptions.of(kind, **options, max_steps=1)
    started = train_drafter(
        engine, kind, tmp_path / "more", begun, data=[written], start=tmp_path / "trained"
    )
    assert sum(started["acceptance"]) > (sum(fresh) + sum(trained)) / 2, "it begins with what was trained"
    drafted = Engine.of(
        engine.target, tokenizer=engine.tokenizer, drafter_options={"weights": tmp_path / "trained"}, depth=2
    )
    assert drafted.summary()["drafter"].startswith(kind), "the folder says its kind"
    greedy = SamplingParams(temperature=0, max_tokens=48)
    prompt = "def add(a, b):\n"
    result = drafted.generate(prompt, greedy)[0]
    assert result.token_ids == engine.generate(prompt, greedy)[0].token_ids
    assert result.stats.drafted_tokens > 0
    assert result.stats.drafter_error is None


def test_reading_ends_by_half_of_the_time(engine, written, tmp_path, monkeypatch):
    """One minute by a clock on which a text is read in a second: what is left is said, and a run that resumes reads on."""
    read = list[int]()
    said = list[str]()
    prefill = engine.target.prefill
    monkeypatch.setattr(
        engine.target,
        "prefill",
        lambda slots, *texts, **asked: (read.append(0), prefill(slots, *texts, **asked))[1],
    )
    options = TrainingOptions.of("medusa", **QUICK | {"minutes": 1}, max_steps=1)
    first = train_drafter(
        engine,
        "medusa",
        tmp_path,
        options,
        data=[written] * 5,
        report=said.append,
        clock=lambda: float(len(read)),
    )
    assert any("shards are left" in line for line in said)
    again = train_drafter(
        engine, "medusa", tmp_path, options, data=[written] * 5, clock=lambda: float(len(read))
    )
    assert (first["tokens"], again["tokens"]) == (2 * 16 * 97, 4 * 16 * 97)


def test_texts_of_a_shard_are_a_function_of_the_seed(engine, tmp_path):
    one, two, other = (
        conversations.write_shard(engine, 3, seed=seed, count=2, earlier=set()) for seed in (1, 1, 2)
    )
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(one, two, strict=True))
    assert not all(np.array_equal(a.tokens, b.tokens) for a, b in zip(one, other, strict=True))
    conversations.save_shard(tmp_path / "a.npz", one)
    assert [t.tokens.tolist() for t in conversations.read_shard(tmp_path / "a.npz")] == [
        t.tokens.tolist() for t in one
    ]


def test_the_draft_vocabulary_is_the_most_frequent_tokens():
    ids, share = draft_vocabulary([TrainingText(np.array([7, *[3] * 5, *[9] * 4, 1, 1, 2]), 1)], 64, 8)
    assert len(ids) == 8
    assert {1, 2, 3, 9} <= set(ids.tolist())
    assert (np.diff(ids) > 0).all()
    assert share == 1


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (TrainingOptions(layers=(1, 2, 77)), InvalidInputError, "77"),
        (TrainingOptions(layers=(2, 1)), InvalidInputError, "rising"),
    ],
)
def test_what_cannot_be_trained_is_refused(engine, written, tmp_path, options, error, said):
    with pytest.raises(error, match=said):
        train_drafter(engine, "eagle", tmp_path, options, data=[written])


def test_a_training_in_pieces_goes_on_where_the_last_one_ended(engine, written, tmp_path):
    """By a clock of ten seconds a step: six pieces of a minute are one training of which no step is made twice."""
    ticks = count(0, 5.0)
    said = list[str]()
    options = TrainingOptions.of("medusa", **QUICK | {"minutes": 3}, piece=1)
    seen = list[int]()
    rates = list[float]()
    while not seen or "a piece is over" in said[-1]:
        said.clear()
        card = train_drafter(
            engine, "medusa", tmp_path, options, data=[written], report=said.append, clock=lambda: next(ticks)
        )
        seen.append(card["tokens_seen"])
        rates = [
            group["lr"]
            for o in torch.load(tmp_path / "work" / "checkpoint.pt")["optimizers"]
            for group in o["param_groups"]
        ]
    assert len(seen) > 2 and seen == sorted(set(seen))
    assert max(rates) < 0.02 * 0.2, "the last steps are small ones: there is one schedule"


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [({"loss": "klm"}, UnknownNameError, "unknown loss 'klm'; did you mean 'kl'"), ({"decay": 0.0}, InvalidInputError, "decay=0.0 was given"),
     ({"decay": 1.5}, InvalidInputError, "at most 1"), ({"piece": 0.5}, InvalidInputError, "piece=0.5 minutes were given")],
)  # fmt: skip
def test_losses_weights_and_pieces_that_cannot_be_are_refused(options, error, said):
    with pytest.raises(error, match=said):
        TrainingOptions.of("dspark", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"minutes": 0.1},
        {"minutes": math.nan},
        {"unroll": -2},
        {"draft_vocab": 0},
        {"batch": 0},
        {"sizes": {"heads": 0}},
    ],
    ids=str,
)
def test_amounts_that_cannot_be_are_refused(options):
    with pytest.raises(InvalidInputError, match=r"expected .*at least 1"):
        TrainingOptions.of("medusa", **options)


def test_kinds_and_sizes_that_there_are_not_are_refused():
    with pytest.raises(InvalidInputError, match="heads, blocks"):
        TrainingOptions.of("medusa", sizes={"width": 3})
    with pytest.raises(UnknownNameError, match="did you mean 'medusa'"):
        TrainingOptions.of("medus")


def test_files_without_a_usable_line_are_refused(engine, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"nothing": 1}\nno json\n')
    with pytest.raises(InvalidInputError, match="usable line"):
        conversations.from_file(tmp_path / "a.jsonl", engine)
    (tmp_path / "b.npz").write_bytes(b"PK\x03\x04 and nothing else")
    with pytest.raises(ModelLoadError, match="no shard"):
        conversations.from_file(tmp_path / "b.npz", engine)
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "import os\n" * 40}) + "\n")
    assert conversations.from_file(tmp_path / "c.jsonl", engine)
    (tmp_path / "rand.bin").write_bytes(bytes(range(256)))
    with pytest.raises(InvalidInputError, match="given as plain text and is none: byte 0x00"):
        conversations.from_file(tmp_path / "rand.bin", engine)
    (tmp_path / "d.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(InvalidInputError, match="cannot be read as parquet"):
        conversations.from_file(tmp_path / "d.parquet", engine)


def test_a_table_is_read_as_lines_are(engine, tmp_path):
    rows = [{"text": "import os\n" * 40}, {"text": "short"}, {"text": "import sys\n" * 30}]
    parquet.write_table(Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table, lines = (conversations.from_file(tmp_path / f"a.{end}", engine) for end in ("parquet", "jsonl"))
    assert len(table) == len(lines) == 2
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(table, lines, strict=True))


KILLED = """
import sys
from pathlib import Path
from polydraft import Engine
from polydraft.train import loop, run
loop.SAVED_EVERY = 0.2
options = run.TrainingOptions.of("medusa", minutes=5, unroll=2, draft_vocab=512, batch=8, window=64)
run.train_drafter(Engine.embedded(drafter=None), "medusa", Path(sys.argv[1]), options, data=[Path(sys.argv[2])])
"""


def test_a_run_that_is_killed_goes_on_from_its_last_checkpoint(engine, written, tmp_path):
    """SIGKILL while it saves as often as it can: what is there is whole, and no step before it is made again."""
    running = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), str(written)], stdout=subprocess.DEVNULL
    )
    checkpoint = tmp_path / "work" / "checkpoint.pt"
    until = time.monotonic() + 120
    while not checkpoint.exists() or not torch.load(checkpoint, weights_only=True)["best"][1]:
        assert time.monotonic() < until and running.poll() is None
        time.sleep(0.05)
    running.send_signal(signal.SIGKILL)
    running.wait()
    state = torch.load(checkpoint, weights_only=True)
    assert state["steps"] > 0 and not (tmp_path / "card.json").exists()
    options = TrainingOptions.of("medusa", **QUICK, max_steps=state["steps"] + 1)
    card = train_drafter(engine, "medusa", tmp_path, options, data=[written])
    assert torch.load(checkpoint, weights_only=True)["steps"] == state["steps"] + 1
    assert card["tokens_seen"] > state["seen"]


def test_training_ends_where_what_is_held_out_gets_no_better_and_keeps_the_best(
    engine, written, tmp_path, monkeypatch
):
    monkeypatch.setattr(loop, "SAVED_EVERY", 0.0)
    monkeypatch.setattr(loop, "PATIENCE", 3)
    said = list[str]()
    options = TrainingOptions.of(
        "medusa", **QUICK | {"lr": 10.0}, max_steps=80
    )  # steps so long that it gets worse
    card = train_drafter(engine, "medusa", tmp_path, options, data=[written], report=said.append)
    looks = [
        ast.literal_eval(line.removeprefix("held out: ")) for line in said if line.startswith("held out: ")
    ]
    assert any("training ends" in line for line in said) and len(looks) < 80
    totals = [sum(look["acceptance"]) for look in looks]
    assert max(totals[-3:]) <= max(totals[:-3]) and sum(card["acceptance"]) == max(totals)


def test_a_target_without_hidden_states_is_refused(engine, tmp_path):
    from types import SimpleNamespace

    from polydraft.core import Needs

    blind: Any = SimpleNamespace(target=SimpleNamespace(offers=Needs(), name="blind"))
    with pytest.raises(IncompatibleError, match="blind"):
        train_drafter(blind, "eagle", tmp_path, TrainingOptions())
