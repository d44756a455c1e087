"""A headless Chromium, where there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome") or ""
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
AVAILABLE = bool(PROGRAM)


def start(url: str, directory: Path, *flags: str) -> subprocess.Popen[bytes]:
    """Open a page; ``directory`` is for what the browser writes of its own. Who starts it ends it with ``stop``."""
    assert AVAILABLE
    command = [PROGRAM, *FLAGS, *flags]
    return subprocess.Popen(
        [*command, f"--user-data-dir={directory / 'profile'}", url],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(directory)},
    )


def stop(browser: subprocess.Popen[bytes]) -> None:
    """End it, if it hasn't ended yet."""
    browser.terminate()
    browser.wait()


def draw(url: str, directory: Path, picture: Path, size: str) -> None:
    """Write a page's picture as PNG; ``size`` is its width and height, such as ``640,1400``."""
    browser = start(url, directory, f"--window-size={size}", f"--screenshot={picture}")
    try:
        assert browser.wait(60) == 0
    finally:
        stop(browser)
