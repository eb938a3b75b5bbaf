"""`generate` of transformers as contenders: plain, assisted by a draft model, and prompt lookup."""

from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from polydraft.bench.compare import Contender, Prompts, Run, Timer
from polydraft.core import SamplingParams


class _Arrivals(BaseStreamer):
    """Tells a timer of each delivery; the first one is the prompt itself."""

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self._prompt = True

    def put(self, value: Any) -> None:
        if not self._prompt:
            self._timer.arrive()
        self._prompt = False

    def end(self) -> None:
        pass


def _padded(prompts: Prompts) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def transformers_contender(
    model: Any, temperature: float, *, name: str = "transformers", drafter: str | None = None, **options: Any
) -> Contender:
    """`generate` of a transformers model; torch's global generator is put back afterwards.

    options: more for `generate`, such as assistant_model=..., prompt_lookup_num_tokens=... or cache_implementation=...; drafter: what they amount to.
    """

    def generate(prompts: Prompts, params: SamplingParams) -> Run:
        ids, mask = (x.to(model.device) for x in _padded(prompts))
        how = (
            {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            if temperature
            else {"do_sample": False}
        )
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(params.seed or 0)
            timer = Timer()
            streamer = {"streamer": _Arrivals(timer)} if len(prompts) == 1 else {}
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=params.max_tokens,
                eos_token_id=None,
                pad_token_id=0,
                **how,
                **streamer,
                **options,
            )
            return timer.run(out[:, ids.shape[1] :].tolist())

    return Contender(name, drafter, None, temperature, generate)
