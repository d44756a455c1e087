"""Shorten a printed traceback to what a user needs: the frames of the user's own files, and the error.

It works on text, since the launcher has no more than that of a rank that ended.
"""

from __future__ import annotations

import os
import re
import sysconfig

HEADER = re.compile(r"^[\s+|]*(Exception Group )?Traceback \(most recent call last\):")
CHAIN = re.compile(r"^(During handling of the above exception|The above exception was the direct cause)")
FRAME = re.compile(r'^(?P<indent>[ |]*)File "(?P<file>[^"]+)", line (?P<line>\d+)')
_REPEATED = "[Previous line repeated"
_MODULE = re.compile(r"^(\w+\.)+(?=\w+(: |$))")
_INSTALLED = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
_PACKAGES = [os.path.join(_INSTALLED, name) for name in ("npu_device", "npu_bridge", "hccl")]
_LIBRARIES = tuple(os.path.join(path, "") for path in (sysconfig.get_path("stdlib"), *_PACKAGES))


def is_users(file: str) -> bool:
    """Return True if a frame's file is neither generated code nor part of a library, Python's own included."""
    generated = file.startswith("<") or os.path.basename(file).startswith("__autograph_generated_file")
    return not generated and not re.search("/(site|dist)-packages/", file) and not file.startswith(_LIBRARIES)


def without_libraries(text: str) -> tuple[str, int]:
    """Return a traceback without the frames of libraries, and how many frames that leaves out.

    A chained traceback that has no frame left is left out if its error is part of a later one's text, and so is one
    that TensorFlow appends to a text that ends with the same error. A text without frames of the user stays as it is.
    """
    kept, left_out = _own_frames(text.splitlines())
    if not any(FRAME.match(line) for line in kept):
        return text, 0
    return "\n".join(_without_repeats(kept)) + "\n", left_out


def _own_frames(lines: list[str]) -> tuple[list[str], int]:
    """Return the lines without the frames of libraries, and how many of them there are."""
    kept: list[str] = []
    left_out = 0
    indent = None  # of the frame that is being left out; the lines that belong to it are indented further, or empty
    for line in lines:
        frame = FRAME.match(line)
        text = line.lstrip(" |")
        if frame and not is_users(frame["file"]):
            left_out += 1
            indent = len(frame["indent"])
        elif indent is None or (text and len(line) - len(text) <= indent and not text.startswith(_REPEATED)):
            indent = None
            kept.append(line)
    return kept, left_out


def _without_repeats(lines: list[str]) -> list[str]:
    """Leave out headers that no frame follows, and the errors below them that are said elsewhere."""
    shown: list[str] = []
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if not HEADER.match(line) or any(map(FRAME.match, lines[number : number + 1])):
            shown.append(line)
            continue
        error = next(filter(str.strip, lines[number:]), "")
        chain = next((later for later in range(number, len(lines)) if CHAIN.match(lines[later])), None)
        if chain is not None and any(_said(error) in later for later in lines[chain:]):
            number = chain + 2  # a blank line follows
        else:
            while number < len(lines) and any(_MODULE.sub("", lines[number]) in before for before in shown):
                number += 1
    return shown


def _said(error: str) -> str:
    """Return an error's text without its type; the whole line if it has no text."""
    return error.partition(": ")[2] or error
