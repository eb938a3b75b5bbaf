"""Costs that nobody has measured are assumed before the first answer, followed by its steps, and measured while the engine is idle."""

import asyncio
import os
import warnings

import pytest

from polydraft import AsyncEngine, Engine, SamplingParams
from polydraft.config import EngineConfig
from polydraft.policy import profile
from polydraft.policy.profile import MOST_FILES, Profile

PARAMS = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
SEEDED = PARAMS.with_(temperature=1.0, seed=3)


def as_another_process(monkeypatch) -> None:
    monkeypatch.setattr(profile, "_known", {})
    monkeypatch.setattr(profile, "_tried", set())


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Where costs are kept: nothing is known."""
    as_another_process(monkeypatch)
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path))
    return tmp_path


def engine(**fields) -> Engine:
    return Engine.embedded(**{"max_num_seqs": 2, "threads": 1, "drafter": "model", **fields})


def measured_in(folder) -> bool:
    return any(Profile.load(file).about["spread"] < profile.UNMEASURED for file in folder.glob("*.json"))


def test_no_pass_is_made_before_the_first_step_unless_speeds_are_to_be_reported():
    built = engine()
    assert built.target.passes == built.drafter.model.passes == 0 and built.policy.missing
    ready = Engine.from_config(EngineConfig(drafter="model", threads=1), measured=True)
    assert ready.target.passes > 0 and not ready.policy.missing


def test_what_the_steps_of_the_first_answer_show_serves_the_next_engine(monkeypatch, folder):
    first = engine()
    first.generate("def add(a, b):", PARAMS)
    kept = first.policy.live.costs
    as_another_process(monkeypatch)
    second = engine()
    assert second.policy.live.costs == kept and second.target.passes == 0 and second.policy.missing


def test_an_idle_engine_measures_once_and_the_next_process_finds_it(monkeypatch, folder):
    first = engine()
    answer = first.generate("def add(a, b):", PARAMS)[0]
    first.measure()
    assert measured_in(folder) and not first.policy.missing
    passes = first.target.passes
    first.measure()
    assert first.target.passes == passes and first.num_free == 2 and first.drafter.slots.num_free == 2
    assert first.generate("def add(a, b):", PARAMS)[0].text == answer.text
    as_another_process(monkeypatch)
    assert engine().policy.profile.costs == first.policy.profile.costs


def test_the_text_of_a_seed_follows_from_measured_costs_alone():
    """Before anything else, behind other requests, and of the next engine."""
    first = engine()
    busy = engine()
    text = first.generate("def add(a, b):", SEEDED)[0].token_ids
    assert not first.policy.missing
    for built in (busy, engine()):
        built.generate("import os\n", PARAMS.with_(temperature=1.0))
        assert built.generate("def add(a, b):", SEEDED)[0].token_ids == text


def test_a_seeded_request_waits_until_what_runs_has_finished_and_loses_nobodys_work(monkeypatch):
    built = engine()
    asked = list[int]()
    monkeypatch.setattr(
        built.policy,
        "measure",
        lambda *_: asked.append(built.num_running) or setattr(built.policy, "missing", False),
    )
    running = built.submit("import os\n", PARAMS)
    built.step()
    seeded = built.submit("def add(a, b):", SEEDED)
    while built.has_unfinished_requests:
        built.step()
    assert asked == [0]
    assert [len(r.samples[0].token_ids) for r in (running, seeded)] == [96, 96]


def test_a_request_that_comes_ends_the_measuring_before_its_next_pass(folder):
    built = engine()
    calls = iter(range(100))

    def stopped() -> bool:
        if next(calls) == 5:
            built.submit("def add(a, b):", PARAMS)
        return False

    built.measure(stopped)
    assert (
        built.policy.missing
        and built.num_free == 2
        and not any(built.target.lengths)
        and not measured_in(folder)
    )
    while built.has_unfinished_requests:
        built.step()
    built.measure()
    assert measured_in(folder)


def test_a_server_measures_while_nobody_asks(folder):
    async def served() -> bool:
        built = engine()
        async with AsyncEngine(built) as server:
            await server.generate("def add(a, b):", PARAMS)
            for _ in range(3000):
                if not built.policy.missing:
                    break
                await asyncio.sleep(0.01)
        return built.policy.missing

    assert not asyncio.run(served()) and measured_in(folder)


def damage(folder, how, monkeypatch) -> None:
    (file,) = folder.glob("*.json")
    if how == "damaged":
        file.write_bytes(file.read_bytes()[:-40])
    elif how == "another version":
        file.write_text(file.read_text().replace('"polydraft_profile": 8', '"polydraft_profile": 3'))
    elif how == "no folder":
        monkeypatch.setenv("POLYDRAFT_CACHE", str(file / "below a file"))
    else:
        file.unlink()
        written = os.fsync

        def full(number: int) -> None:
            written(number)
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)


@pytest.mark.parametrize("how", ["damaged", "another version", "no folder", "full"])
def test_a_folder_of_costs_that_is_of_no_use_costs_a_line_at_most(how, folder, monkeypatch):
    text = engine().generate("def add(a, b):", PARAMS)[0].text
    damage(folder, how, monkeypatch)
    as_another_process(monkeypatch)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        built = engine()
        assert built.generate("def add(a, b):", PARAMS)[0].text == text
        built.measure()
    assert len(said) == (how in ("damaged", "another version")) and not built.policy.missing
    assert len([*folder.iterdir()]) <= 1 < MOST_FILES
