"""Give the ranks of an ``mpiexec`` time to say that one of them was killed.

MPICH's ``mpiexec`` kills the ranks of the other hosts once it hears of a killed one, which is when nobody has that
rank's standard error open any more. So a small process keeps it open for a while. (On the killed rank's own host the
other ranks are killed at once; the hub says then which rank is gone.)
"""

from __future__ import annotations

import contextlib
import subprocess
from typing import Callable

from npu_device._src.cluster.time_limits import LAST_WORDS_SECONDS

# The line comes when the rank exits; without it, the rank was killed.
_KEEP_OPEN = f"read line || sleep {LAST_WORDS_SECONDS}"


def allow_time() -> Callable[[], None]:
    """Keep this process's standard error open for some seconds if it is killed. Without /bin/sh, there is no time.

    Returns:
        What to call when this process exits.
    """
    try:
        keeper = subprocess.Popen(
            ["/bin/sh", "-c", _KEEP_OPEN],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a signal to the rank's process group doesn't reach it
        )
    except OSError:
        return lambda: None

    def release() -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            keeper.communicate(b"\n", LAST_WORDS_SECONDS)

    return release
