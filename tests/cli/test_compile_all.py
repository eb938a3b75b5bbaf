"""Once everything was called, nothing that a run calls is left to compile or to load."""

import os
import subprocess
import sys

import pytest

from polydraft import Engine
from polydraft.cli import compile_all
from polydraft.core import DraftSampling, Method, TreeShape
from polydraft.methods import registry
from polydraft.models import load, pair

RUN = """
from polydraft import Engine, Profile, SamplingParams
from polydraft.numerics import compile_time
from polydraft.cli.compile_all import compile_drafters, compile_formats
from polydraft.models.compiled.forward import compiled_forward

compile_drafters(["model:coupled"])
compile_formats()
ready = compile_time.seconds()
for options in ({}, {"drafter": "model:coupled"}, {"drafter": "model:coupled", "verifier": "match", "quantization": "int8"}, {"quantization": "int4"}):
    engine = Engine.embedded(max_num_seqs=4, **{"drafter": None, "profile": Profile.assumed(), **options})
    engine.generate(["def f(x):", "import"], SamplingParams(seed=1, n=2, max_tokens=40))
    engine.generate("class A:", SamplingParams(temperature=0, max_tokens=40))
print(len(compiled_forward.signatures), compile_time.seconds() - ready)
"""


@pytest.mark.slow
def test_a_run_after_it_in_whatever_format_neither_compiles_nor_loads_compiled_code():
    environment = {**os.environ, "POLYDRAFT_CACHE": "off"}
    done = subprocess.run(
        [sys.executable, "-c", RUN], capture_output=True, text=True, timeout=600, env=environment, check=True
    )
    assert done.stdout.splitlines() == ["1 0.0"]


class Weighted:
    """A drafter that is not built without a file of the user's."""

    methods = (
        Method(
            "weighted", "", "", 2026, "", frozenset({DraftSampling.POINT_MASS}), frozenset({TreeShape.CHAIN})
        ),
    )

    @classmethod
    def build(cls, parts, *, weights): ...


def test_every_kind_of_every_drafter_that_can_be_built_is_called_and_every_rule(tmp_path, monkeypatch):
    every = [info.name for name in registry.names("drafter") for info in registry.drafter(name).methods]
    monkeypatch.setitem(registry.DRAFTERS, "weighted", f"{__name__}:Weighted")
    tokenizer = load.load_tokenizer(str(pair.target_folder()))
    kinds = compile_all._options(tmp_path, [[1, 2, 3, 4] * 5], tokenizer)
    assert list(kinds) == [name for name in every if name in kinds]
    for name in (
        {*every, "weighted"} - {*kinds} - {"nest", "mask-query", "peagle", "assistant"}
    ):  # a distribution's, one of encoder-decoders, and two that are only published
        with pytest.raises(TypeError, match="missing"):
            registry.drafter(name).build(None)
    models = [compile_all._model(name) for name in ("target", "draft")]
    for kind, options in kinds.items():
        built = Engine.of(
            models[0],
            tokenizer=tokenizer,
            draft_model=models[1],
            draft_tokenizer=tokenizer,
            drafter=kind,
            drafter_options=options,
        )
        assert built.drafter is not None and built.drafter.info.name == kind
    rules = {rule for kind in kinds for rule in compile_all._verifiers(compile_all._info(kind))}
    assert rules == set(registry.names("verifier"))
