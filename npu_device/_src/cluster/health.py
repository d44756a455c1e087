"""What a rank hears from the hub of others that fail, leave or are killed, and what it tells of its own failure.

It raises: at once if a collective is pending, or else at the next one.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Callable

from npu_device._src import environment
from npu_device._src.cluster.control_channel import ControlChannel
from npu_device._src.cluster.description import Cluster
from npu_device._src.cluster.frames import Message
from npu_device._src.cluster.rank_errors import ClusterError, PeerError
from npu_device._src.cluster.root_error import root_error
from npu_device._src.cluster.time_limits import (
    ALIVE_SECONDS,
    FINISHED_NOTICE_SECONDS,
    NEWS_SECONDS,
)
from npu_device._src.cluster.tracebacks import parse, without_libraries
from npu_device._src.whole_files import write_whole
from npu_device._src.wording import counted, ranges, ranks_of

# What TensorFlow says of a closed connection. It may learn of that before the hub has told that a rank is gone.
_ABORTED = "Collective ops is aborted"

# Name and members, since disjoint sets of ranks may use the same name.
GroupId = tuple[str, tuple[int, ...]]


class Health:
    """How this rank sees the others, and its reports to them.

    The first failure ends all collectives of this rank:

    - A rank raises, is killed, or the hub is gone: the hub's push or the lost channel (``_on_push``, ``_on_lost``).
    - A rank has left before it joined a collective: ``check``, or ``stop_if_missing`` in the stall watch.
    - This rank has waited too long, or a function met a mismatch: ``stop``.

    Eager calls look at ``check``, transfers in functions at ``require_running``; so do waiting ones, every
    ``CHECK_SECONDS``.
    """

    def __init__(self, cluster: Cluster, channel: ControlChannel) -> None:
        self._cluster = cluster
        self._channel = channel
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._failure: str | None = None
        # The ranks whose script has ended, each with the number of transfers that it began in each group.
        self._departed: dict[int, dict[str, int]] = {}
        self._stop_callbacks: list[Callable[[str], None]] = []
        self.ask = channel.ask
        # Answering functions, by the topic of the question.
        self._answers: dict[str, Callable[[Any], Any]] = {}
        self.on_question("alive", lambda _: True)
        self.on_question("clock", lambda _: time.time())
        self.is_closed = False  # True once this rank leaves
        # Set when the others have ended, or the job has failed.
        self._waits_for_nobody = threading.Event()
        self._gave_up: str | None = None  # the reason, if this rank has stopped on its own
        # Returns how many transfers of collectives this rank has begun in each group.
        self.count_transfers: Callable[[], dict[GroupId, int]] = dict

    def start(self) -> None:
        os.register_at_fork(after_in_child=self._stop_in_fork)
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_uncaught
        self._channel.listen(self._on_push, self._on_lost)

    def check(self, group: str, ranks: tuple[int, ...]) -> None:
        """Raise PeerError if a rank has failed, or one of the group has left, which won't join another collective."""
        if self._failure is None and self._departed:
            count = self.count_transfers().get((group, ranks), 0) + 1
            text = self._missed((group, ranks), count)
            if text is not None:
                raise PeerError(text)
        self.require_running()

    def stop_if_missing(self, waiting: dict[GroupId, int]) -> None:
        """Stop this rank if it waits in a transfer that a rank which has left should have joined; given the number of
        begun transfers in each group in which it waits.
        """
        for group, count in waiting.items():
            text = self._missed(group, count)
            if text is not None:
                self._abort(text)

    def require_running(self) -> None:
        """Raise PeerError if the collective in which this rank waits can no longer end."""
        if self._failure is not None:
            raise PeerError(self._failure)

    def wait_for_news(self) -> None:
        """Raise PeerError if the hub tells soon that a rank has ended: what usually is behind a lost connection."""
        self._waits_for_nobody.wait(NEWS_SECONDS)
        self.require_running()

    def stop(self, text: str) -> None:
        """End the collectives of this rank with an error of this text. The others are told it if the rank ends."""
        if self._abort(text):
            self._gave_up = text

    def on_stop(self, callback: Callable[[str], None]) -> None:
        """Call a function with the error text when the collectives of this rank are stopped."""
        # `_abort` has the same lock, so that each function is called once: there or here.
        with self._lock:
            self._stop_callbacks.append(callback)
            failure = self._failure
        if failure is not None:
            callback(failure)

    def on_question(self, topic: str, answer: Callable[[Any], Any]) -> None:
        """Answer questions on a topic with a function, called in the thread of the channel; it may return a Future."""
        self._answers[topic] = answer

    def has_left(self, rank: int) -> bool:
        """Return True if the script of another rank has ended without an error."""
        return rank in self._departed

    @property
    def is_over(self) -> bool:
        return self.is_closed or self._failure is not None

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def _on_push(self, message: Message) -> None:
        news = message["push"]
        if news == "question":
            self._reply(message)
        elif news == "left":
            for issued, ranks in message["left"]:
                departed = set(ranks_of(ranks)) - {self._cluster.rank}
                self._departed.update(dict.fromkeys(departed, issued))
            if len(self._departed) == self._cluster.world_size - 1:
                self._waits_for_nobody.set()
        elif news == "failed":
            if message["event"]["rank"] != self._cluster.rank:
                self._abort(self._failed_text(message["event"]))
        elif news == "gone":
            self._abort(self._gone_text(message["ranks"]))

    def _reply(self, message: Message) -> None:
        question = message["question"]
        topic, body, _ = json.loads(question)
        answer = self._answers.get(topic)
        if answer is None:
            # The asking rank goes on without an answer.
            return
        send = functools.partial(self._channel.notify, "reply", question=question)
        reply = answer(body)
        if isinstance(reply, Future):
            reply.add_done_callback(lambda future: send(value=future.result()))
        else:
            send(value=reply)

    def _missed(self, group: GroupId, count: int) -> str | None:
        """Return the error text if a member left before the last of the ``count`` transfers of this rank."""
        for rank in group[1]:
            if rank in self._departed:
                issued = self._departed[rank].get(_key(group), 0)
                if count > issued:
                    return self._left_text(rank, issued, group[0])
        return None

    def _on_lost(self, reason: str) -> None:
        if self.is_closed:
            self._waits_for_nobody.set()
        else:
            self._abort(
                f"{reason}: its process ended or was killed, or its host, {self._cluster.hosts[0]}, can't be reached "
                f"any more (seen by {self._cluster.name}).\n"
                "What to do: look at the output of rank 0, and of npurun on its host if npurun started the job."
            )

    def _abort(self, text: str) -> bool:
        with self._lock:
            if self._failure is not None:
                return False
            self._failure = text
            callbacks = list(self._stop_callbacks)
        self._waits_for_nobody.set()
        for callback in callbacks:
            callback(text)
        return True

    def _left_text(self, rank: int, issued: int, group: str) -> str:
        return (
            f"{self._cluster.name_of(rank)} has left the job: its script ended after "
            f"{counted(issued, 'transfer')} of collective operations in group {group!r}, while "
            f"{self._cluster.name} began number {issued + 1}.\n"
            f"Likely cause: the script called sys.exit on rank {rank}; a call is made on some ranks only (for example "
            "inside `if rank == 0`); or the ranks run different numbers of steps (uneven data, another step count, an "
            "early stop on one rank).\n"
            f"What to do: look at the output and the exit code of rank {rank}; make every call on all ranks; give "
            "every rank the same number of steps, for instance dataset.repeat() with a fixed steps_per_epoch."
        )

    def _gone_text(self, ranks: Sequence[int]) -> str:
        lowest, *higher = sorted(ranks)
        also = ""
        if higher:
            also = f" (and rank(s) {ranges(higher)})"
        return (
            f"{self._cluster.name_of(lowest)}{also} is gone: its process ended or was killed, or "
            f"its host can't be reached any more ({self._cluster.name} was told by the hub of the job).\n"
            f"What to do: look at the output of rank {lowest} for the cause."
        )

    def _failed_text(self, event: Message) -> str:
        lines = [f"{self._cluster.name_of(event['rank'])} failed: {event['error']}"]
        advice = f"{self._cluster.name} stops because of it. Fix the error on rank {event['rank']}"
        if event["traceback"]:
            lines.append(f"The end of its traceback:\n{event['traceback']}")
            advice += "; its output has the whole traceback"
        return "\n".join([*lines, f"{advice}."])

    def _on_uncaught(
        self, error_type: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:
            # A forked child isn't a rank.
            self._previous_hook(error_type, error, trace)
            return
        secondary = self._is_secondary(error)
        record = self._record(error, secondary)
        self._write_record(record)
        if not self.is_closed and not secondary:
            self._report_failure(record)
        elif not self.is_closed and self._gave_up is not None:
            # The error only follows from why this rank gave up, which is what the others need to
            # know.
            self._report_failure({**record, "error": self._gave_up})
        with self._lock:
            self._failure = self._failure or record["error"]
        if isinstance(error, KeyboardInterrupt) and self._previous_hook is sys.__excepthook__:
            # Who pressed Ctrl-C knows the cause, and each rank would print dozens of TensorFlow's frames.
            text, _ = without_libraries(parse(record["traceback"].splitlines()))
            print(text, file=sys.stderr, flush=True)
            return
        self._previous_hook(error_type, error, trace)

    def _is_secondary(self, error: BaseException) -> bool:
        """Return True if the failure of another rank, or of the hub, has caused an error."""
        return (
            self._failure is not None
            or isinstance(error, PeerError)
            or isinstance(error.__cause__, PeerError)
            # Without ``str``, which may fail for an exception of the script.
            or _ABORTED in "".join(traceback.format_exception_only(type(error), error))
        )

    def give_up(self, error: BaseException) -> PeerError | None:
        """Close the channel because of an error, and tell the others. Return an earlier error of another rank."""
        self.is_closed = True
        cause = None
        if self._failure is None:
            # Before the first collective, no frame of the script is known here.
            self._report_failure({**self._record(error, False), "traceback": ""})
        else:
            cause = PeerError(self._failure)
        self._channel.close()
        return cause

    def _record(self, error: BaseException, secondary: bool) -> Message:
        """Return what the launcher and the other ranks are told of an error."""
        text = "".join(traceback.format_exception_only(type(error), error))
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        return {
            "time": time.time(),
            "error": root_error(text.strip()),
            "traceback": "".join(lines),
            "secondary": secondary,
        }

    def _report_failure(self, record: Message) -> None:
        text, _ = without_libraries(parse(record["traceback"].splitlines()))
        # The last lines are enough to see where it failed; the output of the rank has all of it.
        end = "\n".join(text.rstrip().splitlines()[-12:])
        self._channel.notify("failed", event={**record, "traceback": end})

    def _write_record(self, record: Message) -> None:
        """Write the failure for the launcher, which prints the earliest one."""
        path = environment.NPU_DEVICE_ERROR_FILE.get()
        if path is None:
            return
        try:
            write_whole(path, json.dumps(record).encode())
        except OSError as error:
            print(f"npu_device: could not write {path}: {error}", file=sys.stderr)

    def leave(self, serves_others: bool) -> None:
        self.is_closed = True
        # Another library may have put its own hook on top, which stays.
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._previous_hook
        if self._failure is None:
            issued = {
                _key(group): count for group, count in self.count_transfers().items() if count
            }
            self._channel.notify("left", issued=issued)
            if serves_others:
                self._wait_for_others()
        else:
            self._channel.notify("stopped")
        self._channel.close()

    def _wait_for_others(self) -> None:
        """Wait for the others to leave, but not for one that is silent for as long as a collective would wait."""
        limit = environment.NPU_DEVICE_STALL_TIMEOUT.get()
        answered_at = time.monotonic()
        notice = f"npu_device: rank {self._cluster.rank} has finished and is waiting for"
        try:
            while not self._waits_for_nobody.wait(FINISHED_NOTICE_SECONDS):
                everyone = range(self._cluster.world_size)
                waiting = set(everyone).difference(self._departed, [self._cluster.rank])
                if notice:
                    names = ", ".join(map(str, sorted(waiting)))
                    print(
                        f"{notice} rank(s) {names}: they need a service that ends with this process.",
                        file=sys.stderr,
                    )
                    notice = ""
                if self._channel.ask("alive", None, waiting, ALIVE_SECONDS):
                    answered_at = time.monotonic()
                elif time.monotonic() - answered_at > limit:
                    return
        except ClusterError:
            return  # the hub is gone; there is no rank to wait for

    def _stop_in_fork(self) -> None:
        """Let collectives raise in this forked child, which has copies of the rank's memory and none of its threads."""
        self._lock = threading.Lock()  # a thread of the parent's may have held it
        self._failure = (
            f"this process ({os.getpid()}) is a forked child of {self._cluster.name} (process {self._pid}), and no "
            "rank: it takes part in no collective operation.\n"
            "What to do: make the call in the process of the rank, outside of workers."
        )


def _key(group: GroupId) -> str:
    """Return a short name of a group for messages, without its list of ranks."""
    return f"{group[0]} {ranges(group[1])}"
