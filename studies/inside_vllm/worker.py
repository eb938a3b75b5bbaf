"""A process of its own for vLLM, which trips over modules that this package loads: run as a script, JSON lines in and out.

arguments    a folder with a model, options of `vllm.LLM` as JSON
in           {"prompts": [[ids]], "params": {...} of vLLM's SamplingParams, "seeds": [one a prompt] or null}
out          {"outputs": [[ids]], "seconds", "cpu_seconds", "arrivals", "drafts", "accepted": [by position]}; the first line says that it is ready
"""

import json
import os
import sys
from time import perf_counter, process_time
from typing import Any

CACHE_GIB = 1


def _engine(folder: str, options: dict[str, Any]) -> tuple[Any, Any]:
    os.environ.setdefault(
        "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
    )  # another process could not be timed from here
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(CACHE_GIB))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm  # pyright: ignore[reportMissingImports]

    quiet = {"disable_log_stats": "speculative_config" not in options}
    return vllm, vllm.LLM(model=folder, **quiet, **options)


def _counts(served: Any) -> tuple[int, list[int]]:
    """Drafts so far, and drafted tokens that were accepted, by position."""
    metrics = {metric.name: metric for metric in served.get_metrics()}
    drafts = metrics.get("vllm:spec_decode_num_drafts")
    accepted = metrics.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    return (
        (int(drafts.value), list(accepted.values)) if drafts is not None and accepted is not None else (0, [])
    )


def _run(vllm: Any, served: Any, asked: dict[str, Any]) -> dict[str, Any]:
    engine = served.llm_engine
    prompts = asked["prompts"]
    seeds = asked.get("seeds") or [None] * len(prompts)
    params = [
        vllm.SamplingParams(ignore_eos=True, detokenize=False, seed=seed, **asked["params"]) for seed in seeds
    ]
    counted = served.llm_engine.log_stats
    drafts, accepted = _counts(served) if counted else (0, [])
    cpu = process_time()
    start = perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params[i])
    arrivals: list[float] = []
    done: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        outputs = engine.step()
        arrivals.append(perf_counter() - start)
        done |= {o.request_id: list(o.outputs[0].token_ids) for o in outputs if o.finished}
    seconds = perf_counter() - start
    cpu_seconds = process_time() - cpu
    ids = [done[name] for name in sorted(done, key=lambda name: int(name.partition("-")[0]))]
    if counted:
        now, by_position = _counts(served)
        accepted = [b - (accepted[i] if i < len(accepted) else 0) for i, b in enumerate(by_position)]
        drafts = now - drafts
    return {
        "outputs": ids,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "arrivals": arrivals,
        "drafts": drafts,
        "accepted": accepted,
    }


def main() -> None:
    """Serve lines until standard input ends."""
    lines = sys.stdout
    sys.stdout = sys.stderr  # whatever libraries print must not disturb the answers
    vllm, served = _engine(sys.argv[1], json.loads(sys.argv[2]))
    print(json.dumps("ready"), file=lines, flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(vllm, served, json.loads(line))), file=lines, flush=True)


if __name__ == "__main__":
    main()
