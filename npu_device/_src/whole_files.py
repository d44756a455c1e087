"""Files that another process may read at any moment."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: str | Path, content: bytes) -> None:
    """Write a file; readers find all of it, or what was there before."""
    part = f"{path}.part"
    Path(part).write_bytes(content)
    os.replace(part, path)
