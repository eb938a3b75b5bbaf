"""Compiled functions that only compiled functions call: they are linked into their callers, and have no machine code of their own.

Numba writes machine code of every function that it compiles, with the code of all that it calls: a function five calls deep is written six times, of
which one is run.
"""

from typing import Any, Literal

from numba import _dynfunc  # pyright: ignore[reportAttributeAccessIssue] - written in C
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.typed_passes import NativeLowering


class _LinkedLibrary(JITCodeLibrary):
    """Optimised code that other libraries link."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _LinkedLowering(NativeLowering):
    """Numba's, but for machine code."""

    _name = "linked_lowering"

    def run_pass(self, state: Any) -> Literal[True]:
        state.library = library = _LinkedLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        lowered = state["cr"]
        name = lowered.fndesc.qualname.rpartition(".")[2]
        function = _dynfunc.make_function(
            lowered.fndesc.lookup_module(), name, "", 0, lowered.env, (library,)
        )
        library.finalize()
        state.targetctx.insert_user_function(function, lowered.fndesc, [library])
        state.reload_init.extend(library._reload_init)
        state["cr"] = lowered._replace(cfunc=function)
        return True


class LinkedCompiler(Compiler):
    """The pipeline of such functions, for `numba.njit(pipeline_class=...)`."""

    def define_pipelines(self) -> list[PassManager]:
        pipeline = DefaultPassBuilder.define_nopython_pipeline(self.state)
        assert pipeline.passes
        passes = [
            (_LinkedLowering, why) if kind is NativeLowering else (kind, why) for kind, why in pipeline.passes
        ]
        linked = PassManager(pipeline.pipeline_name)
        linked.passes.extend(passes)
        linked.finalize()
        return [linked]
