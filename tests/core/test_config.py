"""Settings: declared once, checked in one place, the same on the command line, in Python and in the reference."""

import ast
import json
from dataclasses import fields
from pathlib import Path

import pytest

import polydraft
from polydraft import config
from polydraft.config import (
    BatchConfig,
    EngineConfig,
    ModelConfig,
    ReplicaConfig,
    SamplingConfig,
    ServerConfig,
    SpeculationConfig,
)
from polydraft.errors import InvalidInputError, UnknownNameError
from tests.support.commands import commands

KINDS = [EngineConfig, SamplingConfig, ServerConfig, ReplicaConfig, BatchConfig]
MOST_PARAMETERS = 12
MOST_COMPILED = 14
"""Of a function, and of one that is compiled for tight loops: there a record that groups arrays costs what it saves."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_has_a_setting_and_its_default(kind):
    assert [f.name for f in fields(kind)] == list(config.settings(kind))
    assert all(
        spec.text and not spec.text.endswith(".") and spec.default == getattr(kind(), name)
        for name, spec in config.settings(kind).items()
    )


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (
            ModelConfig,
            {"threads": 0},
            "threads=0 was given; expected at least 1, a whole number. Change it, or leave it out",
        ),
        (
            ModelConfig,
            {"max_num_seqs": 2.5},
            "max_num_seqs=2.5 was given; expected at least 1, a whole number",
        ),
        (ModelConfig, {"max_num_seqs": True}, "max_num_seqs=True was given"),
        (ModelConfig, {"max_num_seqs": None}, "max_num_seqs=None was given"),
        (
            ModelConfig,
            {"quantization": "int3"},
            "quantization='int3' was given; expected one of 'int8', 'int4'",
        ),
        (
            SpeculationConfig,
            {"depth": 0},
            "expected at least 1, a whole number. For plain decoding use drafter=None",
        ),
        (SpeculationConfig, {"lead_cap": 3}, "lead_cap=3 was given without asynchronous=True"),
        (ServerConfig, {"port": 65536}, "expected a whole number in [0, 65535]"),
        (ServerConfig, {"timeout": float("nan")}, "timeout=nan was given; expected at least 0.1, a number"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_what_was_expected(kind, values, message):
    with pytest.raises(InvalidInputError) as error:
        kind(**values)
    assert message in str(error.value)


def test_fields_that_stand_for_options_of_drafter_and_decoding_are_among_them():
    speculation = SpeculationConfig(
        head="folder",
        index="a",
        drafter_options={"depth": 3},
        decoding="contrastive",
        alpha=0.2,
        decoding_options={"k": 8},
    )
    assert speculation.all_drafter_options == {"depth": 3, "weights": "folder", "index": "a"}
    assert speculation.all_decoding_options == {"k": 8, "alpha": 0.2}


def test_one_configuration_of_each_kind_is_made_of_fields_of_all():
    replicas, engine = config.split({"replicas": 2, "depth": 4, "model": "x"}, ReplicaConfig, EngineConfig)
    assert (replicas.chosen(), engine.chosen()) == ({"replicas": 2}, {"model": "x", "depth": 4})
    with pytest.raises(UnknownNameError, match="nonsense"):
        config.split({"nonsense": 1}, ReplicaConfig, EngineConfig)


def test_variables_of_the_environment_are_fields(monkeypatch):
    monkeypatch.setenv("POLYDRAFT_VERIFIER", "block")
    monkeypatch.setenv("POLYDRAFT_DRAFTER_OPTIONS", json.dumps({"depth": 8}))
    assert config.from_environment(SpeculationConfig) == {
        "verifier": "block",
        "drafter_options": '{"depth": 8}',
    }


def options(command: str) -> dict[str, str]:
    """By option its help."""
    return {
        param.opts[0]: param.help for param in commands()[command].params if param.param_type_name == "option"
    }


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "batch"])
def test_commands_have_the_engine_s_options_with_their_help(command):
    by_name = options(command)
    without = (
        {"--offer", "--max-num-seqs", "--prefix-cache-bytes", "--prefix-cache-file"}
        if command != "serve"
        else set()
    )
    for name, spec in config.settings(EngineConfig).items():
        option = spec.flag if spec.flag is not None else config.flag(name)
        absent = {"batch": ("head", "index"), "serve": ("model", "draft_model")}.get(
            command, ()
        )  # several models have options of their own
        if option and option not in without and name not in absent:
            assert by_name[option].startswith(spec.described().partition(" Default: ")[0].removesuffix("."))


def test_help_is_a_noun_phrase_that_ends_with_a_full_stop():
    helps = [
        (name, p.opts[0], p.help)
        for name, command in commands().items()
        if name
        for p in command.params
        if getattr(p, "help", None)
    ]
    assert len(helps) > 150
    verbs = (
        "Write",
        "Print",
        "Measure ",
        "Show",
        "Draw",
        "Read",
        "Fetch",
        "Make",
        "Append",
        "Compile",
        "Go",
        "Keep",
        "Of ",
    )
    assert [h for h in helps if h[2].startswith(verbs) or not h[2].endswith(".")] == []


def test_no_function_has_more_parameters_than_can_be_read():
    source = Path(polydraft.__file__).parent
    long = []
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names = [
                    a.arg
                    for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                    if a.arg not in ("self", "cls")
                ]
                if len(names) > (MOST_COMPILED if node.decorator_list else MOST_PARAMETERS):
                    long.append(f"{path.relative_to(source)}:{node.name}")
    assert not long, "group parameters in a dataclass, as config.py does"
