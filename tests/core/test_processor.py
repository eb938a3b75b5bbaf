"""Compiled code has the dot products of ARM processors, which the system reports and LLVM does not."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from polydraft.numerics import processor

NEOVERSE_N1 = {16: 0x119FFF, 26: 0}
CORTEX_A72 = {16: 0xFF, 26: 0}
NEOVERSE_V2 = {16: 0xEFFFFFFF, 26: 0x3BFFFF}


class _Auxval:
    def __init__(self, words):
        self._words = words

    def __call__(self, kind):
        return self._words[kind]


@pytest.mark.parametrize(
    ("words", "expected"),
    [(NEOVERSE_N1, "+dotprod"), (CORTEX_A72, ""), (NEOVERSE_V2, "+dotprod,+i8mm")],
    ids=str,
)
def test_dot_products_of_arm_processors_are_read_from_the_system(words, expected, monkeypatch):
    monkeypatch.setattr(processor.sys, "platform", "linux")
    monkeypatch.setattr(processor.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(processor.ctypes, "CDLL", lambda name: SimpleNamespace(getauxval=_Auxval(words)))
    assert processor.unreported_features() == expected


def test_numba_compiles_for_what_llvm_does_not_report():
    program = """
from polydraft.numerics import processor
processor.unreported_features = lambda: "+dotprod"
from polydraft.models.matrices.vectors import FEATURES
from numba.core.codegen import get_host_cpu_features
from numba.core.registry import cpu_target
reported = get_host_cpu_features()
assert FEATURES["dotprod"] and "dotprod" not in reported
print(cpu_target.target_context.codegen()._get_host_cpu_features() == f"{reported},+dotprod")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr
