"""NVIDIA's client of speculative decoding reads from our engine what the engine counted."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from polydraft.models import pair
from studies.specdec_bench import PolydraftModel, engine_fields

ROOT = Path(__file__).parents[2]
PROMPT = [5, 6, 7, 8, 9]
GIVEN = {
    "speculative_num_steps": 3,
    "speculative_num_draft_tokens": None,
    "draft_model_dir": None,
    "tensor_parallel_size": 1,
    "moe_expert_parallel_size": 2,
    "trust_remote_code": False,
    "tokenizer_path": "x",
}
"""What the client tells every engine."""


def answered(end_id: int, **options):
    model = PolydraftModel(
        str(pair.target_folder()), 2, {"temperature": 0}, **{**GIVEN, "threads": 1, **options}
    )
    output = asyncio.run(model.run(PROMPT, 24, end_id, request_id=0, turn_id=0))
    model.stop()
    (stats,) = model.stats
    (steps,) = output["output_ids"]
    return steps, output["token_times"], stats


def test_tokens_of_each_step_are_those_that_the_engine_counted():
    steps, times, stats = answered(
        -1, speculative_algorithm="DRAFT_TARGET", draft_model_dir=str(pair.draft_folder())
    )
    assert len(steps) == stats.steps and sum(map(len, steps)) == stats.generated_tokens == 24
    assert sum(len(step) - 1 for step in steps) == stats.accepted_tokens > 0
    assert max(map(len, steps)) <= 4  # --draft_length of 3
    assert len(times) == 1 + len(steps) and times == sorted(times)


def test_drafts_change_no_greedy_token_and_the_end_is_left_out():
    plain, _, _ = answered(-1, speculative_algorithm="NONE")
    drafted, _, _ = answered(-1, speculative_algorithm="NGRAM")
    tokens = [token for step in plain for token in step]
    assert tokens == [token for step in drafted for token in step] and all(len(step) == 1 for step in plain)
    end = tokens[10]
    short, _, stats = answered(end, speculative_algorithm="NONE")
    assert [token for step in short for token in step] == tokens[: tokens.index(end)]
    assert stats.generated_tokens == tokens.index(end) + 1


def test_algorithms_of_the_client_choose_drafters_and_its_parameters_go_before():
    heads = {**GIVEN, "speculative_algorithm": "EAGLE3", "draft_model_dir": "head"}
    assert engine_fields(heads) == {"drafter": "eagle", "depth": 3, "head": "head"}
    assert engine_fields({**GIVEN, "speculative_algorithm": "EAGLE3", "drafter": "auto"}) == {
        "drafter": "auto"
    }


def test_the_client_sums_what_the_engine_counted(tmp_path):
    folder = os.environ.get("POLYDRAFT_SPECDEC_BENCH")
    if folder is None:
        pytest.skip("POLYDRAFT_SPECDEC_BENCH=examples/specdec_bench of NVIDIA's Model-Optimizer")
    target = str(pair.target_folder())
    options = (
        f"--engine VLLM --model_dir {target} --tokenizer {target} --speculative_algorithm NGRAM --completions "
        f"--random_isl 16 --num_requests 3 --output_length 16 --tp_size 1 --ignore_eos --save_dir {tmp_path}"
    )
    command = [sys.executable, "-m", "studies.specdec_bench", folder, "--", *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads((tmp_path / "acceptance_rate.json").read_text())
    lengths = {int(length): count for length, count in found["Acceptance_Length_Histogram"].items()}
    counted = re.search(r"polydraft: (\d+) tokens in (\d+) steps", done.stdout)
    assert counted is not None
    tokens = sum(length * count for length, count in lengths.items())
    assert (tokens, sum(lengths.values())) == tuple(map(int, counted.groups()))
