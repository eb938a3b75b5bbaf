"""Formats by name: those that templates do not write, or not so that a difference shows, and those that any model may answer in; and how a model thinks by its format."""

import json
from collections.abc import Sequence
from typing import Any

from polydraft.core.thinking import Thinking
from polydraft.errors import InvalidInputError
from polydraft.server.formats.form import Format, Parameter

TOOLS_NAMES = ("tools", "xml_tools", "functions")
"""Of the tools, in templates."""
THINKING = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<think:opensource>", "</think:opensource>"),
    ("<thinking>", "</thinking>"),
)
"""Marks around the thoughts of a model, by family."""
OBJECT = '{"name": "{name}", "arguments": '
HERMES = Format("hermes", head=f"<tool_call>\n{OBJECT}", tail="}\n</tool_call>", separator="\n")
MISTRAL = Format("mistral", "[TOOL_CALLS][", ", ", "]", OBJECT, "}", id_length=9)
MISTRAL_ARGS = Format(
    "mistral_args",
    head="[TOOL_CALLS]{name}[ARGS]",
    read_head=r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+?)\s*(?:\[CALL_ID\]\w*)?\[ARGS\]",
    id_length=9,
)
LLAMA = Format(
    "llama3_json",
    separator="; ",
    head='{"name": "{name}", "parameters": ',
    tail="}",
    sign="<|python_tag|>",
    read_head=r'(?:<\|python_tag\|>)?\s*\{\s*"name"\s*:\s*"(?P<name>[\w.-]+)"\s*,\s*"(?:parameters|arguments)"\s*:',
    hidden=("<|python_tag|>",),
)
TAGS = Parameter("<parameter={key}>\n", "\n</parameter>", "\n")
QWEN_XML = Format(
    "qwen_xml",
    separator="\n",
    head="<tool_call>\n<function={name}>\n",
    tail="\n</function>\n</tool_call>",
    coding="tagged",
    parameter=TAGS,
)
GRANITE = Format(
    "granite",
    "<|tool_call|>[",
    ", ",
    "]",
    OBJECT,
    "}",
    thinking=("<think>", "</think>"),
    hidden=("<response>", "</response>"),
)
LFM2 = Format(
    "lfm2", "<|tool_call_start|>[", ", ", "]<|tool_call_end|>", "{name}(", ")", coding="python", quote='"'
)
GPT_OSS = Format(
    "gpt_oss",
    separator="<|start|>assistant",
    head=" to=functions.{name}<|channel|>commentary json<|message|>",
    read_head=r"\s*to=functions\.(?P<name>[\w.-]+?)\s*(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?\s*(?:json)?\s*<\|message\|>",
    lead="<|start|>assistant",
    parallel=False,
    thinking=("<|channel|>analysis<|message|>", "<|end|>"),
    channels=True,
    before_text="<|channel|>final<|message|>",
    hidden=(
        "<|channel|>final<|message|>",
        "<|channel|>commentary<|message|>",
        "<|channel|>commentary",
        "<|start|>assistant",
        "<|end|>",
        "<|return|>",
        "<|call|>",
    ),
)
KIMI_K3 = Format(
    "kimi_k3",
    "<|open|>tools<|sep|>",
    "",
    "<|close|>tools<|sep|>",
    '<|open|>call tool="{name}" index="{index}"<|sep|>',
    "<|close|>call<|sep|>",
    "tagged",
    Parameter('<|open|>argument key="{key}" type="{type}"<|sep|>', "<|close|>argument<|sep|>"),
    first_index=1,
    sign="<|open|>tools<|sep|>",
    thinking=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    hidden=(
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|>",
        "<|close|>message<|sep|>",
        "<|end_of_msg|>",
    ),
    before_text="<|open|>response<|sep|>",
)
MUSE = Format(
    "muse",
    separator="<|eom|><|start|>assistant",
    head=' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n',
    tail="\n</atem:invoke>\n</atem:function_calls>",
    coding="tagged",
    parameter=Parameter('<atem:parameter name="{key}">', "</atem:parameter>", "\n"),
    lead="<|eom|><|start|>assistant",
    sign="to=",
    read_head=r'(?:\s*to=[\w.-]+<\|message\|>)?\s*<atem:function_calls>\s*<atem:invoke name="(?P<name>[\w.-]+)">',
    thinking=("to=self<|message|>", "<|eom|>"),
    channels=True,
    before_text=" to=user<|message|>",
    others=("to=user<|message|>", "to=self<|message|>"),
    hidden=("to=user<|message|>", "<|start|>assistant", "<|eom|>", "<|eot|>"),
)
SOLAR = Format(
    "solar",
    "<|tool_calls|>",
    "",
    "<|calls|>",
    "<|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|>",
    "<|tool_call:end|>",
    lead="<|begin|>assistant",
    thinking=("<|think|>", "<|end|>"),
    channels=True,
    before_text="<|content|>",
    hidden=("<|begin|>assistant", "<|content|>", "<|end|>"),
)
MINIMAX_M3 = Format(
    "minimax_m3",
    "]<]minimax[>[<tool_call>\n",
    "\n",
    "\n]<]minimax[>[</tool_call>",
    ']<]minimax[>[<invoke name="{name}">',
    "]<]minimax[>[</invoke>",
    "nested",
    prefix="]<]minimax[>[",
    thinking=("<mm:think>", "</mm:think>"),
)
MINICPM = Format(
    "minicpm",
    separator="\n",
    head='<function name="{name}">',
    tail="</function>",
    coding="tagged",
    parameter=Parameter('<param name="{key}">', "</param>", python=True),
)
FUNCTIONARY = Format(
    "functionary",
    head=">>>{name}\n",
    read_head=r"\s*>>>(?P<name>(?!all\n)[\w.-]+)\n",
    sign=">>>",
    preset=">>>",
    others=(">>>all\n",),
    hidden=(">>>all\n",),
    before_text="all\n",
)
GIGACHAT = Format(
    "gigachat",
    head="<|message_sep|>\n\nfunction call<|role_sep|>\n" + OBJECT,
    tail="}",
    parallel=False,
)
FIREFUNCTION = Format("firefunction", "functools[", ", ", "]", OBJECT, "}")
DEEPSEEK_R1 = Format(
    "deepseek_r1",
    "<｜tool▁calls▁begin｜>",
    "\n",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
    "\n```<｜tool▁call▁end｜>",
)
APRIEL = Format(
    "apriel_thinker",
    "<tool_calls>[",
    ", ",
    "]</tool_calls>",
    OBJECT,
    "}",
    thinking=("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),
)
COMMAND_R_PLUS = Format(
    "command_r_plus",
    "Action:\n```json\n[\n    ",
    ",\n    ",
    "\n]```",
    '{\n        "tool_name": "{name}",\n        "parameters": ',
    "\n    }",
    sign="Action:",
)
FORMATS = {
    form.name: form
    for form in (
        HERMES, MISTRAL, MISTRAL_ARGS, LLAMA, QWEN_XML, GRANITE, LFM2, GPT_OSS, KIMI_K3, MUSE, SOLAR, MINIMAX_M3,
        MINICPM, FUNCTIONARY, GIGACHAT, FIREFUNCTION, DEEPSEEK_R1, APRIEL, COMMAND_R_PLUS,
    )
}  # fmt: skip
ANY = (HERMES, QWEN_XML, MISTRAL, MISTRAL_ARGS)
"""Those that a model of any format may answer in."""
SIGNS = (
    ("<|channel|>analysis<|message|>", GPT_OSS),
    ("open_tag('argument'", KIMI_K3),
    ("<atem:", MUSE),
    ("<|tool_call:args|>", SOLAR),
    ("]<]minimax[>[", MINIMAX_M3),
    ("<param name=", MINICPM),
    (">>>all", FUNCTIONARY),
    ("function call<|role_sep|>", GIGACHAT),
    ("functools[", FIREFUNCTION),
    ("[BEGIN FINAL RESPONSE]", APRIEL),
    ("Write \\'Action:\\' followed by", COMMAND_R_PLUS),
    ("respond only with <|tool_call|>", GRANITE),
    ("List of tools: ", LFM2),
    ("<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json'", DEEPSEEK_R1),
)
"""What says in a template that it is of a named format."""


def of_template(template: str) -> Format | None:
    """The named format of a template, where no rendering shows it.

    Example:
        >>> of_template("... functools[ ...").name, of_template("{{ messages }}")
        ('firefunction', None)
    """
    return next((form for sign, form in SIGNS if sign in template), None)


def tools_for(name: str, tools: Sequence[Any]) -> Any:
    """The tools as a template takes them under a name: `functions` is a text."""
    return json.dumps([tool["function"] for tool in tools], indent=4) if name == "functions" else list(tools)


def check(name: str | None, option: str) -> None:
    """Refuse a name that no format has.

    Raises:
        InvalidInputError: naming those that there are.
    """
    if name is not None and name not in FORMATS:
        known = ", ".join(FORMATS)
        raise InvalidInputError(
            f"{option}={name!r} was given; expected one of {known}. Choose one, or leave it out."
        )


MOST_MARK_TOKENS = 16
"""That a mark and the blanks behind it may be at the end of a prompt."""


def opens_thoughts(text: str, marks: tuple[str, str]) -> bool:
    """Whether a text ends inside of thoughts.

    Example:
        >>> opens_thoughts("<think>Two", THINKING[0]), opens_thoughts("<think></think>Two", THINKING[0])
        (True, False)
    """
    return text.rfind(marks[0]) > text.rfind(marks[1])


def thinking_of(
    tokenizer: Any, form: Format, prompt: Sequence[int], continued: str | None = None
) -> Thinking | None:
    """How a model thinks behind a prompt; None where it is in the middle of an answer. continued: the beginning of that, where it has one.

    A format that has marks offers them, unless its prompt has closed them: then its models answer at once.
    """
    marks = form.thinking or THINKING[0]
    if continued is not None:
        return Thinking(*marks, opened=True) if opens_thoughts(continued, marks) else None
    end = tokenizer.decode(list(prompt[-MOST_MARK_TOKENS:])).rstrip()
    opened = end.endswith(marks[0].rstrip())
    offered = form.thinking is not None and not end.endswith(marks[1])
    return Thinking(*marks, opened=opened, offered=offered)
