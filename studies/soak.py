"""Ten minutes of a server's worst day: `python -m studies.soak` starts one and sends it clients that stay, leave in the middle, and write nonsense.

lost      an answer that never came whole, or another status than its request should have
mixed     a seeded answer that is not, token for token, what the same request got alone before, or does not begin so where it was cut
cut       a stream that ended with the error of a replica that was killed: with `--replicas N` one is, in the middle
memory    of the server's processes, each minute after the first
"""

import asyncio
import json
import os
import random
import signal
import sys
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from polydraft.errors import PolydraftError
from studies.load.measurement import answer
from studies.load.servers import serving
from studies.processes import processes

CLIENTS = 12
LIMIT = 900.0
"""Seconds of an answer, after which it is lost."""
ODD: list[Any] = [None, -1, 0, 10**30, 1e308, "", "\ud800", [], {}, [[]], "9" * 400, {"a": {}}]
FIELDS = [
    "prompt",
    "max_tokens",
    "temperature",
    "n",
    "stop",
    "seed",
    "logit_bias",
    "top_p",
    "stream",
    "speculation",
    "guided_regex",
    "unknown",
]


def asked(number: int) -> dict[str, Any]:
    """One of the requests that are repeated: texts of all lengths, with and without temperature and a form."""
    body = {
        "prompt": f"def function_{number}(a, b):\n",
        "max_tokens": 4 + 9 * number % 60,
        "temperature": number % 3 / 2,
        "seed": number,
    }
    body |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": number % 5 > 0}
    if number % 7 == 3:
        body |= {"guided_regex": "[a-z]{4,12}( [0-9]{1,3})?", "ignore_eos": False}
    if number % 7 == 5:
        body |= {"prompt": "# " + "a long text of many words, " * (number + 2) + "\n"}
    return body


def text(events: list[dict[str, Any]]) -> str:
    """What was streamed."""
    return "".join(choice["text"] for event in events for choice in event.get("choices", ()))


class Soak:
    """Counts of what was sent and what came of it."""

    def __init__(self, url: str, seconds: float) -> None:
        self.url = url
        self.until = monotonic() + seconds
        self.alone = dict[int, str]()
        self.counts: dict[str, int] = dict.fromkeys(
            ("whole", "left", "refused", "busy", "raw bytes", "cut", "lost", "mixed"), 0
        )
        self.said: list[str] = []

    async def client(self, rng: random.Random) -> None:
        """One after the other until the time is up."""
        while monotonic() < self.until:
            kind = rng.random()
            try:
                if kind < 0.6:
                    await self._whole(rng.randrange(20))
                elif kind < 0.8:
                    await self._leave(rng)
                elif kind < 0.95:
                    await self._nonsense(rng)
                else:
                    await self._bytes(rng)
            except (OSError, PolydraftError, asyncio.TimeoutError, ValueError, KeyError) as error:
                self._fault("lost", f"{error!r}"[:200])

    def _fault(self, kind: str, said: str) -> None:
        self.counts[kind] += 1
        self.said.append(f"{kind}: {said}")

    async def _whole(self, number: int) -> None:
        try:
            _, _, events = await asyncio.wait_for(answer(self.url, "/v1/completions", asked(number)), LIMIT)
        except PolydraftError as error:
            if " 429 " not in str(error):
                raise
            self.counts["busy"] += 1
            return
        if "replica" in str(events[-1].get("error")) and self.alone[number].startswith(text(events)):
            self.counts["cut"] += 1
        elif any("error" in event for event in events):
            self._fault("lost", str(events[-1])[:200])
        elif text(events) != self.alone.setdefault(number, text(events)):
            self._fault(
                "mixed", f"request {number}: {text(events)[:60]!r} and alone {self.alone[number][:60]!r}"
            )
        else:
            self.counts["whole"] += 1

    async def _opened(
        self, content: bytes, path: str = "/v1/completions"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        where = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + content)
        return reader, writer

    async def _leave(self, rng: random.Random) -> None:
        """A client that goes away after some events, or before the first."""
        _, writer = await self._opened(
            json.dumps({**asked(rng.randrange(20)), "max_tokens": 200, "n": rng.randint(1, 3)}).encode()
        )
        await asyncio.sleep(rng.random() * 0.5)
        writer.close()
        self.counts["left"] += 1

    async def _nonsense(self, rng: random.Random) -> None:
        body = json.dumps(
            {**asked(0), "stream": False, "max_tokens": 3, rng.choice(FIELDS): rng.choice(ODD)}
        ).encode()
        if rng.random() < 0.3:
            body = body[: rng.randrange(len(body))]
        reader, writer = await self._opened(
            body, rng.choice(["/v1/completions", "/v1/chat/completions", "/tokenize", "/nothing"])
        )
        status = await asyncio.wait_for(reader.readline(), LIMIT)
        writer.close()
        if not status.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200")):
            self._fault("lost", f"{status!r} for {body[:120]!r}")
        self.counts["refused"] += 1

    async def _bytes(self, rng: random.Random) -> None:
        where = urlsplit(self.url)
        _, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(rng.randbytes(rng.randrange(1, 2000)))
        await asyncio.sleep(0.05)
        writer.close()
        self.counts["raw bytes"] += 1


def resident(pid: int) -> float:
    """Of a process of this machine and all that it started, in MB."""
    return sum(_rss(each) for each in (pid, *processes(pid)))


def _rss(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")), 0.0)


def kill_a_replica(pid: int) -> None:
    """One of those that this server started."""
    names = {each: told.name for each, told in processes(pid).items()}
    victim = next(
        each for each, name in names.items() if name.startswith("ray::ServeReplica:polydraft:Replica")
    )
    os.kill(victim, signal.SIGKILL)


async def soak(url: str, pid: int, seconds: float, kill: bool = False) -> tuple[Soak, list[float]]:
    """All clients for so long; the memory each tenth of it. kill: a replica, in the middle."""
    made = Soak(url, seconds)
    memory = list[float]()
    for number in range(20):
        made.alone[number] = text((await answer(url, "/v1/completions", asked(number)))[2])
    made.until = monotonic() + seconds
    running = [asyncio.ensure_future(made.client(random.Random(i))) for i in range(CLIENTS)]
    for tenth in range(10):
        await asyncio.sleep(seconds / 10)
        memory.append(resident(pid))
        if kill and tenth == 4:
            kill_a_replica(pid)
    await asyncio.gather(*running)
    for number in range(20):
        await made._whole(number)
    return made, memory


def main(seconds: float, *options: str) -> int:
    """options: of `polydraft serve`."""
    given = [
        "--model",
        "embedded",
        "--max-model-len",
        "1024",
        "--verifier",
        "race",
        "--drafter",
        "model:coupled",
        "--offer",
        "ngram",
        *options,
    ]
    with serving(*given) as server:
        made, memory = asyncio.run(soak(server.url, server.pid, seconds, "--replicas" in options))
    print(", ".join(f"{kind} {count}" for kind, count in made.counts.items()))
    print("memory in MB: " + " ".join(f"{m:.0f}" for m in memory))
    print("\n".join(made.said[:10]))
    return bool(made.counts["lost"] or made.counts["mixed"])


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 600, *sys.argv[2:]))
