"""Several models of one server: loaded when they are asked for, so many at a time, the least recently used idle one leaves."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from polydraft import AsyncEngine, Engine
from polydraft.config import ServerConfig
from polydraft.errors import CapacityError, InvalidInputError, ModelLoadError
from polydraft.server.pool import ModelPool, ServedModel
from tests.server.conftest import data_of, serving_models, small_engine

SETTINGS = ServerConfig(served_model_name="one", drain=5, timeout=120)
CHAT = {"messages": [{"role": "user", "content": "def f(a):"}], "max_tokens": 8, "temperature": 0}
DRAFTERS = {"one": "ngram", "two": "suffix", "three": None}


class Builds:
    """Engines that were built, by the name of their model."""

    def __init__(self) -> None:
        self.names = []
        self.targets = {}

    def __call__(self, name: str) -> Engine:
        engine = small_engine(drafter=DRAFTERS[name], offered=[], depth=None if DRAFTERS[name] is None else 3)
        self.names.append(name)
        self.targets[name] = weakref.ref(engine.target)
        return engine


@pytest.fixture
def builds():
    return Builds()


def pool(builds, names=DRAFTERS, **options):
    return ModelPool(
        [ServedModel(name, lambda name=name: builds(name)) for name in names], SETTINGS, **options
    )


def loaded(served):
    return [model["id"] for model in served.http.get("/v1/models").json()["data"] if model["loaded"]]


def test_a_model_is_loaded_at_its_first_request_and_the_least_recently_used_leaves(builds):
    with serving_models(pool(builds, max_loaded=2), SETTINGS) as served:
        assert (loaded(served), builds.names) == ([], [])
        answers = {}
        for name in ("one", "two", "one", "three"):
            answers[name] = served.post("/v1/chat/completions", model=name, **CHAT).json()
        assert loaded(served) == ["one", "three"] and builds.names == ["one", "two", "three"]
        gc.collect()
        assert [builds.targets[name]() is None for name in DRAFTERS] == [False, True, False]
        assert {answer["model"] for answer in answers.values()} == set(DRAFTERS)
        assert [answers[name]["usage"]["speculation"]["drafter"] for name in DRAFTERS] == [
            "ngram",
            "suffix",
            "none",
        ]
        assert len({answer["choices"][0]["message"]["content"] for answer in answers.values()}) == 1
        assert served.post("/v1/chat/completions", **CHAT).json()["model"] == "one"
        figures = served.http.get("/metrics").text
        for name in DRAFTERS:
            assert (
                f'vllm:request_success_total{{finished_reason="length",model_name="{name}"}}'
                in figures.replace(
                    f'model_name="{name}",finished_reason="length"',
                    f'finished_reason="length",model_name="{name}"',
                )
            )
        assert (
            'polydraft:model_loaded{model_name="one"} 1.0' in figures
            and 'model_loaded{model_name="two"}' not in figures
        )


def test_requests_that_come_together_load_a_model_once(builds):
    with serving_models(pool(builds), SETTINGS) as served, ThreadPoolExecutor(6) as threads:
        names = ["one", "two"] * 3
        answers = list(
            threads.map(lambda name: served.post("/v1/chat/completions", model=name, **CHAT).json(), names)
        )
    assert [answer["model"] for answer in answers] == names
    assert sorted(set(builds.names)) == ["one", "two"] and len(builds.names) <= len(names)


def test_a_model_at_work_stays_and_another_waits_for_its_place(builds):
    with serving_models(pool(builds, max_loaded=1), SETTINGS) as served:
        body = {**CHAT, "model": "one", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with (
            served.http.stream("POST", "/v1/chat/completions", json=body) as stream,
            ThreadPoolExecutor(1) as thread,
        ):
            lines = data_of(stream.iter_lines())
            next(lines)
            other = thread.submit(served.post, "/v1/chat/completions", model="two", **CHAT)
            *_, last, end = lines
            assert '"finish_reason":"length"' in last and end == "[DONE]"
            assert other.result().json()["model"] == "two"
    assert builds.names == ["one", "two"]


def test_a_model_that_is_asked_without_a_pause_gives_its_place_to_one_that_waits(builds):
    body = {**CHAT, "max_tokens": 60, "ignore_eos": True}
    answered = {"one": 0, "two": 0}
    over = Event()

    def ask(served, name):
        while not over.is_set():
            answer = served.post("/v1/chat/completions", model=name, **body)
            assert answer.status_code == 200, answer.text
            answered[name] += 1
            if min(answered.values()) >= 3:
                over.set()

    with serving_models(pool(builds, max_loaded=1), SETTINGS) as served, ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask, served, name) for name in ("one", "one", "one", "two")]
        for client in asking:
            client.result(60)
    assert (
        answered["one"] <= 12
    )  # between two places of one model, each client of the other was answered about once


def test_requests_to_a_model_share_its_turn_and_its_failure(builds):
    def broken() -> Engine:
        raise ModelLoadError("'three.gguf' could not be read.")

    models = [ServedModel("one", lambda: builds("one")), ServedModel("broken", broken)]
    with (
        serving_models(ModelPool(models, SETTINGS, max_loaded=1), SETTINGS) as served,
        ThreadPoolExecutor(6) as threads,
    ):
        names = ["one", "broken"] * 3
        found = list(
            threads.map(
                lambda name: served.post("/v1/chat/completions", model=name, **CHAT).status_code, names
            )
        )
        assert found == [200, 503] * 3 and not served.pool._turns
        assert served.post("/v1/chat/completions", model="one", **CHAT).status_code == 200


def test_a_model_that_waits_too_long_for_a_place_is_told_to_ask_again(builds):
    short = ServerConfig(timeout=0.2)
    models = [ServedModel(name, lambda name=name: builds(name)) for name in ("one", "two")]
    with (
        serving_models(ModelPool(models, short, max_loaded=1), SETTINGS) as served,
        ThreadPoolExecutor(1) as thread,
    ):
        served.post("/v1/chat/completions", model="one", **CHAT)
        engine = served.pool.loaded[0]
        engine.num_users += 1  # as one that is on its way
        answer = thread.submit(served.post, "/v1/chat/completions", model="two", **CHAT).result()
        engine.num_users -= 1
        assert (
            answer.status_code == 503
            and "waits for a place: 'one' are at work" in answer.json()["error"]["message"]
        )
        served.post("/v1/chat/completions", model="two", **CHAT)
        assert loaded(served) == ["two"]


def test_a_model_that_does_not_fit_is_refused_with_what_to_do_and_the_others_go_on(builds):
    def too_large() -> Engine:
        raise CapacityError("a cache of 900.00 GiB was asked for; 2.00 GiB are free on cpu.")

    def broken() -> Engine:
        raise ModelLoadError("'three.gguf' could not be read.")

    models = [
        ServedModel("one", lambda: builds("one")),
        ServedModel("huge", lambda: builds("two"), weight_bytes=1 << 50),
        ServedModel("cache", too_large),
        ServedModel("broken", broken),
    ]
    with serving_models(ModelPool(models, SETTINGS, max_loaded=3), SETTINGS) as served:
        assert served.post("/v1/chat/completions", model="one", **CHAT).status_code == 200
        for name, said in (("huge", "its weights take 1048576.00 GiB"), ("cache", "a cache of 900.00 GiB")):
            answer = served.post("/v1/chat/completions", model=name, **CHAT)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (503, "model_does_not_fit", "model")
            assert (
                f"model '{name}' does not fit beside 'one': " in error["message"] and said in error["message"]
            )
            assert "Lower --max-loaded" in error["message"]
        assert (
            "'broken' could not be loaded"
            in served.post("/v1/chat/completions", model="broken", **CHAT).json()["error"]["message"]
        )
        assert (
            loaded(served) == ["one"]
            and served.post("/v1/chat/completions", model="one", **CHAT).status_code == 200
        )
        unknown = served.post("/v1/messages", model="none", max_tokens=1, messages=CHAT["messages"])
        assert (
            unknown.status_code == 404
            and "'one', 'huge', 'cache', 'broken' are served" in unknown.json()["error"]["message"]
        )
        assert served.http.get("/v1/models/none").status_code == 404


def test_one_engine_is_a_pool_of_one_that_stays():
    engine = AsyncEngine(small_engine())
    assert [service.name for service in ModelPool.of(engine, SETTINGS).loaded] == ["one"]


@pytest.mark.parametrize(("names", "options", "said"), [((), {}, "at least one"), (("one", "one"), {}, "different names"), (("one",), {"max_loaded": 0}, "max_loaded=0")])  # fmt: skip
def test_wrong_models_are_refused(builds, names, options, said):
    with pytest.raises(InvalidInputError, match=said):
        pool(builds, names, **options)
