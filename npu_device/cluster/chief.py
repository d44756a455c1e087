"""The chief's side of the rendezvous: it listens, takes the ranks in, and gives all of them the same answer at the end.

One thread and one loop over all connections, so that nobody who is slow, silent or a stranger holds up the others.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time

from npu_device.cluster import ports, protocol
from npu_device.cluster.errors import RendezvousError
from npu_device.cluster.membership import Membership
from npu_device.cluster.progress import Progress
from npu_device.cluster.protocol import Hello, Picture, Refusal, Wait
from npu_device.cluster.roll_call import Attendance, RollCall

_HELLO_SECONDS = 5.0  # who has not said who he is by then is a stranger
_GRACE_SECONDS = 1.5  # after a contradiction: those who are on their way get the news too
_FAREWELL_SECONDS = 5.0
_HASTY_FAREWELL_SECONDS = 0.5

_log = logging.getLogger("npu_device")


class _Guest:
    """One connection."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection = connection
        self.address = address
        self.until = time.monotonic() + _HELLO_SECONDS
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.attendance: Attendance | None = None

    def send(self, message: protocol.Answer) -> None:
        self.outbox += protocol.encode(message)
        self.flush()

    def flush(self) -> None:
        """Send what the connection takes now."""
        try:
            del self.outbox[: self.connection.send(self.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self.outbox.clear()  # gone; the loop sees it when it reads


class Chief:
    """Receives the ranks of one job. Use as a context manager: every socket is closed at the end.

    Raises:
        PortTakenError: another program uses the port.
        RendezvousError: this process can't listen there for another reason.
    """

    def __init__(self, membership: Membership, hello: Hello) -> None:
        self._membership = membership
        self._hello = hello
        self._roll = RollCall(hello, membership.expected_hosts)
        self._deadline = time.monotonic() + membership.connect_timeout
        self._guests: dict[socket.socket, _Guest] = {}
        self._address = hello.host or "127.0.0.1"
        self._listener = ports.listen(membership.chief_hosts, membership.chief_port)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def __enter__(self) -> Chief:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._guests:
            connection.close()
        self._listener.close()
        self._selector.close()

    def gather(self) -> Picture:
        """Wait for all ranks; the picture as the chief gets it.

        Raises:
            RendezvousError: they did not all come in time, or don't fit together. All who came get the same text.
        """
        try:
            self._receive()
        except BaseException as error:  # Ctrl-C above all: the others need not wait for the time to pass
            text = f"the chief ({self._name()}) stopped while the ranks were meeting: {error!r}.\nLook at its output."
            self._farewell({guest: Refusal(text) for guest in self._present()}, _HASTY_FAREWELL_SECONDS)
            raise
        if not self._roll.complete:
            text = self._roll.complaint(self._membership.connect_timeout)
            self._farewell({guest: Refusal(text) for guest in self._present()}, _FAREWELL_SECONDS)
            raise RendezvousError(text)
        order = self._roll.in_order()
        hosts = tuple(attendance.host for attendance in order)
        addresses = tuple(self._roll.addresses(self._address))
        rank_of = {id(attendance): rank for rank, attendance in enumerate(order)}
        pictures = {g: Picture(rank_of[id(g.attendance)], hosts, addresses) for g in self._present()}
        self._farewell(pictures, _FAREWELL_SECONDS)
        own = next(rank for rank, attendance in enumerate(order) if attendance.hello is self._hello)
        return Picture(own, hosts, addresses)

    def _name(self) -> str:
        return f"machine {self._hello.machine}, pid {self._hello.pid}"

    def _present(self) -> list[_Guest]:
        return [guest for guest in self._guests.values() if guest.attendance is not None]

    def _receive(self) -> None:
        """Take guests in until all have come, the time has passed, or they contradict each other."""
        progress = Progress()
        contradictory_since: float | None = None
        while not self._roll.complete:
            now = time.monotonic()
            end = self._deadline
            if not self._roll.contradictory:
                contradictory_since = None
            else:
                contradictory_since = contradictory_since or now
                end = min(end, contradictory_since + _GRACE_SECONDS)
            if now >= end:
                return
            progress.tell(lambda: f"the chief waits for {self._roll.missing()} of job {self._hello.job_id!r}")
            for key, _ in self._selector.select(min(0.5, end - now)):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(self._guests[key.fileobj])  # type: ignore[index]
                if self._roll.complete:
                    return
            for guest in [g for g in self._guests.values() if g.attendance is None and g.until < time.monotonic()]:
                self._dismiss(guest, "said nothing that a rank says")

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except OSError:  # it has gone already, or this process has no file descriptors left; both pass
            return
        connection.setblocking(False)
        self._guests[connection] = _Guest(connection, ports.plain(peer[0]))
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, guest: _Guest) -> None:
        try:
            data = guest.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._dismiss(guest, "connected and went away without a word")
        elif guest.attendance is None:
            guest.inbox += data
            line, newline, _ = guest.inbox.partition(b"\n")
            if newline:
                self._hear(guest, bytes(line))
            elif len(guest.inbox) > protocol.HELLO_LIMIT:
                self._dismiss(guest, "talks another protocol")

    def _hear(self, guest: _Guest, line: bytes) -> None:
        try:
            hello = protocol.decode_hello(line)
        except ValueError:
            self._dismiss(guest, "talks another protocol")
            return
        refusal = self._roll.refuses(hello, guest.address)
        if refusal is not None:
            _log.warning("refused a process of another job: job %r, from %s", hello.job_id, guest.address)
            guest.send(Refusal(refusal))
            self._dismiss(guest, None)
            return
        if self._hello.host is None and ports.is_loopback(self._address):
            # The others reach this host where this one did; any address is better than loopback.
            self._address = ports.plain(guest.connection.getsockname()[0])
        on_this_host = ports.is_loopback(guest.address)
        guest.attendance = self._roll.admit(hello, None if on_this_host else guest.address)
        guest.send(Wait(max(0.0, self._deadline - time.monotonic())))

    def _dismiss(self, guest: _Guest, stranger: str | None) -> None:
        """Close a connection; ``stranger`` says what was strange when it was no rank's."""
        self._selector.unregister(guest.connection)
        del self._guests[guest.connection]
        guest.connection.close()
        if guest.attendance is not None:
            self._roll.strike(guest.attendance)
        elif stranger is not None:
            _log.debug("a stranger from %s %s", guest.address, stranger)
            self._roll.note_stranger(guest.address, stranger)

    def _farewell(self, answers: dict[_Guest, Picture] | dict[_Guest, Refusal], seconds: float) -> None:
        """Send everybody the last word. Who doesn't take it in time has lost."""
        until = time.monotonic() + seconds
        for guest, answer in answers.items():
            guest.send(answer)
        while any(guest.outbox for guest in answers) and time.monotonic() < until:
            time.sleep(0.01)
            for guest in answers:
                if guest.outbox:
                    guest.flush()
