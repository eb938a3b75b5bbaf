"""Replicas behind Ray Serve on this machine: one deployment, and all that may happen to it."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from polydraft import Engine, SamplingParams
from polydraft.config import ServerConfig
from polydraft.errors import IncompatibleError, InvalidInputError

with_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed here: it is the extra `ray`"
)
pytestmark = [with_ray, pytest.mark.slow]
ASK = {"prompt": "import os\n", "max_tokens": 24, "temperature": 0}
LONG = {
    "prompt": "def f(x):\n",
    "max_tokens": 300,
    "temperature": 0,
    "ignore_eos": True,
    "speculation": {"enabled": False},
}
KEYS = {"Authorization": "Bearer sk-one"}


def deploy(port, **more):
    from polydraft.integrations.ray import serve

    server = ServerConfig(served_model_name="embedded", drain=60)
    asked = {"replicas": 2, "cpus": 0.25, "max_num_seqs": 4, "server": server, "keys": ("sk-one",), **more}
    serve.deploy(port=port, **asked)


def free_port():
    from polydraft.cli.serve import _bound

    with _bound("127.0.0.1", 0) as listening:
        return listening.getsockname()[1]


@pytest.fixture(scope="module")
def served():
    from polydraft.integrations.ray import serve

    port = free_port()
    deploy(port)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=240, headers=KEYS) as client:
        client.port = port
        yield client
    serve.shutdown()


@pytest.fixture(scope="module")
def expected():
    engine = Engine.embedded(max_num_seqs=4)

    def text(body):
        params = {name: body[name] for name in ("max_tokens", "temperature", "ignore_eos") if name in body}
        return engine.generate([body["prompt"]], SamplingParams(**params))[0].text

    return text


def streamed(client, body):
    """The text, and the error where there was one."""
    text = ""
    error = None
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        if answer.status_code != 200:
            return "", json.loads(answer.read())["error"]
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                error = event.get("error", error)
                text += "".join(choice["text"] for choice in event.get("choices", ()))
    return text, error


def figures(client, name):
    """Of each replica."""
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(name + "{")]
    return {
        line.partition('replica="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines
    }


def replicas():
    """Process ids."""
    name = b"ray::ServeReplica:polydraft:Replica"
    return [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if path.read_bytes().startswith(name)
    ]


def test_answers_are_those_of_an_engine(served, expected):
    whole = served.post("/v1/completions", json=ASK).json()["choices"][0]["text"]
    assert whole == streamed(served, ASK)[0] == expected(ASK)
    assert (
        served.get("/ready").json() == {"status": "ready"}
        and len(figures(served, "vllm:num_requests_running")) == 2
    )


@pytest.mark.parametrize(
    ("path", "status", "more"),
    [
        ("/v1/completions", 400, {"temperature": -1}),
        ("/nothing", 404, {}),
        ("/v1/completions", 413, {"prompt": "x" * (5 << 20)}),
    ],
)
def test_refusals_are_those_of_the_server(served, path, status, more):
    found = served.post(path, json={**ASK, **more})
    assert found.status_code == status and set(found.json()["error"]) == {"message", "type", "param", "code"}


def test_keys_are_asked_for(served):
    assert httpx.post(f"{served.base_url}/v1/completions", json=ASK, timeout=60).status_code == 401


def test_what_begins_alike_goes_where_it_is_known(served):
    for topic in range(3):
        beginning = f"# topic {topic}\n" + f"x{topic} = {topic}\n" * 60
        used = [
            served.post("/v1/completions", json={**ASK, "prompt": beginning + f"y{i} = ", "max_tokens": 2})
            for i in range(4)
        ]
        cached = [each.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for each in used]
        assert min(cached[1:]) > 100, cached
    assert min(figures(served, "vllm:prompt_tokens_total").values()) > 100  # not all to one of them


def test_a_client_that_leaves_frees_its_place(served):
    with served.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 900, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = answer.iter_lines()
        next(lines)
        assert sum(figures(served, "vllm:num_requests_running").values()) == 1
    until = time.monotonic() + 20
    while sum(figures(served, "vllm:num_requests_running").values()):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert sum(figures(served, "vllm:generation_tokens_total").values()) < 900 * 2


def test_a_replica_that_is_killed_takes_no_answer_with_it_unsaid(served, expected):
    whole = expected(LONG)
    before = replicas()
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(streamed, served, LONG) for _ in range(4)]
        wholes = [pool.submit(served.post, "/v1/completions", json=LONG) for _ in range(4)]
        time.sleep(0.5)
        os.kill(before[0], signal.SIGKILL)
        told = [each.result(timeout=240) for each in streams]
        answers = [each.result(timeout=240) for each in wholes]
    assert [answer.json()["choices"][0]["text"] for answer in answers] == [whole] * 4
    for text, error in told:
        assert (
            text == whole if error is None else (whole.startswith(text) and error["type"] == "server_error")
        )
    until = time.monotonic() + 240
    while len(replicas()) < 2 or before[0] in replicas():
        assert time.monotonic() < until
        time.sleep(0.2)


def test_an_update_under_load_loses_no_request(served, expected):
    whole = expected(ASK)
    before = set(replicas())
    going = [True]

    def client(streams):
        found = []
        while going[0]:
            found.append(
                streamed(served, ASK) if streams else (served.post("/v1/completions", json=ASK).json(), None)
            )
        return found

    with ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(client, number % 2) for number in range(3)]
        try:
            deploy(served.port, max_num_seqs=5)
        finally:
            going[0] = False
        told = [each for one in clients for each in one.result(timeout=240)]
    assert not before & set(replicas())
    texts = [text if isinstance(text, str) else text["choices"][0]["text"] for text, _ in told]
    assert len(texts) > 10 and set(texts) == {whole}


def test_more_replicas_of_another_kind_come_where_the_old_ones_have_all_processors(served, expected):
    import ray
    from ray import serve

    all_of_them = ray.cluster_resources()["CPU"]
    deploy(served.port, cpus=all_of_them / 2)
    deploy(served.port, replicas=4, cpus=all_of_them / 4)
    assert serve.status().applications["polydraft"].deployments["Replica"].replica_states["RUNNING"] == 4
    assert served.post("/v1/completions", json=ASK).json()["choices"][0]["text"] == expected(ASK)


def test_a_longer_queue_makes_more_replicas(served):
    from ray import serve

    from polydraft.integrations.ray import serve as ours

    quick = {"upscale_delay_s": 1, "downscale_delay_s": 5, "metrics_interval_s": 1, "look_back_period_s": 2}
    deploy(served.port, replicas=1, max_replicas=2, autoscaling=quick)
    try:
        with ThreadPoolExecutor(16) as pool:
            running = [
                pool.submit(served.post, "/v1/completions", json={**LONG, "max_tokens": 900})
                for _ in range(60)
            ]
            until = time.monotonic() + 120
            while (
                serve.status()
                .applications["polydraft"]
                .deployments["Replica"]
                .replica_states.get("RUNNING", 0)
                < 2
            ):
                assert time.monotonic() < until
                time.sleep(0.5)
            assert {each.result().status_code for each in running} == {200}
    finally:
        ours.shutdown()


def test_the_command_updates_at_a_hangup_and_drains_at_its_end():
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "polydraft",
        "serve",
        "--model",
        "embedded",
        "--replicas",
        "1",
        "--port",
        str(port),
    ]
    command += ["--cpus", "0.5", "--drain", "60"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert "serving embedded" in server.stderr.readline()
        assert f":{port}/v1, 1 replicas" in server.stderr.readline()
        with (
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=240) as client,
            ThreadPoolExecutor(1) as pool,
        ):
            (before,) = replicas()
            server.send_signal(signal.SIGHUP)
            assert f":{port}/v1, 1 replicas" in server.stderr.readline() and before not in replicas()
            last = pool.submit(streamed, client, LONG)
            time.sleep(1)
            server.send_signal(signal.SIGTERM)
            text, error = last.result()
            assert text and error is None
        assert server.wait(120) == 0 and not replicas()
    finally:
        server.kill()


def test_what_cannot_be_served_is_said_in_a_line():
    from polydraft.integrations.ray import serve

    with pytest.raises(InvalidInputError, match="max_replicas=1"):
        deploy(free_port(), max_replicas=1)
    with pytest.raises(IncompatibleError, match="model folder '/none' does not exist"):
        deploy(free_port(), model="/none")
    serve.shutdown()
