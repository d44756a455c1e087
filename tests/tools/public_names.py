"""The public names of the package with their parameters and defaults, kept in ``public_names.json``;
``python tests/tools/public_names.py`` adds new ones. None of them goes: scripts for Ascend stand on them.

A name has a list of parameters (``seed=0``, ``*arguments``, and ``*`` before those that are given by name only), or
null if it is a module, a value, or comes from elsewhere. Classes are followed by what their objects have.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import itertools
import json
import pkgutil
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

from npu_device._src.options.option_group import GlobalOptions, RunContextOptions

FILE = Path(__file__).with_suffix(".json")
PACKAGES = ("npu_device", "hccl", "npu_bridge")
# compat.v1 has each module of npu_bridge once more.
_NOT_PUBLIC = re.compile(r"\b_|\blaunch\b|\bsoak\b|\bcompat\.v1\.")
_SIMPLE = (type(None), bool, int, float, str, tuple)
_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY

Names = dict[str, Optional[list[str]]]


def modules() -> Iterator[str]:
    """Yield the names of public modules."""
    for package in PACKAGES:
        path = importlib.import_module(package).__path__
        for name in (
            package,
            *(module.name for module in pkgutil.walk_packages(path, f"{package}.")),
        ):
            if not _NOT_PUBLIC.search(name):
                yield name


def names() -> Names:
    """Return the public names, and those of attributes of public classes, with their parameters."""
    found: Names = {}
    for module_name in modules():
        module = importlib.import_module(module_name)
        below = {module.name for module in pkgutil.iter_modules(getattr(module, "__path__", []))}
        for name in sorted({*getattr(module, "__all__", dir(module)), *below}):
            thing = getattr(module, name, None)
            if is_public(name) and type(thing).__module__ != "__future__":
                found[f"{module_name}.{name}"] = _parameters(thing) if _is_ours(thing) else None
                if inspect.isclass(thing) and _is_ours(thing):
                    found.update(_attributes(f"{module_name}.{name}", thing))
    groups = {
        "global_options()": GlobalOptions(),
        "configs.run_context_options()": RunContextOptions(),
    }
    for name, group in groups.items():
        for rule in group._rules:
            found[f"npu_device.{name}.{rule.path}"] = [
                f"default={rule.default!r}",
                *map(repr, rule.allowed),
            ]
    return dict(sorted(found.items()))


def is_public(name: str) -> bool:
    """Return True for a name that scripts may use; pytest adds names that aren't identifiers."""
    return name.isidentifier() and not name.startswith("_")


def _is_ours(thing: Any) -> bool:
    return not isinstance(thing, types.ModuleType) and str(
        getattr(thing, "__module__", "")
    ).startswith(PACKAGES)


def _parameters(thing: Any) -> list[str] | None:
    """Return the parameters of a function, or of a class that has a constructor of its own."""
    if inspect.isclass(thing):
        own = [name for kind in thing.__mro__ if _is_ours(kind) for name in vars(kind)]
        if issubclass(thing, enum.Enum) or not {"__init__", "__new__", "__signature__"} & set(own):
            return None
    if not callable(thing):
        return None
    found: list[str] = []
    for parameter in inspect.signature(thing).parameters.values():
        if parameter.kind == _KEYWORD_ONLY and not any(text.startswith("*") for text in found):
            found.append("*")
        default = parameter.default
        text = repr(default) if isinstance(default, _SIMPLE) else type(default).__name__
        found.append(str(parameter).partition(":")[0].partition("=")[0])
        if default is not parameter.empty:
            found[-1] += f"={text}"
    return found


def _attributes(path: str, thing: type) -> Names:
    """Return what a class and its objects have, as far as the package defines it."""
    found: Names = {}
    for kind in filter(_is_ours, reversed(thing.__mro__)):
        members = [*vars(kind), *getattr(kind, "__annotations__", ()), *_assigned(kind)]
        for name in members:
            if is_public(name):
                member = getattr(thing, name, None)
                found[f"{path}.{name}"] = (
                    _parameters(member) if inspect.isroutine(member) and _is_ours(member) else None
                )
    return found


def _assigned(kind: type) -> Iterator[str]:
    """Yield the attributes that the methods of a class give to ``self``."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError):
        return
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "self"
        ):
            yield node.attr


def kept() -> Names:
    """Return the names of the file."""
    return dict(json.loads(FILE.read_text()))


def gone(old: Names, new: Names) -> list[str]:
    """Return the names that are missing, and those whose parameters or defaults are, or stand in another order."""
    found = []
    for name, parameters in old.items():
        there = new.get(name)
        if name not in new:
            found.append(f"{name} is missing")
        elif parameters is not None and (there is None or not _takes_all(parameters, there)):
            found.append(f"{name}: the parameters were {parameters}, and are {there}")
    return found


def _takes_all(old: list[str], new: list[str]) -> bool:
    """Return True if every call that the old parameters allow is one that the new ones allow."""
    by_position = list(itertools.takewhile(lambda text: not text.startswith("*"), old))
    others = {text for text in old if text not in by_position and text != "*"}
    required = {text for text in new if "=" not in text and not text.startswith("*")}
    return new[: len(by_position)] == by_position and others <= set(new) and required <= set(old)


def added(old: Names, new: Names) -> Names:
    """Return the names that aren't in the file, or have other parameters there."""
    return {
        name: parameters
        for name, parameters in new.items()
        if name not in old or old[name] != parameters
    }


def main() -> int:
    """Add new names to the file, unless names are gone; return the exit code."""
    old = kept() if FILE.exists() else {}
    new = names()
    wrong = gone(old, new)
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    lines = (f"{json.dumps(name)}: {json.dumps(parameters)}" for name, parameters in new.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
