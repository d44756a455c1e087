"""A process that has imported TensorFlow, Keras and the package, and forks into scripts that are to be run: the
imports take seconds, and tests start many ranks. It runs nothing itself, and has no TensorFlow context or device that a
fork could break.

Reads one order per line from its standard input (see ``forked.py``), answers with the number of the process, and writes
how it ended into the file that the order names. When the input ends, the server ends, and the system kills its ranks.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import select
import signal
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

_HERE = os.path.dirname(__file__)
# Python puts the folder of the program there, which isn't a folder of modules.
sys.path[:] = [path for path in sys.path if path != _HERE]

_left_whole: dict[str, types.ModuleType] = {}


# Registered before the functions of the modules below, and so called after them.
@atexit.register
def _leave_modules_whole() -> None:
    """Spare forks a third of their time: Python would clear thousands of modules at exit, and so copy their memory. The
    modules of the package are cleared, as in every program.
    """
    # A thread that imported one of them now would run it again.
    sys.setswitchinterval(60)
    for name, module in _left_whole.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]


# What the imports make stays: to look for garbage in between takes a sixth of their time.
gc.disable()

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import npu_device._api  # noqa: E402, F401
from npu_device._src.compat.live_objects import freeze_modules  # noqa: E402
from npu_device._src.membership.never_opened import warn_at_exit  # noqa: E402
from npu_device._src.membership.parent_rank import mark_as_candidate  # noqa: E402
from npu_device._src.threads import end_with_parent  # noqa: E402
from npu_device._src.whole_files import write_whole  # noqa: E402

tf.keras.Sequential  # noqa: B018 - loads Keras 2, too
# Only forks of this process are ranks.
os.environ.pop("NPU_DEVICE_RANK_PROCESS", None)

_KEPT_PACKAGES = {"__main__", "sys", "builtins", "npu_device", "npu_bridge", "hccl"}


def serve() -> dict[str, Any] | None:
    """Fork for every order; return the order in the child, None in the server when no more can come."""
    _left_whole.update(
        (name, module)
        for name, module in sys.modules.items()
        if name.partition(".")[0] not in _KEPT_PACKAGES
    )
    _left_whole["itself"] = _left_whole  # type: ignore[assignment]  # a cycle: what is frozen as well is never freed
    gc.enable()
    # The collections of the children, at their exit above all, then leave TensorFlow's objects alone.
    freeze_modules()
    status_of: dict[int, str] = {}
    unread = b""
    # To look for the ends of children at intervals would be 0.3 % of a core.
    ended, signalled = os.pipe()
    os.set_blocking(signalled, False)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    signal.set_wakeup_fd(signalled)
    while True:
        # Read without Python's buffer, whose content each child would inherit.
        ready = select.select([0, ended], [], [])[0]
        if ended in ready:
            os.read(ended, 1 << 16)
        if 0 in ready:
            block = os.read(0, 1 << 16)
            if not block:
                return None
            *orders, unread = (unread + block).split(b"\n")
            for line in orders:
                order: dict[str, Any] = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    # The child must not wake the server.
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.close(ended)
                    os.close(signalled)
                    return order
                status_of[pid] = order["status"]
                os.write(1, b"%d\n" % pid)
        while status_of:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            code = os.waitstatus_to_exitcode(status)
            write_whole(status_of.pop(pid), str(code).encode())


def become(order: dict[str, Any]) -> types.ModuleType:
    """Make this process look as if Python had been started with the script; the module in which to run it."""
    # Killed with the server, so that no rank stays behind if a test is killed.
    end_with_parent()
    os.setpgid(0, 0)
    empty_input = os.open(os.devnull, os.O_RDONLY)
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    # The inputs of the server are its orders, which a script must not read.
    for descriptor, source in ((0, empty_input), (1, output), (2, output)):
        os.dup2(source, descriptor)
    os.close(empty_input)
    os.close(output)
    os.environ.clear()
    os.environ.update(order["environment"])
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    # In other processes, the import of the package makes these two calls.
    mark_as_candidate()
    warn_at_exit()
    os.chdir(order["directory"])
    script = order["arguments"][0]
    sys.argv = order["arguments"]
    folder = os.path.dirname(script)
    sys.path[:] = order["path"]
    if folder != _HERE:
        sys.path.insert(0, folder)
    tempfile.tempdir = None  # the import of TensorFlow has looked it up
    # Without a new seed, every process would draw the same numbers.
    np.random.seed()
    module = types.ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    return module


if __name__ == "__main__" and (order := serve()) is not None:
    main = become(order)
    exec(
        compile(Path(order["arguments"][0]).read_bytes(), order["arguments"][0], "exec"),
        main.__dict__,
    )
