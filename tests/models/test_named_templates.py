"""A conversation with tools is written by the template for tools, wherever a model's files name one."""

import json
import shutil

import pytest

from polydraft.models import pair
from polydraft.models.load import load_tokenizer
from tests.models.test_gguf_tokenizer import byte_level_file
from tests.server.conftest import serving, small_engine

PLAIN = "plain: {{ messages[0].content }}"
TOOLS = "tools: {{ tools[0].function.name }} {{ messages[0].content }}<tool_call>"
NAMED = {"default": PLAIN, "tool_use": TOOLS, "rag": "rag"}
HELLO = [{"role": "user", "content": "hi"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def list_in_json(folder):
    shutil.copytree(pair.target_folder(), folder)
    file = folder / "tokenizer_config.json"
    listed = [{"name": name, "template": template} for name, template in NAMED.items()]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": listed}))
    return folder


def jinja_files(folder):
    shutil.copytree(pair.target_folder(), folder)
    (folder / "additional_chat_templates").mkdir()
    for name, template in NAMED.items():
        place = "chat_template" if name == "default" else f"additional_chat_templates/{name}"
        (folder / f"{place}.jinja").write_text(template)
    return folder


def gguf_file(path):
    listed = [{"name": name, "template": template} for name, template in NAMED.items()]
    return byte_level_file(path, "qwen2", template=listed)


@pytest.mark.parametrize("own", [None, "own: {{ messages[0].content }}"])
def test_a_template_beside_the_pictures_is_read_where_the_tokenizer_has_none(tmp_path, own):
    folder = tmp_path / "model"
    shutil.copytree(pair.target_folder(), folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": PLAIN}))
    if own is not None:
        (folder / "chat_template.jinja").write_text(own)
    assert load_tokenizer(str(folder)).chat_template == (own or PLAIN)


def saved_again(folder):
    load_tokenizer(str(gguf_file(folder.with_suffix(".gguf")))).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("files", [list_in_json, jinja_files, gguf_file, saved_again])
def test_the_template_for_tools_is_taken_where_tools_are_given(tmp_path, files):
    tokenizer = load_tokenizer(
        str(files(tmp_path / "model.gguf" if files is gguf_file else tmp_path / "model"))
    )
    engine = small_engine()
    engine.tokenizer = tokenizer
    for parse_special in (True, False):
        assert tokenizer.decode(engine.encode_chat(HELLO, parse_special=parse_special)) == "plain: hi"
        with_tools = engine.encode_chat(HELLO, parse_special=parse_special, tools=[ADD])
        assert tokenizer.decode(with_tools) == "tools: add hi<tool_call>"


def test_a_server_writes_tools_by_their_template_and_other_chats_by_the_default():
    engine = small_engine()
    engine.tokenizer.chat_template = NAMED
    with serving(engine) as served:
        body = {"messages": HELLO, "max_tokens": 1}
        sizes = [
            served.post("/v1/chat/completions", **body, **more).json()["usage"]["prompt_tokens"]
            for more in ({}, {"tools": [ADD]})
        ]
    assert sizes == [len(engine.encode(text)) for text in ("plain: hi", "tools: add hi<tool_call>")]
