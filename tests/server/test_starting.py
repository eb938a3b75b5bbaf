"""A server answers from its first second, and requests that come while it loads are answered once it is there."""

import asyncio
import os
import subprocess
import sys
import threading
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI

from polydraft.server.starting import Starting


@asynccontextmanager
async def started(make, ends=lambda: False):
    """A client of a server that makes its application, and what it told."""
    told: list[str] = []
    starting = Starting(
        make, ready=lambda: told.append("ready"), ends=ends, failed=lambda: told.append("failed")
    )
    events = asyncio.Queue()
    sent = asyncio.Queue()
    life = asyncio.create_task(starting({"type": "lifespan"}, events.get, sent.put))
    await events.put({"type": "lifespan.startup"})
    assert (await sent.get())["type"] == "lifespan.startup.complete"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(starting), base_url="http://server") as client:
        yield client, starting, told
    await events.put({"type": "lifespan.shutdown"})
    await life


def application(lived: list[str]) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_):
        lived.append("began")
        yield
        lived.append("ended")

    app = FastAPI(lifespan=lifespan)
    app.get("/text")(lambda: "generated")
    app.get("/health")(lambda: {"status": "ok"})
    return app


def test_it_says_that_it_loads_and_requests_wait_until_the_application_is_there():
    loaded = threading.Event()
    lived = list[str]()

    def make():
        assert loaded.wait(60)
        return application(lived)

    async def talk():
        async with started(make) as (client, _, told):
            text = asyncio.create_task(client.get("/text"))
            states = [await client.get(path) for path in ("/health", "/ready")]
            assert [(state.status_code, state.json()["status"]) for state in states] == [
                (200, "loading"),
                (503, "loading"),
            ]
            assert not text.done() and not told
            loaded.set()
            assert (await text).json() == "generated" and told == ["ready"] and lived == ["began"]
            assert (await client.get("/health")).json()["status"] == "ok"
        assert lived == ["began", "ended"]

    asyncio.run(talk())


def test_what_cannot_be_loaded_ends_the_server_and_its_waiting_requests():
    ended = threading.Event()

    def make():
        raise ValueError("no weights")

    async def talk():
        async with started(make, ends=ended.is_set) as (client, starting, told):
            text = asyncio.create_task(client.get("/text"))
            while not told:
                await asyncio.sleep(0.01)
            ended.set()
            assert (
                (await text).status_code == 503 and told == ["failed"] and str(starting.error) == "no weights"
            )

    asyncio.run(talk())


def test_it_listens_before_anything_heavy_is_imported():
    code = "import sys, uvicorn, polydraft.cli.serve, polydraft.server.starting; print({'torch', 'numba', 'transformers', 'fastapi'} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout == "set()\n"
