"""What a node of LibCST holds: the nodes below it, the name that it spells, the arguments of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import libcst as cst
from libcst import matchers

DEFINITIONS = (cst.FunctionDef, cst.ClassDef)
_CAPTURES = matchers.MatchAs() | matchers.MatchStar()

_MOST_STEPS = 20


def bounded(unknown: Any) -> Callable[[Callable], Callable]:
    """Let a function that follows a node back, by calling itself, return ``unknown`` after many steps: assignments may
    go round in a circle.
    """

    def decorate(follow: Callable) -> Callable:
        depth = 0

        def follow_step(owner: Any, node: Any) -> Any:
            nonlocal depth
            if depth > _MOST_STEPS:
                return unknown
            depth += 1
            try:
                return follow(owner, node)
            finally:
                depth -= 1

        return follow_step

    return decorate


def follow(start: Any, sources: Callable[[Any], Iterable]) -> Iterator:
    """Yield a node, and all those that its sources lead to, each once: assignments may go round in a circle."""
    visited = set()
    pending = [start]
    while pending:
        node = pending.pop()
        if node not in visited:
            visited.add(node)
            yield node
            # The sources of a source come before the next source.
            pending += reversed(list(sources(node)))


def walk(node: Any) -> Iterator:
    """Yield a node and all below it."""
    yield node
    for child in node.children:
        yield from walk(child)


def dotted(node: Any) -> str:
    """Return "a.b.c" of names and attributes; "" for anything else."""
    if isinstance(node, cst.Name):
        return str(node.value)
    if not isinstance(node, cst.Attribute):
        return ""
    owner = dotted(node.value)
    if not owner:
        return ""
    return f"{owner}.{node.attr.value}"


def last_word(name: str) -> str:
    """Return the "c" of "a.b.c"."""
    return name.rpartition(".")[2]


def parameters(function: Any) -> list[str]:
    """Return the names of the parameters that one argument each is for."""
    params = function.params
    return [
        param.name.value
        for param in (*params.posonly_params, *params.params, *params.kwonly_params)
    ]


def binds(node: Any, name: str) -> bool:
    """Return True for a function, a lambda, a comprehension, or a branch of ``try`` or ``match``, in which a name isn't
    that of the scopes around.
    """
    targets: list = []
    if isinstance(node, (cst.FunctionDef, cst.Lambda)):
        targets = [param.name for param in matchers.findall(node.params, matchers.Param())]
    elif isinstance(node, cst.BaseComp):
        targets = [loop.target for loop in matchers.findall(node.for_in, matchers.CompFor())]
    elif isinstance(node, cst.ExceptHandler) and node.name is not None:
        targets = [node.name.name]
    elif isinstance(node, cst.MatchCase):
        captures = matchers.findall(node.pattern, _CAPTURES)
        targets = [capture.name for capture in captures if capture.name is not None]
    return any(matchers.findall(target, matchers.Name(name)) for target in targets)


def method(call: Any) -> str:
    """Return the name of the method that a call makes; "" if none."""
    if isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute):
        return str(call.func.attr.value)
    return ""


def argument(call: Any, name: str, position: int | None = None) -> Any:
    """Return the value of an argument, by its name or position; None if there is none."""
    for index, arg in enumerate(call.args):
        if arg.keyword:
            is_wanted = arg.keyword.value == name
        else:
            is_wanted = index == position and not arg.star
        if is_wanted:
            return arg.value
    return None


def is_call_of(node: Any, name: str) -> bool:
    return isinstance(node, cst.Call) and dotted(node.func) == name
