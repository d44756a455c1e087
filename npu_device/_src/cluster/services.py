"""The services of the hub for a job after the rendezvous: values, gathers, questions, and news of ranks that have gone.

Knows no sockets. A message causes at most O(ranks) messages; so do all ranks together when they do the same. One that
isn't valid is refused whole (``FrameError``); values are kept as the JSON text that is sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

from npu_device._src.cluster import frames
from npu_device._src.cluster.frames import Message
from npu_device._src.cluster.time_limits import (
    ANSWERS_KEPT_SECONDS,
    LEFT_TOGETHER_SECONDS,
    LONGEST_REQUEST_SECONDS,
)
from npu_device._src.wording import ranges, ranks_of

_POSTS_KEPT = 200  # most names that are kept; the oldest go
_POST_BYTES_KEPT = 1 << 26
_SHOWN = 10


@dataclass
class _Gather:
    """A gather that isn't complete; the values are JSON texts."""

    ranks: set[int]
    partial: bool  # what has come is handed out at the end of the time, or when the missing ranks have gone
    texts: dict[int, str] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)  # each rank's request


@dataclass
class _Question:
    """One question that several ranks may ask; it is put to each rank once."""

    key: str  # what is asked, and of whom
    number: int
    pending: set[int]
    answers: dict[int, str] = field(default_factory=dict)
    waiting: list[tuple[int, int]] = field(default_factory=list)  # ranks and their requests
    joined_answers: bytes | None = None  # set once the question is closed


@dataclass
class Services:
    """The services of one job."""

    hosts: list[str]
    _processes: list[int]
    _send: Callable[[int, bytes], None]
    _later: Callable[[float, Callable[[], None]], Callable[[], object]]
    _say: Callable[[str], None]
    # The function that cancels the time limit of a request, by rank and request.
    _cancels: dict[tuple[int, int], Callable[[], object]] = field(default_factory=dict)
    _store: dict[str, str] = field(default_factory=dict)
    _readers: dict[str, dict[tuple[int, int], None]] = field(default_factory=dict)
    _posts: dict[str, dict[int, str]] = field(default_factory=dict)
    _post_bytes: int = 0
    _gathers: dict[str, _Gather] = field(default_factory=dict)
    _questions: dict[str, _Question] = field(default_factory=dict)
    _open_questions: dict[int, _Question] = field(default_factory=dict)
    _questions_asked: int = 0
    # The ranks whose script has ended, each with the calls that it issued, as JSON.
    _departures: dict[int, str] = field(default_factory=dict)
    _absent: set[int] = field(default_factory=set)
    # Absent ranks whose process goes on to answer the questions that are put to ended ranks as well.
    _serving: set[int] = field(default_factory=set)
    _unreported_departures: list[int] = field(default_factory=list)
    _unreported_losses: list[int] = field(default_factory=list)
    _failing: bool = False
    _is_told: bool = False

    def handle(self, rank: int, message: Message) -> None:
        """Handle a message of a rank; FrameError if it isn't one of those that ranks send."""
        # A message of a wrong form may raise any of these: it ends the connection, not the hub.
        try:
            _HANDLERS[message["do"]](self, rank, message)
        except (
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise frames.FrameError(f"{error!r} in {str(message.get('do'))[:100]!r}") from error

    def closed(self, rank: int) -> None:
        # A rank that has left says so before it closes.
        if rank not in self._departures:
            self._unreported_losses.append(rank)
        self._serving.discard(rank)
        self._mark_absent(rank)

    def report_losses(self) -> None:
        """Report all ranks that have gone without a message, together; none after a failure: all are ending then."""
        losses = self._unreported_losses
        self._unreported_losses = []
        if losses and not self._failing:
            self._failing = True
            if not self._is_told:
                self._say(self._loss_text(losses))
            self._push(frames.encode({"push": "gone", "ranks": losses}))

    def _loss_text(self, losses: Sequence[int]) -> str:
        rank, *followers = losses
        history = ""
        if self._departures:
            history = f" The script of rank(s) {ranges(self._departures)} had ended before."
        if followers:
            history += f" Then rank(s) {ranges(followers)} went, too."
        return (
            f"{self._listed([rank])} (process {self._processes[rank]}) is gone: its process ended or was killed, or "
            f"its host can't be reached any more.{history}\n"
            f"What to do: look at the output of rank {rank}. mpiexec ends the other ranks, too, and may name the "
            "process of one of them."
        )

    # What a rank may ask for. Each handler reads the whole message before it changes anything.

    def _do_set(self, rank: int, message: Message) -> None:
        key = str(message["key"])
        text = str(message["value"])
        request = int(message["id"])
        if key in self._store:
            self._refuse(rank, request, "exists", key)
            return
        self._store[key] = text
        self._answer(rank, request, None)
        for reader, read_request in self._readers.pop(key, {}):
            self._answer(reader, read_request, text)

    def _do_get(self, rank: int, message: Message) -> None:
        key = str(message["key"])
        request = int(message["id"])
        seconds = _seconds_of(message)
        if key in self._store:
            self._answer(rank, request, self._store[key])
            return

        def give_up() -> None:
            readers = self._readers.get(key, {})
            if (rank, request) in readers:
                del readers[rank, request]
                if not readers:
                    del self._readers[key]
                self._refuse(
                    rank, request, "late", f"no rank has provided {key!r} within {seconds:g} s"
                )

        self._cancels[rank, request] = self._later(seconds, give_up)
        self._readers.setdefault(key, {})[rank, request] = None

    def _do_delete(self, rank: int, message: Message) -> None:
        key = str(message["key"])
        request = int(message["id"])
        self._store.pop(key, None)
        self._answer(rank, request, None)

    def _do_post(self, rank: int, message: Message) -> None:
        name = str(message["name"])
        request = int(message["id"])
        text = _text(message["value"])
        posted = self._posts.setdefault(name, {})
        self._post_bytes += len(text) - len(posted.get(rank, ""))
        posted[rank] = text
        answer = b"[]"
        # Only when all have posted are the values of use, and many ranks post at once.
        if len(posted) == len(self.hosts):
            answer = frames.joined(posted)
        self._answer_text(rank, request, answer)
        while len(self._posts) > _POSTS_KEPT or self._post_bytes > _POST_BYTES_KEPT:
            oldest = self._posts.pop(next(iter(self._posts)))
            self._post_bytes -= sum(map(len, oldest.values()))

    def _do_gather(self, rank: int, message: Message) -> None:
        name = str(message["name"])
        request = int(message["id"])
        seconds = _seconds_of(message)
        text = _text(message["value"])
        gather = self._gathers.get(name)
        if gather is None:
            gather = _Gather(self._ranks(message["ranks"]), bool(message["partial"]))
        if rank not in gather.ranks or rank in gather.waiting:
            raise ValueError("not, or twice, in the gather")
        self._cancels[rank, request] = self._later(
            seconds, lambda: self._give_up(name, gather, rank, request, seconds)
        )
        self._gathers[name] = gather
        gather.texts[rank] = text
        gather.waiting[rank] = request
        if len(gather.texts) == len(gather.ranks):
            self._forget(name, gather)
        else:
            self._end_if_hopeless(name, gather)

    def _forget(self, name: str, gather: _Gather) -> None:
        """End a gather, unless it has ended already, and another one has its name."""
        if self._gathers.get(name) is gather:
            self._hand_out(gather)
            del self._gathers[name]

    def _give_up(self, name: str, gather: _Gather, rank: int, request: int, seconds: float) -> None:
        """Answer a rank whose time is up without those that haven't come."""
        # The gather may have ended, and another one begun under its name.
        if self._gathers.get(name) is not gather or gather.waiting.get(rank) != request:
            return
        if gather.partial:
            self._hand_out(gather)
            # Late ranks still get the values of the others.
            self._later(ANSWERS_KEPT_SECONDS, lambda: self._forget(name, gather))
            return
        absent = sorted(gather.ranks.difference(gather.texts))
        text = (
            f"{self._listed(absent)} did not reach {name!r} within {seconds:g} s, as the others have.\n"
            "What to do: find out whether it is stopped or still busy; its output may tell."
        )
        self._refuse(rank, request, "late", text)
        del gather.waiting[rank]
        if not gather.waiting:
            del self._gathers[name]

    def _end_if_hopeless(self, name: str, gather: _Gather) -> None:
        absent = gather.ranks & self._absent.difference(gather.texts)
        # A partial gather goes on as long as a rank that hasn't come still may.
        if not absent or (gather.partial and len(absent) + len(gather.texts) < len(gather.ranks)):
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
        text = frames.joined(gather.texts)
        for rank, request in gather.waiting.items():
            self._answer_text(rank, request, text)
        gather.waiting.clear()

    def _do_ask(self, rank: int, message: Message) -> None:
        topic = str(message["kind"])
        body = message["body"]
        request = int(message["id"])
        seconds = _seconds_of(message)
        key = _text([topic, body, message["ranks"]])
        question = self._questions.get(key)
        if question is None:
            silent = self._absent
            if message.get("even_ended"):
                silent = self._absent - self._serving
            asked = self._ranks(message["ranks"]) - silent
            number = self._questions_asked + 1
            frame = frames.encode(
                {"push": "question", "question": number, "kind": topic, "body": body}
            )
            self._questions_asked = number
            question = _Question(key, number, asked, waiting=[(rank, request)])
            self._put(question, frame, seconds)
        elif question.joined_answers is None:
            question.waiting.append((rank, request))
        else:
            self._answer_text(rank, request, question.joined_answers)

    def _put(self, question: _Question, frame: bytes, seconds: float) -> None:
        """Put a new question to the ranks that are asked."""
        self._questions[question.key] = question
        self._open_questions[question.number] = question
        for rank in question.pending:
            self._send(rank, frame)
        self._later(seconds, lambda: self._close_question(question))
        if not question.pending:
            self._close_question(question)

    def _do_reply(self, rank: int, message: Message) -> None:
        question = self._open_questions.get(int(message["question"]))
        text = _text(message["value"])
        if question is not None and rank in question.pending:
            question.pending.remove(rank)
            question.answers[rank] = text
            if not question.pending:
                self._close_question(question)

    def _close_question(self, question: _Question) -> None:
        if question.joined_answers is not None:
            return
        del self._open_questions[question.number]
        question.joined_answers = frames.joined(question.answers)
        for rank, request in question.waiting:
            self._answer_text(rank, request, question.joined_answers)
        # Ranks that ask the same a little later get the same answers.
        self._later(ANSWERS_KEPT_SECONDS, lambda: self._questions.__delitem__(question.key))

    def _do_left(self, rank: int, message: Message) -> None:
        issued = {str(group): int(count) for group, count in dict(message["issued"]).items()}
        serves = bool(message.get("serves"))
        if rank in self._departures:
            return
        self._departures[rank] = _text(issued)
        if serves:
            self._serving.add(rank)
        # Ranks usually end at the same time: one message tells of them all.
        if not self._unreported_departures:
            self._later(LEFT_TOGETHER_SECONDS, self._report_departures)
        self._unreported_departures.append(rank)
        self._mark_absent(rank)
        if len(self._departures) == len(self.hosts):
            self._report_departures()

    def _report_departures(self) -> None:
        ranks = self._unreported_departures
        self._unreported_departures = []
        if not ranks:
            # An earlier report has told of all ranks.
            return
        departures = frames.joined({rank: self._departures[rank] for rank in ranks})
        self._push(frames.join(b'{"push":"left","left":', departures, b"}"))

    def _do_stopped(self, rank: int, message: Message) -> None:
        self._is_told = True  # the rank has raised an error, and ends because of it

    def _do_failed(self, rank: int, message: Message) -> None:
        event = dict(message["event"])
        texts = {name: str(event[name]) for name in ("error", "traceback")}
        if not self._failing:
            self._failing = True
            # The rank is the one that the connection belongs to, whatever the event says.
            self._push(frames.encode({"push": "failed", "event": {**event, **texts, "rank": rank}}))

    # How it is done

    def _mark_absent(self, rank: int) -> None:
        if rank not in self._absent:
            self._absent.add(rank)
            # A copy of the table, since gathers that end are deleted on the way.
            for name, gather in list(self._gathers.items()):
                self._end_if_hopeless(name, gather)
        if rank in self._serving:
            return
        for question in list(self._open_questions.values()):
            question.pending.discard(rank)
            if not question.pending:
                self._close_question(question)

    def _listed(self, ranks: Iterable[int]) -> str:
        ranks = list(ranks)
        text = ", ".join(f"rank {rank} on host {self.hosts[rank]}" for rank in ranks[:_SHOWN])
        if len(ranks) > _SHOWN:
            text += f" and {len(ranks) - _SHOWN} more"
        return text

    def _ranks(self, text: str | None) -> set[int]:
        """Return the ranks that a message names; all if it names none."""
        if text is None:
            return set(range(len(self.hosts)))
        ranks = set(ranks_of(text))
        if max(ranks, default=0) >= len(self.hosts):
            raise ValueError("no such rank")
        return ranks

    def _push(self, frame: bytes) -> None:
        for rank in range(len(self.hosts)):
            self._send(rank, frame)

    def _answer(self, rank: int, request: int, answer: str | None) -> None:
        self._answer_text(rank, request, json.dumps(answer).encode())

    def _answer_text(self, rank: int, request: int, text: bytes) -> None:
        self._cancel_limit(rank, request)
        # The text is JSON already, encoded once for all ranks that get it.
        self._send(rank, frames.join(b'{"id":%d,"value":' % request, text, b"}"))

    def _refuse(self, rank: int, request: int, error: str, text: str) -> None:
        self._cancel_limit(rank, request)
        self._send(rank, frames.encode({"id": request, "error": error, "text": text}))

    def _cancel_limit(self, rank: int, request: int) -> None:
        cancel = self._cancels.pop((rank, request), None)
        if cancel is not None:
            cancel()


# The handler of each message, by what it asks for ("do").
_HANDLERS: dict[str, Callable[[Services, int, Message], None]] = {
    "set": Services._do_set,
    "get": Services._do_get,
    "delete": Services._do_delete,
    "post": Services._do_post,
    "gather": Services._do_gather,
    "ask": Services._do_ask,
    "reply": Services._do_reply,
    "left": Services._do_left,
    "stopped": Services._do_stopped,
    "failed": Services._do_failed,
}


def _seconds_of(message: Message) -> float:
    seconds = float(message["seconds"])
    # Written as a chain, which refuses NaN, too.
    if not -1.0 <= seconds <= LONGEST_REQUEST_SECONDS:
        raise ValueError("no such time")
    return seconds


def _text(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))
