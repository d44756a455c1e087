"""A rank's end of the control channel: the connection it used for the rendezvous, kept open while the job lasts.

Key-value store, gathers, barriers, questions, and notices from the hub. Nothing polls; every wait has a limit.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import os
import socket
import struct
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, Callable

from npu_device._src.cluster import frames
from npu_device._src.cluster.frames import Message
from npu_device._src.cluster.rank_errors import ClusterError, PeerError
from npu_device._src.cluster.time_limits import MARGIN_SECONDS, SHORT_SECONDS
from npu_device._src.threads import start_thread
from npu_device._src.wording import ranges, ranks_of

_log = logging.getLogger("npu_device")


class ControlChannel:
    """The connection to the hub after the rendezvous; requests raise ``ClusterError`` if the hub is gone or silent."""

    def __init__(self, connection: socket.socket, reader: frames.Reader) -> None:
        self._socket = connection
        # The rendezvous had a time limit; from here on, a thread waits for messages as long as the
        # job runs.
        self._socket.settimeout(None)
        # Sending has one, which isn't Python's.
        limit = struct.pack("ll", *divmod(int(SHORT_SECONDS * 1e6), 10**6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._reader = reader
        self._sending = threading.Lock()
        self._request_ids = itertools.count(1)
        self._waiting: dict[int, Future[Message]] = {}
        self._problem: str | None = None
        self.messages = 0
        os.register_at_fork(after_in_child=self._close_in_fork)

    def listen(self, on_push: Callable[[Message], None], on_lost: Callable[[str], None]) -> None:
        """Start receiving; ``on_push`` gets each message that isn't an answer, ``on_lost`` once why none follows."""
        start_thread("npu_device-channel", self._read, on_push, on_lost)

    def set(self, key: str, value: str) -> None:
        """Write a new key, which every rank can read at once; KeyError if it exists: another rank may have read it."""
        self._request("set", SHORT_SECONDS, key=key, value=value)

    def get(self, key: str, timeout: float) -> str:
        """Read a key, waiting until a rank has written it; TimeoutError if none did."""
        return str(self._request("get", timeout, key=key))

    def delete(self, key: str) -> None:
        self._request("delete", SHORT_SECONDS, key=key)

    def post(self, name: str, value: Any) -> list:
        """Post this rank's value under a name, in place of an earlier one; return the values of all ranks, by rank,
        once all have posted, until then nothing. The hub keeps the newest 200 names.
        """
        return list(_by_rank(self._request("post", SHORT_SECONDS, name=name, value=value)).values())

    def gather(self, name: str, value: Any, timeout: float) -> list:
        """Return the values that all ranks pass under a name, by rank; TimeoutError if some don't come."""
        answer = self._request("gather", timeout, name=name, value=value, ranks=None)
        return list(_by_rank(answer).values())

    def gather_from(
        self, name: str, value: Any, ranks: Iterable[int], timeout: float
    ) -> dict[int, Any]:
        """Return the values that some ranks, this one among them, pass under a name in time, by rank."""
        asked = ranges(ranks)
        return _by_rank(self._request("gather", timeout, name=name, value=value, ranks=asked))

    def ask(self, topic: str, body: Any, ranks: Iterable[int], timeout: float) -> dict[int, Any]:
        """Ask some ranks; return the answers that arrived in time. Ranks that ask the same share the answers."""
        question = {"kind": topic, "body": body, "ranks": ranges(ranks)}
        return _by_rank(self._request("ask", timeout, **question))

    def notify(self, do: str, **fields: Any) -> None:
        """Send a message that needs no answer."""
        self._send({"do": do, **fields})

    def close(self) -> None:
        frames.shut_down(self._socket)
        self._socket.close()

    def _close_in_fork(self) -> None:
        """Close the copy of this forked child, or the hub would not see that the parent closes its end."""
        self._problem = "this process is a fork of a rank, not a rank itself"
        # A shutdown, as in `close`, would end the connection of the rank, too.
        self._socket.close()

    def _request(self, do: str, seconds: float, **fields: Any) -> Any:
        request_id = next(self._request_ids)
        limit = seconds + MARGIN_SECONDS  # the hub enforces the time itself, unless it is stopped
        reply: Future[Message] = Future()
        # The reply is registered before the request is sent, as the answer may come at once.
        self._waiting[request_id] = reply
        try:
            self._send({"id": request_id, "do": do, "seconds": seconds, **fields})
            if self._problem is not None:
                raise PeerError(self._problem)
            answer = reply.result(limit)
        except concurrent.futures.TimeoutError:
            raise PeerError(
                self._problem or _stopped(f"has not answered for {limit:g} s ({do})")
            ) from None
        finally:
            self._waiting.pop(request_id, None)
        if "error" in answer:
            errors = {"exists": KeyError, "late": TimeoutError, "gone": PeerError}
            error_type = errors.get(str(answer["error"]), ClusterError)
            raise error_type(str(answer.get("text")))
        if "value" not in answer:
            raise ClusterError(f"the hub of the job has answered something unknown ({do})")
        return answer["value"]

    def _send(self, message: Message) -> None:
        """Send a whole message, or close the connection."""
        if self._problem is not None:
            return
        self.messages += 1
        # An error here is no news: the thread that reads notices the loss.
        with self._sending, contextlib.suppress(OSError):
            try:
                self._socket.sendall(frames.encode(message))
            except BlockingIOError:
                self._problem = _stopped(f"has received nothing for {SHORT_SECONDS:g} s")
                # Half a message may have been sent, so nothing can follow.
                frames.shut_down(self._socket)

    def _read(self, on_push: Callable[[Message], None], on_lost: Callable[[str], None]) -> None:
        reason = "the connection to the hub of the job has ended"
        try:
            for message in self._reader.messages(self._socket):
                self.messages += 1
                if isinstance(message.get("id"), int):
                    reply = self._waiting.pop(message["id"], None)
                    if reply is not None:
                        reply.set_result(message)
                elif message.get("push") == "end":
                    reason = str(message["text"])
                else:
                    try:
                        on_push(message)
                    except Exception:
                        # The channel goes on: it serves others, too.
                        _log.exception("could not handle a message from the hub of the job")
        except (OSError, ValueError, LookupError, TypeError) as error:
            reason = f"the connection to the hub of the job broke: {error!r}"
        # The problem is set before the requests are woken: one that isn't in the list yet finds it after sending.
        self._problem = self._problem or reason
        for reply in list(self._waiting.values()):
            reply.set_exception(PeerError(self._problem))
        on_lost(self._problem)


def _stopped(how: str) -> str:
    return (
        f"the hub of the job {how}: its process is stopped or overloaded.\n"
        "What to do: look at the host of rank 0, where it runs."
    )


def _by_rank(answer: list[tuple[Any, str]]) -> dict[int, Any]:
    """Return the values of an answer, each of which comes once, with the ranks that have sent it; in order of rank."""
    by_rank = {rank: value for value, text in answer for rank in ranks_of(text)}
    return dict(sorted(by_rank.items()))
