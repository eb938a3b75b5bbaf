"""What only compiled functions call is compiled once for its types, and has no machine code of its own."""

import numba
import numpy as np

from polydraft.models.matrices import kernels
from polydraft.numerics import threads
from polydraft.numerics.compile_time import inner


def test_a_function_that_only_compiled_ones_call_is_linked_into_them_and_has_no_code_of_its_own():
    added = inner(lambda x, y: x + y)
    assert numba.njit(lambda x: added(x, 2.0))(1.0) == 3.0
    result = next(iter(added.overloads.values()))
    assert result.library.get_llvm_str()
    assert not result.library.codegen._engine.is_symbol_defined(result.fndesc.llvm_func_name)


def test_functions_that_are_called_with_a_literal_are_not_compiled_for_it():
    @numba.njit
    def caller(x, gain, out, sync):
        kernels.rms_norm(x, gain, np.float32(0), out, 0, 1)
        kernels.norm_part(x[0], np.int64(0), gain, np.float32(0))
        threads.share(sync, np.int64(1), (np.int64(0), np.int64(0)), np.int64(0), np.int64(1))
        threads._rouse(sync, threads._AT.wake)
        threads._rouse(sync, threads._AT.ended)

    functions = kernels.inverse_norm, threads._claim, threads._take, threads._rouse
    row = numba.types.float32[:, ::1]
    caller.compile((row, numba.types.float32[::1], row, numba.types.int64[::1]))
    for function in functions:
        literal = [
            types
            for types in function.overloads
            if any(isinstance(kind, numba.types.Literal) for kind in types)
        ]
        assert not literal, function.py_func.__name__
