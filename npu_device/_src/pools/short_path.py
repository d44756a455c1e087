"""Names of sockets, which have at most 107 characters, for places with longer ones, such as a batch system's TMPDIR."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def short_path(path: str) -> Iterator[str]:
    """Give a short path to a file, through the open folder; it is for this process only, and as long as this lasts."""
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)
