"""llama.cpp as a contender, through the `xllamacpp` wheel."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from polydraft.bench.compare import Contender, Prompts, Run, Timer
from polydraft.core import SamplingParams
from polydraft.errors import IncompatibleError
from polydraft.models.torch.door import logits_of_text
from polydraft.sampling.softmax import log_softmax


class LlamaCpp:
    """A llama.cpp server inside this process. server: as `xllamacpp` has it.

    model, draft: GGUF files; with a draft it speculates with the given number of drafted tokens.
    lookup: or by a type of its speculation that needs no draft, such as "NGRAM_SIMPLE".
    parallel, context: sequences at a time, and tokens of all their places; 0 is the model's.
    exact: float32 keys and values without flash attention, which computes in float16; else its own defaults.
    """

    def __init__(
        self,
        model: Path,
        draft: Path | None = None,
        *,
        lookup: str | None = None,
        exact: bool = True,
        num_threads: int = 1,
        draft_length: int = 4,
        parallel: int = 1,
        context: int = 0,
    ) -> None:
        import xllamacpp as engine

        xllamacpp: Any = engine
        self.drafter = "model" if draft is not None else lookup
        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_ctx = context
        params.n_parallel = parallel
        params.n_gpu_layers = 0
        params.verbosity = -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
        if exact:
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        if lookup is not None:
            params.speculative.types = [
                xllamacpp.common_speculative_type[f"COMMON_SPECULATIVE_TYPE_{lookup}"]
            ]
        if draft is not None:
            chosen = params.speculative.draft
            chosen.mparams.path = str(draft)
            chosen.n_max = draft_length
            chosen.cpuparams.n_threads = chosen.cpuparams_batch.n_threads = num_threads
            params.speculative.types = [
                xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE
            ]
        self.server = xllamacpp.Server(params)

    def request(self, prompt: list[int], params: SamplingParams, **more: Any) -> dict[str, Any]:
        """Body of a completion."""
        return {
            "prompt": prompt,
            "n_predict": params.max_tokens,
            "temperature": params.temperature,
            "samplers": ["temperature"],
            "seed": (params.seed or 0) % 2**32,
            "ignore_eos": True,
            "cache_prompt": False,
            **more,
        }

    def stream(self, prompt: list[int], params: SamplingParams, arrive: Callable[[], None]) -> str:
        """Continue a prompt; `arrive` is called at each token. Returns the text."""
        pieces: list[str] = []

        def deliver(answer: dict[str, Any]) -> None:
            if answer["choices"][0]["finish_reason"] is None:
                arrive()
            pieces.append(answer["choices"][0]["text"])

        self.server.handle_completions(self.request(prompt, params, stream=True), deliver)
        return "".join(pieces)

    def check_logits(self, judge: Any, prompt: list[int]) -> float:
        """Largest difference of log-probabilities to transformers after a prompt.

        Raises:
            IncompatibleError: it is too large for the same model.
        """
        size = int(judge.config.vocab_size)
        request_body = self.request(prompt, SamplingParams(temperature=0, max_tokens=1), n_probs=size)
        answer = self.server.handle_completions(request_body)
        top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        ours = log_softmax(logits_of_text(judge, prompt))[-1]
        worst = max(
            abs(entry["logprob"] - float(ours[entry["id"]])) for entry in top if entry["logprob"] > -20
        )
        if worst > 1e-3:  # not the same model
            raise IncompatibleError(
                f"llama.cpp's log-probabilities differ from transformers' by {worst:.2g} on the same prompt."
            )
        return worst

    def contender(self, name: str, temperature: float) -> Contender:
        """As a contender. Token ids come only with log-probabilities: the same seed is asked again outside the timed call."""

        def generate(prompts: Prompts, params: SamplingParams) -> Run:
            if len(prompts) != 1:
                raise IncompatibleError("llama.cpp is measured with one sequence at a time; use --batch 1.")
            prompt = list(prompts[0])
            timer = Timer()
            text = self.stream(prompt, params, timer.arrive)
            timed = timer.run([])
            again = self.server.handle_completions(self.request(prompt, params, n_probs=1))["choices"][0]
            if again["text"] != text:
                raise IncompatibleError(
                    "llama.cpp gave another text for the same seed; its tokens cannot be checked."
                )
            return replace(timed, outputs=[[entry["id"] for entry in again["logprobs"]["content"]]])

        return Contender(name, self.drafter, None, temperature, generate)
