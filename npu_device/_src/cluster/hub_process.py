"""Start the hub as a separate process, in a bare interpreter that imports next to nothing.

The secret isn't on its command line: it goes through a pipe, and the pipe's end tells the hub that its parent ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from npu_device._src.cluster.ports import listen, reached_at
from npu_device._src.cluster.rank_errors import RendezvousError

_ROOT = Path(__file__).resolve().parents[len(__package__.split("."))]
_CODE = f"import sys; sys.path.append(sys.argv[1]); from {__package__}.hub import main; main()"


class HubProcess:
    """A running hub, as its parent sees it; PortTakenError or RendezvousError if it can't listen.

    It listens at one of the ports, the first and the last of which are given, so that the hosts reach it. The settings
    are what ``Hub`` reads.
    """

    def __init__(
        self,
        *,
        secret: bytes,
        hosts: Sequence[str],
        ports: Sequence[int],
        speaks: bool = False,
        **settings: Any,
    ) -> None:
        errors: int | None = subprocess.DEVNULL
        if speaks:
            # The hub inherits this process's standard error.
            errors = None
        with listen(hosts, ports) as listener:
            self.host = reached_at(listener)
            self.port: int = listener.getsockname()[1]
            self.process = subprocess.Popen(
                # -I and -S: neither the user's settings nor installed packages delay the start.
                [sys.executable, "-I", "-S", "-c", _CODE, str(_ROOT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                # Neither Ctrl-C nor the end of the starter's process group ends the hub.
                start_new_session=True,
                pass_fds=[listener.fileno()],
            )
            settings.update(secret=secret.hex(), speaks=speaks, listener=listener.fileno())
        assert self.process.stdin is not None and self.process.stdout is not None
        with self.process.stdout as stdout:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(json.dumps(settings).encode() + b"\n")
                self.process.stdin.flush()
            is_running = stdout.readline()
        if not is_running:
            self.close()
            code = self.process.wait()
            raise RendezvousError(
                f"the hub of the job could not be started: it ended with code {code}"
            )
        _started.append(self)

    def close(self) -> None:
        """Let the hub end as soon as no rank is connected to it."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.poll()

    def end(self) -> None:
        """End the hub at once. A rank that is still connected loses it."""
        self.close()
        self.process.kill()
        self.process.wait()


# Kept until the process ends. A function of the system that referred to a hub would keep it longer: Python 3.9 clears
# such functions last, and crashes when it warns of a process that still runs.
_started: list[HubProcess] = []


def _leave_to_parent() -> None:
    """Leave the hubs to the parent of this forked child."""
    for hub in _started:
        hub.close()


os.register_at_fork(after_in_child=_leave_to_parent)
