"""Checks shapes at every call in tests: B, N and V must mean one number each throughout a signature."""

import ast
import inspect
from collections.abc import Callable
from typing import Any

from beartype import beartype
from jaxtyping import _import_hook, install_import_hook, jaxtyped


def of_shapes(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations that name a shape: the others are left to the static type checker."""
    annotations = getattr(function, "__annotations__", {})
    return {name: hint for name, hint in annotations.items() if "jaxtyping." in str(hint)}


def shapes_only(function: Callable[..., Any]) -> Callable[..., Any]:
    function.__annotations__ = of_shapes(function)
    return beartype(function)


def checked(made: Any) -> Any:
    """A function or a class with the shapes in its signature checked, or itself where it names none: a check costs a call."""
    function = made.__init__ if inspect.isclass(made) else made
    return jaxtyped(made, typechecker=shapes_only) if of_shapes(function) else made


class _Typechecker(_import_hook.Typechecker):
    """Has the hook decorate with `checked` itself and not with `jaxtyped` around it."""

    def get_ast(self) -> ast.expr:
        return ast.parse(f"jaxtyping._import_hook.Typechecker.lookup['{self.hash}']", mode="eval").body


class _Outermost(_import_hook.JaxtypingTransformer):
    """Leaves out functions inside functions, for which a check would be compiled whenever they are made, and those that Numba
    compiles, which must be seen as they are."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        names = " ".join(map(ast.unparse, node.decorator_list))
        compiled = any(word in names for word in ("njit", "compiled"))
        inside = any(isinstance(parent, ast.FunctionDef) for parent in self._parents)
        return node if compiled or inside else super().visit_FunctionDef(node)


def install() -> None:
    """Check every module of polydraft that is imported from now on."""
    _import_hook.JaxtypingTransformer = _Outermost
    _import_hook.Typechecker = _Typechecker
    install_import_hook("polydraft", "tests.support.shape_checks.checked")
