"""Coding agents that people have: the program of each, and what tells it of a server and a model."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["AGENTS", "Agent"]

KEY = "none"
"""Where the server asks for no key; most programs want one."""


@dataclass(frozen=True)
class Agent:
    """program: its command.  install: how to get it.  variables, arguments: of a server's address (without /v1), a model and a key."""

    program: str
    install: str
    variables: Callable[[str, str, str], Mapping[str, str]]
    arguments: Callable[[str, str], Sequence[str]]


def _claude(url: str, model: str, key: str) -> dict[str, str]:
    kinds = (
        "ANTHROPIC_MODEL",
        "ANTHROPIC_SMALL_FAST_MODEL",
        *(f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in ("OPUS", "SONNET", "HAIKU")),
    )
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLAUDE_CODE_ATTRIBUTION_HEADER": "0"}
    return {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": key, **dict.fromkeys(kinds, model), **quiet}


def _codex(url: str, model: str) -> list[str]:
    provider = f'{{name="polydraft", base_url="{url}/v1", env_key="POLYDRAFT_API_KEY", wire_api="responses"}}'
    return ["-c", f"model_providers.polydraft={provider}", "-c", 'model_provider="polydraft"', "-c", f"model={json.dumps(model)}"]


def _opencode(url: str, model: str, key: str) -> dict[str, str]:
    options = {"baseURL": f"{url}/v1", "apiKey": key}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "polydraft", "options": options, "models": {model: {"name": model}}}
    name = f"polydraft/{model}"
    config = {"provider": {"polydraft": provider}, "model": name, "small_model": name}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_MODELS_FETCH": "1"}


AGENTS: Mapping[str, Agent] = {
    "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code", _claude, lambda url, model: ["--model", model]),
    "codex": Agent("codex", "npm install -g @openai/codex", lambda url, model, key: {"POLYDRAFT_API_KEY": key}, _codex),
    "qwen": Agent(
        "qwen",
        "npm install -g @qwen-code/qwen-code",
        lambda url, model, key: {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "OPENAI_MODEL": model},
        lambda url, model: ["--auth-type", "openai", "--model", model],
    ),
    "opencode": Agent("opencode", "npm install -g opencode-ai", _opencode, lambda url, model: []),
    "aider": Agent(
        "aider",
        "python -m pip install aider-chat",
        lambda url, model, key: {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": key},
        lambda url, model: ["--model", f"openai/{model}", "--no-show-model-warnings"],
    ),
}
"""By the name that `polydraft launch` takes."""
