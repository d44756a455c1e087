"""The lines of a script that made the operations of a graph."""

from __future__ import annotations

import linecache

import tensorflow as tf

from npu_device._src.cluster.tracebacks import is_user_file


def where(operation: tf.Operation) -> str:
    """Return the user's line that made an operation, in words; "" if there is none."""
    frames = [frame for frame in operation.traceback if is_user_file(frame.filename)]
    if not frames:
        return ""
    # The last call in a file of the user is the nearest to the operation.
    file = frames[-1].filename
    line_number = frames[-1].lineno
    return f"{file}, line {line_number}: {linecache.getline(file, line_number).strip()}"
