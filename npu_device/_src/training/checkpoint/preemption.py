"""Stop all ranks after the same step when one of them is sent a signal, or npurun asks rank 0 for that.

The signal reaches a thread at once (``signal.set_wakeup_fd``), even while the main thread waits in an operation. The
thread asks all ranks after which step they can still stop. Each rank answers with its current step, and waits at that
step's end until it is told the largest of the answers. All stop after that step; the caller writes the checkpoint and
ends. Ranks may be any number of steps apart, and any number of them may be sent the signal.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import secrets
import select
import signal
import sys
import threading
import time
from typing import Any

from npu_device._src import environment
from npu_device._src.cluster.rank_errors import RESUMABLE, ClusterError
from npu_device._src.cluster.time_limits import PREEMPTION_JOIN_SECONDS, SAME_PREEMPTION_SECONDS
from npu_device._src.threads import start_thread
from npu_device._src.training.checkpoint.join_requests import join_requests
from npu_device._src.world.world import World

STEP_QUESTION = "preemption step"
STOP_QUESTION = "preemption stop"
_NEVER = -1
_NO_STEP = sys.maxsize  # no rank comes to it

_log = logging.getLogger("npu_device")
_names = itertools.count()
_current: Preemption | None = None


class Preemption:
    """Watches for the signal until ``close`` or another one is made; every rank has one, made in the main thread."""

    def __init__(self, world: World | None) -> None:
        self._world = world
        self._signal = signal.Signals[environment.NPU_DEVICE_PREEMPT_SIGNAL.get()]
        self._requests = join_requests(world)
        # npurun starts the job again when a node comes or goes: it tells rank 0 only.
        self.takes_nodes = self._requests is not None
        self._grants_request = False  # the ranks end as npurun has asked for
        # Seconds from the signal until this process ends, finished or not.
        self._limit = environment.NPU_DEVICE_PREEMPT_TIMEOUT.get()
        self.name = next(_names)  # the same on all ranks, since they make the same calls
        self._changed = threading.Condition()
        self._steps = 0
        self._holds_at = _NO_STEP
        # Ranks that have asked for a step and not yet told which one it is.
        self._asking = set[str]()
        self._last_step: int | None = None
        self._signalled_at: float | None = None
        self._code = 128 + self._signal
        self._pid = os.getpid()
        global _current
        if _current is not None:
            _log.warning(
                "a new JobCheckpoint handles %s from now on. The one before no longer does, and isn't saved when the "
                "job is asked to stop.\nWhat to do: put everything into one; or close the one before when it isn't "
                "used any more, or make it with preemption=False.",
                self._signal.name,
            )
            _current.close()
        self._previous = signal.signal(self._signal, _ignore_signal)
        _current = self
        self._reader, self._writer = os.pipe()
        # ``set_wakeup_fd`` takes no descriptor that blocks.
        os.set_blocking(self._writer, False)
        self._previous_descriptor = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if world is not None:
            world.job.health.on_question(STEP_QUESTION, self._answer_step)
            world.job.health.on_question(STOP_QUESTION, self._answer_stop)
        self._thread = start_thread("npu_device-preemption", self._watch)

    def count_step(self) -> bool:
        """Count a step; return True if all ranks stop after it. Every rank has to call it once after each step.

        Waits while a rank has asked at which step all can stop, and hasn't told yet.
        """
        with self._changed:
            self._steps += 1
            while self._last_step is None and self._steps >= self._holds_at:
                if not self._changed.wait(self._limit):
                    self._holds_at = _NO_STEP  # the rank that asked is gone
            return self._steps == self._last_step

    @property
    def is_signalled(self) -> bool:
        """Return whether this rank itself was sent the signal, so that its node goes."""
        return self._signalled_at is not None

    def note_saved(self) -> None:
        """Record that the last checkpoint is complete: from now on, the process can only end as resumable."""
        self._code = RESUMABLE
        if self._requests is not None and self._grants_request:
            self._requests.grant()
        # This rank may be ahead of its own signal. Python gives signals their default behaviour back as it ends, and
        # a rank that the signal kills then would not count as resumable.
        atexit.register(signal.signal, self._signal, signal.SIG_IGN)

    def close(self) -> None:
        """Restore the handler of the signal, which is possible in the main thread only; the limit no longer applies."""
        global _current
        # Another one has closed it.
        if _current is not self:
            return
        _current = None
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(self._previous_descriptor)
            if self._code == RESUMABLE:
                signal.signal(self._signal, signal.SIG_IGN)
            else:
                signal.signal(self._signal, self._previous or signal.SIG_DFL)
        # The thread ends when the pipe has no writer any more.
        os.close(self._writer)
        if os.getpid() == self._pid:
            self._thread.join(PREEMPTION_JOIN_SECONDS)
        else:
            # A forked child has no thread that would close them.
            self._close_readers()

    # Answers to the other ranks, in the channel's thread

    def _answer_step(self, body: Any) -> int:
        name, asker = body
        with self._changed:
            if name != self.name or _current is not self:
                return _NEVER
            if self._last_step is not None:
                # All ranks that ask have to find the same step.
                return self._last_step
            self._asking.add(asker)
            # The first answer counts for all ranks that ask later: this rank has promised to wait at that step.
            self._holds_at = min(self._holds_at, self._steps + 1)
            return self._holds_at

    def _answer_stop(self, body: Any) -> bool:
        name, asker, last_step = body
        with self._changed:
            self._asking.discard(asker)
            if name == self.name and self._last_step is None:
                if last_step != _NEVER:
                    self._last_step = last_step
                if self._last_step is not None or not self._asking:
                    self._holds_at = _NO_STEP
                self._changed.notify_all()
        return True

    # After the signal, in a thread of its own

    def _watch(self) -> None:
        poll = select.poll()  # select.select takes no descriptor above 1023
        poll.register(self._reader, select.POLLIN)
        if self._requests is not None:
            poll.register(self._requests.descriptor, select.POLLIN)
        while True:
            timeout = None
            if self._signalled_at is not None:
                deadline = self._signalled_at + self._limit
                timeout = 1000 * max(0.0, deadline - time.monotonic())
            ready = [descriptor for descriptor, _ in poll.poll(timeout)]
            if not ready:
                # The process doesn't go on after this: ``_end`` leaves it.
                self._end(f"the step and its checkpoint were not finished within {self._limit:g} s")
            if self._reader not in ready:
                self._on_request()
                continue
            # One byte for each signal that has come; none when the writer is closed.
            signal_numbers = os.read(self._reader, 4096)
            if not signal_numbers:
                self._close_readers()
                return
            # The script may have set a descriptor before, as asyncio does.
            if self._previous_descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._previous_descriptor, signal_numbers)
            if self._signal not in signal_numbers:
                continue
            if self._signalled_at is None:
                self._signalled_at = time.monotonic()
                self._begin()
            elif time.monotonic() - self._signalled_at > SAME_PREEMPTION_SECONDS:
                self._end("a second signal has come")

    def _close_readers(self) -> None:
        os.close(self._reader)
        if self._requests is not None:
            self._requests.close()

    def _on_request(self) -> None:
        """Agree on the last step, without a limit of time: if the ranks can't, they train on."""
        assert self._requests is not None
        # In a failed job, and where some ranks don't train any more, npurun learns that by itself.
        with contextlib.suppress(ClusterError):
            if self._requests.accept():
                had_agreed = self._grants_request
                has_agreed = False
                # As soon as the ranks agree, the main thread may be at its last step.
                self._grants_request = True
                try:
                    has_agreed = self._agree() != _NEVER
                finally:
                    self._grants_request = had_agreed or has_agreed

    def _begin(self) -> None:
        if self._world is not None and self._world.job.health.is_over:
            self._end("the job has failed already")
        self._say(
            "all ranks finish the step, write a checkpoint and stop; a second signal ends this rank at once"
        )
        try:
            if self._agree() == _NEVER:
                self._say(
                    "some ranks don't train any more, so that there is no step at which all could stop"
                )
        except ClusterError as error:
            self._say(f"the ranks can't agree on a step: {error}")

    def _agree(self) -> int:
        asker = secrets.token_hex(4)
        if self._world is None:
            last_step = self._answer_step([self.name, asker])
            self._answer_stop([self.name, asker, last_step])
            return last_step
        ask = self._world.job.health.ask
        ranks = range(self._world.size)
        # A third of the limit, for two questions and some time to write the checkpoint.
        seconds = self._limit / 3
        answers = ask(STEP_QUESTION, [self.name, asker], ranks, seconds).values()
        # A rank that has left, or that doesn't answer, will not come to any step.
        last_step = _NEVER
        if len(answers) == len(ranks) and _NEVER not in answers:
            last_step = max(answers)
        ask(STOP_QUESTION, [self.name, asker, last_step], ranks, seconds)
        return last_step

    def _say(self, text: str) -> None:
        print(f"npu_device: {self._signal.name}: {text}", file=sys.stderr, flush=True)

    def _end(self, why: str) -> None:
        with contextlib.suppress(Exception):
            # The output may be closed by now.
            self._say(f"{why}; this process ends")
            sys.stdout.flush()
        # The main thread may be waiting in an operation forever.
        os._exit(self._code)


def _ignore_signal(signal_number: int, frame: Any) -> None:
    """Handle the signal in Python: the thread does everything."""


# Signals are masked in a fork until the child has the default behaviour back: the child has the parent's descriptor,
# and a signal that it gets earlier would count as the parent's.
_mask_before_fork = threading.local()


def _hold_signal() -> None:
    mask = set()
    if _current is not None:
        mask = {_current._signal}
    _mask_before_fork.value = signal.pthread_sigmask(signal.SIG_BLOCK, mask)


def _release_signal() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask_before_fork.value)


def _release_in_child() -> None:
    # ``close`` gives a forked child the default behaviour back.
    if _current is not None:
        _current.close()
    _release_signal()


os.register_at_fork(
    before=_hold_signal, after_in_parent=_release_signal, after_in_child=_release_in_child
)
