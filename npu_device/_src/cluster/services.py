"""The services of the hub for a job after the rendezvous: values, gathers, questions, and news of ranks that have gone.

Knows no sockets. A message causes at most O(ranks) messages; so do all ranks together when they do the same. One that
isn't valid is refused whole (``FrameError``); values are kept as the JSON text that is sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Callable

from npu_device._src.cluster import frames
from npu_device._src.cluster.frames import Message
from npu_device._src.cluster.time_limits import (
    ANSWERS_KEPT_SECONDS,
    LEFT_TOGETHER_SECONDS,
    LONGEST_REQUEST_SECONDS,
)
from npu_device._src.wording import ranges, ranks_of, shortened

_POSTS_KEPT = 200  # most names that are kept; the oldest go
_POST_BYTES_KEPT = 1 << 26
_SHOWN = 10
_DONE = b"null"

_Request = tuple[int, int]
"""A rank, and the number that it has given its request."""
_Key = tuple[str, str]
"""What is collected: ``gather`` and its name, or ``ask`` and the question."""


class _Collection:
    """Values of some ranks, as JSON texts: those of a gather, or the answers to a question."""

    def __init__(self, ranks: set[int], is_partial: bool) -> None:
        self.awaited = ranks
        # What has come is handed out at the end of the time, or when the missing ranks have gone.
        self.is_partial = is_partial
        self.is_over = False
        self.texts: dict[int, str] = {}
        self.waiting: list[_Request] = []

    def add(self, rank: int, text: str) -> None:
        self.texts[rank] = text
        self.awaited.discard(rank)


class Services:
    """The services of one job."""

    def __init__(
        self,
        hosts: list[str],
        processes: list[int],
        send: Callable[[int, bytes], None],
        later: Callable[[float, Callable[[], None]], object],
        say: Callable[[str], None],
    ) -> None:
        self._hosts = hosts
        self._processes = processes
        self._send = send
        self._later = later
        self._say = say
        self._store: dict[str, bytes] = {}
        self._readers: dict[_Request, str] = {}  # the key that each of them waits for
        self._posts: dict[str, dict[int, str]] = {}
        self._post_bytes = 0
        self._collections: dict[_Key, _Collection] = {}
        # The ranks whose script has ended, each with the calls that it issued, as JSON.
        self._departures: dict[int, str] = {}
        self._absent = set[int]()
        self._unreported_departures: list[int] = []
        self._unreported_losses: list[int] = []
        self._failing = False
        self._is_told = False

    def handle(self, rank: int, message: Message) -> None:
        """Handle a message of a rank; FrameError if it isn't one of those that ranks send."""
        # What isn't read ends the connection, not the hub.
        try:
            request = rank, int(message.get("id", 0))
            handle = getattr(self, f"_do_{message['do']}")
            handle(request, message)
        except frames.WRONG_FORM as error:
            raise frames.FrameError(f"{error!r} in {str(message.get('do'))[:100]!r}") from error

    def closed(self, rank: int) -> None:
        # A rank that has left says so before it closes.
        if rank not in self._departures:
            # Connections that are lost at the same moment are reported together.
            if not self._unreported_losses:
                self._later(0.0, self.report_losses)
            self._unreported_losses.append(rank)
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

    # What a rank may ask for ("do"). Each handler reads the whole message before it changes anything.

    def _do_set(self, request: _Request, message: Message) -> None:
        key = str(message["key"])
        text = _text(message["value"]).encode()
        if key in self._store:
            self._refuse(request, "exists", key)
            return
        self._store[key] = text
        self._answer(request, _DONE)
        for reader, read_key in list(self._readers.items()):
            if read_key == key:
                del self._readers[reader]
                self._answer(reader, text)

    def _do_get(self, request: _Request, message: Message) -> None:
        key = str(message["key"])
        seconds = _seconds_of(message)
        if key in self._store:
            self._answer(request, self._store[key])
            return

        def give_up() -> None:
            if self._readers.pop(request, None) is not None:
                text = f"no rank has provided {key!r} within {seconds:g} s"
                self._refuse(request, "late", text)

        self._later(seconds, give_up)
        self._readers[request] = key

    def _do_delete(self, request: _Request, message: Message) -> None:
        self._store.pop(str(message["key"]), None)
        self._answer(request, _DONE)

    def _do_post(self, request: _Request, message: Message) -> None:
        name = str(message["name"])
        text = _text(message["value"])
        rank, _ = request
        posted = self._posts.setdefault(name, {})
        self._post_bytes += len(text) - len(posted.get(rank, ""))
        posted[rank] = text
        answer = b"[]"
        # Only when all have posted are the values of use, and many ranks post at once.
        if len(posted) == len(self._hosts):
            answer = frames.joined(posted)
        self._answer(request, answer)
        while len(self._posts) > _POSTS_KEPT or self._post_bytes > _POST_BYTES_KEPT:
            oldest = self._posts.pop(next(iter(self._posts)))
            self._post_bytes -= sum(map(len, oldest.values()))

    def _do_gather(self, request: _Request, message: Message) -> None:
        key = ("gather", str(message["name"]))
        seconds = _seconds_of(message)
        text = _text(message["value"])
        rank, _ = request
        ranks = message["ranks"]
        gather = self._collections.get(key) or _Collection(self._ranks(ranks), ranks is not None)
        if rank not in gather.awaited and not gather.is_over:
            raise ValueError("not, or twice, in the gather")
        self._begin(key, gather, seconds)
        gather.add(rank, text)
        gather.waiting.append(request)
        self._settle(key)

    def _do_ask(self, request: _Request, message: Message) -> None:
        # The question is known by its text: several ranks may ask it, and it is put to each rank once.
        question = _text([str(message["kind"]), message["body"], message["ranks"]])
        key = ("ask", question)
        seconds = _seconds_of(message)
        answers = self._collections.get(key)
        if answers is None:
            answers = _Collection(self._ranks(message["ranks"]), True)
            frame = frames.encode({"push": "question", "question": question})
            self._begin(key, answers, seconds)
            for rank in answers.awaited - self._absent:
                self._send(rank, frame)
        answers.waiting.append(request)
        self._settle(key)

    def _do_reply(self, request: _Request, message: Message) -> None:
        key = ("ask", str(message["question"]))
        text = _text(message["value"])
        rank, _ = request
        answers = self._collections.get(key)
        if answers is not None and rank in answers.awaited:
            answers.add(rank, text)
            self._settle(key)

    def _begin(self, key: _Key, collection: _Collection, seconds: float) -> None:
        """Begin a collection, unless it has begun. It ends after the time of the first request."""
        if key not in self._collections:
            self._collections[key] = collection
            self._later(seconds, lambda: self._give_up(key, collection, seconds))

    def _give_up(self, key: _Key, collection: _Collection, seconds: float) -> None:
        """End a collection whose time is over without those that haven't come."""
        # It may have ended, and another one begun under its name.
        if self._collections.get(key) is not collection:
            return
        if collection.is_partial:
            self._end(key, collection)
            return
        text = (
            f"{self._listed(sorted(collection.awaited))} did not reach {key[1]!r} within {seconds:g} s, as the "
            "others have.\nWhat to do: find out whether it is stopped or still busy; its output may tell."
        )
        self._refuse_all(key, "late", text)

    def _settle(self, key: _Key) -> None:
        """End a collection if all of its ranks have come or gone; once it has ended, late ranks get what is there."""
        collection = self._collections[key]
        absent = collection.awaited & self._absent
        if absent and not collection.is_partial:
            text = (
                f"{self._listed(sorted(absent))} ended before {key[1]!r}, where the others wait.\n"
                "What to do: look at its output for the cause."
            )
            self._refuse_all(key, "gone", text)
        elif collection.is_over or collection.awaited == absent:
            # A partial one goes on as long as a rank that hasn't come still may.
            self._end(key, collection)

    def _end(self, key: _Key, collection: _Collection) -> None:
        text = frames.joined(collection.texts)
        for request in collection.waiting:
            self._answer(request, text)
        collection.waiting.clear()
        is_question = key[0] == "ask"
        # Once all ranks have come or gone, the next gather of this name is a new one.
        if not is_question and collection.awaited <= self._absent:
            del self._collections[key]
        elif not collection.is_over:
            collection.is_over = True
            # Ranks that are late, or ask the same a little later, still get the values.
            self._later(ANSWERS_KEPT_SECONDS, lambda: self._forget(key, collection))

    def _forget(self, key: _Key, collection: _Collection) -> None:
        if self._collections.get(key) is collection:
            del self._collections[key]

    def _do_left(self, request: _Request, message: Message) -> None:
        issued = {str(group): int(count) for group, count in dict(message["issued"]).items()}
        rank, _ = request
        if rank in self._departures:
            return
        self._departures[rank] = _text(issued)
        # Ranks usually end at the same time: one message tells of them all.
        if not self._unreported_departures:
            self._later(LEFT_TOGETHER_SECONDS, self._report_departures)
        self._unreported_departures.append(rank)
        self._mark_absent(rank)
        if len(self._departures) == len(self._hosts):
            self._report_departures()

    def _report_departures(self) -> None:
        ranks = self._unreported_departures
        self._unreported_departures = []
        if not ranks:
            # An earlier report has told of all ranks.
            return
        departures = frames.joined({rank: self._departures[rank] for rank in ranks})
        self._push(frames.join(b'{"push":"left","left":', departures, b"}"))

    def _do_stopped(self, request: _Request, message: Message) -> None:
        self._is_told = True  # the rank has raised an error, and ends because of it

    def _do_failed(self, request: _Request, message: Message) -> None:
        event = {name: str(message["event"][name]) for name in ("error", "traceback")}
        rank, _ = request
        if not self._failing:
            self._failing = True
            # The rank is the one that the connection belongs to, whatever the event says.
            self._push(frames.encode({"push": "failed", "event": {**event, "rank": rank}}))

    # How it is done

    def _mark_absent(self, rank: int) -> None:
        if rank not in self._absent:
            self._absent.add(rank)
            # A copy of the table, since gathers that end are deleted on the way.
            for key in list(self._collections):
                self._settle(key)

    def _listed(self, ranks: Iterable[int]) -> str:
        return shortened([f"rank {rank} on host {self._hosts[rank]}" for rank in ranks], _SHOWN)

    def _ranks(self, text: str | None) -> set[int]:
        """Return the ranks that a message names; all if it names none."""
        if text is None:
            return set(range(len(self._hosts)))
        ranks = set(ranks_of(text))
        if max(ranks, default=0) >= len(self._hosts):
            raise ValueError("no such rank")
        return ranks

    def _push(self, frame: bytes) -> None:
        for rank in range(len(self._hosts)):
            self._send(rank, frame)

    def _answer(self, request: _Request, text: bytes) -> None:
        rank, request_id = request
        # The text is JSON already, encoded once for all ranks that get it.
        self._send(rank, frames.join(b'{"id":%d,"value":' % request_id, text, b"}"))

    def _refuse(self, request: _Request, error: str, text: str) -> None:
        rank, request_id = request
        self._send(rank, frames.encode({"id": request_id, "error": error, "text": text}))

    def _refuse_all(self, key: _Key, error: str, text: str) -> None:
        """End a gather with an error on all ranks that have come."""
        for request in self._collections.pop(key).waiting:
            self._refuse(request, error, text)


def _seconds_of(message: Message) -> float:
    seconds = float(message["seconds"])
    # The chain refuses NaN, too.
    if not -1.0 <= seconds <= LONGEST_REQUEST_SECONDS:
        raise ValueError("no such time")
    return seconds


def _text(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))
