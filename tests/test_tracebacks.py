"""What the launcher shows of a traceback: the user's frames and each error once."""

from __future__ import annotations

import json
import sys
import traceback
from typing import Callable

import pytest

from npu_device._src.cluster.root_error import root_error
from npu_device._src.cluster.tracebacks import parse, without_libraries

LIBRARY = f'  File "{json.__file__}", line 3, in load\n    raise Something\n    ^^^^^^^^^^^^^^^\n'
USER = '  File "/home/me/train.py", line 5, in <module>\n    load()\n'
HEAD = "Traceback (most recent call last):\n"
CHAIN = "\nThe above exception was the direct cause of the following exception:\n\n"


AGAIN = (
    HEAD
    + LIBRARY
    + "OSError: no file\n"
    + CHAIN
    + HEAD
    + USER
    + LIBRARY
    + "RuntimeError: can't load: no file\n"
)
MORE = CHAIN + HEAD + USER + "RuntimeError: can't load\n"
DEEP = HEAD + USER + LIBRARY + "  [Previous line repeated 970 more times]\nRecursionError: deep\n"
TEXTS = {
    "one": (HEAD + USER + LIBRARY * 3 + "OSError: a\n  b\n", HEAD + USER + "OSError: a\n  b\n", 3),
    "libraries only": (
        HEAD + LIBRARY + "OSError: no file\n",
        HEAD + LIBRARY + "OSError: no file\n",
        0,
    ),
    "a cause that is said again": (AGAIN, HEAD + USER + "RuntimeError: can't load: no file\n", 2),
    "a cause that adds something": (
        HEAD + LIBRARY + "OSError: no file\n" + MORE,
        "OSError: no file\n" + MORE,
        1,
    ),
    "recursion": (DEEP, HEAD + USER + "RecursionError: deep\n", 1),
}


@pytest.mark.parametrize(("text", "shown", "left_out"), TEXTS.values(), ids=TEXTS)
def test_frames_of_libraries_are_left_out(text: str, shown: str, left_out: int) -> None:
    assert without_libraries(parse(text.splitlines())) == (shown, left_out)


def _decode(text: str) -> None:
    try:
        json.loads(text)
    except ValueError as error:
        raise RuntimeError(f"can't decode {text}") from error


def _recur(depth: int) -> None:
    if depth:
        _recur(depth - 1)
    _decode("{")


@pytest.mark.parametrize(
    "act",
    [
        lambda: _decode("{"),
        lambda: _recur(50),
        lambda: compile("(", "train.py", "exec"),
        lambda: json.loads(1),  # type: ignore[arg-type]
    ],
    ids=["a cause", "recursion", "a syntax error", "in a library"],
)
def test_a_parsed_traceback_reads_as_the_printed_one(act: Callable[[], None]) -> None:
    try:
        act()
    except Exception:
        printed = traceback.format_exc()
    errors = parse(printed.splitlines())
    assert "".join(f"{line}\n" for error in errors for line in error.lines()) == printed


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no groups of exceptions")
def test_the_errors_of_a_group_are_shown() -> None:
    try:
        raise ExceptionGroup("several", [ValueError("a"), TypeError("b")])  # noqa: F821
    except Exception:
        shown, _ = without_libraries(parse(traceback.format_exc().splitlines()))
    lines = [line.strip(" |") for line in shown.splitlines()]
    assert [line for line in lines if "Error: " in line] == ["ValueError: a", "TypeError: b"]


ERRORS = {
    "plain": ("ValueError: a\nb", "ValueError: a\nb"),
    "no text": ("KeyError", "KeyError"),
    "of the package": (
        "npu_device._src.cluster.rank_errors.PeerError: rank 1",
        "PeerError: rank 1",
    ),
    "in a graph": (
        "a.b.UnknownError: Graph execution error:\n\nDetected at node N defined at (most recent call last):\n"
        '<stack traces unavailable>\nDetected at node N defined at (most recent call last):\n  File "x", line 1\n'
        "2 root error(s) found.\n  (0) UNKNOWN:  PeerError: rank 1\n  more\nWhat to do: x\n"
        + HEAD
        + "\nOSError",
        "PeerError: rank 1\n  more\nWhat to do: x",
    ),
    "in a function": (
        "a.UnknownError: {{function_node f_1}} PeerError: rank 1\nmore\n" + HEAD,
        "PeerError: rank 1\nmore",
    ),
    "a kernel": (
        "a.InvalidArgumentError: Graph execution error:\n\nDetected at node N defined at (most recent call last):\n"
        '  File "x", line 1, in f\n\nIncompatible shapes: [2] vs. [3]\n\t [[{{node N}}]] [Op:__inference_f_1]',
        "a.InvalidArgumentError: Incompatible shapes: [2] vs. [3]",
    ),
    "a session": (
        "a.UnknownError: Graph execution error:\n\nDetected at node 'D' defined at (most recent call last):\n"
        "    File \"x\", line 1\nNode: 'D'\nError in user-defined function passed to MapDataset:1 "
        "transformation with iterator: One::Map: /dev/null/PeerError: rank 1\nmore\n; Not a directory\n\nOriginal",
        "PeerError: rank 1\nmore",
    ),
    "nothing": (
        "a.UnknownError: Graph execution error:\n\n",
        "a.UnknownError: Graph execution error:\n\n",
    ),
    "tracing": (
        'ValueError: in user code:\n\n    File "x", line 1, in f  *\n        g()\n\n    TypeError: bad\n      more\n',
        "TypeError: bad\n  more",
    ),
    "tracing a layer of tf-keras": (
        'ValueError: in user code:\n\n    File "x", line 1, in f  *\n        g()\n\n'
        "    ValueError: Exception encountered when calling layer 'a b' (type A).\n    \n    in user code:\n    \n"
        '        File "y", line 2, in call  *\n            h()\n    \n        TypeError: bad\n          more\n'
        "    \n    \n    Call arguments received by layer 'a b' (type A):\n      • x=1\n",
        "TypeError: bad\n  more",
    ),
    "a layer of Keras 3": (
        "a.InvalidArgumentError: Exception encountered when calling A.call().\n\n\x1b[1mbad\nmore\x1b[0m\n\n"
        "Arguments received by A.call():\n  • x=1",
        "a.InvalidArgumentError: bad\nmore",
    ),
    "no text of a layer": (
        "E: Exception encountered when calling f.\n",
        "E: Exception encountered when calling f.\n",
    ),
}


@pytest.mark.parametrize(("error", "root"), ERRORS.values(), ids=ERRORS)
def test_the_error_inside_an_error_of_tensorflow_or_keras(error: str, root: str) -> None:
    assert root_error(error) == root


def test_a_long_error_of_a_session_keeps_its_ends() -> None:
    """It passes through a path, which has at most 4096 bytes: rank 0's line and what to do have to be in it."""
    from npu_device._src.collectives.sessions import _shortened

    lines = [f"  rank {rank} on host é: all_reduce of 'x'" for rank in range(500)]
    found = _shortened(
        "\n".join(["the ranks differ", *lines, "What to do: call the same operations"])
    )
    assert len(found.encode()) < 3600
    assert "rank 0 on" in found and "rank 499 on" in found and found.endswith("same operations")
    assert _shortened("short") == "short"
