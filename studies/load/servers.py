"""Servers in processes of their own: ours, llama.cpp's and vLLM's."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from time import sleep
from typing import IO, NamedTuple
from urllib.parse import urlsplit

from polydraft.errors import InvalidInputError, PolydraftError

CONTEXT = 512
"""Tokens of each stream's place in a cache, on all servers."""


class Served(NamedTuple):
    """A server's address, and its process."""

    url: str
    pid: int


@contextmanager
def serving(*arguments: str) -> Iterator[Served]:
    """A `polydraft serve` of its own on a free port."""
    command = [sys.executable, "-m", "polydraft", "serve", "--port", "0", "--drain", "1", *arguments]
    with TemporaryFile("w+") as output:  # a pipe that nobody reads would fill
        server = subprocess.Popen(command, stderr=output)
        try:
            url = _started(server, output)
            asyncio.run(_ready(url, "/ready", server, output))
            yield Served(url, server.pid)
        finally:
            server.terminate()
            server.wait(30)


def _started(server: subprocess.Popen[bytes], said: IO[str]) -> str:
    """The address that a server tells, once it listens."""
    while True:
        ended = server.poll() is not None
        said.seek(0)
        lines = said.read().splitlines()
        address = next((line for line in lines if line.startswith("http://")), None)
        if address is not None:
            return address.partition("/v1")[0]
        if ended:
            raise PolydraftError(f"the server did not start: {' '.join(lines[-3:])}")
        sleep(0.1)


async def _ready(url: str, path: str, server: subprocess.Popen[bytes], said: IO[str]) -> None:
    where = urlsplit(url)
    for _ in range(6000):
        try:
            reader, writer = await asyncio.open_connection(where.hostname, where.port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n\r\n".encode())
            line = await reader.readline()
            writer.close()
            if b" 200 " in line:
                return
        except OSError:
            pass
        if server.poll() is not None:
            said.seek(0)
            raise PolydraftError(
                f"the server ended before it answered: {' '.join(said.read().splitlines()[-3:])[-500:]}"
            )
        await asyncio.sleep(0.1)
    raise PolydraftError(f"{url} was not ready within 600 s.")


def check_vllm(python: Path) -> None:
    probe = [python, "-c", "from importlib.util import find_spec as f; exit(f('vllm') is None)"]
    if subprocess.run(probe, check=False).returncode:
        raise InvalidInputError(
            f"{python} has no vLLM; expected an interpreter that has it. `make vllm` makes one: .venv-vllm/bin/python."
        )


@contextmanager
def llama_cpp(model: str, folder: Path, slots: int, threads: int) -> Iterator[str]:
    """llama.cpp's own server in this process, whose threads are its own: on the very file, where it is one of its kind."""
    from polydraft.bench.llama_cpp import LlamaCpp, write_gguf
    from polydraft.models import load as models
    from polydraft.models import pair
    from polydraft.models.store.catalogue import MODELS, cached
    from polydraft.models.torch.module import load_module

    source = str(pair.target_folder()) if model == "embedded" else model
    file = cached(MODELS[source]) if source in MODELS else Path(source)
    if file is None or file.suffix != ".gguf":
        file = folder / "model.gguf"
        write_gguf(
            load_module(source), models.load_tokenizer(source), file, "F32" if model == "embedded" else "BF16"
        )
    server = LlamaCpp(file, exact=False, num_threads=threads, parallel=slots, context=CONTEXT * slots)
    yield server.server.listening_address


@contextmanager
def vllm_server(python: Path, model: str, folder: Path, slots: int, threads: int) -> Iterator[str]:
    """vLLM's own server, on the model as a folder: in bfloat16, and the embedded target as it is."""
    from polydraft.heads.export import export_model
    from polydraft.models import pair

    embedded = model == "embedded"
    model_folder = pair.target_folder() if embedded else folder / "model"
    if not embedded:
        export_model(model, model_folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "dtype": "float32" if embedded else "bfloat16",
        "max-model-len": CONTEXT,
        "max-num-seqs": slots,
        "port": port,
    }
    command = [
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        model_folder,
        "--enforce-eager",
        "--host",
        "127.0.0.1",
    ]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    cores = ",".join(map(str, range(threads)))
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "2"}  # GiB
    with TemporaryFile("w+") as output:
        server = subprocess.Popen(
            list(map(str, command)), stdout=output, stderr=output, env=environment, cwd=folder
        )
        try:
            url = f"http://127.0.0.1:{port}"
            asyncio.run(_ready(url, "/health", server, output))
            yield url
        finally:
            server.terminate()
            server.wait(60)
