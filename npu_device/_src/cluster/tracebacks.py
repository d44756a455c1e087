"""Shorten a printed traceback, all that the launcher has of a rank, to the frames of the user's files and the error.

TensorFlow reports a failure inside a graph as ``UnknownError: Graph execution error:`` and the places of the operation
before the error itself, or as ``UnknownError: {{function_node NAME}}`` and the error; one inside a function that it
traces as ``ValueError: in user code:``, the places and the error. Keras puts ``Exception encountered when calling …``
before the text of an error inside a layer, and the arguments of the layer after it. One may contain the other.
"""

from __future__ import annotations

import functools
import os
import re
import sysconfig
import textwrap

HEADER = re.compile(r"^[\s+|]*(Exception Group )?Traceback \(most recent call last\):")
CHAIN = re.compile(
    r"^(During handling of the above exception|The above exception was the direct cause)"
)
FRAME = re.compile(r'^(?P<indent>[ |]*)File "(?P<file>[^"]+)", line (?P<line>\d+)')
_IN_A_GRAPH = re.compile(
    r"(?P<kind>[\w.]+): (Graph execution error:|\{\{function_node [^}]*\}\} )(?P<text>.*)"
)
_IN_A_TRACED_FUNCTION = re.compile(r"[\w.]+: in user code:")
_PLACE = re.compile(r"Detected at node |Node: |<stack traces|\d+ root error\(s\) found|\s|$")
_NUMBERED = re.compile(r"\s+\(\d+\) [A-Z_ ]+:\s+")  # one of several root errors
_IN_A_DATA_SET = re.compile(
    r"Error in user-defined function passed to \S+ \w+ with iterator: \S+: (/dev/null/)?"
)
_END = re.compile(
    r"Traceback \(most recent call last\):|\s*\[\[\{\{node |; Not a directory"
)  # see ``sessions``
_TYPE = re.compile(r"[\w.]*[A-Z]\w+: ")
_INTERNAL = re.compile(
    r"^npu_device\._src\.[\w.]+\.(?=\w)"
)  # the module of an error of this package
_IN_A_LAYER = re.compile(r"(?P<kind>[\w.]+): Exception encountered when calling (?P<layer>.+)\.$")
_PLACE_IN_CODE = re.compile(r'File "|\s|$')  # a frame, its source line, an empty line
_BOLD = re.compile(r"\x1b\[\d*m")  # Keras 3
_REPEATED = "[Previous line repeated"
_MODULE = re.compile(r"^(\w+\.)+(?=\w+(: |$))")
_INSTALLED = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
_PACKAGES = [os.path.join(_INSTALLED, name) for name in ("npu_device", "npu_bridge", "hccl")]
_LIBRARIES = tuple(os.path.join(path, "") for path in (sysconfig.get_path("stdlib"), *_PACKAGES))


@functools.lru_cache(maxsize=4096)
def is_user_file(file: str) -> bool:
    """Return True if the file of a frame is neither generated code nor part of a library, that of Python included."""
    generated = file.startswith("<") or os.path.basename(file).startswith(
        "__autograph_generated_file"
    )
    return (
        not generated
        and not re.search("/(site|dist)-packages/", file)
        and not file.startswith(_LIBRARIES)
    )


def without_libraries(text: str) -> tuple[str, int]:
    """Return a traceback without the frames of libraries, and how many those are; without frames of the user, all."""
    user_lines: list[str] = []
    left_out = 0
    indent = None  # of the frame that is being left out; the lines that belong to it are indented further, or empty
    for line in text.splitlines():
        frame = FRAME.match(line)
        code = line.lstrip(" |")
        if frame and not is_user_file(frame["file"]):
            left_out += 1
            indent = len(frame["indent"])
        elif indent is None or (
            code and len(line) - len(code) <= indent and not code.startswith(_REPEATED)
        ):
            indent = None
            user_lines.append(line)
    if not any(map(FRAME.match, user_lines)):
        return text, 0
    return "\n".join(_without_repeats(user_lines)) + "\n", left_out


def _without_repeats(lines: list[str]) -> list[str]:
    """Leave out headers that no frame follows, and the errors below them that a later or an earlier error repeats."""
    output: list[str] = []
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if not HEADER.match(line) or any(map(FRAME.match, lines[number : number + 1])):
            output.append(line)
            continue
        error = next(filter(str.strip, lines[number:]), "")
        said = error.partition(": ")[2] or error
        chains = (index for index in range(number, len(lines)) if CHAIN.match(lines[index]))
        chain = next(chains, None)
        if chain is not None and any(said in later for later in lines[chain:]):
            number = chain + 2  # a blank line follows
        else:
            while number < len(lines) and _is_repeated(lines[number], output):
                number += 1
    return output


def _is_repeated(line: str, output: list[str]) -> bool:
    error = _MODULE.sub("", line)
    return any(error in earlier for earlier in output)


def root_error(error: str) -> str:
    """Return the type and text of an error; inside one of TensorFlow's, those of the error that it is about.

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
        begin = next(
            (number for number, line in enumerate(lines) if not _PLACE_IN_CODE.match(line)),
            len(lines),
        )
        return "\n".join(lines[begin:]).rstrip()
    if failed := _IN_A_LAYER.match(headline):
        end = f"rguments received by {failed['layer']}:"
        until = next(
            (number for number, line in enumerate(lines) if line.endswith(end)), len(lines)
        )
        inner = _BOLD.sub("", "\n".join(lines[:until])).strip()
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
