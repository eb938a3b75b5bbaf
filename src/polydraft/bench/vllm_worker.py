"""A process of its own for vLLM, which trips over modules that this package loads: run as a script, JSON lines in and out.

in    {"prompts": [[ids]], "temperature", "max_tokens", "seed"}
out   {"outputs": [[ids]], "seconds", "cpu_seconds", "arrivals"}; the first line says that it is ready
"""

import json
import os
import sys
from time import perf_counter, process_time
from typing import Any

CACHE_GIB = 1


def _engine(folder: str, max_model_len: int, batch_size: int, dtype: str, graphs: bool) -> tuple[Any, Any]:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # another process could not be timed from here
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(CACHE_GIB))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm  # pyright: ignore[reportMissingImports]

    served = vllm.LLM(
        model=folder,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=batch_size,
        enforce_eager=not graphs,
        disable_log_stats=True,
    )
    return vllm, served.llm_engine


def _run(vllm: Any, engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
    wanted = vllm.SamplingParams(
        temperature=asked["temperature"], max_tokens=asked["max_tokens"], seed=asked["seed"], ignore_eos=True, detokenize=False
    )
    cpu, start = process_time(), perf_counter()
    for i, prompt in enumerate(asked["prompts"]):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, wanted)
    arrivals: list[float] = []
    done: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        outputs = engine.step()
        arrivals.append(perf_counter() - start)
        done |= {o.request_id: list(o.outputs[0].token_ids) for o in outputs if o.finished}
    seconds, cpu_seconds = perf_counter() - start, process_time() - cpu
    ids = [done[name] for name in sorted(done, key=lambda name: int(name.partition("-")[0]))]
    return {"outputs": ids, "seconds": seconds, "cpu_seconds": cpu_seconds, "arrivals": arrivals}


def main() -> None:
    """Serve lines until standard input ends."""
    lines, sys.stdout = sys.stdout, sys.stderr  # whatever libraries print must not disturb the answers
    vllm, engine = _engine(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5] == "1")
    print(json.dumps("ready"), file=lines, flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(vllm, engine, json.loads(line))), file=lines, flush=True)


if __name__ == "__main__":
    main()
