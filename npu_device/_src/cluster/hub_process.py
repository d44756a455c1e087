"""Start the hub as a separate process, in a bare interpreter that imports next to nothing.

The secret isn't on its command line: it goes through a pipe, and the pipe's end tells the hub that its parent ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from npu_device._src.cluster.rank_errors import PortTakenError, RendezvousError

_ROOT = Path(__file__).resolve().parents[len(__package__.split("."))]
_CODE = f"import sys; sys.path.append(sys.argv[1]); from {__package__}.hub import main; main()"


class HubProcess:
    """A running hub, as its parent sees it; PortTakenError or RendezvousError if it can't listen.

    The settings are what ``Hub`` reads, and the addresses (``listen``) and first and last port (``ports``).
    """

    def __init__(self, *, secret: bytes, speaks: bool = False, **settings: Any) -> None:
        errors: int | None = subprocess.DEVNULL
        if speaks:
            # The hub inherits this process's standard error.
            errors = None
        self.process = subprocess.Popen(
            # -I and -S: neither the user's settings nor installed packages delay the start.
            [sys.executable, "-I", "-S", "-c", _CODE, str(_ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            # Neither Ctrl-C nor the end of the starter's process group ends the hub.
            start_new_session=True,
        )
        settings.update(secret=secret.hex(), speaks=speaks)
        assert self.process.stdin is not None and self.process.stdout is not None
        with self.process.stdout as stdout:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(json.dumps(settings).encode() + b"\n")
                self.process.stdin.flush()
            answer = stdout.readline()
        reply = json.loads(answer or "{}")
        if "port" not in reply:
            self.close()
            crash = (
                f"the hub of the job could not be started: it ended with code {self.process.wait()}"
            )
            text = reply.get("error", crash)
            if reply.get("taken"):
                raise PortTakenError(text)
            raise RendezvousError(text)
        self.host = str(reply["host"])
        self.port = int(reply["port"])
        os.register_at_fork(after_in_child=self.close)

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
