"""Coding agents' first requests, in their own shape and with invented content, are answered, and their loops of tools close."""

import json

import pytest

from studies.clients.scripted import scripted_engine, uses_a_shell
from tests.server.conftest import data_of, serving

ASKED = "Read note.txt and tell me what the note says."
ANSWER = "The note says plum-47."
RESULT = "The word is plum-47.\n"
COMMAND = {
    "type": "object",
    "properties": {"command": {"description": "The command.", "type": "string"}},
    "required": ["command"],
}
LIMITS = {
    "timeout": {
        "minimum": -9007199254740991,
        "exclusiveMinimum": 0,
        "type": "integer",
        "maximum": 9007199254740991,
    }
}
SCHEMA = "https://json-schema.org/draft/2020-12/schema"


@pytest.fixture(scope="module")
def scripted():
    with serving(scripted_engine(uses_a_shell())) as running:
        yield running


def events(scripted, path, body):
    """Bodies of a stream's events."""
    with scripted.http.stream("POST", path, json=body) as response:
        text = response.read().decode()
        assert response.status_code == 200, text
    return [json.loads(line) for line in data_of(text.split("\n")) if line != "[DONE]"]


CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE = {
    "model": "small",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<reminder>Be kind.</reminder>"},
                {"type": "text", "text": ASKED, **CACHED},
            ],
        },
        {"role": "system", "content": "Agents: a helper."},
    ],
    "system": [
        {"type": "text", "text": "You help with code.", **CACHED},
        {"type": "text", "text": "\nBe brief.", **CACHED},
    ],
    "tools": [
        {
            "name": "Bash",
            "description": "Runs a command.",
            "input_schema": {"$schema": SCHEMA, **COMMAND, "additionalProperties": False},
            "eager_input_streaming": True,
        },
        {
            "name": "TaskCreate",
            "description": "Notes a task.",
            "input_schema": {
                "$schema": SCHEMA,
                "type": "object",
                "properties": {
                    "metadata": {
                        "type": "object",
                        "propertyNames": {"type": "string"},
                        "additionalProperties": {},
                    }
                },
                "additionalProperties": False,
            },
        },
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": '{"device_id": "0"}'},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}


def test_claude_code_is_answered_and_its_loop_closes(scripted):
    first = events(scripted, "/v1/messages?beta=true", CLAUDE)
    (block,) = [
        e["content_block"]
        for e in first
        if e["type"] == "content_block_start" and e["content_block"]["type"] == "tool_use"
    ]
    written = json.loads(
        "".join(
            e["delta"]["partial_json"] for e in first if e.get("delta", {}).get("type") == "input_json_delta"
        )
    )
    assert (block["name"], written) == ("Bash", {"command": "cat note.txt"})
    thought = {"type": "thinking", "thinking": "A note.", "signature": "x"}
    result = {
        "type": "tool_result",
        "tool_use_id": block["id"],
        "content": RESULT,
        "is_error": False,
        **CACHED,
    }
    more = [
        {"role": "assistant", "content": [thought, {**block, "input": written}]},
        {"role": "user", "content": [result]},
    ]
    second = events(scripted, "/v1/messages?beta=true", {**CLAUDE, "messages": [*CLAUDE["messages"], *more]})
    assert (
        "".join(e["delta"]["text"] for e in second if e.get("delta", {}).get("type") == "text_delta")
        == ANSWER
    )
    assert scripted.http.post("/v1/messages/count_tokens", json=CLAUDE).json()["input_tokens"] > 100


def _said(role, *texts):
    return {
        "type": "message",
        "id": f"msg_{role}",
        "role": role,
        "content": [{"type": "input_text", "text": text} for text in texts],
    }


CODEX = {
    "model": "small",
    "stream": True,
    "input": [_said("developer", "You help with code."), _said("developer", "# Skills", "# Rules"), _said("user", "<cwd>/x</cwd>"), _said("user", ASKED)],
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "strict": False,
            "description": "Runs a command.",
            "parameters": {
                "type": "object",
                "properties": {"cmd": {"type": "string"}, "login": {"type": "boolean"}, "prefix_rule": {"type": "array", "items": {"type": "string"}}},
                "required": ["cmd"],
                "additionalProperties": False,
            },
        },
        {"type": "namespace", "name": "agents", "description": "Others.", "tools": [{"type": "function", "name": "start", "parameters": {"type": "object"}}]},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0",
    "text": {"verbosity": "low"},
    "client_metadata": {"turn_id": "0"},
}  # fmt: skip


def test_codex_is_answered_and_its_loop_closes(scripted):
    call = events(scripted, "/v1/responses", CODEX)[-1]["response"]["output"][-1]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == (
        "function_call",
        "exec_command",
        {"cmd": "cat note.txt"},
    )
    thought = {"type": "reasoning", "id": "rs_0", "summary": [], "encrypted_content": "x"}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": f"Exit code 0\n{RESULT}"}
    last = events(scripted, "/v1/responses", {**CODEX, "input": [*CODEX["input"], thought, call, result]})[-1]
    assert (
        last["type"] == "response.completed"
        and last["response"]["output"][-1]["content"][0]["text"] == ANSWER
    )


def _tools(name, **more):
    function = {
        "name": name,
        "description": "Runs a command.",
        "parameters": {**COMMAND, "properties": {**COMMAND["properties"], **more}},
    }
    return [{"type": "function", "function": function}]


QWEN = {
    "model": "small",
    "messages": [
        {"role": "system", "content": "You help with code."},
        {"role": "user", "content": [{"type": "text", "text": "This is the setup."}]},
        {"role": "assistant", "content": "Got it."},
        {
            "role": "user",
            "content": [{"type": "text", "text": ASKED, "cache_control": {"type": "ephemeral"}}],
        },
    ],
    "tools": _tools("run_shell_command", is_background={"type": "boolean"}),
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 8000,
    "metadata": {"sessionId": "0"},
}
OPENCODE = {
    "model": "small",
    "max_tokens": 32000,
    "messages": [
        {"role": "system", "content": "You help with code."},
        {"role": "user", "content": f'"{ASKED}"\n'},
    ],
    "tools": _tools("bash", **LIMITS),
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}
CHATS = {"qwen-code": QWEN, "opencode": OPENCODE}


@pytest.mark.parametrize("name", CHATS)
def test_agents_of_chats_are_answered_and_their_loops_close(scripted, name):
    asked = CHATS[name]
    first = events(scripted, "/v1/chat/completions", asked)
    parts = [
        part
        for event in first
        for choice in event["choices"]
        for part in choice["delta"].get("tool_calls", ())
    ]
    assert json.loads("".join(part["function"]["arguments"] for part in parts)) == {"command": "cat note.txt"}
    assert (
        first[-1]["usage"]["prompt_tokens"] > 50 and first[-2]["choices"][0]["finish_reason"] == "tool_calls"
    )
    made = {
        "id": parts[0]["id"],
        "type": "function",
        "function": {**parts[0]["function"], "arguments": '{"command": "cat note.txt"}'},
    }
    said = {
        "role": "assistant",
        "content": None,
        "tool_calls": [made],
        "reasoning_content": "",
        "reasoning_details": [],
    }
    result = {"role": "tool", "tool_call_id": made["id"], "content": RESULT}
    second = events(
        scripted, "/v1/chat/completions", {**asked, "messages": [*asked["messages"], said, result]}
    )
    assert (
        "".join(choice["delta"].get("content") or "" for event in second for choice in event["choices"])
        == ANSWER
    )


def test_aider_gets_a_file(scripted):
    messages = [
        {"role": "system", "content": "Answer with a *file listing*."},
        {"role": "user", "content": "Write plum-48."},
    ]
    found = events(
        scripted,
        "/v1/chat/completions",
        {"model": "small", "messages": messages, "stream": True, "temperature": 0},
    )
    assert "plum-48" in "".join(
        choice["delta"].get("content") or "" for event in found for choice in event["choices"]
    )
