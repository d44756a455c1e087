"""docs/compatibility.md is true: its names can be imported, and none is missing. The English of all pages follows the
rules. docs/messages.md lists every message with a remedy, below its family. Public
names say what they take, return and raise; examples in docstrings do what they show, on a single device.
"""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import messages
import prose
import pytest

import hccl
import npu_bridge
import npu_device
from npu_device._src.gradients import split_strategy

DOCS = Path(__file__).parent.parent / "docs"
PAGE, MESSAGES = ((DOCS / name).read_text() for name in ("compatibility.md", "messages.md"))
ROW = re.compile(
    r"^\| (?P<names>`(?:npu_device|hccl|npu_bridge)\..*?) \| (?P<status>[^|]*) \|", re.MULTILINE
)
NAMES = [
    (name, row["status"])
    for row in ROW.finditer(PAGE)
    for name in re.findall(r"`([\w.]+)`", row["names"])
]
PACKAGE = Path(npu_device.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if ">>> " in path.read_text()
)

_DEPTH = 2  # of calls in which an error is looked for
_NOT_PUBLIC = re.compile(r"\b_src\b|\blaunch\b|__main__|\bsoak\b")
_NO_VALUE = (None, "None", "NoReturn", "Iterator[None]", inspect.Signature.empty)


def is_there(name: str) -> bool:
    """Return True for a dotted name that ``from a.b import c`` would find."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_the_page_has_rows() -> None:
    names = [name for name, _ in NAMES]
    assert len(names) > 150
    assert sorted(names) == sorted(set(names))
    assert {status for _, status in NAMES} == {"works", "no effect", "refused"}


def test_the_names_are_there() -> None:
    assert not [name for name, _ in NAMES if not is_there(name)]


def test_every_public_name_has_a_row() -> None:
    listed = {name for name, _ in NAMES}
    assert not [name for name in npu_device.__all__ if f"npu_device.{name}" not in listed]


def test_the_english_of_pages_follows_the_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert prose.main() == 0, capsys.readouterr().err


def quoted() -> list[str]:
    """Return what the hand-written parts of the page, ``differs.md`` and the tutorials quote of messages."""
    by_hand = (
        re.sub(r"```text\n.*?```", "", MESSAGES, flags=re.DOTALL)
        + (DOCS / "differs.md").read_text()
    )
    found = [text for text in re.findall(r'"([^"]+)"', by_hand) if text.count(" ") > 1]
    for page in (DOCS / "tutorials").glob("*.md"):
        found += [
            block.splitlines()[0]
            for block in re.findall(r"```text\n(.*?)```", page.read_text(), re.DOTALL)
        ]
    return found


def test_the_page_has_every_message() -> None:
    assert messages.written(MESSAGES) == MESSAGES, "run: make docs"
    assert "\nthe ranks were given different data\n" in MESSAGES
    assert sum(map(len, messages.openings().values())) > 150


def plain(text: str) -> str:
    """Return a text without values."""
    return re.sub(r"…|\b\d+\b|\bAdam\b|^\w*Error: ", "", " ".join(text.split()))


def test_what_is_quoted_is_in_the_code() -> None:
    trees = [ast.parse(path.read_text()) for path in messages.SOURCE.rglob("*.py")]
    code = "\n".join(plain(text) for tree in trees for text in messages.texts(tree))
    assert len(quoted()) > 10
    assert not [text for text in quoted() if plain(text) not in code]


def public() -> dict[str, Any]:
    """Return the package's own public functions and classes, and the methods of those, by name; each once."""
    found: dict[int, tuple[str, Any]] = {}
    for package in (npu_device, hccl, npu_bridge):
        names = [
            module.name
            for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        ]
        for name in [package.__name__, *names]:
            if not _NOT_PUBLIC.search(name):
                module = importlib.import_module(name)
                for each in getattr(module, "__all__", vars(module)):
                    thing = getattr(module, each, None)
                    is_ours = str(getattr(thing, "__module__", "")).startswith("npu_device")
                    if callable(thing) and is_ours and not each.startswith("_"):
                        found.setdefault(id(thing), (f"{name}.{each}", thing))
    return {name: thing for first in found.values() for name, thing in _with_methods(*first)}


def _with_methods(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield a thing, and the methods of a class that no class of Keras or TensorFlow describes."""
    yield name, thing
    if inspect.isclass(thing):
        theirs = [
            kind for kind in thing.__mro__[1:] if not kind.__module__.startswith("npu_device")
        ]
        for method, function in vars(thing).items():
            if (
                inspect.isfunction(function)
                and not method.startswith("_")
                and not any(hasattr(k, method) for k in theirs)
            ):
                yield f"{name}.{method}", function


def missing(thing: Any) -> Iterator[str]:
    """Yield the parts that a docstring lacks."""
    if not (thing.__doc__ or "").strip():
        yield "docstring"
    function = thing.__init__ if inspect.isclass(thing) else thing
    if not inspect.isfunction(inspect.unwrap(function)) or (
        inspect.isclass(thing) and "__init__" not in vars(thing)
    ):
        return
    text, signature = inspect.getdoc(thing) or "", inspect.signature(function)
    described = " ".join(re.findall(r"^(?:Args|Attributes):\n((?: .*\n?)*)", text, re.MULTILINE))
    for name in signature.parameters:
        if name != "self" and not re.search(rf"\b{name}\b", described):
            yield f"Args: {name}"
    returns = signature.return_annotation
    if (
        function is thing
        and returns not in _NO_VALUE
        and not re.search(r"^(Returns|Yields):|\AReturn\b", text, re.M)
    ):
        yield "Returns"
    if "\nRaises:" not in text and raises(function, _DEPTH):
        yield "Raises"


@functools.cache
def raises(function: Any, depth: int) -> bool:
    """Return True if a function, or one of the package that it calls, raises an error."""
    function = inspect.unwrap(function)
    is_written = inspect.isfunction(function) and function.__code__.co_filename.endswith(
        ".py"
    )  # not by dataclasses
    if not is_written or not function.__module__.startswith("npu_device"):
        return False
    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))))
    if any(isinstance(node, ast.Raise) and node.exc for node in nodes):
        return True
    calls = [node.func for node in nodes if isinstance(node, ast.Call)] if depth else []
    return any(
        raises(called, depth - 1)
        for called in map(functools.partial(_called, function), calls)
        if called
    )


def _called(function: Any, node: ast.expr) -> Any:
    """Return the function behind ``name(…)`` or ``module.name(…)``; None for other calls."""
    path = ast.unparse(node).split(".") if isinstance(node, (ast.Name, ast.Attribute)) else [""]
    found = functools.reduce(
        lambda thing, name: getattr(thing, name, None), path[1:], function.__globals__.get(path[0])
    )
    return found if inspect.isfunction(found) else None


def test_public_names_are_described() -> None:
    names = public()
    assert len(names) > 200 and len(MODULES) > 10
    lacking = {name: list(missing(thing)) for name, thing in names.items()}
    assert not {name: parts for name, parts in lacking.items() if parts}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        failed, tried = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    finally:
        split_strategy.forget_strategies()
    assert tried
    assert not failed, "see the output for what came instead"
