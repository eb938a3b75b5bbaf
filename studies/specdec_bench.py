"""`python -m studies.specdec_bench FOLDER -- OPTIONS`: NVIDIA's client `specdec_bench`, unchanged, runs this engine.

FOLDER is `examples/specdec_bench` of NVIDIA's Model-Optimizer; behind `--` stand options of its `run.py`. Its list of engines is closed: this one takes the
place of `--engine VLLM`, whose names of limits are those used here. The client makes its own figures from tokens step by step; the engine's own follow them.

    python -m studies.specdec_bench FOLDER -- --engine VLLM --model_dir a.gguf --tokenizer FOLDER_OF_THE_TOKENIZER \\
        --specbench question.jsonl --num_requests 8 --output_length 64 --tp_size 1 --save_dir build/specdec

`--speculative_algorithm` chooses the drafter, `--draft_length` its depth, as for other engines; a head that comes with the package needs no `--draft_model_dir`. Further
fields of `Engine.from_pretrained` stand under `engine_args` of `--runtime_params`: `drafter: auto` leaves drafter and depth to the engine.
"""

import asyncio
import runpy
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from polydraft import AsyncEngine, Engine, SamplingParams
from polydraft.engine.stats import RequestStats

DRAFTERS: dict[str, str | None] = {
    "DRAFT_TARGET": "model",
    "NGRAM": "ngram",
    "EAGLE": "eagle",
    "EAGLE3": "eagle",
    "MTP": "mtp",
    "DFLASH": "block",
    "NONE": None,
}
"""Drafter by the client's name of an algorithm."""
OF_OTHERS = (
    "trust_remote_code",
    "tensor_parallel_size",
    "moe_expert_parallel_size",
    "speculative_num_draft_tokens",
    "tokenizer_path",
)
"""What the client tells every engine, and this one has no use for."""


class PolydraftModel:
    """An engine as the client's `models.base.Model` has them.

    model_dir: a folder, a file, or a name of `polydraft models`.  max_concurrent_requests: that share forward passes.
    sampling_kwargs: `temperature`, `top_p`, `top_k`.  options: of the client's `run.py`, and fields of `Engine.from_pretrained`.
    stats: of every request, in the order of their ends.
    """

    def __init__(
        self, model_dir: str, max_concurrent_requests: int, sampling_kwargs: dict[str, Any], **options: Any
    ) -> None:
        self.stats = list[RequestStats]()
        self._sampling = sampling_kwargs
        self._fields = engine_fields(options)
        engine = Engine.from_pretrained(model_dir, max_num_seqs=max_concurrent_requests, **self._fields)
        self._engine = AsyncEngine(engine)

    async def run(
        self, prompt_ids: Sequence[int], max_length: int, end_id: int, request_id: int, turn_id: int
    ) -> dict[str, Any]:
        """Tokens of each step, and when each came, behind the time of the request. end_id: left out at the end; -1 goes on behind any."""
        if not self._engine.running:
            await self._engine.__aenter__()
        stops = () if end_id == -1 else (end_id,)
        params = SamplingParams(
            max_tokens=max_length, ignore_eos=not stops, stop_token_ids=stops, **self._sampling
        )
        steps = list[list[int]]()
        times = [perf_counter()]
        async for output in self._engine.stream(list(prompt_ids), params):
            tokens = [token for token in output.token_ids if token != end_id]
            if tokens:
                steps.append(tokens)
                times.append(perf_counter())
            if output.finished:
                self.stats.append(output.sample.stats)
        return {"output_ids": [steps], "output_logits": None, "token_times": times}

    def get_serving_config(self) -> dict[str, Any]:
        """Fields of the engine."""
        return {name: str(value) for name, value in self._fields.items()}

    def stop(self) -> None:
        """End the engine's thread."""
        asyncio.run(self._engine.close())


def engine_fields(options: dict[str, Any]) -> dict[str, Any]:
    """Fields of an engine, from what the client tells every engine and what its parameters add.

    Example:
        >>> engine_fields({"speculative_algorithm": "NGRAM", "speculative_num_steps": 3, "draft_model_dir": None, "threads": 1})
        {'threads': 1, 'drafter': 'ngram', 'depth': 3}
    """
    fields = {name: value for name, value in options.items() if name not in OF_OTHERS and value is not None}
    algorithm = fields.pop("speculative_algorithm", "NONE")
    depth = fields.pop("speculative_num_steps", None)
    folder = fields.pop("draft_model_dir", None)
    if "drafter" not in fields:
        fields["drafter"] = DRAFTERS[algorithm]
        if depth is not None and algorithm != "NONE":
            fields["depth"] = depth
    if folder is not None:
        fields["draft_model" if algorithm == "DRAFT_TARGET" else "head"] = folder
    return fields


def told(stats: Sequence[RequestStats]) -> str:
    """The engine's own counts of all requests."""
    tokens = sum(each.generated_tokens for each in stats)
    steps = sum(each.steps for each in stats)
    drafted = sum(each.drafted_tokens for each in stats)
    accepted = sum(each.accepted_tokens for each in stats)
    return f"polydraft: {tokens} tokens in {steps} steps, {drafted} drafted, {accepted} accepted"


def main(
    folder: Annotated[Path, typer.Argument(help="examples/specdec_bench of Model-Optimizer.")],
    options: Annotated[list[str], typer.Argument(help="Of its run.py, behind --.")],
) -> None:
    """The client's figures, then the engine's own counts."""
    sys.path.insert(0, str(folder))
    models: Any = import_module("specdec_bench.models")
    made = list[PolydraftModel]()

    def build(*arguments: Any, **named: Any) -> PolydraftModel:
        made.append(PolydraftModel(*arguments, **named))
        return made[-1]

    models.VLLMModel = build
    sys.argv = [str(folder / "run.py"), *options]
    runpy.run_path(sys.argv[0], run_name="__main__")
    for model in made:
        model.stop()
        print(told(model.stats))


if __name__ == "__main__":
    typer.run(main)
