"""Products have the same bits on every kind of vectors, which are those that the processor has. ARM's are compiled here and not run."""

import json
import os
import subprocess
import sys

import llvmlite.binding as llvm
import pytest


def told(**environment):
    """What `tests.models.processor` says in a process with these variables."""
    run = [sys.executable, "-m", "tests.models.processor"]
    done = subprocess.run(
        run, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=True
    )
    return json.loads(done.stdout)


def without(*beginnings):
    """Features of this processor but those whose names begin so."""
    features = llvm.get_host_cpu_features()
    lost = {name: False for name in features if name.startswith(beginnings)}
    return ",".join(("+" if has else "-") + name for name, has in (features | lost).items())


@pytest.fixture(scope="module")
def here():
    return told()


@pytest.fixture(scope="module")
def with_avx2():
    if not llvm.get_host_cpu_features().get("avx2"):
        pytest.skip("this processor has no AVX2")
    return told(NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES=without("avx512", "avxvnni", "avx10", "amx"))


@pytest.mark.slow
def test_vectors_and_instructions_are_those_of_the_processor(here, with_avx2):
    assert (with_avx2["vectors"], with_avx2["lanes"], with_avx2["dots"]) == ("AVX2", 8, "avx2")
    assert here["lanes"] == (16 if llvm.get_host_cpu_features().get("avx512f") else 8)


@pytest.mark.slow
def test_bits_do_not_depend_on_the_vectors(here, with_avx2):
    assert with_avx2["bits"] == here["bits"]


@pytest.mark.slow
def test_an_avx512_processor_without_vnni_has_the_same_bits(here):
    if not llvm.get_host_cpu_features().get("avx512bw"):
        pytest.skip("this processor has no AVX-512")
    found = told(NUMBA_CPU_NAME="skylake-avx512", NUMBA_CPU_FEATURES=without("avx512vnni", "avxvnni"))
    assert (found["lanes"], found["dots"]) == (16, "avx512bw")
    assert found["bits"] == here["bits"]


@pytest.mark.slow
def test_a_processor_that_widens_no_float16_has_the_same_bits(here):
    if not llvm.get_host_cpu_features().get("sse2"):
        pytest.skip("this processor is no x86")
    lost = without("avx", "amx", "f16c", "fma", "vaes", "vpclmulqdq", "gfni", "xsave")
    found = told(NUMBA_CPU_NAME="nehalem", NUMBA_CPU_FEATURES=lost)
    assert (found["vectors"], found["lanes"], found["dots"]) == ("baseline", 8, None)
    assert found["bits"] == here["bits"]


@pytest.mark.slow
def test_on_arm_bytes_are_multiplied_by_its_dot_products(with_avx2):
    assert with_avx2["arm"] == {
        "bfloat16": 0,
        "Q8_0": 48,
        "Q4_1": 48,
        "Q5_0": 48,
        "Q4_K": 96,
        "Q6_K": 192,
        "IQ4_NL": 48,
    }
