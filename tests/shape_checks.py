"""Checks shapes at every call in tests: B, N and V must mean one number each throughout a signature."""

import ast
from collections.abc import Callable
from typing import Any

from beartype import beartype
from jaxtyping import _import_hook, install_import_hook

__all__ = ["install", "shapes_only"]


def shapes_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the annotations that speak of tensors and leave the others to the static type checker."""
    annotations = getattr(function, "__annotations__", {})
    function.__annotations__ = {name: hint for name, hint in annotations.items() if "Tensor" in str(hint)}
    return beartype(function)


class _SkipCompiled(_import_hook.JaxtypingTransformer):
    """Numba and Triton must see the function itself and not a wrapper around it."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        names = " ".join(map(ast.unparse, node.decorator_list))
        compiled = any(word in names for word in ("njit", "compiled", "triton"))
        return node if compiled else super().visit_FunctionDef(node)


def install() -> None:
    """Check every module of polydraft that is imported from now on."""
    _import_hook.JaxtypingTransformer = _SkipCompiled
    install_import_hook("polydraft", "tests.shape_checks.shapes_only")
