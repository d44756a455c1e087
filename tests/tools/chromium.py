"""A headless Chromium, where there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")


def visit(url: str, directory: Path, *flags: str) -> str:
    """Open a page, and return what the browser prints; ``directory`` is for what it writes of its own."""
    assert PROGRAM
    command = [PROGRAM, *FLAGS, *flags, f"--user-data-dir={directory / 'profile'}", url]
    home = {**os.environ, "HOME": str(directory)}
    return subprocess.run(
        command, env=home, capture_output=True, text=True, timeout=60, check=True
    ).stdout


def draw(url: str, directory: Path, picture: Path, size: str, *flags: str) -> None:
    """Write a page's picture as PNG; ``size`` is its width and height, such as ``640,1400``."""
    visit(url, directory, f"--window-size={size}", f"--screenshot={picture}", *flags)
    assert picture.stat().st_size > 20_000, "an empty page takes a tenth"
