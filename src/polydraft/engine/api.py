"""The faces of the engine: build it from models by name, generate, stream."""

import secrets
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any

from typing_extensions import Unpack

from polydraft.config import EngineConfig, SpeculationConfig
from polydraft.core import Budget, EncoderDecoder, NamedDecoding, Request, SamplingParams, Target
from polydraft.core.params import CHAT_DEFAULTS, MOST_SAMPLES
from polydraft.drafters.base import Parts
from polydraft.engine.encoding import Prompt, PromptEncoding, as_list, check_params
from polydraft.engine.fields import EngineFields, SpeculationFields
from polydraft.engine.output import Inbox, StepOutput
from polydraft.engine.parts import check_encoders, check_step, decoding, slots
from polydraft.engine.plan import Plan, with_several
from polydraft.engine.pretrained import load_models
from polydraft.engine.sequence import Result, Sample
from polydraft.engine.signatures import with_fields
from polydraft.engine.speculation import CompileDrafts, Menu
from polydraft.errors import InvalidInputError
from polydraft.heads.finding import located_head
from polydraft.models import pair
from polydraft.models.memory import default_prefix_cache_bytes
from polydraft.models.prefix_cache import PrefixCache, can_store, shares
from polydraft.models.store.store import sampling_defaults
from polydraft.numerics.start_code import StartCode


class Engine(PromptEncoding):
    """A target model made faster by drafts, with the same output distribution.

    Make it with `from_pretrained`, `embedded` or `of`; use `generate` and `stream`, or `add_request` and `step`.

    Example:
        >>> engine = Engine.embedded()
        >>> result = engine.generate("def add(a, b):\\n", SamplingParams(temperature=0, max_tokens=8))[0]
        >>> result.finish_reason, result.stats.generated_tokens
        ('length', 8)
    """

    _ids = count()
    sampling_defaults: Mapping[str, Any] = MappingProxyType({})
    """Fields of `SamplingParams` that the target's authors set."""

    @classmethod
    @with_fields(EngineConfig, EngineFields)
    def from_pretrained(cls, model: str | Path | None = None, **fields: Unpack[EngineFields]) -> "Engine":
        """An engine on models by name: folders, GGUF files, names of `polydraft models list`, or `OWNER/NAME` of the Hugging Face hub.

        model: the target model; None is the embedded pair.
        fields: of `polydraft.config.EngineConfig`, such as draft_model="...", depth=4 and quantization="int8"; the reference page lists all.
        The KV cache entries of finished requests stay for requests with the same prefix, such as the next turn of a chat.

        Target and draft model have the same vocabulary, and are both causal models or both encoder-decoders (T5, BART, Marian), whose source the
        prompt is; the drafters "tli" and "slem" take any two. A target that takes no drafts is
        decoded plainly and a warning says why; a drafter that is named is refused for it.
        A request that names a seed is decided from it and from its own steps, so that its text depends on nothing else that runs.

        Raises:
            ModelLoadError, IncompatibleError, CapacityError, UnknownNameError, InvalidInputError: each says what to do.
        """
        return cls.from_config(EngineConfig.of(model=model, **fields))

    @classmethod
    @with_fields(EngineConfig, EngineFields)
    def embedded(cls, **fields: Unpack[EngineFields]) -> "Engine":
        """An engine on the pair of small models inside the package; fields as in `from_pretrained`."""
        fields.setdefault("draft_model", str(pair.draft_folder()))
        return cls.from_pretrained(pair.target_folder(), **fields)

    @classmethod
    def from_config(
        cls, config: EngineConfig, *, measured: bool = False, compile_drafts: CompileDrafts | None = None
    ) -> "Engine":
        """An engine on models by name; without a target on the embedded pair. measured, compile_drafts: see `of`."""
        if config.model in (None, pair.EMBEDDED):
            config = config.with_(
                model=str(pair.target_folder()), draft_model=config.draft_model or str(pair.draft_folder())
            )
        config = with_several(config)
        if isinstance(config.head, (str, Path)):
            config = config.with_(head=located_head(config.head, config.model))
        plan = Plan.of(config)
        code = StartCode(plan.kind)
        code.load()
        models = load_models(plan)
        cache_bytes = config.prefix_cache_bytes
        speculation: dict[str, Any] = config.part(SpeculationConfig) | {
            "amateur": None,
            "alpha": None,
            "beta": None,
            "decoding_options": models.decoding_options,
        }
        build = partial(
            cls.of,
            models.target,
            tokenizer=models.tokenizer,
            draft_model=models.draft,
            draft_tokenizer=models.draft_tokenizer,
            tie_margin=config.tie_margin,
            keep_prefixes=True,
            prefix_cache_bytes=default_prefix_cache_bytes() if cache_bytes is None else cache_bytes,
            sampling_defaults=sampling_defaults(str(config.model)),
            measured=measured,
            compile_drafts=compile_drafts,
        )
        engine = models.build(partial(build, **speculation))
        engine.start_code = code
        engine.prefix_cache_file = config.prefix_cache_file
        if config.prefix_cache_file is not None and Path(config.prefix_cache_file).exists():
            engine.load_prefixes(config.prefix_cache_file)
        return engine

    @classmethod
    @with_fields(SpeculationConfig, SpeculationFields)
    def of(
        cls,
        target: Target,
        *,
        tokenizer: Any = None,
        draft_model: Target | None = None,
        draft_tokenizer: Any = None,
        eos_token_ids: Seq[int] | None = None,
        tie_margin: float | None = None,
        keep_prefixes: bool = False,
        prefix_cache_bytes: int = 0,
        sampling_defaults: Mapping[str, Any] | None = None,
        measured: bool = True,
        compile_drafts: CompileDrafts | None = None,
        **fields: Unpack[SpeculationFields],
    ) -> "Engine":
        """An engine from objects that are already there; see `Loop` for `keep_prefixes` and `prefix_cache_bytes`.

        eos_token_ids: ids that end a text; default the target's, else that of the tokenizer.
        sampling_defaults: fields of `SamplingParams` for requests that name none, see `default_params`.
        measured: whether costs that are missing are measured at once, for speeds that are to be reported; else by `measure`, and before the first request
            whose text depends on them: with a seed above temperature 0.
        compile_drafts: begins to compile, in another process, what drafts call, and returns whether that still goes on; None where there is nothing to
            compile. Meanwhile requests are decoded plainly, but for those whose text depends on their drafts, which wait: with a seed above
            temperature 0, or a budget of their own.
        fields: of `polydraft.config.SpeculationConfig`.
        """
        config = SpeculationConfig.of(**fields)
        eos = _end_ids(target, tokenizer) if eos_token_ids is None else tuple(eos_token_ids)
        parts = Parts(target, draft_model, tokenizer, eos, draft_tokenizer)
        parts = replace(parts, decoding=decoding(config.decoding, parts, config.all_decoding_options))
        check_encoders(parts)
        cache: dict[str, Any] = {"keep_prefixes": keep_prefixes, "prefix_cache_bytes": prefix_cache_bytes}
        if keep_prefixes and draft_model is not parts.second_model and can_store(draft_model):
            cache["prefix_cache_bytes"], draft_bytes = shares(prefix_cache_bytes, target, draft_model)
            parts.draft_slots.prefix_cache = PrefixCache(draft_model, draft_bytes)
        menu = Menu.of(config, parts, compile_drafts)
        max_step = inf if config.max_step_ms is None else 1e-3 * config.max_step_ms
        options: dict[str, Any] = {
            "tie_margin": tie_margin,
            "decoding": parts.decoding,
            "max_step": max_step,
            **cache,
        }
        engine = cls(target, menu, tokenizer=tokenizer, eos_token_ids=eos, **options)
        engine.sampling_defaults = dict(sampling_defaults or {})
        engine.draft_slots = None if draft_model is None else parts.draft_slots
        if max_step < inf:
            check_step(target, engine._seats.slots, max_step)
        if measured:
            engine.measure()
        return engine

    def summary(self) -> dict[str, Any]:
        """What was built: models, limits, cache bytes, drafter, verifier."""
        drafter = self.drafter
        return {
            "target": self.model_name,
            "backend": type(self.target).__name__,
            "weight_format": self.target.weight_format,
            "quantization_error": self.target.quantization_error,
            "activations": self.target.activations,
            "rounded_again": {name: sorted(formats) for name, formats in self.target.rounded_again.items()},
            "max_model_len": self.target.max_model_len,
            "max_num_seqs": self.target.max_num_seqs // slots(self.decoding),
            "cache_bytes": self.target.cache_bytes or None,
            "cache_grows": self.target.cache_grows,
            "drafter": None if drafter is None else drafter.info.name,
            "draft": None if drafter is None else drafter.info.title,
            "drafters": self.menu.names,
            "verifier": self.verifier.info.name,
            "lossless": self.verifier.info.lossless,
            "decoding": self.lossless_to,
        }

    @property
    def lossless_to(self) -> str:
        """The distribution that outputs follow with a lossless verifier, in words."""
        if self.decoding is None:
            return "the target distribution"
        if isinstance(self.decoding, NamedDecoding):
            return self.decoding.info.lossless_to
        return f"the decoding method {type(self.decoding).__name__}"

    def default_params(self, *, chat: bool = False) -> SamplingParams:
        """Sampling parameters of requests that name none: what the model's authors set, and for chats else temperature 0.7 and top-p 0.95.

        Example:
            >>> Engine.embedded().default_params(chat=True).temperature
            0.7
        """
        return SamplingParams(**{**(CHAT_DEFAULTS if chat else {}), **self.sampling_defaults})

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        index: int = 0,
        outputs: Inbox | None = None,
        budget: Budget | None = None,
        drafter: str | None = None,
        verifier: str | None = None,
        prediction: Seq[int] = (),
        seed: int | None = None,
    ) -> Result:
        """Queue all samples of a prompt, from any thread; the returned result fills as they run.

        seed: of its noise where `params` name none: drafts are decided as for any request without a seed.

        outputs: is given what steps give them, in the thread that steps, until it is forgotten.
        budget, drafter, verifier, prediction: see `core.Request`.
        """
        check_params(params)
        ids = self.encode(prompt)
        output_prompt, source = tuple(ids), ()
        if isinstance(self.target, EncoderDecoder):
            output_prompt, source = self.target.decoder_prompt, output_prompt
        seed = next(x for x in (params.seed, seed, secrets.randbits(63)) if x is not None)
        name = f"request-{next(self._ids)}"
        samples: list[Sample] = []
        if outputs is not None:
            self._outbox.streams[name] = outputs
        try:
            for sample in range(params.n):
                request = Request(
                    name,
                    output_prompt,
                    params,
                    seed,
                    MOST_SAMPLES * index + sample,
                    budget=budget,
                    drafter=drafter,
                    verifier=verifier,
                    source_token_ids=source,
                    prediction_token_ids=tuple(prediction),
                )
                samples.append(self.add_request(request))
        except BaseException:
            self._outbox.streams.pop(name, None)
            self.discard([name])
            raise
        lossless = self.menu.find(drafter, verifier).verifier.info.lossless
        return Result(
            name, prompt if isinstance(prompt, str) else None, ids, samples, lossless, index, self.lossless_to
        )

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        progress: bool = False,
        first_index: int = 0,
    ) -> list[Result]:
        """Continue one prompt or many; results in the order of the prompts.

        params: one for all, or one each; default `default_params()`.  progress: show a bar on the terminal.
        first_index: number of the first prompt. Sample j of prompt i draws with (seed, j, i), so that prompts with one seed are independent;
            a part of a call is repeated alone by its number there, see `Result.index`.
        If it is interrupted, the requests of this call are aborted and the engine stays usable.
        """
        results: list[Result] = []
        try:
            for index, prompt, prompt_params in self.numbered(prompts, params, first_index):
                results.append(self.submit(prompt, prompt_params, index))
            self._run(results, progress)
        finally:
            self.discard(r.id for r in results if any(s.finish_reason is None for s in r.samples))
        return results

    def numbered(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None,
        first_index: int = 0,
    ) -> list[tuple[int, Prompt, SamplingParams]]:
        """Each prompt of a call with its number and its parameters; arguments and errors as of `generate`."""
        prompt_list = as_list(prompts)
        params_list = (
            list(params)
            if isinstance(params, Seq)
            else [self.default_params() if params is None else params] * len(prompt_list)
        )
        if len(params_list) != len(prompt_list):
            raise InvalidInputError(
                f"{len(prompt_list)} prompts and {len(params_list)} params were given; expected one for all or one each."
            )
        if not 0 <= first_index <= MOST_SAMPLES - len(prompt_list):
            raise InvalidInputError(
                f"first_index={first_index} and {len(prompt_list)} prompts were given; expected numbers of prompts in [0, {MOST_SAMPLES}). Split the call."
            )
        for prompt_params in params_list:
            check_params(prompt_params)
        indices = range(first_index, first_index + len(prompt_list))
        return list(zip(indices, prompt_list, params_list, strict=True))

    def _run(self, results: list[Result], progress: bool) -> None:
        waiting = deque(sample for result in results for sample in result.samples)
        with _bar(len(waiting)) if progress else nullcontext(lambda: None) as advance:
            while waiting:
                if waiting[0].finish_reason is None:
                    self.step()
                else:
                    waiting.popleft()
                    advance()

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[StepOutput, None, None]:
        """Yield what each step emits for one prompt, whoever calls the step; closing the iterator aborts the request."""
        outputs = deque[StepOutput]()
        result = self.submit(prompt, self.default_params() if params is None else params, outputs=outputs)
        unfinished = len(result.samples)
        try:
            while unfinished > 0:
                if not outputs:
                    self.step()
                while outputs:
                    output = outputs.popleft()
                    unfinished -= output.finished
                    yield output
        finally:
            self.forget(result.id)
            if unfinished > 0:
                self.discard([result.id])

    def forget(self, request_id: str) -> None:
        """Give no more outputs to the inbox of a request; it runs on."""
        self._outbox.streams.pop(request_id, None)

    def chat(self, messages: Seq[Mapping[str, Any]], params: SamplingParams | None = None) -> Result:
        """The model's answer to a conversation; `stream(engine.encode_chat(messages))` gives it piece by piece.

        messages, errors: see `encode_chat`.  params: default `default_params(chat=True)`.  The text is in `result.text`; append it as the assistant's to go on.
        """
        return self.generate(
            [self.encode_chat(messages)], self.default_params(chat=True) if params is None else params
        )[0]


@contextmanager
def _bar(total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on the terminal, which each call of what is yielded moves by one."""
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        task = bar.add_task("generating", total=total)
        yield lambda: bar.advance(task)


def _end_ids(target: Target, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a text: the target's, or where its files name none that of the tokenizer."""
    end = getattr(tokenizer, "eos_token_id", None)
    return tuple(target.eos_token_ids) or (() if end is None or end >= target.vocab_size else (end,))
