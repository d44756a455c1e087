"""A headless Chromium, where there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

_PROGRAM = shutil.which("chromium")
AVAILABLE = _PROGRAM is not None


def start(url: str, directory: Path, *flags: str) -> subprocess.Popen[bytes]:
    """Open a page; ``directory`` is for what the browser writes of its own."""
    assert _PROGRAM
    command = [_PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", *flags]
    return subprocess.Popen(
        [*command, f"--user-data-dir={directory / 'profile'}", url],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(directory)},
    )
