import json

import pytest

from studies.asynchronous import main


@pytest.mark.slow
def test_the_study_of_drafting_while_verifying_writes_figures_a_trace_and_its_picture(tmp_path):
    main(layers=[0], draft_layers=0, tokens=64, num_prompts=2, quick=True, out=tmp_path)
    rows = json.loads((tmp_path / "figures.json").read_text())
    assert [row["temperature"] for row in rows] == [0.0, 1.0]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (tmp_path / "trace.png").stat().st_size > 5000
