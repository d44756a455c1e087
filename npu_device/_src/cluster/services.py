"""The services of the hub for a job after the rendezvous: values, gathers, questions, and news of ranks that have gone.

Knows no sockets. A message causes at most O(ranks) messages; so do all ranks together when they do the same. One that
isn't valid is refused whole (``FrameError``); values are kept as the JSON text that is sent.
"""

from __future__ import annotations

import heapq
import itertools
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

from npu_device._src.cluster import frames
from npu_device._src.cluster.time_limits import ANSWERS_KEPT_SECONDS, LEFT_TOGETHER_SECONDS, LONGEST_REQUEST_SECONDS
from npu_device._src.wording import ranges, ranks_of

_POSTS_KEPT = 200  # names; the oldest go
_POST_BYTES_KEPT = 1 << 26
_SHOWN = 10


class Timers:
    """Calls that the hub makes later, unless they are cancelled."""

    def __init__(self) -> None:
        self._times: list[tuple[float, int]] = []
        self._acts: dict[int, Callable[[], None]] = {}  # those that haven't been cancelled
        self._numbers = itertools.count()

    def later(self, seconds: float, act: Callable[[], None]) -> Callable[[], object]:
        """Call a function after some seconds; return a function that cancels that."""
        number = next(self._numbers)
        if len(self._times) > 2 * len(self._acts) + 16:
            self._times = [each for each in self._times if each[1] in self._acts]
            heapq.heapify(self._times)
        self._acts[number] = act
        heapq.heappush(self._times, (time.monotonic() + seconds, number))
        return lambda: self._acts.pop(number, None)

    @property
    def first(self) -> float | None:
        """Return when ``run`` is to be called next, on the monotonic clock."""
        return self._times[0][0] if self._times else None

    def run(self, now: float) -> None:
        while self._times and self._times[0][0] <= now:
            act = self._acts.pop(heapq.heappop(self._times)[1], None)
            if act is not None:
                act()


@dataclass
class _Gather:
    ranks: set[int]
    partial: bool
    values: dict[int, str] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)  # each rank's request


@dataclass
class _Round:
    """One question that several ranks may ask."""

    key: str
    number: int
    pending: set[int]
    answers: dict[int, str] = field(default_factory=dict)
    waiting: list[tuple[int, int]] = field(default_factory=list)
    result: bytes | None = None


@dataclass
class Services:
    """The services of one job."""

    hosts: list[str]
    _processes: list[int]
    _send: Callable[[int, bytes], None]
    _later: Callable[[float, Callable[[], None]], Callable[[], object]]
    _say: Callable[[str], None]
    # Each cancels the limit of a request.
    _waiting: dict[tuple[int, int], Callable[[], object]] = field(default_factory=dict)
    _values: dict[str, str] = field(default_factory=dict)
    _readers: dict[str, dict[tuple[int, int], None]] = field(default_factory=dict)
    _posts: dict[str, dict[int, str]] = field(default_factory=dict)
    _post_bytes: int = 0
    _gathers: dict[str, _Gather] = field(default_factory=dict)
    _rounds: dict[str, _Round] = field(default_factory=dict)
    _round_of: dict[int, _Round] = field(default_factory=dict)
    _rounds_made: int = 0
    _left: dict[int, str] = field(default_factory=dict)
    _absent: set[int] = field(default_factory=set)
    _unreported_left: list[int] = field(default_factory=list)
    _unreported_gone: list[int] = field(default_factory=list)
    _failing: bool = False
    _is_told: bool = False

    def handle(self, rank: int, message: dict[str, Any]) -> None:
        """Handle a message of a rank; FrameError if it isn't one of those that ranks send."""
        try:
            getattr(self, f"_do_{message['do']}")(rank, message)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise frames.FrameError(f"{error!r} in {str(message.get('do'))[:100]!r}") from error

    def closed(self, rank: int) -> None:
        if rank not in self._left:
            self._unreported_gone.append(rank)
        self._mark_absent(rank)

    def report_losses(self) -> None:
        """Report all ranks that have gone without a message, together; none after a failure: all are ending then."""
        gone, self._unreported_gone = self._unreported_gone, []
        if gone and not self._failing:
            self._failing = True
            if not self._is_told:
                self._say(self._loss(gone))
            self._push(frames.encode({"push": "gone", "ranks": gone}))

    def _loss(self, gone: Sequence[int]) -> str:
        first = gone[0]
        after = f" Then rank(s) {ranges(gone[1:])} went, too." if gone[1:] else ""
        before = f" The script of rank(s) {ranges(self._left)} had ended before." if self._left else ""
        return (
            f"{self._listed([first])} (process {self._processes[first]}) is gone: its process ended or was killed, or "
            f"its host can't be reached any more.{before}{after}\n"
            f"What to do: look at the output of rank {first}. mpiexec ends the other ranks, too, and may name the "
            "process of one of them."
        )

    # What a rank may ask for

    def _do_set(self, rank: int, message: dict[str, Any]) -> None:
        key, value, request = str(message["key"]), str(message["value"]), int(message["id"])
        if key in self._values:
            self._refuse(rank, request, "exists", key)
            return
        self._values[key] = value
        self._answer(rank, request, None)
        for reader, request in self._readers.pop(key, {}):
            self._answer(reader, request, value)

    def _do_get(self, rank: int, message: dict[str, Any]) -> None:
        key, request, seconds = str(message["key"]), int(message["id"]), _seconds_of(message)
        if key in self._values:
            self._answer(rank, request, self._values[key])
            return

        def give_up() -> None:
            readers = self._readers.get(key, {})
            if (rank, request) in readers:
                del readers[rank, request]
                if not readers:
                    del self._readers[key]
                self._refuse(rank, request, "late", f"no rank has provided {key!r} within {seconds:g} s")

        self._waiting[rank, request] = self._later(seconds, give_up)
        self._readers.setdefault(key, {})[rank, request] = None

    def _do_delete(self, rank: int, message: dict[str, Any]) -> None:
        key, request = str(message["key"]), int(message["id"])
        self._values.pop(key, None)
        self._answer(rank, request, None)

    def _do_post(self, rank: int, message: dict[str, Any]) -> None:
        name, request, text = str(message["name"]), int(message["id"]), _text(message["value"])
        posted = self._posts.setdefault(name, {})
        self._post_bytes += len(text) - len(posted.get(rank, ""))
        posted[rank] = text
        is_last = len(posted) == len(self.hosts)  # only then the values are of use, and many ranks post at once
        self._answer_text(rank, request, frames.joined(posted) if is_last else b"[]")
        while len(self._posts) > _POSTS_KEPT or self._post_bytes > _POST_BYTES_KEPT:
            self._post_bytes -= sum(map(len, self._posts.pop(next(iter(self._posts))).values()))

    def _do_gather(self, rank: int, message: dict[str, Any]) -> None:
        name, request, seconds, value = str(message["name"]), int(message["id"]), _seconds_of(message), message["value"]
        gather = self._gathers.get(name) or _Gather(self._ranks(message["ranks"]), bool(message["partial"]))
        if rank not in gather.ranks or rank in gather.waiting:
            raise ValueError("not, or twice, in the gather")

        def forget() -> None:
            if self._gathers.get(name) is gather:
                self._hand_out(gather)
                del self._gathers[name]

        def give_up() -> None:
            if self._gathers.get(name) is gather and gather.waiting.get(rank) == request:
                if gather.partial:
                    self._hand_out(gather)
                    self._later(ANSWERS_KEPT_SECONDS, forget)
                    return
                missing = sorted(gather.ranks.difference(gather.values))
                text = (
                    f"{self._listed(missing)} did not reach {name!r} within {seconds:g} s, as the others have.\n"
                    "What to do: find out whether it is stopped or still busy; its output may tell."
                )
                self._refuse(rank, request, "late", text)
                del gather.waiting[rank]
                if not gather.waiting:
                    del self._gathers[name]

        self._waiting[rank, request] = self._later(seconds, give_up)
        self._gathers[name] = gather
        gather.values[rank] = _text(value)
        gather.waiting[rank] = request
        if len(gather.values) == len(gather.ranks):
            forget()
        else:
            self._end_if_hopeless(name, gather)

    def _end_if_hopeless(self, name: str, gather: _Gather) -> None:
        absent = gather.ranks & self._absent.difference(gather.values)
        if not absent or (gather.partial and len(absent) + len(gather.values) < len(gather.ranks)):
            return
        del self._gathers[name]
        if gather.partial:
            self._hand_out(gather)
            return
        for rank, request in gather.waiting.items():
            text = (
                f"{self._listed(sorted(absent))} ended before {name!r}, where the others wait.\n"
                "What to do: look at its output for the cause."
            )
            self._refuse(rank, request, "gone", text)

    def _hand_out(self, gather: _Gather) -> None:
        text = frames.joined(gather.values)
        for rank, request in gather.waiting.items():
            self._answer_text(rank, request, text)
        gather.waiting.clear()

    def _do_ask(self, rank: int, message: dict[str, Any]) -> None:
        kind, body, request, seconds = str(message["kind"]), message["body"], int(message["id"]), _seconds_of(message)
        key = _text([kind, body, message["ranks"]])
        found = self._rounds.get(key)
        if found is None:
            asked = self._ranks(message["ranks"]) - self._absent
            number = self._rounds_made + 1
            frame = frames.encode({"push": "question", "question": number, "kind": kind, "body": body})
            self._rounds_made = number
            found = self._rounds[key] = self._round_of[number] = _Round(key, number, asked)
            found.waiting.append((rank, request))
            for other in asked:
                self._send(other, frame)
            self._later(seconds, lambda: self._finish(found))
            if not asked:
                self._finish(found)
        elif found.result is None:
            found.waiting.append((rank, request))
        else:
            self._answer_text(rank, request, found.result)

    def _do_reply(self, rank: int, message: dict[str, Any]) -> None:
        found, text = self._round_of.get(int(message["question"])), _text(message["value"])
        if found is not None and rank in found.pending:
            found.pending.remove(rank)
            found.answers[rank] = text
            if not found.pending:
                self._finish(found)

    def _finish(self, found: _Round) -> None:
        if found.result is not None:
            return
        del self._round_of[found.number]
        found.result = frames.joined(found.answers)
        for rank, request in found.waiting:
            self._answer_text(rank, request, found.result)
        self._later(ANSWERS_KEPT_SECONDS, lambda: self._rounds.__delitem__(found.key))

    def _do_left(self, rank: int, message: dict[str, Any]) -> None:
        issued = {str(group): int(count) for group, count in dict(message["issued"]).items()}
        if rank in self._left:
            return
        self._left[rank] = _text(issued)
        if not self._unreported_left:
            self._later(LEFT_TOGETHER_SECONDS, self._report_departures)
        self._unreported_left.append(rank)
        self._mark_absent(rank)
        if len(self._left) == len(self.hosts):
            self._report_departures()

    def _report_departures(self) -> None:
        left_ranks, self._unreported_left = self._unreported_left, []
        if not left_ranks:  # the last one has reported them
            return
        left = frames.joined({rank: self._left[rank] for rank in left_ranks})
        self._push(frames.join(b'{"push":"left","left":', left, b"}"))

    def _do_stopped(self, rank: int, message: dict[str, Any]) -> None:
        self._is_told = True  # the rank has raised an error, and ends because of it

    def _do_failed(self, rank: int, message: dict[str, Any]) -> None:
        event = dict(message["event"])
        texts = {name: str(event[name]) for name in ("error", "traceback")}
        if not self._failing:
            self._failing = True
            self._push(frames.encode({"push": "failed", "event": {**event, **texts, "rank": rank}}))

    # How it is done

    def _mark_absent(self, rank: int) -> None:
        if rank in self._absent:
            return
        self._absent.add(rank)
        for name, gather in list(self._gathers.items()):
            self._end_if_hopeless(name, gather)
        for found in list(self._round_of.values()):
            found.pending.discard(rank)
            if not found.pending:
                self._finish(found)

    def _listed(self, ranks: Iterable[int]) -> str:
        ranks = list(ranks)
        named = [f"rank {rank} on host {self.hosts[rank]}" for rank in ranks[:_SHOWN]]
        return ", ".join(named) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")

    def _ranks(self, text: str | None) -> set[int]:
        """Return the ranks that a message names; all if it names none."""
        found = set(range(len(self.hosts)) if text is None else ranks_of(text))
        if max(found, default=0) >= len(self.hosts):
            raise ValueError("no such rank")
        return found

    def _push(self, frame: bytes) -> None:
        for rank in range(len(self.hosts)):
            self._send(rank, frame)

    def _answer(self, rank: int, request: int, value: Any) -> None:
        self._answer_text(rank, request, json.dumps(value).encode())

    def _answer_text(self, rank: int, request: int, value: bytes) -> None:
        self._waiting.pop((rank, request), lambda: None)()  # cancels its time limit
        self._send(rank, frames.join(b'{"id":%d,"value":' % request, value, b"}"))

    def _refuse(self, rank: int, request: int, kind: str, text: str) -> None:
        self._waiting.pop((rank, request), lambda: None)()
        self._send(rank, frames.encode({"id": request, "error": kind, "text": text}))


def _seconds_of(message: dict[str, Any]) -> float:
    seconds = float(message["seconds"])
    if not -1.0 <= seconds <= LONGEST_REQUEST_SECONDS:  # nor NaN
        raise ValueError("no such time")
    return seconds


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
