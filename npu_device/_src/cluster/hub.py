"""The hub: the process through which the ranks of a job find each other and exchange everything except tensors.

One thread and one loop serve all connections, so that slow, silent or unknown clients don't block the others. It ends
with its job: when no client is connected and either its parent has ended or the job is over.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sched
import select
import selectors
import signal
import socket
import sys
import time
import traceback
from typing import Any, Callable

from npu_device._src.cluster import frames, ports, time_limits as limits
from npu_device._src.cluster.frames import Message
from npu_device._src.cluster.hub_client import Client, State
from npu_device._src.cluster.hub_rendezvous import HubRendezvous
from npu_device._src.cluster.roster import Hello
from npu_device._src.cluster.server_handshake import UnprovedError
from npu_device._src.cluster.services import Services

_FEWEST_UNPROVED = 256  # limit on simultaneous unproved connections, if larger than two per rank
# Bytes that may wait for a rank which doesn't read. Beyond that it is dropped, or the hub would fill its memory.
_LONGEST_OUTBOX = 1 << 28
_SILENT = "sent nothing that a rank would send"


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
        self._clients: dict[socket.socket, Client] = {}
        self._timers = sched.scheduler(time.monotonic)
        self._is_over = False
        self._begin()

    def _begin(self) -> None:
        clients = self._clients.values()
        self._rendezvous = HubRendezvous(
            self._settings, clients, self._send_message, self._send_last
        )
        self._services: Services | None = None

    def run(self) -> None:
        try:
            seconds = self._run_due()
            while not self._is_done():
                for key, events in self._selector.select(seconds):
                    if key.data is not None:
                        key.data()
                    elif key.fileobj in self._clients:
                        # The client may just have been closed.
                        self._serve(self._clients[key.fileobj], events)
                seconds = self._run_due()
        except BaseException:
            text = f"the hub of the job (pid {os.getpid()}) failed:\n{traceback.format_exc()}"
            for client in self._rendezvous.arrivals():
                self._send_message(client, {"push": "end", "text": text})
            raise

    def _run_due(self) -> float | None:
        """Do what is due, once all that has been received is handled; return the seconds until more is due."""
        if self._services is None:
            time_now = time.monotonic()
            # The rendezvous ends when all ranks have come, the time is up, or they contradict each other.
            if self._rendezvous.check_complete(time_now):
                self._start_services()
            elif (complaint := self._rendezvous.complaint(time_now)) is not None:
                self._refuse_all(complaint)
        # Run last, as what is done above may set timers.
        seconds = self._timers.run(blocking=False)
        if self._rendezvous.is_waiting:
            # What ends the waiting changes with each rank that comes or leaves.
            return min(limits.WAITING_TICK_SECONDS, seconds or math.inf)
        return seconds

    def _is_done(self) -> bool:
        if any(client.has_arrived for client in self._clients.values()):
            return False
        return self._parent is None or (self._is_over and not self._settings["stays"])

    def _read_from_parent(self) -> None:
        assert self._parent is not None
        if not os.read(self._parent, 1024):
            self._selector.unregister(self._parent)
            self._parent = None

    def _accept(self) -> None:
        try:
            accepted, peer = self._listener.accept()
        except OSError:
            # No file descriptor is free, for a moment. The listener stays ready: the hub would spin without a pause.
            time.sleep(limits.ACCEPT_PAUSE_SECONDS)
            return
        accepted.setblocking(False)
        frames.keep_alive(accepted)
        client = Client(accepted, ports.plain(peer[0]), self._secret)
        self._clients[accepted] = client
        self._later(limits.PROOF_SECONDS, self._close_unproved, client)
        self._selector.register(accepted, selectors.EVENT_READ)
        # Clients that prove nothing can't take all descriptors: the oldest one has to go.
        unproved = [client for client in self._clients.values() if client.state is State.UNKNOWN]
        if len(unproved) > max(_FEWEST_UNPROVED, 2 * self._settings["world_size"]):
            self._close_unproved(unproved[0])

    def _close_unproved(self, client: Client) -> None:
        if client.state is State.UNKNOWN:
            self._close(client, _SILENT)

    def _later(self, seconds: float, call: Callable[..., None], *arguments: Client | None) -> None:
        self._timers.enter(seconds, 0, call, arguments)

    def _serve(self, client: Client, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(client)
        if not events & selectors.EVENT_READ or client.socket not in self._clients:
            return
        try:
            received = client.socket.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._close(client, "connected and disconnected without sending anything")
            return
        if not client.is_ending:
            client.reader.add(received)
        try:
            # Handling a message may close the connection, or make the message the last one that is read.
            while client.socket in self._clients and not client.is_ending:
                if (message := client.reader.next_message()) is None:
                    return
                self._handle(client, message)
        except frames.FrameError as error:
            if client.state is State.RANK:
                text = f"the hub of the job can't read what rank {client.rank} has sent: {error}"
                self._send_last(client, {"push": "end", "text": text})
            else:
                self._close(client, "talks another protocol")

    def _handle(self, client: Client, message: Message) -> None:
        if not client.handshake.is_proved:
            self._handle_handshake(client, message)
        elif client.state is State.UNKNOWN:
            self._handle_hello(client, message)
        elif client.state is State.ARRIVED:
            if "stopping" in message and client.arrival.hello.is_chief:
                self._refuse_all(str(message["stopping"]))
        elif client.state is State.RANK:
            assert self._services is not None
            self._services.handle(client.rank, message)

    def _handle_handshake(self, client: Client, message: Message) -> None:
        try:
            reply = client.handshake.answer(message)
        except UnprovedError:
            self._close(client, "could not prove that it knows the job secret")
            return
        if client.handshake.is_proved:
            client.reader.limit = frames.LIMIT_OF_HELLO
        self._send_message(client, reply)

    def _send_message(self, client: Client, message: Message) -> None:
        self._send(client, frames.encode(message))

    def _send(self, client: Client, frame: bytes) -> None:
        client.outbox += frame
        # Dropped, since a client that reads nothing must not fill the memory of the hub.
        if len(client.outbox) > _LONGEST_OUTBOX:
            client.outbox.clear()
            frames.shut_down(client.socket)
        elif len(client.outbox) == len(frame):
            self._flush(client)

    def _say(self, text: str) -> None:
        if self._settings["speaks"] and sys.stderr:
            with contextlib.suppress(OSError):
                # Written only if there is room, since a full pipe would block the hub.
                if select.select([], [sys.stderr], [], 0)[1]:
                    print(f"npu_device: {text}", file=sys.stderr, flush=True)

    def _flush(self, client: Client) -> None:
        """Send what the socket takes now. The loop sends the rest, and detects a closed connection by reading."""
        try:
            del client.outbox[: client.socket.send(client.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            client.outbox.clear()
        if client.outbox:
            self._selector.modify(client.socket, selectors.EVENT_READ | selectors.EVENT_WRITE)
            return
        self._selector.modify(client.socket, selectors.EVENT_READ)
        if client.is_ending:
            self._later(0.0, self._close, client, None)

    def _close(self, client: Client, problem: str | None) -> None:
        """Close the connection of a client; ``problem`` is what was wrong if it wasn't a rank."""
        if self._clients.pop(client.socket, None) is None:
            return
        self._selector.unregister(client.socket)
        client.socket.close()
        if client.state is State.RANK:
            assert self._services is not None
            self._services.closed(client.rank)
            # The job is over with its last rank.
            if not any(rival.state is State.RANK for rival in self._clients.values()):
                self._end()
        elif client.state is State.ARRIVED:
            if not client.is_ending and self._services is None:
                self._rendezvous.roster.remove(client.arrival)
        elif problem is not None and not client.is_ending:
            self._rendezvous.roster.note_unknown_client(client.address, problem)

    def _end(self) -> None:
        if self._services is not None:
            self._services.report_losses()
        self._is_over = True
        self._begin()

    # The rendezvous

    def _handle_hello(self, client: Client, message: Message) -> None:
        try:
            hello = Hello.read(message.get("hello"))
        except frames.WRONG_FORM as error:
            raise frames.FrameError(str(error)) from error
        self._rendezvous.receive(client, hello)

    def _start_services(self) -> None:
        """Give all ranks their numbers and the same roster, and serve them from now on."""
        self._rendezvous.number_ranks()
        ranks = self._rendezvous.ranks
        hosts = self._rendezvous.hosts()
        processes = [client.arrival.hello.pid for client in ranks]

        # Timers of an earlier job reach nobody: its ranks have gone.
        def send_to_rank(rank: int, frame: bytes) -> None:
            client = ranks[rank]
            if client.socket in self._clients:
                self._send(client, frame)

        self._services = Services(hosts, processes, send_to_rank, self._later, self._say)
        roster = {
            "hosts": hosts,
            "addresses": self._rendezvous.addresses(),
            "loopback": ports.is_loopback(self._listener.getsockname()[0]),
        }
        # Encoded once for all ranks, as it is as long as the job is large.
        shared = frames.encode({"roster": roster})
        for client in ranks:
            client.reader.limit = frames.LIMIT_FROM_RANK
            self._send(client, frames.encode({"rank": client.rank}) + shared)

    def _refuse_all(self, text: str) -> None:
        for client in self._rendezvous.arrivals() + self._rendezvous.children():
            self._send_last(client, {"refused": text})
        self._end()

    def _send_last(self, client: Client, message: Message) -> None:
        """Send a last message and close. A client that doesn't read it in time misses it."""
        client.is_ending = True
        self._later(limits.LAST_MESSAGE_SECONDS, self._close, client, None)
        self._send_message(client, message)


def main() -> None:
    """Serve with the settings in the first line of standard input, which stays open while the parent runs.

    The parent has opened the listener, and this process inherits it.
    """
    settings = json.loads(sys.stdin.buffer.readline())
    os.chdir("/")
    # A scheduler may signal all processes of a job (Slurm). The ranks need the hub until they have ended their step.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    ports.allow_many_descriptors()
    listener = socket.socket(fileno=settings["listener"])
    listener.setblocking(False)
    # The parent waits for this line.
    print(flush=True)
    # The parent closes the pipe after that line: printing into it would be an error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    Hub(settings, listener, sys.stdin.fileno()).run()
