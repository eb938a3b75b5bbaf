"""Every test runs on one thread and with the shapes in signatures checked, B, N and V the same throughout a call."""

import ast
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from beartype import beartype
from jaxtyping import _import_hook, install_import_hook

torch.set_num_threads(1)


def shapes_only(function):
    """Check the annotations that speak of tensors and leave the others to the type checker."""
    annotations = getattr(function, "__annotations__", {})
    function.__annotations__ = {name: hint for name, hint in annotations.items() if "Tensor" in str(hint)}
    return beartype(function)


class _Uncompiled(_import_hook.JaxtypingTransformer):
    """Numba compiles the function itself and not a wrapper around it, so compiled functions stay as they are."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        compiled = any("njit" in ast.unparse(decorator) for decorator in node.decorator_list)
        return node if compiled else super().visit_FunctionDef(node)


_import_hook.JaxtypingTransformer = _Uncompiled
install_import_hook("polydraft", "beartype.beartype")
_import_hook.Typechecker.lookup.update(dict.fromkeys(_import_hook.Typechecker.lookup, shapes_only))
