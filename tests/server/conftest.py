"""A real server on a free port of this machine, in a thread of the test's process, and clients of it."""

import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from polydraft import AsyncEngine, Engine
from polydraft.cli.serve import _bound
from polydraft.config import ServerConfig
from polydraft.models import load, pair
from polydraft.server.app import create_app
from polydraft.server.pool import ModelPool
from polydraft.server.starting import Connection, DrainingServer
from tests.server.windows import BROWSER, SCREEN

TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"


def small_engine(**options) -> Engine:
    """The smaller model of the embedded pair as the target, with drafts from the text, and a template for chats."""
    folder = str(pair.draft_folder())
    tokenizer = load.load_tokenizer(folder)
    tokenizer.chat_template = TEMPLATE
    model = load.load_model(folder, device="cpu", max_num_seqs=4, max_model_len=512)
    model.vocab_size = load.num_token_ids(tokenizer, model.vocab_size)
    return Engine.of(
        model,
        tokenizer=tokenizer,
        **{"drafter": "ngram", "offered": ["suffix"], "depth": 3, "keep_prefixes": True, **options},
    )


class Served:
    """A running server. pool: its models.  server: uvicorn's."""

    def __init__(self, pool: ModelPool, server: uvicorn.Server, url: str) -> None:
        self.pool = pool
        self.server = server
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=30)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="sk-none", max_retries=0, timeout=30)

    @property
    def engine(self) -> Engine:
        """That of the model that is loaded."""
        return self.pool.loaded[0].engine.engine

    def post(self, path: str, **body) -> httpx.Response:
        return self.http.post(path, json=body)


def data_of(lines: Iterable[str]) -> Iterator[str]:
    """What a stream sends, without the comments that it has where a busy machine sends nothing for a while."""
    return (line.removeprefix("data: ") for line in lines if line.startswith("data: "))


@contextmanager
def serving(engine: Engine, *, keys=(), sent_ahead: int | None = None, **settings) -> Iterator[Served]:
    """sent_ahead: bytes that the system takes for a client that does not read."""
    options: dict[str, Any] = {"served_model_name": "small", "drain": 5.0, **settings}
    config = ServerConfig(**options)
    pool = ModelPool.of(AsyncEngine(engine, max_waiting=config.max_waiting), config)
    with serving_models(pool, config, keys, sent_ahead=sent_ahead) as served:
        yield served


@contextmanager
def serving_models(
    pool: ModelPool, config: ServerConfig, keys=(), *, sent_ahead: int | None = None
) -> Iterator[Served]:
    listening = _bound("127.0.0.1", 0)
    if sent_ahead is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sent_ahead)
    app = create_app(pool, config, keys)
    settings = uvicorn.Config(
        app,
        log_level="warning",
        ws="none",
        timeout_graceful_shutdown=30,
        timeout_keep_alive=75,
        http=Connection,
    )
    server = DrainingServer(settings, app.state.drain)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    served = Served(pool, server, f"http://127.0.0.1:{listening.getsockname()[1]}")
    until = time.monotonic() + 120
    while not server.started:
        assert thread.is_alive() and time.monotonic() < until
        time.sleep(0.01)
    try:
        yield served
    finally:
        server.should_exit = True
        thread.join(60)
        engines = [service.engine.engine for service in pool.loaded]
        assert not thread.is_alive() and all(
            engine.num_free == engine.target.max_num_seqs for engine in engines
        )


@pytest.fixture(scope="package")
def served() -> Iterator[Served]:
    with serving(small_engine()) as running:
        yield running


@pytest.fixture(scope="module")  # longer, and its loop would be in the way of tests that run coroutines
def browser():
    if BROWSER is None:
        pytest.skip("no Chromium on the PATH: apt install chromium. Nothing else tests what the page does")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as starter:
        program = starter.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield program
        program.close()


@pytest.fixture
def window(browser):
    """A window of a browser that keeps nothing yet."""
    page = browser.new_page(viewport=SCREEN)
    yield page
    page.close()
