"""vLLM as a contender, in a process of its own, on a folder that is written here from a transformers model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from polydraft.bench.compare import Contender, Prompts, Run
from polydraft.core import SamplingParams
from polydraft.errors import IncompatibleError

WORKER = Path(__file__).with_name("vllm_worker.py")


class VLLM:
    """Plain decoding by vLLM, driven and timed step by step by `vllm_worker`.

    model, tokenizer: saved into `folder` first.  graphs: whether it may capture some, on a GPU.

    Raises:
        IncompatibleError: it did not start; with the last lines of its log.
    """

    def __init__(
        self, model: Any, tokenizer: Any, folder: Path, *, batch_size: int = 1, dtype: str = "float32", graphs: bool = False
    ) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        length = str(model.config.max_position_embeddings)
        self._log = folder / "vllm.log"
        with self._log.open("w") as log:
            command = [sys.executable, "-I", str(WORKER), str(folder), length, str(batch_size), dtype, str(int(graphs))]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder
            )
        self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = " ".join(self._log.read_text(errors="replace").splitlines()[-3:])
            raise IncompatibleError(f"vLLM ended before it answered: {tail[-300:]}")
        return json.loads(line)

    def contender(self, name: str, temperature: float) -> Contender:
        """As a contender."""

        def generate(prompts: Prompts, params: SamplingParams) -> Run:
            assert self._process.stdin is not None
            asked = {"prompts": [list(p) for p in prompts], "temperature": temperature}
            self._process.stdin.write(json.dumps({**asked, "max_tokens": params.max_tokens, "seed": params.seed}) + "\n")
            self._process.stdin.flush()
            return Run(**self._read())

        return Contender(name, None, None, temperature, generate)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
