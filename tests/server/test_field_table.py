"""Every field of other servers and clients is served, ignored for a reason, or refused by name: the table of `server.fields` is walked."""

import inspect
import typing

import pytest

from polydraft.server import llamacpp, ollama
from polydraft.server.bodies import Requested
from polydraft.server.embeddings import EmbeddingRequest
from polydraft.server.fields import (
    BY_GROUP,
    FIELDS,
    IGNORED,
    REFUSED,
    Refused,
    is_like_sampling,
    refusal,
    why_ignored,
)
from polydraft.server.messages import CountRequest, MessagesRequest, OutputConfig
from polydraft.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ThinkingSwitch,
    TokenizeRequest,
)
from polydraft.server.responses import OutputText, Reasoning, ResponsesRequest
from polydraft.server.sampled import StreamOptions, WantedForm

TURNS = [{"role": "user", "content": "def f("}]
GREEDY = {"temperature": 0, "max_tokens": 4}
PATHS: dict[str, tuple[str, type[Requested], dict]] = {
    "chats": ("/v1/chat/completions", ChatRequest, {"messages": TURNS, **GREEDY}),
    "completions": ("/v1/completions", CompletionRequest, {"prompt": "def f(", **GREEDY}),
    "responses": ("/v1/responses", ResponsesRequest, {"input": "def f(", "temperature": 0, "max_output_tokens": 4}),
    "input_tokens": ("/v1/responses/input_tokens", ResponsesRequest, {"input": "def f("}),
    "messages": ("/v1/messages", MessagesRequest, {"messages": TURNS, **GREEDY}),
    "count_tokens": ("/v1/messages/count_tokens", CountRequest, {"messages": TURNS}),
    "embeddings": ("/v1/embeddings", EmbeddingRequest, {"input": "x"}),
    "tokenize": ("/tokenize", TokenizeRequest, {"prompt": "x"}),
    "detokenize": ("/detokenize", DetokenizeRequest, {"tokens": [5]}),
    "completion": ("/completion", llamacpp.LlamaCppCompletion, {"prompt": "def f(", "temperature": 0, "n_predict": 4}),
    "infill": ("/infill", llamacpp.InfillRequest, {"input_prefix": "a", "input_suffix": "b"}),
    "ollama chat": ("/api/chat", ollama.OllamaChat, {"messages": TURNS, "stream": False, "options": {"temperature": 0, "num_predict": 4}}),
    "generate": ("/api/generate", ollama.OllamaGenerate, {"prompt": "x", "stream": False, "options": {"temperature": 0, "num_predict": 4}}),
    "embed": ("/api/embed", ollama.OllamaEmbed, {"input": "x"}),
    "ollama embeddings": ("/api/embeddings", ollama.OllamaEmbedding, {"prompt": "x"}),
    "stream_options": ("/v1/completions", StreamOptions, {"prompt": "def f(", **GREEDY, "stream_options": {}}),
    "structured_outputs": ("/v1/completions", WantedForm, {"prompt": "x", **GREEDY, "structured_outputs": {"choice": ["a", "b"]}}),
    "reasoning": ("/v1/responses", Reasoning, {"input": "x", "temperature": 0, "max_output_tokens": 4, "reasoning": {"effort": "low"}}),
    "text": ("/v1/responses", OutputText, {"input": "x", "temperature": 0, "max_output_tokens": 4, "text": {}}),
    "output_config": ("/v1/messages", OutputConfig, {"messages": TURNS, **GREEDY, "output_config": {}}),
    "thinking": ("/v1/messages", ThinkingSwitch, {"messages": TURNS, **GREEDY, "thinking": {"type": "enabled"}}),
    "options": ("/api/chat", ollama.Options, {"messages": TURNS, "stream": False, "options": {"temperature": 0, "num_predict": 4}}),
}  # fmt: skip
"""Of each kind of request its path, its body and one that is answered."""
NAMES = {
    group: sorted({name for names in servers.values() for name in names.split()})
    for group, servers in FIELDS.items()
}
VOLATILE = {"id", "created", "created_at", "usage", "item_id", "timings", "metrics", "total_duration", "load_duration", "prompt_eval_duration", "eval_duration", "speculation", "tokens_cached", "generation_settings"}  # fmt: skip


def is_served(group, name):
    return name in PATHS[group][1]._names()


def body(group, name, value):
    return with_fields(group, {name: value})


def with_fields(group, fields):
    """A request, or an object in it of that name, with further fields."""
    base = PATHS[group][2]
    return (
        {**base, group: {**base[group], **fields}}
        if isinstance(base.get(group), dict)
        else {**base, **fields}
    )


def steady(told):
    """Without what differs from one answer to the next."""
    if isinstance(told, dict):
        return {name: steady(value) for name, value in told.items() if name not in VOLATILE}
    return [steady(value) for value in told] if isinstance(told, list) else told


@pytest.mark.parametrize("group", FIELDS)
def test_every_field_has_exactly_one_fate(group):
    for name in NAMES[group]:
        fates = [
            is_served(group, name),
            refusal(group, name) is not None,
            why_ignored(group, name) is not None,
        ]
        assert sum(fates) == 1 or (fates[0] and not BY_GROUP.get(group, {}).get(name)), (group, name, fates)


@pytest.mark.parametrize("group", FIELDS)
def test_a_field_that_is_not_served_is_refused_by_name_with_what_to_do(served, group):
    path = PATHS[group][0]
    for name in NAMES[group]:
        refused = None if is_served(group, name) else refusal(group, name)
        if refused is None:
            continue
        found = served.post(
            path, **body(group, name, next(v for v in (7, [7], "x", False) if refused.asks(v)))
        )
        error = found.json()["error"]
        message = error["message"] if isinstance(error, dict) else error
        assert found.status_code == 400 and name in message and refused.reason in message, (group, name)


@pytest.mark.parametrize("group", [group for group in FIELDS if group != "infill"])
def test_a_field_that_is_ignored_changes_no_answer(served, group):
    path, _, base = PATHS[group]
    ignored = {
        name: "auto" for name in NAMES[group] if not is_served(group, name) and why_ignored(group, name)
    }
    plain = served.post(path, **base)
    found = served.post(path, **with_fields(group, ignored))
    assert found.status_code == 200 and steady(found.json()) == steady(plain.json())


def test_values_that_ask_for_nothing_are_taken(served):
    for group in ("chats", "completions", "completion"):
        for name in NAMES[group]:
            refused = None if is_served(group, name) else refusal(group, name)
            if refused is not None:
                for value in refused.off:
                    assert PATHS[group][1]._problem(name, value) is None, (group, name, value)
    assert (
        served.post(
            "/completion", **PATHS["completion"][2], mirostat=0, top_n_sigma=-1, xtc_probability=0.0
        ).status_code
        == 200
    )


def test_an_unknown_name_that_begins_like_a_sampling_parameter_is_refused(served):
    for group, name in (
        ("chats", "top_h"),
        ("completions", "dry_new"),
        ("messages", "repetition_range"),
        ("options", "min_q_p"),
    ):
        problem = PATHS[group][1]._problem(name, 0.5)
        assert (problem is not None and "change the answer" in problem) == is_like_sampling(name), name
    found = served.post("/v1/chat/completions", messages=TURNS, top_h=0.4)
    assert (found.status_code, found.json()["error"]["param"]) == (400, "top_h")
    assert (
        served.post(
            "/v1/chat/completions", messages=TURNS, max_tokens=1, traceparent="x", top_h=None
        ).status_code
        == 200
    )


def test_reasons_are_sentences_and_no_field_is_both_ignored_and_refused():
    assert not REFUSED.keys() & IGNORED.keys()
    reasons = [
        fate if isinstance(fate, str) else fate.reason for fate in (*REFUSED.values(), *IGNORED.values())
    ]
    assert all(reason.endswith(".") and len(reason) < 170 for reason in reasons)
    assert all(isinstance(fate, str | Refused) for fates in BY_GROUP.values() for fate in fates.values())


def fields_of(kind):
    return set(typing.get_type_hints(kind))


def test_the_table_has_every_field_of_openais_client():
    openai = pytest.importorskip("openai")
    kinds = {
        "chats": openai.types.chat.completion_create_params.CompletionCreateParamsBase,
        "completions": openai.types.completion_create_params.CompletionCreateParamsBase,
        "responses": openai.types.responses.response_create_params.ResponseCreateParamsBase,
        "input_tokens": openai.types.responses.input_token_count_params.InputTokenCountParams,
        "embeddings": openai.types.embedding_create_params.EmbeddingCreateParams,
        "stream_options": openai.types.chat.ChatCompletionStreamOptionsParam,
        "reasoning": openai.types.shared_params.Reasoning,
        "text": openai.types.responses.ResponseTextConfigParam,
    }
    for group, kind in kinds.items():
        assert fields_of(kind) <= {*FIELDS[group]["OpenAI"].split()}, group


def test_the_table_has_every_field_of_anthropics_client():
    types = pytest.importorskip("anthropic").types
    for group, kinds in {
        "messages": (types.message_create_params, types.beta.message_create_params),
        "count_tokens": (types.message_count_tokens_params, types.beta.message_count_tokens_params),
    }.items():
        names = [
            name
            for module in kinds
            for name in dir(module)
            if name in ("MessageCreateParamsBase", "MessageCountTokensParams")
        ]
        for module, name in zip(kinds, names, strict=True):
            assert fields_of(getattr(module, name)) <= {*FIELDS[group]["Anthropic"].split()}, module

    beta = types.beta
    for group, kinds in {
        "output_config": (types.OutputConfigParam, beta.BetaOutputConfigParam),
        "thinking": (types.ThinkingConfigEnabledParam, types.ThinkingConfigAdaptiveParam),
    }.items():
        for kind in kinds:
            assert fields_of(kind) <= {*FIELDS[group]["Anthropic"].split()}, kind


def test_the_table_has_every_field_of_ollamas_client():
    types = pytest.importorskip("ollama")._types
    kinds = {"ollama chat": "ChatRequest", "generate": "GenerateRequest", "embed": "EmbedRequest", "ollama embeddings": "EmbeddingsRequest", "options": "Options"}  # fmt: skip
    for group, name in kinds.items():
        assert set(getattr(types, name).model_fields) <= {*FIELDS[group]["Ollama"].split()}, group


def test_the_table_has_every_parameter_that_openais_client_sends(served):
    """Its own methods name what it takes."""
    for group, create in (
        ("chats", served.openai.chat.completions.create),
        ("completions", served.openai.completions.create),
    ):
        own = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
        assert set(inspect.signature(create).parameters) - own <= {*NAMES[group]}
