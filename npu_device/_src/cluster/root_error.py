"""Find the error that the text of one of TensorFlow's or Keras's errors is about.

TensorFlow reports a failure inside a graph as ``UnknownError: Graph execution error:`` and the places of the operation
before the error itself, or as ``UnknownError: {{function_node NAME}}`` and the error; one inside a function that it
traces as ``ValueError: in user code:``, the places and the error. Keras puts ``Exception encountered when calling …``
before the text of an error inside a layer, and the layer's arguments after it. One may contain the other.
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
_IN_A_LAYER = re.compile(r"(?P<kind>[\w.]+): Exception encountered when calling (?P<layer>.+)\.$")
_PLACE_IN_CODE = re.compile(r'File "|\s|$')  # a frame, its source line, an empty line
_BOLD = re.compile(r"\x1b\[\d*m")  # Keras 3


def root_error(error: str) -> str:
    """Return the type and text of an error; inside one of TensorFlow's, those of the error that it is about.

    Errors of this package are named without their module.

    Args:
        error: type and text of an exception, as Python prints them after a traceback.
    """
    inner = error
    while inner:
        error, inner = inner, _inside(inner)
    return _INTERNAL.sub("", error)


def _inside(error: str) -> str:
    """Return the error that an error contains; "" if it contains none."""
    first, *lines = error.splitlines() or [""]
    if failed := _IN_A_GRAPH.match(first):
        inner = _in_graph([failed["text"], *lines])
        return inner if not inner or _TYPE.match(inner) else f"{failed['kind']}: {inner}"
    if _IN_A_TRACED_FUNCTION.match(first):
        return _in_function(lines)
    if failed := _IN_A_LAYER.match(first):
        inner = _in_layer(lines, f"rguments received by {failed['layer']}:")
        return inner and f"{failed['kind']}: {inner}"
    return ""


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
    """Return what follows the frames; all of it is indented."""
    lines = textwrap.dedent("\n".join(lines)).splitlines()
    begin = next((number for number, line in enumerate(lines) if not _PLACE_IN_CODE.match(line)), len(lines))
    return "\n".join(lines[begin:]).rstrip()


def _in_layer(lines: list[str], end: str) -> str:
    """Return what comes before the layer's arguments."""
    until = next((number for number, line in enumerate(lines) if line.endswith(end)), len(lines))
    return _BOLD.sub("", "\n".join(lines[:until])).strip()
