"""Under ``mpiexec``, a killed rank's standard error stays open for a while, and that of a rank that exits doesn't."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from ranks import clean_environment

RANK = """
import atexit, os, signal, sys
from npu_device._src.cluster import last_words
atexit.register(last_words.allow_time())
os.write(2, b"ready")
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("how", "least", "most"), [("killed", 2.0, 10.0), ("exits", 0.0, 2.0)])
def test_standard_error_of_a_rank(how: str, least: float, most: float) -> None:
    with subprocess.Popen([sys.executable, "-c", RANK, how], env=clean_environment(), stderr=subprocess.PIPE) as rank:
        rank.wait(60)
        ended = time.monotonic()
        assert rank.stderr is not None
        assert rank.stderr.read() == b"ready"
        assert least < time.monotonic() - ended + 1e-9 < most
