"""Files answered by workers of Ray, each a process of its own: crashes, bad rows, order."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from polydraft.errors import CapacityError, IncompatibleError, InvalidInputError
from polydraft.integrations import ray as ours
from polydraft.integrations.ray.files import RowParts
from polydraft.integrations.ray.worker import EngineWorker

GREEDY = {"temperature": 0, "max_tokens": 6}
with_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed here: it is the extra `ray`"
)


def written(path, count=6):
    """Rows of which two cannot be answered, and a line that is none."""
    rows = [{"id": i, "prompt": f"import os\nx{i} = "} for i in range(count)]
    rows[1] = {"id": 1, "messages": [{"role": "user"}]}
    rows[3]["params"] = {"temperature": -1}
    lines = [json.dumps(row) for row in rows]
    lines.insert(5, '{"id": ')
    path.write_text("\n".join(lines) + "\n")
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_worker_answers_what_it_can_and_says_what_it_cannot():
    worker = EngineWorker(params=GREEDY)
    good, none, both, strange = worker.answer(
        [
            (0, {"prompt": "import os"}),
            (1, {"id": 1}),
            (2, {"prompt": "a", "messages": []}),
            (3, {"prompt": "a", "params": {"hot": 1}}),
        ]
    )
    assert good["text"] and good["prompt"] == "import os"
    assert (
        "expected one of" in none["error"]
        and "expected one of" in both["error"]
        and "hot" in strange["error"]
    )


def test_a_rows_text_depends_on_its_number_and_not_on_its_neighbours():
    worker = EngineWorker(params={"max_tokens": 8}, drafter=None)
    rows = [(i, {"prompt": "import os\n"}) for i in range(4)]
    together = [row["text"] for row in worker.answer(rows)]
    alone = [
        EngineWorker(params={"max_tokens": 8}, drafter=None).answer([row])[0]["text"] for row in rows[2:]
    ]
    assert together[2:] == alone and len(set(together)) > 1


def test_parts_are_kept_and_only_the_same_job_goes_on(tmp_path):
    source = written(tmp_path / "in.jsonl")
    out = tmp_path / "out.jsonl"
    parts = RowParts(out, {"seed": 1})
    (first, rows), second, _ = parts.missing(source, 3, print)
    parts.write(first, [{"row": number, "text": str(number)} for number, _ in rows])
    with pytest.raises(InvalidInputError, match="--resume"):
        RowParts(out, {"seed": 1})
    with pytest.raises(InvalidInputError, match="seed"):
        RowParts(out, {"seed": 2}, resume=True)
    seen = []
    assert next(
        RowParts(out, {"seed": 1}, resume=True).missing(source, 3, seen.append)
    ) == second and seen == [3]
    assert "no JSON" in second[1][2][1]["error"]


def test_an_output_that_is_there_is_left_alone(tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("mine")
    with pytest.raises(InvalidInputError, match="is there already"):
        RowParts(out, {})
    assert out.read_text() == "mine"


def test_a_missing_file_and_wrong_numbers_are_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="Check the path"):
        ours.run(tmp_path / "none.jsonl", tmp_path / "out.jsonl")
    with pytest.raises(InvalidInputError, match="at least 1"):
        ours.run(written(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", workers=0)


def test_outputs_are_exchanged_once_and_not_with_oneself():
    exchange = ours.Exchange()
    assert exchange.exchange([[1, 2]], 0) == ([], 1)
    assert exchange.exchange([[3]], 0) == ([[1, 2]], 2)
    assert exchange.exchange([], 1) == ([[3]], 2)


@with_ray
def test_other_versions_and_a_cluster_that_does_not_answer_are_refused(monkeypatch):
    import ray

    monkeypatch.setattr(ray, "__version__", "3.0.0")
    with pytest.raises(IncompatibleError, match=r"3\.0\.0"):
        ours.connect()


def command(source, out, *more):
    asked = ["--workers", "2", "--rows", "2", "--max-tokens", "6", "--temperature", "0", *more]
    return [sys.executable, "-m", "polydraft", "batch", "--model", "embedded", str(source), str(out), *asked]


@with_ray
def test_rows_come_in_order_and_bad_ones_beside_them(tmp_path):
    source = written(tmp_path / "in.jsonl")
    out = tmp_path / "out.jsonl"
    done = subprocess.run(command(source, out), capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "4 rows answered, 3 not" in done.stderr, done.stderr
    assert [row["id"] for row in read(out)] == [0, 2, 4, 5]
    assert [row["row"] for row in read(tmp_path / "out.jsonl.errors.jsonl")] == [1, 3, 5]
    worker = EngineWorker(params=GREEDY)
    assert all(row["text"] == worker.answer([(0, {"prompt": row["prompt"]})])[0]["text"] for row in read(out))
    assert not (tmp_path / "out.jsonl.parts").exists()


def wait_for_parts(count, folder, driver):
    while len(list((folder / "out.jsonl.parts").glob("0*.jsonl"))) < count:
        time.sleep(0.05)
        assert driver.poll() is None, driver.stderr.read()


def workers():
    """Process ids."""
    return [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if path.read_bytes().startswith(b"ray::Actor")
    ]


@with_ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "environment", "said"),
    [
        (["--rows", "100000000"], {}, "max_num_seqs=100000000"),
        (
            [],
            {"RAY_memory_usage_threshold": "0.01", "RAY_memory_monitor_refresh_ms": "100"},
            "ask for fewer workers",
        ),
    ],
    ids=["an engine that does not fit", "workers that Ray ends, as memory runs out"],
)
def test_workers_without_memory_end_the_command_in_a_line_and_it_may_be_run_again(
    tmp_path, asked, environment, said
):
    source = written(tmp_path / "in.jsonl")
    out = tmp_path / "out.jsonl"
    done = subprocess.run(
        command(source, out, *asked),
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and said in done.stderr.splitlines()[-1], done.stderr
    again = subprocess.run(command(source, out), capture_output=True, text=True, check=False)
    assert again.returncode == 0 and len(read(out)) == 4, again.stderr


@with_ray
@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "worker that starts", "driver"])
def test_what_is_killed_loses_nothing_and_repeats_nothing(victim, tmp_path):
    source = tmp_path / "in.jsonl"
    out = tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": i, "prompt": f"x{i} = "}) + "\n" for i in range(40)))
    driver = subprocess.Popen(command(source, out, "--max-tokens", "64"), stderr=subprocess.PIPE, text=True)
    if victim == "worker that starts":
        while driver.poll() is None and not workers():
            time.sleep(0.01)
    else:
        wait_for_parts(3, tmp_path, driver)
    if victim == "driver":
        driver.kill()
        driver.wait()
        assert not out.exists()
        driver = subprocess.Popen(
            command(source, out, "--max-tokens", "64", "--resume"), stderr=subprocess.PIPE, text=True
        )
    else:
        os.kill(workers()[0], signal.SIGKILL)
    assert driver.wait() == 0, driver.stderr.read()
    assert [row["id"] for row in read(out)] == list(range(40))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 24 KiB, and what gives it more."""
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24k", "small", tmp_path], capture_output=True, check=False
    ).returncode:
        pytest.skip("a file system of its own cannot be mounted here")
    yield tmp_path, lambda: subprocess.run(["mount", "-o", "remount,size=4m", tmp_path], check=True)
    subprocess.run(["umount", "-l", tmp_path], check=True)


def test_parts_on_a_full_disk_are_kept_and_go_on_when_there_is_room(small_disk, tmp_path_factory):
    folder, enlarge = small_disk
    source = tmp_path_factory.mktemp("elsewhere") / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": "x"}) + "\n" for _ in range(40)))

    def answer(parts):
        for part, rows in parts.missing(source, 4, lambda rows: None):
            parts.write(part, [{"row": number, "text": "y" * 500} for number, _ in rows])
        return parts.finish()

    with pytest.raises(CapacityError, match="--resume"):
        answer(RowParts(folder / "out.jsonl", {}))
    kept = len(list((folder / "out.jsonl.parts").iterdir()))
    assert kept > 2 and not (folder / "out.jsonl").exists()
    enlarge()
    assert answer(RowParts(folder / "out.jsonl", {}, resume=True)) == (40, 0)
    assert len(read(folder / "out.jsonl")) == 40


@with_ray
@pytest.mark.slow
def test_a_full_disk_ends_the_command_in_a_line_and_resume_goes_on(small_disk, tmp_path_factory):
    folder, enlarge = small_disk
    source = tmp_path_factory.mktemp("elsewhere") / "in.jsonl"
    out = folder / "out.jsonl"
    source.write_text("".join(json.dumps({"id": i, "prompt": f"x{i} = "}) + "\n" for i in range(40)))
    full = subprocess.run(command(source, out), capture_output=True, text=True, check=False)
    assert (
        full.returncode == 2
        and full.stderr.splitlines()[-1].startswith("error: ")
        and "--resume" in full.stderr
    )
    kept = len(list((folder / "out.jsonl.parts").glob("0*.jsonl")))
    assert kept > 2
    enlarge()
    done = subprocess.run(command(source, out, "--resume"), capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "40 rows answered, 0 not" in done.stderr, done.stderr
    assert [row["id"] for row in read(out)] == list(range(40))


@with_ray
@pytest.mark.slow
def test_a_dataset_gets_texts_and_reasons():
    import ray

    ours.connect()
    rows = [{"prompt": "import os"}, {"prompt": ""}, {"prompt": "import re"}]
    found = ours.generate(ray.data.from_items(rows), params=GREEDY, batch_size=2).take_all()
    ray.shutdown()
    worker = EngineWorker(params=GREEDY)
    for row in found:
        (expected,) = worker.answer([(0, {"prompt": row["prompt"]})])
        assert (row["text"], row["error"]) == (expected.get("text", ""), expected.get("error", ""))
