"""Programs that use a library as its pages show it: a question, and a tool that reads a note. `python programs.py NAME URL MODEL` runs one.

It runs with the library's own Python, where nothing of this project is installed.
"""
# pyright: basic, reportMissingImports=false, reportOptionalIterable=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false, reportCallIssue=false

import asyncio
import json
import sys
from collections.abc import Callable

QUESTION = "What does the note say? Read it."
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
FUNCTION = {"name": "read_note", "description": "Text of a note.", "parameters": PARAMETERS}


def read_note(path: str) -> str:
    """Text of a note."""
    with open(path) as file:
        return file.read()


def openai(url: str, model: str) -> str:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    messages: list = [{"role": "user", "content": QUESTION}]
    tools: list = [{"type": "function", "function": FUNCTION}]
    first = client.chat.completions.create(model=model, messages=messages, tools=tools).choices[0].message
    (call,) = first.tool_calls
    result = read_note(**json.loads(call.function.arguments))
    messages += [first, {"role": "tool", "tool_call_id": call.id, "content": result}]
    with client.chat.completions.stream(model=model, messages=messages, tools=tools) as stream:
        chat = stream.get_final_completion().choices[0].message.content
    asked: list = [{"role": "user", "content": QUESTION}]
    flat: list = [{"type": "function", **FUNCTION}]
    response = client.responses.create(model=model, input=asked, tools=flat)
    call = next(item for item in response.output if item.type == "function_call")
    asked += [*response.output, {"type": "function_call_output", "call_id": call.call_id, "output": result}]
    assert client.responses.create(model=model, input=asked, tools=flat).output_text == chat
    return chat


def anthropic(url: str, model: str) -> str:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none")
    tool = anthropic.beta_tool(read_note)
    runner = client.beta.messages.tool_runner(
        model=model, max_tokens=1000, tools=[tool], messages=[{"role": "user", "content": QUESTION}]
    )
    return runner.until_done().content[-1].text


def ollama(url: str, model: str) -> str:
    import ollama

    client = ollama.Client(host=url)
    messages: list = [{"role": "user", "content": QUESTION}]
    first = client.chat(model, messages, tools=[read_note])
    messages.append(first.message)
    for call in first.message.tool_calls:
        messages.append(
            {"role": "tool", "tool_name": call.function.name, "content": read_note(**call.function.arguments)}
        )
    return "".join(
        part.message.content for part in client.chat(model, messages, tools=[read_note], stream=True)
    )


def llm(url: str, model: str) -> str:
    import llm
    from llm.default_plugins.openai_models import Chat

    chat = Chat("small", model_name=model, api_base=f"{url}/v1", can_stream=True, supports_tools=True)
    chat.key = "none"
    return chat.chain(QUESTION, tools=[llm.Tool.function(read_note)], key="none").text()


def langchain(url: str, model: str) -> str:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    reading = tool(read_note)
    messages = [HumanMessage(QUESTION)]
    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model).bind_tools([reading])
    first = chat.invoke(messages)
    results = [
        ToolMessage(reading.invoke(call["args"]), tool_call_id=call["id"]) for call in first.tool_calls
    ]
    return "".join(part.content for part in chat.stream([*messages, first, *results]))


def litellm(url: str, model: str) -> str:
    import litellm

    asked = {
        "model": f"openai/{model}",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "tools": [{"type": "function", "function": FUNCTION}],
    }
    messages: list = [{"role": "user", "content": QUESTION}]
    first = litellm.completion(messages=messages, **asked).choices[0].message
    (call,) = first.tool_calls
    result = read_note(**json.loads(call.function.arguments))
    messages += [first, {"role": "tool", "tool_call_id": call.id, "content": result}]
    return "".join(
        part.choices[0].delta.content or ""
        for part in litellm.completion(messages=messages, stream=True, **asked)
    )


def openai_agents(url: str, model: str) -> str:
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    answers = []
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        agent = Agent(name="reader", model=kind(model, client), tools=[function_tool(read_note)])
        answers.append(asyncio.run(Runner.run(agent, QUESTION)).final_output)
    assert answers[0] == answers[1]
    return answers[0]


def pydantic_ai(url: str, model: str) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    answers = []
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        agent = Agent(kind(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none")))
        agent.tool_plain(read_note)
        answers.append(agent.run_sync(QUESTION).output)
    assert answers[0] == answers[1]
    return answers[0]


def instructor(url: str, model: str) -> str:
    import instructor
    import openai
    from pydantic import BaseModel

    class Note(BaseModel):
        word: str

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        patched = instructor.from_openai(client, mode=mode)
        messages: list = [{"role": "user", "content": "The note says plum-47. Which word is it?"}]
        note = patched.chat.completions.create(
            model=model, response_model=Note, messages=messages, max_tokens=200, max_retries=0
        )
        assert note.word == "plum-47"
    return f"The note says {note.word}."


PROGRAMS: dict[str, Callable[[str, str], str]] = {
    name: program
    for name, program in dict(globals()).items()
    if name
    in (
        "openai",
        "anthropic",
        "ollama",
        "llm",
        "langchain",
        "litellm",
        "openai_agents",
        "pydantic_ai",
        "instructor",
    )
}

if __name__ == "__main__":
    print(PROGRAMS[sys.argv[1]](*sys.argv[2:]))
