"""Inside transformers: `model.generate(**inputs, custom_generate=polydraft.custom_generate(draft_model=small_model))`.

`generate` prepares inputs, logits processors and stopping criteria as always; only its decoding loop is replaced. Every logits
processor sees every drafted node with the node's own text, so the output has the distribution of plain `generate`, and at
`do_sample=False` its tokens.

Rows advance by different numbers of tokens, so processors and criteria are called with single rows of text. One whose answer
for a row depends on the other rows or on earlier calls is found out at the first step and refused by name.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from polydraft.core import Drafter, Request, SamplingParams, Target, Verifier
from polydraft.core.cursor import Cursor
from polydraft.engine import drafter_state, reading
from polydraft.engine.api import Engine
from polydraft.engine.sequence import Sample
from polydraft.engine.sequence import Sequence as Running
from polydraft.engine.stats import RequestStats
from polydraft.engine.step import Stepper
from polydraft.engine.stopping import Stopper
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.integrations.transformers_distribution import ByRow, ProcessedDistribution, refused
from polydraft.models.load import load_model
from polydraft.models.supported import check_rolls_back
from polydraft.models.torch.hf import HFTarget
from polydraft.models.torch.module import load_config

NEUTRAL: dict[str, tuple[object, ...]] = {
    "num_beams": (1, None),
    "num_beam_groups": (1, None),
    "penalty_alpha": (0, None),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "cache_implementation": (None, "dynamic"),
    "output_attentions": (False, None),
    "output_hidden_states": (False, None),
}
"""Options of the generation config that cannot be honoured, with the values that mean "off"."""
OTHERWISE = "or call generate without custom_generate."
PREPARED = (
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "cache_position",
)
"""What `generate` itself hands to a decoding loop."""


def _check_config(config: Any) -> None:
    for name, off in NEUTRAL.items():
        value = getattr(config, name, None)
        if value not in off:
            raise refused(name, value, f"It is not supported here; leave it at {off[0]!r}, {OTHERWISE}")


def _check_inputs(model_kwargs: dict[str, Any]) -> None:
    extra = [name for name, value in model_kwargs.items() if name not in PREPARED and value is not None]
    if extra:
        raise refused(extra[0], "...", f"Trees are scored by token ids only; leave it out, {OTHERWISE}")
    past = model_kwargs.get("past_key_values")
    if past is not None and past.get_seq_length():
        raise refused(
            "past_key_values",
            type(past).__name__,
            "The cache is polydraft's own; give the whole text as input_ids.",
        )


class _Row:
    """One row of the batch: what it was given, what it emitted, and the scores collected on the way."""

    def __init__(
        self,
        number: int,
        input_ids: Int[Tensor, " L"],
        real: Bool[Tensor, " L"],
        params: SamplingParams,
        seed: int,
    ) -> None:
        if not real.any() or not real[int(real.int().argmax()) :].all():
            raise InvalidInputError(
                f"attention_mask has {int(real.sum())} ones, not all at the end, in row {number}; expected left padding: zeros, then "
                "ones. Set tokenizer.padding_side = 'left'."
            )
        self.number = number
        self.ids = input_ids.tolist()
        self.padding = input_ids[~real].tolist()
        text = tuple(input_ids[real].tolist())
        request = Request(f"row-{number}", text, params, seed, number)
        stopper = Stopper(None, text, stop_ids=frozenset(), stop_strings=(), max_tokens=1 << 62)
        self.sequence = Running(request, stopper, Sample(number, seed), list(text))
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []
        self.finished = False


class CustomGenerate:
    """A decoding loop for `generate`; make it with `custom_generate`.

    stats: of the last call, one for each row: forward passes of the model, drafted and accepted tokens, seconds by phase.
    """

    def __init__(self, draft: Any, **options: Any) -> None:
        if isinstance(draft, str):
            load_config(draft)  # refused here, before `generate` runs
        elif draft is not None and not isinstance(draft, PreTrainedModel):
            raise InvalidInputError(
                f"draft_model={draft!r} was given; expected a smaller model of transformers, its folder, or None to copy earlier text."
            )
        self._draft = draft
        self._options = options
        self._model: Any = None
        self._engine: Engine | None = None
        self.stats: list[RequestStats] = []

    def __call__(
        self,
        model: Any,
        input_ids: Int[Tensor, "B L"],
        logits_processor: LogitsProcessorList,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """What `generate` calls; arguments and result as those of its own loops."""
        check_rolls_back(model.config, generation_config.max_length, model)
        _check_config(generation_config)
        _check_inputs(model_kwargs)
        streamer = self._streamer(streamer, len(input_ids))
        mask = model_kwargs.get("attention_mask")
        real = torch.ones_like(input_ids) if mask is None else mask
        engine = self._engine_for(model, len(input_ids), generation_config.max_length)
        run = _Run(engine, input_ids, real.bool(), logits_processor, stopping_criteria, generation_config)
        try:
            run.start()
            while run.live:
                for token in run.step():
                    if streamer is not None:
                        streamer.put(torch.tensor([token]))
        finally:
            run.release()
        self.stats = [row.sequence.sample.stats for row in run.rows]
        if streamer is not None:
            streamer.end()
        return run.output()

    def _streamer(self, streamer: Any, num_texts: int) -> Any:
        """The streamer, which `generate` may have been given alone; refuses what it was given that is not served here."""
        arguments = _arguments_of_generate(self)
        streamer = streamer if streamer is not None else arguments.get("streamer")
        for option in ("assistant_model", "synced_gpus"):
            if arguments.get(option):
                advice = "Give the draft to custom_generate(draft_model=...), and run on one device."
                raise refused(option, "...", advice)
        if streamer is not None and num_texts > 1:
            advice = f"It takes one text and {num_texts} were given; stream them one by one."
            raise refused("streamer", type(streamer).__name__, advice)
        return streamer

    def _engine_for(self, model: Any, num_rows: int, max_length: int) -> Engine:
        """The engine of the last call if it serves this one too; it holds no weights of its own, only caches."""
        if self._engine is not None and self._model is model:
            target = self._engine.target
            if num_rows <= target.max_num_seqs and max_length <= target.max_model_len:
                return self._engine
        target = HFTarget(model, max_model_len=max_length, max_num_seqs=num_rows)
        self._engine = Engine.of(target, draft_model=self._small(target), eos_token_ids=(), **self._options)
        self._model = model
        return self._engine

    def _small(self, target: HFTarget) -> Target | None:
        if self._draft is None:
            return None
        sizes: dict[str, Any] = {"max_model_len": target.max_model_len, "max_num_seqs": target.max_num_seqs}
        small = (
            load_model(self._draft, **sizes)
            if isinstance(self._draft, str)
            else HFTarget(self._draft, **sizes)
        )
        if small.vocab_size != target.vocab_size:
            raise IncompatibleError(
                f"draft has {small.vocab_size} rows of logits and the model {target.vocab_size}; expected the same vocabulary. "
                "Use a draft of the same tokenizer, or Engine.from_pretrained(..., drafter='slem') for another one."
            )
        return small


class _Run:
    """One call of `generate`: its rows, the step, and what it returns."""

    def __init__(
        self,
        engine: Engine,
        input_ids: Int[Tensor, "B L"],
        real: Bool[Tensor, "B L"],
        processors: LogitsProcessorList,
        criteria: Any,
        config: Any,
    ) -> None:
        self.engine = engine
        self.criteria = criteria
        self.config = config
        self.device = input_ids.device
        length = input_ids.shape[1]
        by_row = ByRow(processors, input_ids, engine.target.vocab_size)
        params = _draft_params(config, length)
        seeds = torch.randint(2**62, (len(input_ids),)).tolist() if config.do_sample else [0] * len(input_ids)
        self.rows = [_Row(b, input_ids[b], real[b], params, seeds[b]) for b in range(len(input_ids))]
        self.decoding = ProcessedDistribution(
            by_row, [row.padding for row in self.rows], config.do_sample, self.device
        )
        self.stepper = Stepper(engine.target, engine.menu.default, frozenset(), decoding=self.decoding)
        self.keeps_scores = config.return_dict_in_generate and config.output_scores
        self.keeps_logits = config.return_dict_in_generate and config.output_logits

    @property
    def live(self) -> list[_Row]:
        return [row for row in self.rows if not row.finished]

    def start(self) -> None:
        """Fill the caches with all tokens but the last of each row."""
        target = self.engine.target
        drafter = self.engine.drafter
        target.release(range(target.max_num_seqs))
        for slot, row in enumerate(self.rows):
            row.sequence.seat = Cursor(target, slot, row.sequence.num_prompt_tokens - 1)
            row.sequence.drafting = drafter is not None
            row.sequence.speculation = self.engine.menu.default
        reading.read_whole(drafter, [row.sequence for row in self.rows])

    def release(self) -> None:
        """Give all slots back."""
        self.engine.target.release(range(len(self.rows)))
        if self.engine.drafter is not None:
            drafter_state.release(self.engine.drafter, [row.sequence for row in self.rows])
            for row in self.rows:
                drafter_state.teach(self.engine.drafter, row.sequence)

    def step(self) -> list[int]:
        """One step for the rows that are not done; the tokens of the first row."""
        live = self.live
        self.decoding.live = [row.number for row in live]
        done = self.stepper([row.sequence for row in live])
        for _, error in done.failed:
            raise error
        first: list[int] = []
        for b, row in enumerate(live):
            emitted = self._emit(row, done.tokens[b], done.nodes[b], b, done.scores.logits)
            row.sequence.token_ids += emitted
            row.sequence.sample.stats.discard(len(done.tokens[b]) - len(emitted))
            for phase, value in done.seconds.items():
                row.sequence.sample.stats.seconds[phase] += value / len(live)
            first += emitted if row.number == 0 else []
        return first

    def _emit(
        self, row: _Row, tokens: list[int], nodes: list[int], b: int, logits: Float[np.ndarray, "B N V"]
    ) -> list[int]:
        """The block's tokens up to the first that ends the row."""
        emitted: list[int] = []
        processed = self.decoding.scores_of(b, tokens) if self.keeps_scores else []
        for token, node in zip(tokens, nodes, strict=True):
            emitted.append(token)
            row.ids.append(token)
            row.scores += processed[len(emitted) - 1 : len(emitted)]
            row.logits += [torch.from_numpy(logits[b, node].copy())] if self.keeps_logits else []
            scores = tuple(x[None] for x in row.scores) if self.keeps_scores else None
            row.finished = bool(self.criteria(torch.tensor([row.ids], device=self.device), scores).all())
            if row.finished:
                break
        return emitted

    def output(self) -> Any:
        """Texts padded on the right, as a tensor or with scores."""
        pad = getattr(self.config, "_pad_token_tensor", None)
        longest = max(len(row.ids) for row in self.rows)
        fill = 0 if pad is None else int(pad)
        sequences = torch.tensor(
            [row.ids + [fill] * (longest - len(row.ids)) for row in self.rows], device=self.device
        )
        if not self.config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,  # pyright: ignore[reportArgumentType]
            scores=self._by_step([row.scores for row in self.rows], fill),
            logits=self._by_step([row.logits for row in self.rows], fill),
        )

    def _by_step(self, scores_by_row: list[list[Tensor]], fill: int) -> Any:
        """One [B, V] tensor a step, None where nothing was collected; a row that is done has all its mass on padding."""
        if not any(scores_by_row):
            return None
        ended = torch.full_like(scores_by_row[0][0], -torch.inf)
        ended[fill] = 0.0
        steps = range(max(map(len, scores_by_row)))
        return tuple(
            torch.stack([row[i] if i < len(row) else ended for row in scores_by_row]).to(self.device)
            for i in steps
        )


def _draft_params(config: Any, length: int) -> SamplingParams:
    """Sampling parameters for the draft's own distribution: any would be right, these fit best."""
    names = ("temperature", "top_k", "top_p", "min_p") if config.do_sample else ()
    sampling = {
        name: getattr(config, name)
        for name in (*names, "repetition_penalty")
        if getattr(config, name) is not None
    }
    greedy = {} if config.do_sample else {"temperature": 0}
    return SamplingParams(max_tokens=config.max_length - length, ignore_eos=True, **greedy, **sampling)


def _arguments_of_generate(loop: CustomGenerate) -> dict[str, Any]:
    """Arguments of the `generate` that called the loop: transformers 5 does not hand its streamer to a callable."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_locals.get("custom_generate") is loop:
            return frame.f_locals
        frame = frame.f_back
    return {}


def custom_generate(
    draft_model: Any = None,
    *,
    drafter: str | Drafter | None = "auto",
    verifier: str | Verifier = "auto",
    depth: int | None = None,
    num_paths: int | None = None,
) -> Callable[..., Any]:
    """A decoding loop for `model.generate(**inputs, custom_generate=...)`; use it again, as it has its own caches.

    draft_model: a smaller model of transformers with the same vocabulary, or its folder; without one earlier text is copied (n-grams).
    drafter, verifier, depth, num_paths: as for `Engine.from_pretrained`.

    Honoured: all parameters of the generation config that become logits processors or stopping criteria, `do_sample`,
    `max_length`, `max_new_tokens`, `num_return_sequences`, left padding, `return_dict_in_generate` with `output_scores` and
    `output_logits`, streamers (one text), `prefix_allowed_tokens_fn`, `torch.manual_seed`. Others are refused by name.
    Of `stop_strings` transformers 5 loses the tokenizer on the way to a callable: give a `StopStringCriteria` instead.

    Raises:
        InvalidInputError: a draft that is neither a model nor a name.
        ModelLoadError: a folder or name without a model.

    Raises (when `generate` runs):
        IncompatibleError: an option that cannot be honoured, or a processor that looks at other rows or has state.
        ModelLoadError: a model whose cache cannot be rolled back.
        InvalidInputError: right padding, or constraints that leave no token.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model, prompt = LlamaForCausalLM(config).eval(), torch.tensor([[3, 1, 4, 1, 5]])
        >>> ours = model.generate(prompt, max_new_tokens=8, do_sample=False, custom_generate=custom_generate())
        >>> torch.equal(ours, model.generate(prompt, max_new_tokens=8, do_sample=False))
        True
    """
    return CustomGenerate(draft_model, drafter=drafter, verifier=verifier, depth=depth, num_paths=num_paths)
