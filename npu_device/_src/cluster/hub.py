"""The hub: the process through which the ranks of a job find each other and exchange everything except tensors.

One thread and one loop serve all connections, so that slow, silent or unknown clients don't block the others. It ends
with its job: when no client is connected and either its parent has ended or the job is over.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import selectors
import signal
import socket
import sys
import time
import traceback
from typing import Any

from npu_device._src.cluster import frames, ports, time_limits as limits
from npu_device._src.cluster.errors import PortTakenError, RendezvousError
from npu_device._src.cluster.roster import Arrival, Hello, Roster
from npu_device._src.cluster.services import Services, Timers
from npu_device._src.wording import ranges

_FEWEST_UNPROVED = 256  # limit on simultaneous unproved connections, if larger than two per rank
_LONGEST_OUTBOX = 1 << 28  # bytes; a rank that reads nothing while this much is waiting for it is dropped
_SILENT = "sent nothing that a rank would send"


class _Connection:
    """A connection of one client, at first unknown, then a rank."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.socket = connection
        self.address = address
        self.until = time.monotonic() + limits.PROOF_SECONDS
        self.reader = frames.Reader(frames.LIMIT_BEFORE_PROOF)
        self.outbox = bytearray()
        self.nonces: tuple[str, str] | None = None  # its own, and the one of the hub
        self.proved = False
        self.arrival: Arrival | None = None
        self.rank: int | None = None
        self.parent: _Connection | None = None  # the rank whose child this client is
        self.is_ending = False  # closed as soon as everything has been sent


class Hub:
    """The hub of one job, or of several successive jobs of the same ranks."""

    def __init__(self, settings: dict[str, Any], listener: socket.socket, parent: int) -> None:
        self._settings = settings
        self._secret = bytes.fromhex(settings["secret"])
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(parent, selectors.EVENT_READ, self._read_from_parent)
        self._parent: int | None = parent
        self._connections: dict[socket.socket, _Connection] = {}
        self._unproved: dict[_Connection, None] = {}
        self._timers = Timers()
        self._is_over = False
        self._begin()

    def _begin(self) -> None:
        self._roster = Roster(self._settings["job_id"], self._settings["expected_hosts"])
        self._address = "127.0.0.1"
        self._began: float | None = None
        self._contradictory_since: float | None = None
        self._next_progress = 0.0
        self._candidates_until: float | None = None
        self._services: Services | None = None
        self._timers_of_job = Timers()  # those of an earlier job go with it
        self._by_rank: list[_Connection | None] = []

    def run(self) -> None:
        try:
            while not self._is_done():
                for key, events in self._selector.select(self._seconds_to_wait()):
                    if key.data is not None:
                        key.data()
                    elif key.fileobj in self._connections:  # else it has just been closed
                        self._serve(self._connections[key.fileobj], events)
                now = time.monotonic()
                self._timers.run(now)
                self._timers_of_job.run(now)
                while self._unproved and (oldest := next(iter(self._unproved))).until <= now:
                    self._close(oldest, _SILENT)
                if self._services is not None:
                    self._services.report_losses()
                elif self._began is not None:
                    self._check_rendezvous()
        except BaseException:
            text = f"the hub of the job (pid {os.getpid()}) failed:\n{traceback.format_exc()}"
            for connection in self._arrivals():
                self._send(connection, frames.encode({"push": "end", "text": text}))
            raise

    def _is_done(self) -> bool:
        if any(connection.arrival is not None for connection in self._connections.values()):
            return False
        return self._parent is None or (self._is_over and not self._settings["stays"])

    def _read_from_parent(self) -> None:
        assert self._parent is not None
        if not os.read(self._parent, 1024):
            self._selector.unregister(self._parent)
            self._parent = None

    def _seconds_to_wait(self) -> float | None:
        dues = [timers.first for timers in (self._timers, self._timers_of_job) if timers.first is not None]
        if self._unproved:
            dues.append(next(iter(self._unproved)).until)
        if self._services is None and self._began is not None:
            dues += [self._candidates_until or self._deadline(), self._next_progress]
        return max(0.0, min(dues) - time.monotonic()) if dues else None

    def _accept(self) -> None:
        try:
            accepted, peer = self._listener.accept()
        except OSError as error:  # the client has gone, or no file descriptor is free; both are temporary
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(limits.ACCEPT_PAUSE_SECONDS)  # the listener stays ready, and the hub would spin
            return
        accepted.setblocking(False)
        frames.keep_alive(accepted)
        connection = self._connections[accepted] = _Connection(accepted, ports.plain(peer[0]))
        self._unproved[connection] = None
        self._selector.register(accepted, selectors.EVENT_READ)
        if len(self._unproved) > max(_FEWEST_UNPROVED, 2 * self._settings["world_size"]):
            self._close(next(iter(self._unproved)), _SILENT)

    def _serve(self, connection: _Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(connection)
        if not events & selectors.EVENT_READ or connection.socket not in self._connections:
            return
        try:
            data = connection.socket.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(connection, "connected and disconnected without sending anything")
            return
        if not connection.is_ending:
            connection.reader.add(data)
        try:
            while connection.socket in self._connections and not connection.is_ending:
                if (message := connection.reader.next()) is None:
                    return
                self._handle(connection, message)
        except frames.FrameError as error:
            if connection.rank is None:
                self._close(connection, "talks another protocol")
            else:
                text = f"the hub of the job can't read what rank {connection.rank} has sent: {error}"
                self._send_last(connection, {"push": "end", "text": text})

    def _handle(self, connection: _Connection, message: dict[str, Any]) -> None:
        if connection.rank is not None:
            assert self._services is not None
            self._services.handle(connection.rank, message)
        elif connection.arrival is not None:
            if "stopping" in message and connection.arrival.hello.is_chief:
                self._refuse_all(str(message["stopping"]))
        elif connection.parent is not None:
            return
        elif connection.proved:
            self._handle_hello(connection, message)
        elif connection.nonces is None:
            theirs, mine = message.get("nonce"), frames.nonce()
            if not isinstance(message.get("npu_device"), int) or not isinstance(theirs, str):
                raise frames.FrameError("no greeting")
            connection.nonces = theirs, mine
            self._send(connection, frames.encode({"nonce": mine}))
        elif frames.is_proof(message.get("proof"), frames.proof(self._secret, "client", *connection.nonces)):
            connection.proved = True
            connection.reader.limit = frames.LIMIT_OF_HELLO
            self._send(connection, frames.encode({"proof": frames.proof(self._secret, "hub", *connection.nonces)}))
        else:
            self._close(connection, "could not prove that it knows the job secret")

    def _send(self, connection: _Connection, frame: bytes) -> None:
        connection.outbox += frame
        if len(connection.outbox) > _LONGEST_OUTBOX:
            connection.outbox.clear()
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)
        elif len(connection.outbox) == len(frame):
            self._flush(connection)

    def _say(self, text: str) -> None:
        if self._settings["speaks"] and sys.stderr:
            with contextlib.suppress(OSError):
                if select.select([], [sys.stderr], [], 0)[1]:  # else it may block
                    print(f"npu_device: {text}", file=sys.stderr, flush=True)

    def _send_to_rank(self, rank: int, frame: bytes) -> None:
        connection = self._by_rank[rank]
        if connection is not None:
            self._send(connection, frame)

    def _flush(self, connection: _Connection) -> None:
        """Send what the socket takes now. The loop sends the rest, and detects a closed connection by reading."""
        try:
            del connection.outbox[: connection.socket.send(connection.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            connection.outbox.clear()
        if connection.outbox:
            self._selector.modify(connection.socket, selectors.EVENT_READ | selectors.EVENT_WRITE)
            return
        self._selector.modify(connection.socket, selectors.EVENT_READ)
        if connection.is_ending:
            self._timers.later(0.0, lambda: self._close(connection, None))

    def _close(self, connection: _Connection, problem: str | None) -> None:
        """Close a connection; ``problem`` is what was wrong if it wasn't a rank's."""
        if self._connections.pop(connection.socket, None) is None:
            return
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._unproved.pop(connection, None)
        if connection.rank is not None:
            assert self._services is not None
            self._by_rank[connection.rank] = None
            self._services.closed(connection.rank)
            if not any(self._by_rank):
                self._end()
        elif connection.arrival is not None:
            if not connection.is_ending and self._services is None:
                self._roster.remove(connection.arrival)
        elif problem is not None and not connection.is_ending:
            self._roster.note_unknown_client(connection.address, problem)

    def _end(self) -> None:
        if self._services is not None:
            self._services.report_losses()
        self._is_over = True
        self._begin()

    # The rendezvous

    def _handle_hello(self, connection: _Connection, message: dict[str, Any]) -> None:
        try:
            hello = Hello.read(message.get("hello"))
        except (ValueError, LookupError, TypeError) as error:
            raise frames.FrameError(str(error)) from error
        del self._unproved[connection]
        refusal = self._roster.refusal(hello, connection.address)
        if refusal is not None:
            self._send_last(connection, {"refused": refusal})
            return
        seen_at = None if ports.is_loopback(connection.address) else connection.address
        arrival = Arrival(hello, hello.host_key or seen_at or self._settings["host_key"], seen_at)
        others = self._connections.values() if self._roster.has(arrival) else ()
        same = [(c, c.arrival) for c in others if c.arrival is not None and c.arrival.key == arrival.key]
        connection.parent = next((c for c, other in same if hello.is_child_of(other.hello)), None)
        if connection.parent is not None:
            self._tell_child(connection)
            return
        children = [(c, other) for c, other in same if other.hello.is_child_of(hello)]  # that have come before it
        if self._services is not None:
            met = {"busy": "the ranks of this job have met already"}
            self._send_last(connection, {"refused": hello.too_late} if children else met)
            return
        if self._roster.is_crowded:
            self._send_last(connection, {"busy": "too many processes have come as ranks of this job"})
            return
        if ports.is_loopback(self._address):
            # The others reach this host at the address this rank used; any address is better than loopback.
            self._address = ports.plain(connection.socket.getsockname()[0])
        before = self._roster.reference
        connection.arrival = arrival
        self._roster.add(arrival)
        for child, earlier in children:
            self._roster.remove(earlier)
            child.arrival, child.parent = None, connection
        if self._began is None:
            self._began = time.monotonic()
            self._next_progress = self._began + limits.FIRST_PROGRESS_SECONDS
        for other in [connection] if before is self._roster.reference else self._arrivals():
            self._send(other, frames.encode({"wait": max(0.0, self._end_of_waiting() - time.monotonic())}))

    def _tell_child(self, connection: _Connection) -> None:
        """Tell a client whose child it is, once the ranks have met; it waits with them until then."""
        parent = connection
        while parent.parent is not None:  # which may be a child, too
            parent = parent.parent
        if self._services is None or parent.rank is None or parent.arrival is None:
            self._send(connection, frames.encode({"wait": max(0.0, self._end_of_waiting() - time.monotonic())}))
            return
        hosts, hello = self._services.hosts, parent.arrival.hello
        neighbours = ranges(rank for rank, host in enumerate(hosts) if host == hosts[parent.rank])
        place = {"rank": parent.rank, "world_size": len(hosts), "neighbours": neighbours, "device_id": hello.device_id}
        self._send_last(connection, {"child_of": {"pid": hello.pid, **place}})

    def _children(self) -> list[_Connection]:
        return [c for c in self._connections.values() if c.parent is not None and not c.is_ending]

    def _arrivals(self) -> list[_Connection]:
        return [c for c in self._connections.values() if c.arrival is not None and not c.is_ending]

    def _end_of_waiting(self) -> float:
        assert self._began is not None and self._roster.reference is not None
        return self._began + self._roster.reference.seconds

    def _deadline(self) -> float:
        if self._contradictory_since is None:
            return self._end_of_waiting()
        return min(self._end_of_waiting(), self._contradictory_since + limits.CONTRADICTION_SECONDS)

    def _check_rendezvous(self) -> None:
        """End the rendezvous when all ranks have come, the time is up, or they contradict each other."""
        now = time.monotonic()
        if self._roster.complete:
            if not self._awaits_candidates(now):
                self._complete_rendezvous()
            return
        self._candidates_until = None
        if not self._roster.contradictory:
            self._contradictory_since = None
        elif self._contradictory_since is None:
            self._contradictory_since = now
        if now >= self._deadline():
            self._refuse_all(self._roster.complaint())
        elif now >= self._next_progress:
            self._next_progress = now + limits.NEXT_PROGRESS_SECONDS
            for connection in self._arrivals():
                if connection.arrival is not None and connection.arrival.hello.is_chief:
                    self._send(connection, frames.encode({"waits_for": self._roster.missing()}))

    def _awaits_candidates(self, now: float) -> bool:
        """Return True while all have come, but a process that has started one of them may still take its place."""
        candidates = {one: one.arrival.hello.candidate for one in self._arrivals() if one.arrival is not None}
        if not any(candidate is not None for candidate in candidates.values()):
            return False
        if self._candidates_until is None:
            self._candidates_until = now + limits.CANDIDATE_SECONDS
            for one, candidate in candidates.items():
                self._send(one, frames.encode({"wait": limits.CANDIDATE_SECONDS, "for": candidate}))
        return now < self._candidates_until

    def _complete_rendezvous(self) -> None:
        order, by_arrival = self._roster.in_order(), {id(each.arrival): each for each in self._arrivals()}
        hosts, processes = [arrival.host for arrival in order], [arrival.hello.pid for arrival in order]
        on_loopback = ports.is_loopback(self._listener.getsockname()[0])
        addresses = [arrival.hello.host or arrival.seen_at or self._address for arrival in order]
        roster = {"hosts": hosts, "addresses": addresses, "loopback": on_loopback}
        shared = frames.encode({"roster": roster})
        self._services = Services(hosts, processes, self._send_to_rank, self._timers_of_job.later, self._say)
        for rank, connection in enumerate(by_arrival[id(arrival)] for arrival in order):
            connection.rank = rank
            self._by_rank.append(connection)
            connection.reader.limit = frames.LIMIT_FROM_RANK
            self._send(connection, frames.encode({"rank": rank}) + shared)
        for child in self._children():
            self._tell_child(child)

    def _refuse_all(self, text: str) -> None:
        for connection in self._arrivals() + self._children():
            self._send_last(connection, {"refused": text})
        self._end()

    def _send_last(self, connection: _Connection, message: dict[str, Any]) -> None:
        """Send a last message and close. A client that doesn't read it in time misses it."""
        connection.is_ending = True
        self._timers.later(limits.LAST_MESSAGE_SECONDS, lambda: self._close(connection, None))
        self._send(connection, frames.encode(message))


def main() -> None:
    """Serve with the settings in the first line of standard input, which stays open while the parent runs."""
    settings = json.loads(sys.stdin.buffer.readline())
    os.chdir("/")
    # A scheduler may signal all processes of a job (Slurm). The ranks need the hub until they have ended their step.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    ports.allow_many_descriptors()
    try:
        listener = ports.listen(settings["listen"], settings["ports"])
    except RendezvousError as error:
        print(json.dumps({"error": str(error), "taken": isinstance(error, PortTakenError)}), flush=True)
        return
    listener.setblocking(False)
    host, port = listener.getsockname()[:2]
    print(json.dumps({"host": host, "port": port}), flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    Hub(settings, listener, sys.stdin.fileno()).run()
