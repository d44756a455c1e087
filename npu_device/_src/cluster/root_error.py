"""Find the error that the text of one of TensorFlow's errors is about.

TensorFlow reports a failure inside a graph as ``UnknownError: Graph execution error:`` and the places of the operation
before the error itself, or as ``UnknownError: {{function_node NAME}}`` and the error; one inside a function that it
traces as ``ValueError: in user code:``, the places and the error.
"""

from __future__ import annotations

import re
import textwrap

_IN_A_GRAPH = re.compile(r"(?P<kind>[\w.]+): (Graph execution error:|\{\{function_node [^}]*\}\} )(?P<text>.*)")
_IN_A_TRACED_FUNCTION = re.compile(r"[\w.]+: in user code:")
_PLACE = re.compile(r"Detected at node |Node: |<stack traces|\d+ root error\(s\) found|\s|$")
_NUMBERED = re.compile(r"\s+\(\d+\) [A-Z_ ]+:\s+")  # one of several root errors
_IN_A_DATA_SET = re.compile(r"Error in user-defined function passed to \S+ transformation with iterator: \S+: ")
_END = re.compile(r"Traceback \(most recent call last\):|\s*\[\[\{\{node ")
_TYPE = re.compile(r"[\w.]*[A-Z]\w+: ")
_INTERNAL = re.compile(r"^npu_device\._src\.[\w.]+\.(?=\w)")  # the module of an error of this package
_FRAME = re.compile(r' +File "')


def root_error(error: str) -> str:
    """Return the type and text of an error; inside one of TensorFlow's, those of the error that it is about.

    Errors of this package are named without their module.

    Args:
        error: type and text of an exception, as Python prints them after a traceback.
    """
    first, *lines = error.splitlines() or [""]
    inner = ""
    if failed := _IN_A_GRAPH.match(first):
        inner = _in_graph([failed["text"], *lines])
        if inner and not _TYPE.match(inner):
            inner = f"{failed['kind']}: {inner}"
    elif _IN_A_TRACED_FUNCTION.match(first):
        inner = _in_function(lines)
    return _INTERNAL.sub("", inner or error)


def _in_graph(lines: list[str]) -> str:
    said: list[str] = []
    for line in lines:
        if said and _END.match(line):
            break
        text = line if said else _IN_A_DATA_SET.sub("", _NUMBERED.sub("", line))
        if said or not _PLACE.match(text):
            said.append(text)
    return "\n".join(said).rstrip()


def _in_function(lines: list[str]) -> str:
    """Return what follows the last frame; frames are indented by 4, their source lines by 8."""
    begin = max((number for number, line in enumerate(lines) if _FRAME.match(line)), default=-1) + 1
    while begin < len(lines) and (not lines[begin].strip() or lines[begin].startswith(" " * 8)):
        begin += 1
    return textwrap.dedent("\n".join(lines[begin:])).rstrip()
