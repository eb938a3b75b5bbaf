"""The table of a step's time, on the embedded pair."""

from io import StringIO

from rich.console import Console

from polydraft import Engine
from studies.step_time import measure, table


def test_a_steps_time_is_told_by_phase_kind_and_temperature_beside_plain_decoding():
    engine = Engine.embedded(max_num_seqs=1)
    times = measure(engine, {"code": [engine.encode("import os\n")]}, (0.0, 1.0), 24)
    assert list(times) == [("code", 0.0), ("code", 1.0)]
    for step in times.values():
        assert step.tokens >= 1.0 and min(step.milliseconds.values()) > 0 and step.speedup > 0
    console = Console(width=140, file=StringIO(), record=True)
    console.print(table("a model", times))
    last = console.export_text().splitlines()[-1].split()
    assert last[:2] == ["code", "1"] and last[-1] == f"{times['code', 1.0].speedup:.2f}"
