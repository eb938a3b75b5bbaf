"""vLLM as a contender, in a process of its own, on a folder of transformers."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polydraft.bench.compare import Contender, Prompts, Run
from polydraft.core import SamplingParams
from polydraft.errors import IncompatibleError

WORKER = Path(__file__).with_name("worker.py")


class VLLM:
    """Decoding by vLLM, driven and timed step by step by `worker`.

    folder: of a model and its tokenizer, as `save_pretrained` writes them.  python: that has vLLM.  environment: beside this process's own.
    options: of `vllm.LLM`, such as `speculative_config`.

    Raises:
        IncompatibleError: it did not start; with the last lines of its log.
    """

    def __init__(
        self,
        folder: Path,
        *,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [python, "-I", str(WORKER), str(folder), json.dumps({"enforce_eager": True, **options})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=folder,
            env={**os.environ, **(environment or {})},
        )
        self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            tail = " ".join(self._log.read().splitlines()[-3:])
            raise IncompatibleError(f"vLLM ended before it answered: {tail[-300:]}")
        return json.loads(line)

    def generate(
        self, prompts: Prompts, *, seeds: Sequence[int] | None = None, **params: Any
    ) -> dict[str, Any]:
        """What `worker` answers. params: of vLLM's SamplingParams."""
        assert self._process.stdin is not None
        self._process.stdin.write(
            json.dumps({"prompts": [list(p) for p in prompts], "seeds": seeds, "params": params}) + "\n"
        )
        self._process.stdin.flush()
        return self._read()

    def contender(self, name: str, temperature: float) -> Contender:
        """As a contender."""

        def generate(prompts: Prompts, params: SamplingParams) -> Run:
            seeds = None if params.seed is None else [params.seed] * len(prompts)
            outputs = self.generate(
                prompts, seeds=seeds, temperature=temperature, max_tokens=params.max_tokens
            )
            return Run(**{key: outputs[key] for key in ("outputs", "seconds", "cpu_seconds", "arrivals")})

        return Contender(name, None, None, temperature, generate)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._log.close()
