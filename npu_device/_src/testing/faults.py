"""``npu_device.testing.faults``: faults of a rank at a step, for tests of restarts and checkpoints.

``run`` gives them to the ranks, and asserts that each has happened. Imports no TensorFlow.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
"""Faults of a process, here at a step and in the soak at a time, with the signals that make them."""


@dataclass(frozen=True)
class Fault:
    """A fault that a rank has once, when it has done a step."""

    kind: str
    rank: int
    step: int
    detail: Any = None

    def __str__(self) -> str:
        return f"faults.{self.kind}(rank={self.rank}, step={self.step})"

    def happen(self) -> None:
        if self.kind in SIGNALS:
            strike(self.kind, os.getpid(), self.detail)
        elif self.kind == "leave":
            raise SystemExit
        else:
            raise self.detail


def strike(kind: str, pid: int, seconds: float | None = None) -> None:
    """Make one of ``SIGNALS`` happen to a process; one that is stopped continues after some seconds, or never."""
    if kind == "stop" and seconds is not None:
        # A shell wakes it, since this process may be the one that stops. The shell goes on, whatever happens to this
        # process.
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {pid} 2> /dev/null"])
    os.kill(pid, SIGNALS[kind])


def kill(rank: int, step: int) -> Fault:
    """Kill a rank with SIGKILL, as a machine without memory does."""
    return Fault("kill", rank, step)


def stop(rank: int, step: int, seconds: float | None = None) -> Fault:
    """Stop a rank with SIGSTOP, as a frozen machine; it continues after some seconds, or never."""
    return Fault("stop", rank, step, seconds)


def leave(rank: int, step: int) -> Fault:
    """Let a rank end as a script that is over, while the others go on."""
    return Fault("leave", rank, step)


def raise_(rank: int, step: int, error: BaseException | None = None) -> Fault:
    """Raise an error on a rank, by default a RuntimeError."""
    return Fault(
        "raise_", rank, step, error or RuntimeError(f"a fault on rank {rank} after step {step}")
    )


_armed: Armed | None = None


@dataclass
class Armed:
    """A function with the faults that it has on the ranks; used there and in the process of the test."""

    func: Callable
    _faults: Sequence[Fault]
    _directory: Path  # which all ranks see, and later attempts; it knows what has happened

    def __call__(self, *arguments: Any) -> Any:
        global _armed
        _armed = self
        try:
            return self.func(*arguments)
        finally:
            _armed = None

    def reached(self, rank: int, step: int) -> None:
        # A file outlives the rank that writes it.
        (self._directory / f"rank{rank}").write_text(str(step))
        for index, fault in enumerate(self._faults):
            mark = self._directory / f"fault{index}"
            if fault.rank == rank and step >= fault.step and not mark.exists():
                # Marked before it happens: the rank may not survive it, and must not repeat it after a restart.
                mark.touch()
                fault.happen()

    def require_all(self) -> None:
        lines = []
        for index, fault in enumerate(self._faults):
            if (self._directory / f"fault{index}").exists():
                continue
            # A rank may have ended before it came to its first step.
            progress = "has called faults.step_done never"
            newest_step = self._directory / f"rank{fault.rank}"
            if newest_step.exists():
                progress = f"reached step {newest_step.read_text()}"
            lines.append(f"{fault} did not happen: rank {fault.rank} {progress}")
        if lines:
            hint = "What to do: call faults.step_done(step) after each step, or give fit callbacks=[faults.callback()]."
            raise AssertionError("\n".join([*lines, hint]))


def step_done(step: int) -> None:
    """Tell the faults that this rank has done a step, from 1 on; nothing happens outside ``run(..., faults=…)``."""
    if _armed is not None:
        from npu_device._src.training.distribute.ranks import rank

        _armed.reached(rank(), int(step))


def callback() -> Any:
    """Return a Keras callback that calls ``step_done`` after each batch with the number of steps of the optimizer."""
    import tensorflow as tf

    class Steps(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            step_done(int(self.model.optimizer.iterations))

    return Steps()
