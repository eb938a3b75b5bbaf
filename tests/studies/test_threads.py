"""The table of threads, on a small model."""

from io import StringIO

import numpy as np
import torch
from rich.console import Console

from polydraft.core import TokenTree
from polydraft.models import load, pair
from studies.threads import (
    behind_a_pass,
    between_threads,
    measure,
    named_parts,
    on_threads,
    only,
    part_seconds,
    parts_table,
    tasks,
)


def loaded(number):
    model = load.load_model(
        str(pair.target_folder()), device="cpu", max_num_seqs=2, max_model_len=256, threads=number
    )
    model.prefill([0], [list(range(20))])
    return model


def test_contenders_take_turns_on_one_model_with_their_own_threads():
    model = loaded(3)
    ways = {("ours", n): on_threads(model, n) for n in (1, 2, 3)}
    assert [way.num_threads for way in ways.values()] == [1, 2, 3]
    chain = TokenTree.chain(torch.arange(3)[None])
    first, *others = [way.score([0], chain).logits for way in ways.values()]
    assert all(torch.equal(first, other) for other in others)
    samples = measure({key: tasks(way, 1) for key, way in ways.items()}, 2)
    assert [len(each) for each in samples.values()] == [2, 2, 2]
    assert all(
        sample.seconds.keys() == {"1 row", "8 rows", "prompt"} for each in samples.values() for sample in each
    )
    assert np.isfinite(
        [(*s.seconds.values(), s.processor, s.others) for each in samples.values() for s in each]
    ).all()


def test_parts_of_a_pass_are_counted_by_kind_and_those_of_one_unit_are_what_one_thread_does():
    names = []
    with named_parts(names):
        model = loaded(2)
    times = {rows: part_seconds(model, names, rows, 2) for rows in (1, 8)}
    assert sum(part.number for part in times[1].values()) == len(names) == len(model.arrays.program.parts)
    assert times[1]["norm"].units == 1 < times[8]["norm"].units and times[1]["head"].units > 1
    chain = TokenTree.chain(torch.arange(3)[None])
    every = np.ones(len(names), bool)
    assert torch.equal(only(model, every).score([0], chain).logits, model.score([0], chain).logits)
    console = Console(width=120, file=StringIO(), record=True)
    others = {
        rows: behind_a_pass(model.vocab_size, 1) | between_threads(model, each, rows, 1)
        for rows, each in times.items()
    }
    assert others[1]["distribution, T = 1"].seconds > 0 and others[1]["joins of two threads"].number < len(
        names
    )
    console.print(parts_table("a model", times, others))
    lines = console.export_text().splitlines()
    assert lines[-1].split()[:3] == ["waiting,", "joins,", "memory"]
    assert [line.split()[:3] for line in lines].index(["on", "one", "thread"]) == len(lines) - 1 - len(
        others[1]
    )
