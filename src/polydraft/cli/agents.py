"""Coding agents that people have: the program of each, and what tells it of a server, a model and its context.

An agent that does not know the context takes its own models' for it, and grows a conversation until no request fits.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from polydraft.files.cache_folder import temporary_folder

KEY = "none"
"""Where the server asks for no key; most programs want one."""
ANSWER_MS = 3_600_000
"""That an agent waits for an answer: a long prompt takes minutes on a processor."""
CLAUDES_LEAST = 24_576
"""Tokens of a context with which Claude Code can work: its first request has 18,700 of Qwen2.5's, with version 2.1.197."""
CLAUDES_RESERVE = 13_000
"""Tokens that it keeps free beside an answer: where fewer are, it summarises the conversation."""


@dataclass(frozen=True)
class Endpoint:
    """What an agent talks to. url: without /v1.  context: of the model in tokens, None where nobody knows it."""

    url: str
    model: str
    key: str = KEY
    context: int | None = None

    @property
    def answer(self) -> int:
        """Tokens of the context that an answer may have: agents keep them free."""
        return min(8192, (self.context or 65_536) // 8)


@dataclass(frozen=True)
class Agent:
    """program: its command.  install: how to get it.  variables, arguments: that tell it of an endpoint.

    least: tokens of a context below which its own instructions and tools leave no room for work.
    """

    program: str
    install: str
    variables: Callable[[Endpoint], Mapping[str, str]]
    arguments: Callable[[Endpoint], Sequence[str]]
    least: int = 16_384


def _claude(to: Endpoint) -> dict[str, str]:
    kinds = (
        "ANTHROPIC_MODEL",
        "ANTHROPIC_SMALL_FAST_MODEL",
        *(f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in ("OPUS", "SONNET", "HAIKU")),
    )
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLAUDE_CODE_ATTRIBUTION_HEADER": "0"}
    lengths = {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": to.context, "CLAUDE_CODE_MAX_OUTPUT_TOKENS": to.answer}
    known = {name: str(length) for name, length in lengths.items() if to.context}
    if (
        to.context and to.context - to.answer < CLAUDES_RESERVE + CLAUDES_LEAST
    ):  # each of its turns would begin with a summary
        known["DISABLE_AUTO_COMPACT"] = "1"
    server = {"ANTHROPIC_BASE_URL": to.url, "ANTHROPIC_AUTH_TOKEN": to.key}
    patient = dict.fromkeys(("API_TIMEOUT_MS", "CLAUDE_STREAM_IDLE_TIMEOUT_MS"), str(ANSWER_MS))
    return {**server, **patient, **dict.fromkeys(kinds, to.model), **known, **quiet}


def _codex(to: Endpoint) -> list[str]:
    provider = f'{{name="polydraft", base_url="{to.url}/v1", env_key="POLYDRAFT_API_KEY", wire_api="responses", stream_idle_timeout_ms={ANSWER_MS}}}'
    settings = [
        f"model_providers.polydraft={provider}",
        'model_provider="polydraft"',
        f"model={json.dumps(to.model)}",
    ]
    if to.context:
        settings += [
            f"model_context_window={to.context}",
            f"model_auto_compact_token_limit={to.context - 2 * to.answer}",
        ]
    return [part for setting in settings for part in ("-c", setting)]


def _qwen(to: Endpoint) -> dict[str, str]:
    server = {"OPENAI_BASE_URL": f"{to.url}/v1", "OPENAI_API_KEY": to.key, "OPENAI_MODEL": to.model}
    server["QWEN_CODE_API_TIMEOUT_MS"] = str(ANSWER_MS)
    if not to.context:
        return server
    settings = {"model": {"generationConfig": {"contextWindowSize": to.context}}}
    file = {"QWEN_CODE_SYSTEM_DEFAULTS_PATH": _written("qwen", settings)}  # below what its user has set
    return {**server, "QWEN_CODE_MAX_OUTPUT_TOKENS": str(to.answer), **file}


def _opencode(to: Endpoint) -> dict[str, str]:
    options = {"baseURL": f"{to.url}/v1", "apiKey": to.key, "timeout": ANSWER_MS}
    limit = {"limit": {"context": to.context, "output": to.answer}} if to.context else {}
    models = {to.model: {"name": to.model, **limit}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "polydraft", "options": options, "models": models}
    name = f"polydraft/{to.model}"
    config = {"provider": {"polydraft": provider}, "model": name, "small_model": name}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_MODELS_FETCH": "1"}


def _aider(to: Endpoint) -> list[str]:
    name = f"openai/{to.model}"
    arguments = ["--model", name, "--no-show-model-warnings"]
    if not to.context:
        return arguments
    lengths = {
        "max_input_tokens": to.context - to.answer,
        "max_output_tokens": to.answer,
        "max_tokens": to.answer,
    }
    model = {
        **lengths,
        "litellm_provider": "openai",
        "mode": "chat",
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
    }
    return [*arguments, "--model-metadata-file", _written("aider", {name: model})]


def _written(agent: str, settings: Mapping[str, object]) -> str:
    """The place of a file with settings, for agents that read them nowhere else."""
    text = json.dumps(settings)
    file = temporary_folder() / f"{agent}-{sha256(text.encode()).hexdigest()[:12]}.json"
    file.write_text(text, encoding="utf-8")
    return str(file)


AGENTS: Mapping[str, Agent] = {
    "claude": Agent(
        "claude",
        "npm install -g @anthropic-ai/claude-code",
        _claude,
        lambda to: ["--model", to.model],
        CLAUDES_LEAST,
    ),
    "codex": Agent("codex", "npm install -g @openai/codex", lambda to: {"POLYDRAFT_API_KEY": to.key}, _codex),
    "qwen": Agent(
        "qwen",
        "npm install -g @qwen-code/qwen-code",
        _qwen,
        lambda to: ["--auth-type", "openai", "--model", to.model],
    ),
    "opencode": Agent("opencode", "npm install -g opencode-ai", _opencode, lambda to: []),
    "aider": Agent(
        "aider",
        "python -m pip install aider-chat",
        lambda to: {"OPENAI_API_BASE": f"{to.url}/v1", "OPENAI_API_KEY": to.key},
        _aider,
    ),
}
"""By the name that `polydraft launch` takes."""
