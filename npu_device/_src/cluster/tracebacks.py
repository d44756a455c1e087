"""Tracebacks as lists, of which the frames of the user's files are shown, and each error once.

Parsed are the traceback that a rank records, and what ranks without a record have printed.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import sysconfig
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_PRINTED_HEADER = re.compile(r"[\s+|]*(Exception Group )?Traceback \(most recent call last\):")
_PRINTED_FRAME = re.compile(r'(?P<indent>[ |]*)File "(?P<file>[^"]+)", line (?P<line>\d+)')
_REPEATED = "[Previous line repeated"
_CAUSE = "The above exception was the direct cause of the following exception:"
_CONTEXT = "During handling of the above exception, another exception occurred:"
_MODULE = re.compile(r"^(\w+\.)+(?=\w+(: |$))")
_INSTALLED = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
_PACKAGES = [os.path.join(_INSTALLED, name) for name in ("npu_device", "npu_bridge", "hccl")]
_LIBRARIES = tuple(os.path.join(path, "") for path in (sysconfig.get_path("stdlib"), *_PACKAGES))


class Block(NamedTuple):
    """Lines that belong together: a frame with its source, as Python prints it, or a line of text, without a file."""

    text: str
    file: str = ""
    line: int = 0


class PrintedError(NamedTuple):
    """An error of a chain, with its traceback."""

    link: str  # the sentence between it and the error before; empty without one
    header: str  # the line above its frames; empty for text without a traceback
    blocks: list[Block]

    def frames(self) -> list[Block]:
        """Return the frames of the traceback, then those that the text of the error names."""
        return [block for block in self.blocks if block.file]

    def text(self) -> str:
        """Return type and message; the frames above them are indented."""
        texts = [block.text for block in self.blocks]
        return "\n".join(itertools.dropwhile(lambda text: not text[:1].strip(), texts))

    def lines(self) -> list[str]:
        """Return all as Python prints it."""
        lines = [block.text for block in self.blocks]
        if self.header:
            lines.insert(0, self.header)
        if self.link:
            lines[:0] = ["", self.link, ""]
        return lines


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


def parse(lines: Iterable[str]) -> list[PrintedError]:
    """Return the errors among printed lines, after what stands before the first traceback."""
    errors = [PrintedError("", "", [])]
    link = ""
    for block in _blocks(lines):
        blocks = errors[-1].blocks
        if _PRINTED_HEADER.match(block.text):
            errors.append(PrintedError(link, block.text, []))
            link = ""
        elif block.text in (_CAUSE, _CONTEXT):
            link = block.text
            # The empty lines around a block belong to it.
            if blocks and not blocks[-1].text:
                blocks.pop()
        elif block.text or not link:
            blocks.append(block)
    return errors


def _blocks(lines: Iterable[str]) -> list[Block]:
    blocks = []
    # Indentation of a frame; the lines that belong to it are indented further, or empty.
    indent = None
    for line in lines:
        code = line.lstrip(" |")
        depth = len(line) - len(code)
        frame = _PRINTED_FRAME.match(line)
        if frame:
            indent = depth
            blocks.append(Block(line, frame["file"], int(frame["line"])))
        elif indent is not None and (depth > indent or not code or code.startswith(_REPEATED)):
            source = blocks.pop()
            blocks.append(source._replace(text=f"{source.text}\n{line}"))
        else:
            indent = None
            blocks.append(Block(line))
    return blocks


def without_libraries(errors: Sequence[PrintedError]) -> tuple[str, int]:
    """Return the errors without the frames of libraries, and how many those are; without frames of the user, all."""
    user_errors = [_without_library_blocks(error) for error in errors]
    user_frames = sum(len(error.frames()) for error in user_errors)
    if not user_frames:
        return _joined(errors), 0
    output: list[PrintedError] = []
    for position, error in enumerate(user_errors, 1):
        shortened = _without_repeats(error, output, user_errors[position:])
        if not output:
            shortened = shortened._replace(link="")
        if shortened.blocks:
            output.append(shortened)
    return _joined(output), sum(len(error.frames()) for error in errors) - user_frames


def _without_library_blocks(error: PrintedError) -> PrintedError:
    blocks = [block for block in error.blocks if not block.file or is_user_file(block.file)]
    return error._replace(blocks=blocks)


def _without_repeats(
    error: PrintedError, earlier: Sequence[PrintedError], later: Sequence[PrintedError]
) -> PrintedError:
    """Return an error; if it has no frames, without its header and the text that other errors repeat."""
    if not error.header or (error.blocks and error.blocks[0].file):
        return error
    headline = next((block.text for block in error.blocks if block.text.strip()), "")
    message = headline.partition(": ")[2] or headline
    if message in _joined(later):
        return error._replace(blocks=[])
    output = _joined(earlier)
    blocks = itertools.dropwhile(lambda block: _MODULE.sub("", block.text) in output, error.blocks)
    return error._replace(header="", blocks=list(blocks))


def _joined(errors: Iterable[PrintedError]) -> str:
    return "".join(line + "\n" for error in errors for line in error.lines())
