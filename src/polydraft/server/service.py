"""One model of a server: answers of its engine to completions, chats, responses and messages."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from polydraft.config import ServerConfig
from polydraft.core import EncoderDecoder
from polydraft.core.params import WHOLE_CONTEXT, SamplingParams, StructuredOutputs
from polydraft.core.thinking import Thinking
from polydraft.engine.asynchronous import AsyncEngine
from polydraft.engine.output import StepOutput
from polydraft.engine.sequence import Result, Sample
from polydraft.engine.texts import Embedding
from polydraft.methods import registry
from polydraft.models.tokens.encoding import special_tokens
from polydraft.policy.fixed import FixedPolicy
from polydraft.server.answers import Answer
from polydraft.server.choices import Chat, Completion
from polydraft.server.conversation import Message, Tools, text_of
from polydraft.server.errors import ApiError
from polydraft.server.fill_in import fill_form
from polydraft.server.formats import named
from polydraft.server.formats.named import thinking_of
from polydraft.server.incoming import GONE, unless_gone
from polydraft.server.messages import MessageAnswer, MessagesRequest
from polydraft.server.metrics import Metrics
from polydraft.server.model_tokens import ModelTokens
from polydraft.server.protocol import EFFORTS, ChatRequest, CompletionRequest, ThoughtBudget
from polydraft.server.responses import ResponsesRequest
from polydraft.server.responses_answer import Responses
from polydraft.server.sampled import RequestedSpeculation, Sampled, TokensTold, most_prompt_logprobs
from polydraft.server.streaming import PAUSE_SECONDS, Pause, events, with_pauses
from polydraft.server.tool_grammars import ToolGrammars
from polydraft.server.tracing import traced

log = logging.getLogger("polydraft.server")
T = TypeVar("T")
NO_BUDGET = ThoughtBudget()
Outputs = AsyncGenerator[tuple[int, StepOutput], None]
UNCONSTRAINED = "X-Polydraft-Unconstrained-Tools"
"""Header that names the tools whose schemas cannot be followed: their arguments are some JSON object."""


class Service(ModelTokens):
    """One model. num_users: requests on their way to the engine."""

    def __init__(self, engine: AsyncEngine, name: str, config: ServerConfig, metrics: Metrics) -> None:
        self.engine = engine
        self.name = name
        self.config = config
        self.num_users = 0
        engine.engine.menu.offer(
            registry.drafter(registry.COPYING)(eos_token_ids=engine.engine.eos_token_ids)
        )  # for predictions
        self._metrics = metrics
        named.check(config.tool_format, "tool_format")
        named.check(config.reasoning_format, "reasoning_format")
        self._tools = ToolGrammars(engine)
        engine.observe = metrics.join(engine.engine, name).observe

    @property
    def idle(self) -> bool:
        """Whether nothing runs, waits or is on its way."""
        return not self.num_users and not self.engine.engine.has_unfinished_requests

    async def close(self) -> None:
        """End the engine, whose figures stay, those of its state left out."""
        await self.engine.close()
        self._metrics.leave(self.name)

    def thinking(
        self, prompt: Sequence[int], continued: str | None = None, budget: ThoughtBudget = NO_BUDGET
    ) -> Thinking | None:
        """How the model thinks behind the prompt of a chat, see `thinking_of`; None where thoughts stay in the text and have no budget."""
        if not self.config.reasoning and budget.tokens is None:
            return None
        thinking = thinking_of(self.tokenizer, self.format(tools=False), prompt, continued)
        return thinking and replace(thinking, budget=budget.tokens, message=budget.message)

    def described(self) -> dict[str, Any]:
        """What is known of the model."""
        built = self.engine.engine.summary()
        drafts = {name: built[name] for name in ("drafter", "drafters", "verifier", "lossless", "decoding")}
        drafts["verifiers"] = self.engine.engine.menu.verifiers()
        length = built["max_model_len"]
        lengths = {
            "max_model_len": length,
            "max_input_tokens": length,
            "max_tokens": length,
        }  # vLLM's name, and Anthropic's
        return {**lengths, "chat": bool(self.template()), "speculation": drafts}

    async def completions(
        self,
        request: Request,
        body: CompletionRequest,
        kind: Callable[..., Answer] = Completion,
        thinking: Thinking | None = None,
    ) -> Response:
        """Continue texts. kind: of the answer.  thinking: what the model does before it answers, where a template wrote the prompt."""
        prompts = body.prompts()
        params = self._thinking_first(await self._params(body, len(prompts), chat=False), thinking)
        if body.fills_in:
            params, ids = await self._filled_in(body, prompts, params)
        else:
            ids = [
                await self.encoded(prompt, body.parse_special, begins=body.add_special_tokens)
                for prompt in prompts
            ]
        echo = [p if isinstance(p, str) else self.decoded(p) for p in prompts] if body.echo else ()
        answer = kind(self.tokenizer, self.name, ids, params, body.speculation.trace, echo)
        if isinstance(answer, Completion):
            answer.ranked = body.prompt_logprobs is not None
        return await self._answer(request, body, answer, params)

    async def _filled_in(
        self, body: CompletionRequest, prompts: Sequence[str | list[int]], params: SamplingParams
    ) -> tuple[SamplingParams, list[list[int]]]:
        """Parameters and prompts of texts before a suffix, by the model's own marks.

        Raises:
            ApiError: a model without them, or prompts of token ids.
        """
        form = fill_form(self.tokenizer)
        if form is None:
            raise ApiError(400, f"suffix was given; {self.name!r} was not trained to fill in: its vocabulary has no marks for it.", param="suffix")  # fmt: skip
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if len(texts) < len(prompts):
            raise ApiError(
                400, "suffix was given beside a prompt of token ids; expected text.", param="prompt"
            )
        if body.echo and body.logprobs is not None:
            raise ApiError(400, "echo with logprobs was given beside suffix; a prompt is told there in another order. Leave one out.", param="echo")  # fmt: skip

        extra, begin = body.further
        before = await self.files(form, extra)
        suffix = await self.middle(body.suffix or "")
        behind = await self.middle(begin)
        ids = [form.prompt(await self.middle(text), suffix, before, behind) for text in texts]
        return params.with_(stop_token_ids=tuple(dict.fromkeys([*params.stop_token_ids, *form.end_ids]))), ids

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        """Answer a conversation."""
        told = {
            "tells_reasoning": body.include_reasoning,
            "tells_prompt": body.return_prompt_text,
            "echo": body.echoed(),
        }
        return await self.converse(
            request, body, body.messages, partial(Chat, tells_apart=body.keeps_thoughts_apart(), **told)
        )

    async def responses(self, request: Request, body: ResponsesRequest) -> Response:
        """Answer a text or a conversation."""
        return await self.converse(
            request, body, body.messages(), partial(Responses, request=body), param="input"
        )

    async def messages(self, request: Request, body: MessagesRequest) -> Response:
        """Answer a conversation in Anthropic's format."""
        return await self.converse(request, body, body.conversation(), MessageAnswer)

    async def converse(
        self,
        request: Request,
        body: ChatRequest | ResponsesRequest | MessagesRequest,
        messages: Sequence[Message],
        kind: Callable[..., Answer],
        param: str = "messages",
    ) -> Response:
        """An answer of a kind. param: where the messages stand in the request."""
        params = await self._params(body, 1, chat=True)
        tools = body.offered_tools()
        ids = await self.conversation(body, messages, param)
        beginning = text_of(messages[-1].content).strip() if body.continues() else ""
        params = self._thinking_first(params, self.thinking(ids, beginning or None, self._budget(body)))
        held = await unless_gone(request, self._with_tools(params, tools))
        if held is None:
            return Response(status_code=GONE)
        params, free = held
        callable_tools = {function.name: function.parameters for function in tools.callable}
        trace = body.speculation.trace
        calls = self.format(tools=bool(callable_tools))
        answer = kind(self.tokenizer, self.name, [ids], params, trace, tools=callable_tools, calls=calls)
        response = await self._answer(request, body, answer, params)
        if free:
            response.headers[UNCONSTRAINED] = ", ".join(free)[:1000]
        return response

    def _thinking_first(self, params: SamplingParams, thinking: Thinking | None) -> SamplingParams:
        """Of a model that thinks before it answers: marks that are control tokens are part of its text."""
        if thinking is None:
            return params
        marks = (thinking.opening, thinking.closing, *self.format(tools=False).hidden)
        return params.with_(
            thinking=thinking, skip_special_tokens=params.skip_special_tokens and not self._has_special(marks)
        )

    def _budget(self, body: ChatRequest | ResponsesRequest | MessagesRequest) -> ThoughtBudget:
        """Of thoughts; an effort is one where the template knows none."""
        budget = body.budget_of_thoughts()
        effort = body.template_options().get("reasoning_effort")
        if budget.tokens is not None or "reasoning_effort" in self.template():
            return budget
        return budget._replace(tokens=EFFORTS.get(str(effort)))

    def _has_special(self, texts: Sequence[str]) -> bool:
        """Whether texts have control tokens in them, which an output's text is given without."""
        return any(token in text for token in special_tokens(self.tokenizer) for text in texts)

    async def _with_tools(self, params: SamplingParams, tools: Tools) -> tuple[SamplingParams, list[str]]:
        """With the grammar of the calls that may be made, and the tools whose arguments it does not hold to their schemas.

        Raises:
            ApiError: a schema that cannot be followed, of a tool that has to be called, by its place; another form beside the tools.
        """
        if not tools.callable:
            return params, []
        form = params.structured_outputs
        calls = self.format()
        if form is not None and not (
            isinstance(form, StructuredOutputs) and form.kind.startswith("json") and not form.exact
        ):
            raise ApiError(
                400,
                "tools were given beside a form of the text; expected response_format alone beside them.",
                param="tools",
            )
        source, free = await self._tools.source(tools, form, calls)
        skips = params.skip_special_tokens and not self._has_special(calls.written_parts)
        return params.with_(structured_outputs=source, skip_special_tokens=skips), free

    async def embedded(self, texts: Sequence[list[int]]) -> list[Embedding]:
        """The mean of the last states of each text.

        Raises:
            ApiError: more texts than may be asked for, or not in time.
        """
        self._check_choices(len(texts), 1, "input")
        return await self._in_time(self.engine.embed(texts))

    async def _in_time(self, work: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(work, self.config.timeout)
        except (asyncio.TimeoutError, TimeoutError):
            raise ApiError(503, "the request was ended before it was done: its time was up.") from None

    async def _params(self, body: Sampled, num_prompts: int, *, chat: bool) -> SamplingParams:
        read = partial(body.params, self.engine.engine.default_params(chat=chat))
        params = (
            await self.engine.compiling(read) if body.has_grammar() else read()
        )  # a long grammar is read beside others
        self._check_choices(num_prompts, params.n, "n")
        return params

    def _check_choices(self, num_prompts: int, n: int, param: str) -> None:
        if n * num_prompts > self.config.max_choices:
            raise ApiError(
                400, f"{num_prompts} prompts with n={n} were given; {self.config.max_choices} choices may be asked for at a time.", param=param
            )  # fmt: skip

    def _fitting(self, params: SamplingParams, ids: Sequence[int]) -> SamplingParams:
        """Of a prompt: a `max_tokens` beyond what the context still holds is all that it holds."""
        target = self.engine.engine.target
        length = len(target.decoder_prompt) if isinstance(target, EncoderDecoder) else len(ids)
        too_many = params.max_tokens is not None and params.max_tokens > target.max_model_len - length
        return params.with_(max_tokens=WHOLE_CONTEXT) if too_many else params

    def _speculation(self, requested: RequestedSpeculation, params: SamplingParams) -> dict[str, Any]:
        """Drafter, verifier and size that are asked for, as the engine takes them."""
        chosen = self.engine.engine.menu.find(requested.drafter, requested.verifier)
        budget = requested.budget()
        verifier = chosen.verifier.info
        fixed = budget is not None or isinstance(chosen.policy, FixedPolicy)
        if requested.seed_exact and not (params.greedy or fixed or verifier.shared_noise):
            raise ApiError(
                400, f"seed_exact was asked for, but how much {chosen.source!r} drafts follows the load, and with the verifier {verifier.name!r} so does the "
                "text of a seed. Ask for the verifier 'race' where it fits the drafter, a depth, or temperature 0.", param="speculation"
            )  # fmt: skip
        return {"budget": budget, "drafter": requested.drafter, "verifier": requested.verifier}

    async def _predicted(self, body: Sampled) -> list[int]:
        """Token ids of the prediction, as far as an answer may be long."""
        text = "" if body.prediction is None else text_of(body.prediction.content)
        ids = await self.encoded(text, parse_special=False) if text else []
        return self.without_first(ids)[: self.engine.engine.target.max_model_len]

    async def _answer(
        self, request: Request, body: Sampled, answer: Answer, params: SamplingParams
    ) -> Response:
        menu = self.engine.engine.menu
        prediction = await self._predicted(body)
        if prediction and body.speculation.drafter is None and registry.COPYING in menu.names:
            body.speculation.drafter = registry.COPYING
        drafting = self._speculation(body.speculation, params) | {"prediction": prediction}
        chosen = menu.find(body.speculation.drafter, body.speculation.verifier)
        _tell_what_is_asked_for(answer, body)
        answer.num_predicted = len(prediction)
        verifier = chosen.verifier.info
        answer.methods = {
            "drafter": chosen.source,
            "verifier": verifier.name,
            "lossless": verifier.lossless,
        }
        form = params.structured_outputs
        if isinstance(form, StructuredOutputs):
            source = await unless_gone(request, self.engine.compile_grammar(form))
            if source is None:
                return Response(status_code=GONE)
            params = params.with_(structured_outputs=source)
        results = list[Result]()
        outputs = self._outputs(body, answer, params, drafting, results)
        outputs = traced(outputs, request.headers, self.name, chosen.source)
        if body.stream:
            return await self._streamed(request, answer, outputs, results)
        collected = await unless_gone(request, _all(outputs))
        return Response(status_code=GONE) if collected is None else JSONResponse(answer.whole(collected))

    def _outputs(
        self,
        body: Sampled,
        answer: Answer,
        params: SamplingParams,
        drafting: dict[str, Any],
        results: list[Result],
    ) -> Outputs:
        """What the engine gives, behind the log-probabilities of the prompts where they are asked for."""
        fitting = [self._fitting(params, ids) for ids in answer.prompts]
        outputs = self.engine.stream_all(
            answer.prompts, fitting, seconds=self.config.timeout, results=results, **drafting
        )
        most = most_prompt_logprobs(body, params)
        if body.most_tokens() == 0:
            outputs = self._unsampled(answer, held=most is not None)
        return outputs if most is None else self._scored(answer, most, outputs)

    async def _streamed(
        self, request: Request, answer: Answer, outputs: Outputs, results: Sequence[Result]
    ) -> Response:
        # a stream that fails in its first 50 ms has a status of its own
        paced = with_pauses(outputs, 0.05, PAUSE_SECONDS)
        first = await unless_gone(request, anext(paced))  # a refusal has its own status
        if first is None:
            await paced.aclose()
            return Response(status_code=GONE)
        if not isinstance(first, Pause):
            answer.check(*first)
        stream = events(request, answer, first, paced, results)
        return StreamingResponse(stream, media_type=answer.media, headers={"Cache-Control": "no-cache"})

    async def _scored(self, answer: Answer, most: int, outputs: Outputs) -> Outputs:
        """Outputs, before which the log-probabilities of the prompts are there."""
        answer.prompt_logprobs = await self._in_time(self.engine.likelihoods(answer.prompts, most))
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def _unsampled(self, answer: Answer, *, held: bool) -> Outputs:
        """Of an answer of no tokens, whose prompts are read for requests to come. held: they are read already."""
        if not held:
            await self._in_time(self.engine.hold(answer.prompts))
        for prompt, ids in enumerate(answer.prompts):
            for index in range(answer.n):
                sample = Sample(index, answer.params.seed or 0, finish_reason="length")
                sample.stats.prompt_tokens = len(ids)
                yield prompt, StepOutput("", [], [], "", sample, True)


def _tell_what_is_asked_for(answer: Answer, body: Sampled) -> None:
    """What an answer tells beside its text."""
    if isinstance(body, TokensTold):
        of_prompt = isinstance(body, ChatRequest) and body.return_prompt_token_ids
        answer.tells_ids = body.return_token_ids
        answer.names_ids = body.return_tokens_as_token_ids
        answer.tells_prompt_ids = body.return_token_ids or of_prompt
    if body.stream_options is not None:
        answer.include_usage = body.stream_options.include_usage
        answer.continuous_usage = body.stream_options.continuous_usage_stats


async def _all(outputs: AsyncGenerator[tuple[int, StepOutput], None]) -> list[tuple[int, StepOutput]]:
    async with aclosing(outputs):
        return [output async for output in outputs]
