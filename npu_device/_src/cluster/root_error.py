"""Find the error that an error of TensorFlow or Keras is about, in its text.

TensorFlow reports a failure inside a graph as ``UnknownError: Graph execution error:`` and the places of the operation
before the error itself, or as ``UnknownError: {{function_node NAME}}`` and the error; one inside a function that it
traces as ``ValueError: in user code:``, the places and the error. Keras puts ``Exception encountered when calling …``
before the text of an error inside a layer, and the arguments of the layer after it. One may contain the other.
"""

from __future__ import annotations

import itertools
import re
import textwrap

_IN_A_GRAPH = re.compile(
    r"(?P<kind>[\w.]+): (Graph execution error:|\{\{function_node [^}]*\}\} )(?P<text>.*)"
)
_IN_A_TRACED_FUNCTION = re.compile(r"[\w.]+: in user code:")
_PLACE = re.compile(r"Detected at node |Node: |<stack traces|\d+ root error\(s\) found|\s|$")
_NUMBERED = re.compile(r"\s+\(\d+\) [A-Z_ ]+:\s+")  # the head of one of several root errors
_IN_A_DATA_SET = re.compile(
    r"Error in user-defined function passed to \S+ \w+ with iterator: \S+: (/dev/null/)?"
)
# What follows the error's own text, in tracebacks, graphs and the paths of ``sessions``.
_END = re.compile(r"Traceback \(most recent call last\):|\s*\[\[\{\{node |; Not a directory")
_TYPE = re.compile(r"[\w.]*[A-Z]\w+: ")
# The module of an error of this package, which says nothing to a user.
_INTERNAL = re.compile(r"^npu_device\._src\.[\w.]+\.(?=\w)")
_IN_A_LAYER = re.compile(r"(?P<kind>[\w.]+): Exception encountered when calling (?P<layer>.+)\.$")
_PLACE_IN_CODE = re.compile(r'File "|\s|$')  # a frame, its source line, an empty line
_BOLD = re.compile(r"\x1b\[\d*m")  # Keras 3 prints titles in bold


def root_error(error: str) -> str:
    """Return the type and text of an error; for one of TensorFlow's, of the error that it is about.

    Errors of this package are named without their module.
    """
    inner = error
    while inner:
        error = inner
        inner = _inside(error)
    return _INTERNAL.sub("", error)


def _inside(error: str) -> str:
    headline, *lines = error.splitlines() or [""]
    if failed := _IN_A_GRAPH.match(headline):
        inner = _in_graph([failed["text"], *lines])
        if inner and not _TYPE.match(inner):
            inner = f"{failed['kind']}: {inner}"
        return inner
    if _IN_A_TRACED_FUNCTION.match(headline):
        lines = textwrap.dedent("\n".join(lines)).splitlines()
        return "\n".join(itertools.dropwhile(_PLACE_IN_CODE.match, lines)).rstrip()
    if failed := _IN_A_LAYER.match(headline):
        end = f"rguments received by {failed['layer']}:"
        message = itertools.takewhile(lambda line: not line.endswith(end), lines)
        inner = _BOLD.sub("", "\n".join(message)).strip()
        return inner and f"{failed['kind']}: {inner}"
    return ""


def _in_graph(lines: list[str]) -> str:
    said: list[str] = []
    for line in lines:
        if said and _END.match(line):
            break
        text = line
        if not said:
            text = _IN_A_DATA_SET.sub("", _NUMBERED.sub("", line))
        if said or not _PLACE.match(text):
            said.append(text)
    return "\n".join(said).rstrip()
