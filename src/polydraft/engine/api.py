"""The faces of the engine: build it from models by name, generate, stream."""

import operator
import reprlib
import secrets
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import count
from numbers import Integral
from types import MappingProxyType
from typing import Any, cast

from polydraft.core import Budget, Decoding, Drafter, EncoderDecoder, Request, SamplingParams, Target, Verifier
from polydraft.drafters.amusd.drafter import cores
from polydraft.drafters.base import Parts
from polydraft.engine import build
from polydraft.engine.loop import Inbox, Loop
from polydraft.engine.output import StepOutput
from polydraft.engine.sequence import Result, Sample
from polydraft.errors import CapacityError, IncompatibleError, InvalidInputError
from polydraft.models import load, pair
from polydraft.models.defaults import sampling_defaults
from polydraft.models.encoding import Cuts, longest_token, num_bytes, token_ids
from polydraft.models.hub import default_draft
from polydraft.models.memory import default_prefix_cache_bytes
from polydraft.params import CHAT_DEFAULTS, MOST_SAMPLES
from polydraft.policy.fixed import Policy
from polydraft.policy.profile import Profile

__all__ = ["Engine", "Prompt"]

Prompt = str | Seq[int]
"""Text, or token ids."""
LEAST_LONGEST = 8
"""Bytes of the longest token of any vocabulary, at least: texts of fewer bytes for each token of the context are not looked into."""


class Engine(Loop):
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
    def from_pretrained(
        cls,
        target: str,
        *,
        draft: str | None = None,
        drafter: str | Drafter | Seq[str] | None = "auto",
        verifier: str | Verifier = "auto",
        depth: int | None = None,
        num_paths: int | None = None,
        drafter_options: Mapping[str, Any] | None = None,
        policy: Policy | str | None = None,
        profile: str | Profile | None = None,
        dtype: str | None = None,
        device: str | None = None,
        backend: str = "auto",
        quantization: str | None = None,
        draft_quantization: str | None = None,
        activations: str | None = None,
        cache_dtype: str | None = None,
        threads: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        prefix_cache_bytes: int | None = None,
        tie_margin: float | None = None,
        decoding: str | Decoding | None = None,
        decoding_options: Mapping[str, Any] | None = None,
        offered: Seq[str] = (),
        asynchronous: bool = False,
        tensor_parallel: int | None = None,
        device_map: str | Mapping[str, Any] | None = None,
    ) -> "Engine":
        """An engine on models by name: folders, GGUF files, names of `polydraft models list`, or `OWNER/NAME` of the Hugging Face hub.

        What requests have read is kept in their slots for requests that begin alike, such as the next turn of a chat.

        target, draft: causal language models with the same vocabulary (a name of the list may have a draft of its own, which drafts where drafter is "auto" or "model"), or both encoder-decoders (T5, BART, Marian), whose source the prompt is; or with drafter "tli" or "slem" any two. A target whose cache cannot be rolled back (sliding
            window, recurrent, hybrid) is decoded plainly: give drafter=None.
        drafter: a name of `polydraft methods` (such as "model:coupled"), an object, None for plain decoding; "auto" is "model" with a draft, "eagle" with a head that is given or comes with the package, else "ngram".
            Several names, as a list or "model,ngram": each round is drafted by the one that promises most, see `policy/switch.py`.
        verifier: a name, an object, or "auto" for the best lossless rule for the drafter's draft sampling and shape.
        depth, num_paths: a fixed policy; without them the policy follows measured costs and acceptance.
        policy: "adaptive", "fixed" (a chain of 5 where depth and num_paths are not given), or an object.
        profile: what `polydraft tune` saved, for the adaptive policy; without it what was measured of the same parts before, or now by a handful of
            passes. A request that names a seed is decided from it and from its own steps, so that its text depends on nothing else that runs.
        drafter_options: passed to the drafter's `build`; of several drafters, by their names.
        dtype, device: of both models, for example "bfloat16" and "cuda".
        backend: "compiled" (Llama family on a CPU), "transformers" (any device), or "auto".
        quantization, draft_quantization: "int8", "int4", "bfloat16" or "bfloat16-dot" matrices of the target or the draft, on the
            compiled path; see `models.compiled.llama.CompiledLlama`.
            The output then follows the quantised target's distribution; quantising the draft changes no distribution.
        activations: of the target: "float32" computes exactly with a file's blocks; by default their products take activations rounded to
            eight bits a block, as llama.cpp's do. The draft's are always rounded, which changes no distribution.
        cache_dtype: "bfloat16" keeps the target's keys and values in half of float32's memory, on the compiled path; what is read is rounded
            once, which changes the distribution.
        threads: that a compiled pass runs on; bits do not depend on it. None: the cores that are idle, one for small models.
        max_model_len: longest prompt plus output in tokens; default: the models' own limit.
        max_num_seqs: sequences that run at the same time.
        prefix_cache_bytes: most memory for the KV cache entries of finished texts, beside the slots, the least recently used dropped first; 0: none.
            Default: an eighth of the free memory, at most 8 GiB.
        tie_margin: in float16 and bfloat16, greedy decisions between logits closer than this are made by a pass that does
            not depend on the draft or the batch; None = off. 0.25 is ample for logits of the usual size.
        decoding: what is sampled, where it is more than each request's sampling parameters on the target's logits: a name of `polydraft methods`, or
            a `core.Decoding`.
        decoding_options: passed to the decoding method's `build`; a model among them ("amateur") by its name, and then the draft model, too, where there is no other.
        asynchronous: the draft model runs ahead on a core, stream or device of its own while the target verifies, see `drafters.amusd`;
            drafter_options: "lead_cap", "least", "burst", "pin", "trace". `depth` bounds what one pass takes, default all that waits.
        tensor_parallel: processes that hold a part of the target each, for one that does not fit one device, see `models.distributed`; the draft is whole
            in this one.
        device_map: which of the target's modules lie on which devices of this process, as of transformers' `from_pretrained`.
        offered: names of further drafters, each built without options and with a policy of its own, that a request may ask for in place of `drafter`.

        Raises:
            ModelLoadError, IncompatibleError, CapacityError, UnknownNameError, InvalidInputError: each says what to do.
        """
        options = {
            "dtype": dtype,
            "device": device,
            "backend": backend,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "threads": threads,
        }
        if asynchronous and threads is None and len(cores()) <= 2:
            options["threads"] = 1  # the other core is the draft's
        plain = drafter is None or drafter == "none"
        own: dict[str, Any] = options | {"max_num_seqs": max_num_seqs * build.slots(decoding), "tensor_parallel": tensor_parallel}
        own |= {"device_map": device_map}
        model = load.load_model(
            target, quantization=quantization, activations=activations, cache_dtype=cache_dtype, plain=plain, **own
        )
        tokenizer = load.load_tokenizer(target)
        small, other, role = None, None, "draft"
        chosen = dict(decoding_options or {})
        if isinstance(amateur := chosen.get("amateur"), str):
            if draft is None and (plain or drafter == "auto" or (isinstance(drafter, str) and drafter.startswith("model"))):
                draft, role = chosen.pop("amateur"), "amateur"
            else:
                chosen["amateur"] = load.load_model(amateur, quantization=draft_quantization, **options)
                theirs, size = load.load_tokenizer(amateur), chosen["amateur"].vocab_size
                chosen["amateur"].vocab_size = load.check_same_vocabulary(
                    tokenizer, theirs, model.vocab_size, size, role="amateur"
                )
        if draft is None and isinstance(drafter, str) and drafter.partition(":")[0] in ("auto", "model"):
            draft = default_draft(target)
        if draft is not None:
            own = {**options, **({"threads": 1} if asynchronous else {})}
            small = load.load_model(draft, quantization=draft_quantization, **own)
            load.check_same_context(model.max_model_len, small.max_model_len)
            other = load.load_tokenizer(draft)
            if build.has_own_vocabulary(drafter):
                small.vocab_size = load.num_token_ids(other, small.vocab_size)
            else:
                small.vocab_size = load.check_same_vocabulary(tokenizer, other, model.vocab_size, small.vocab_size, role=role)
        model.vocab_size = load.num_token_ids(tokenizer, model.vocab_size)
        return cls.of(
            model,
            tokenizer=tokenizer,
            draft_model=small,
            draft_tokenizer=other,
            drafter=drafter,
            verifier=verifier,
            depth=depth,
            num_paths=num_paths,
            drafter_options=drafter_options,
            policy=policy,
            tie_margin=tie_margin,
            decoding=decoding,
            decoding_options=chosen,
            profile=profile,
            keep_prefixes=True,
            prefix_cache_bytes=default_prefix_cache_bytes() if prefix_cache_bytes is None else prefix_cache_bytes,
            offered=offered,
            asynchronous=asynchronous,
            sampling_defaults=sampling_defaults(target),
        )

    @classmethod
    def embedded(cls, **options: Any) -> "Engine":
        """An engine on the pair of small models inside the package; options as in `from_pretrained`."""
        options.setdefault("draft", str(pair.draft_folder()))
        return cls.from_pretrained(str(pair.target_folder()), **options)

    @classmethod
    def of(
        cls,
        target: Target,
        *,
        tokenizer: Any = None,
        draft_model: Target | None = None,
        draft_tokenizer: Any = None,
        drafter: str | Drafter | Seq[str] | None = "auto",
        verifier: str | Verifier = "auto",
        depth: int | None = None,
        num_paths: int | None = None,
        drafter_options: Mapping[str, Any] | None = None,
        policy: Policy | str | None = None,
        profile: str | Profile | None = None,
        eos_token_ids: Seq[int] | None = None,
        tie_margin: float | None = None,
        decoding: str | Decoding | None = None,
        decoding_options: Mapping[str, Any] | None = None,
        keep_prefixes: bool = False,
        prefix_cache_bytes: int = 0,
        offered: Seq[str] = (),
        asynchronous: bool = False,
        sampling_defaults: Mapping[str, Any] | None = None,
    ) -> "Engine":
        """An engine from objects that are already there; see `from_pretrained`, and `Loop` for `keep_prefixes` and `prefix_cache_bytes`.

        sampling_defaults: fields of `SamplingParams` for requests that name none, see `default_params`.
        """
        eos = tuple(eos_token_ids if eos_token_ids is not None else getattr(target, "eos_token_ids", ()))
        parts = Parts(target, draft_model, tokenizer, eos, draft_tokenizer)
        decoding = build.decoding(decoding, parts, decoding_options or {})
        parts = replace(parts, decoding=decoding)
        build.check_encoders(parts)
        if asynchronous:
            drafter = build.asynchronous(drafter, verifier)
        source = build.drafter(drafter, parts, drafter_options or {})
        rule = build.verifier(verifier, source)
        others = build.others(offered, source, parts)
        kind = policy if isinstance(policy, str) else None  # an object is of one drafter

        def make_policy(one: Drafter) -> Policy:
            return build.policy(kind, depth, num_paths, None, one)

        policy = build.policy(policy, depth, num_paths, profile, source)
        more: dict[str, Any] = {"tie_margin": tie_margin, "decoding": decoding, "keep_prefixes": keep_prefixes, "others": others}
        more["prefix_cache_bytes"] = prefix_cache_bytes
        engine = cls(target, source, rule, policy, tokenizer=tokenizer, eos_token_ids=eos, make_policy=make_policy, **more)
        engine.sampling_defaults = dict(sampling_defaults or {})
        return engine

    def summary(self) -> dict[str, Any]:
        """What was built: models, limits, cache bytes, drafter, verifier."""
        drafter = self.drafter
        return {
            "target": getattr(self.target, "name", type(self.target).__name__),
            "backend": type(self.target).__name__,
            "weight_format": getattr(self.target, "weight_format", None),
            "quantization_error": getattr(self.target, "quantization_error", None),
            "activations": getattr(self.target, "activations", None),
            "rounded_again": {name: sorted(formats) for name, formats in getattr(self.target, "rounded_again", {}).items()},
            "max_model_len": self.target.max_model_len,
            "max_num_seqs": self.target.max_num_seqs // build.slots(self.decoding),
            "cache_bytes": getattr(self.target, "cache_bytes", None),
            "cache_grows": getattr(self.target, "cache_grows", False),
            "drafter": None if drafter is None else drafter.info.name,
            "draft": None if drafter is None else drafter.info.title,
            "drafters": self.menu.names,
            "verifier": self.verifier.info.name,
            "lossless": self.verifier.info.lossless,
            "decoding": self.lossless_to,
        }

    @property
    def lossless_to(self) -> str:
        """The distribution that outputs follow with a lossless rule, in words."""
        info = getattr(self.decoding, "info", None)
        return (
            "the target distribution"
            if self.decoding is None
            else info.lossless_to
            if info
            else f"the decoding method {type(self.decoding).__name__}"
        )

    def default_params(self, *, chat: bool = False) -> SamplingParams:
        """Sampling parameters of requests that name none: what the model's authors set, and for chats else temperature 0.7 and top-p 0.95.

        Example:
            >>> Engine.embedded().default_params(chat=True).temperature
            0.7
        """
        return SamplingParams(**{**(CHAT_DEFAULTS if chat else {}), **self.sampling_defaults})

    def encode(self, prompt: Prompt, *, parse_special: bool = True) -> list[int]:
        """Token ids of a prompt, with BOS once where the model wants it; for an encoder-decoder those of its source.

        parse_special: special tokens such as <|im_end|> in a text are control tokens; False: they are text, as in a text by someone else.

        Raises:
            InvalidInputError: an empty prompt, text without a tokenizer, or neither text nor token ids.
        """
        if not isinstance(prompt, str):
            ids = _as_ids(prompt)
        elif self.tokenizer is None:
            raise InvalidInputError(
                "text was given to an engine without a tokenizer; give token ids, or build it with a tokenizer."
            )
        else:
            self._check_bytes(prompt)
            ids = (
                load.encode(self.tokenizer, prompt, source=isinstance(self.target, EncoderDecoder), parse_special=parse_special)
                if prompt
                else []
            )
        if not ids:
            raise InvalidInputError("an empty prompt was given; expected at least one token. Give some text to continue.")
        return ids

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
    ) -> Result:
        """Queue all samples of a prompt, from any thread; the returned result fills as they run.

        outputs: is given what steps give them, in the thread that steps, until it is forgotten.
        budget, drafter, verifier, prediction: see `core.Request`.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidInputError(
                f"params={params!r} was given; expected a SamplingParams, such as SamplingParams(temperature=0.8, max_tokens=64)."
            )
        ids = self.encode(prompt)
        output_prompt, source = (
            (self.target.decoder_prompt, tuple(ids)) if isinstance(self.target, EncoderDecoder) else (tuple(ids), ())
        )
        seed = secrets.randbits(63) if params.seed is None else params.seed
        name = f"request-{next(self._ids)}"
        samples: list[Sample] = []
        if outputs is not None:
            self._streams[name] = outputs
        try:
            for sample in range(params.n):
                number = MOST_SAMPLES * index + sample
                more: dict[str, Any] = {"budget": budget, "drafter": drafter, "verifier": verifier, "source_token_ids": source}
                more["prediction_token_ids"] = tuple(prediction)
                request = Request(name, output_prompt, params, seed, number, **more)
                samples.append(self.add_request(request))
        except BaseException:
            self._streams.pop(name, None)
            self.discard([name])
            raise
        lossless = self.menu.find(drafter, verifier).verifier.info.lossless
        return Result(name, prompt if isinstance(prompt, str) else None, ids, samples, lossless, index, self.lossless_to)

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
        prompt_list = _as_list(prompts)
        params_list = (
            list(params) if isinstance(params, Seq) else [self.default_params() if params is None else params] * len(prompt_list)
        )
        if len(params_list) != len(prompt_list):
            raise InvalidInputError(
                f"{len(prompt_list)} prompts and {len(params_list)} params were given; expected one for all or one each."
            )
        if not 0 <= first_index <= MOST_SAMPLES - len(prompt_list):
            raise InvalidInputError(
                f"first_index={first_index} and {len(prompt_list)} prompts were given; expected numbers of prompts in [0, {MOST_SAMPLES}). Split the call."
            )
        results: list[Result] = []
        try:
            for index, (prompt, prompt_params) in enumerate(zip(prompt_list, params_list, strict=True), first_index):
                results.append(self.submit(prompt, prompt_params, index))
            self._run(results, progress)
        finally:
            self.discard(r.id for r in results if any(s.finish_reason is None for s in r.samples))
        return results

    def _run(self, results: list[Result], progress: bool) -> None:
        from rich.progress import Progress

        waiting = deque(sample for result in results for sample in result.samples)
        with Progress(disable=not progress, transient=True) as bar:
            task = bar.add_task("generating", total=len(waiting))
            while waiting:
                if waiting[0].finish_reason is None:
                    self.step()
                else:
                    waiting.popleft()
                    bar.advance(task)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[StepOutput, None, None]:
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
        self._streams.pop(request_id, None)

    def encode_chat(self, messages: Seq[Mapping[str, Any]], *, parse_special: bool = False, **options: Any) -> list[int]:
        """Token ids of a conversation that the model is to answer, through the tokenizer's own template.

        messages: each with "role" (such as "system", "user" or "assistant") and "content"; the last one is not the assistant's.
        parse_special: special tokens in messages are control tokens, so that a message can open a turn of another role; False: they are text.
        options: what else the template is given, such as `tools` and `enable_thinking`.

        Raises:
            InvalidInputError: no messages, a message without role or content, or no tokenizer.
            IncompatibleError: a tokenizer without a chat template, or one that refuses these messages.
        """
        _check_messages(messages)
        if self.tokenizer is None:
            raise InvalidInputError("a chat needs a tokenizer; build the engine with one, or use generate with token ids.")
        if not getattr(self.tokenizer, "chat_template", None):
            raise IncompatibleError(
                f"the tokenizer of {self.summary()['target']!r} has no chat template: the model was not trained to converse. "
                "Use a chat model, give the engine's tokenizer a chat_template, or use generate."
            )
        arguments: dict[str, Any] = {"messages": [dict(message) for message in messages], **options}
        self._check_bytes([*(message.get("content") for message in messages), *options.values()])
        cuts = None if parse_special else Cuts(self.tokenizer, arguments)
        arguments_shown = arguments if cuts is None else cuts.put(arguments)
        try:
            text = self.tokenizer.apply_chat_template(
                arguments_shown.pop("messages"), tokenize=False, add_generation_prompt=True, **arguments_shown
            )
        except Exception as error:  # a template is a program, and not ours
            raise IncompatibleError(
                f"the chat template of {self.summary()['target']!r} refuses these messages: {error}. Change their roles or order."
            ) from error
        return (
            token_ids(self.tokenizer, text) if cuts is None else cuts.encode(text)
        )  # the template writes its own special tokens

    @cached_property
    def _longest_token(self) -> int | None:
        return longest_token(self.tokenizer)

    def _check_bytes(self, texts: Any) -> None:
        """Refuse texts that are too long whatever their tokens are, before they are tokenised."""
        longest, text_bytes = self.target.max_model_len, num_bytes(texts)
        if isinstance(self.target, EncoderDecoder) or text_bytes <= LEAST_LONGEST * longest or self._longest_token is None:
            return
        if text_bytes > self._longest_token * longest:
            raise CapacityError(
                f"a text of {text_bytes} bytes was given; the context holds {longest} tokens of at most {self._longest_token} bytes each. Shorten it."
            )

    def chat(self, messages: Seq[Mapping[str, Any]], params: SamplingParams | None = None) -> Result:
        """The model's answer to a conversation; `stream(engine.encode_chat(messages))` gives it piece by piece.

        messages, errors: see `encode_chat`.  params: default `default_params(chat=True)`.  The text is in `result.text`; append it as the assistant's to go on.
        """
        return self.generate([self.encode_chat(messages)], self.default_params(chat=True) if params is None else params)[0]


def _check_messages(messages: Seq[Mapping[str, Any]]) -> None:
    if isinstance(messages, str) or not messages:
        raise InvalidInputError(
            f"messages={messages!r} were given; expected a list such as [{{'role': 'user', 'content': 'Hello'}}] with at least one."
        )
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise InvalidInputError(f"message {number} is {dict(message)!r}; expected text for 'role' and for 'content'.")
    if messages[-1]["role"] == "assistant":
        raise InvalidInputError("the last message is the assistant's; expected one to answer. Append the user's next message.")


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt alone or several; what is neither is taken for one, which `Engine.encode` refuses."""
    if not isinstance(prompts, (str, bytes, Mapping)):
        with suppress(TypeError):
            prompt_list: list[Any] = list(prompts)
            return [prompt_list] if prompt_list and isinstance(prompt_list[0], Integral) else prompt_list
    return [cast(Prompt, prompts)]


def _as_ids(prompt: Iterable[Any]) -> list[int]:
    if not isinstance(prompt, (bytes, Mapping)):
        with suppress(TypeError):
            return [operator.index(token) for token in prompt]
    raise InvalidInputError(f"the prompt {reprlib.repr(prompt)} was given; expected text, or whole numbers: token ids.")
