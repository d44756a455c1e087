"""The other ranks' side of the rendezvous: find the chief, say hello, and wait for its answer.

The chief may come up later than this rank, and its name may become known later still; so everything is tried again
until the time has passed, and the error then says what happened at each address.
"""

from __future__ import annotations

import ipaddress
import queue
import socket
import struct
import threading
import time
from typing import Any, Callable

from npu_device.cluster import protocol
from npu_device.cluster.description import join_address
from npu_device.cluster.errors import RendezvousError
from npu_device.cluster.membership import Membership
from npu_device.cluster.progress import Progress
from npu_device.cluster.protocol import Hello, Picture, Refusal, Wait

_CONNECT_SECONDS = 3.0
_ANSWER_SECONDS = 3.0  # the chief answers each hello at once
_VERDICT_MARGIN_SECONDS = 5.0
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0


class _Failed(Exception):
    """One try came to nothing; the text says why."""


class _TooLate(Exception):
    """No line came in time. (socket.timeout is an OSError, and so is a broken connection.)"""


class Visitor:
    """A rank on its way to the chief."""

    def __init__(self, membership: Membership, hello: Hello) -> None:
        self._membership = membership
        self._hello = hello
        self._deadline = time.monotonic() + membership.connect_timeout
        self._progress = Progress()
        self._outcomes: dict[str, str] = {}

    def visit(self) -> Picture:
        """Try the chief's addresses in turn until it has answered.

        Raises:
            RendezvousError: the chief refused (its text, the same for every rank), or it was never reached.
        """
        pause = _FIRST_PAUSE_SECONDS
        while True:
            for host in self._membership.chief_hosts:
                picture = self._try_host(host)
                if picture is not None:
                    return picture
                if time.monotonic() >= self._deadline:
                    raise RendezvousError(self._complaint())
            self._progress.tell(lambda: f"{self._name()} looks for the chief: " + "; ".join(self._lines()))
            time.sleep(max(0.0, min(pause, self._deadline - time.monotonic())))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def knock(self) -> None:
        """Try each address once; return when no chief of npu_device's is there.

        Raises:
            RendezvousError: a chief is there, and refused.
        """
        for host in self._membership.chief_hosts:
            self._try_host(host)

    def _try_host(self, host: str) -> Picture | None:
        port = self._membership.chief_port
        place = join_address(host, port)
        try:
            addresses = _resolve(host, port, self._remaining())
        except _Failed as failure:
            self._outcomes[place] = str(failure)
            return None
        outcomes: list[str] = []
        for family, address in addresses:
            if outcomes and time.monotonic() >= self._deadline:
                break
            try:
                return self._call_on(family, address)
            except _Failed as failure:
                outcomes.append(str(failure) if len(addresses) == 1 else f"{address[0]} {failure}")
        self._outcomes[place] = ", ".join(outcomes)
        return None

    def _call_on(self, family: int, address: tuple[Any, ...]) -> Picture:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(max(0.1, min(_CONNECT_SECONDS, self._remaining())))
            try:
                connection.connect(address)
                if connection.getsockname() == connection.getpeername():
                    # A port of this host that nobody listens on can connect to itself. Leave no TIME_WAIT, which would
                    # keep the chief from listening there.
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    raise _Failed("refused: nobody listens there")
                connection.sendall(protocol.encode(self._hello))
            except ConnectionRefusedError:
                raise _Failed("refused: nobody listens there") from None
            except socket.timeout:
                raise _Failed("timed out: the host doesn't answer") from None
            except OSError as error:
                raise _Failed(f"can't be reached: {error.strerror or error}") from error
            return self._await_answer(connection)

    def _await_answer(self, connection: socket.socket) -> Picture:
        lines = _Lines(connection)
        until = time.monotonic() + _ANSWER_SECONDS
        taken_in = False
        while True:
            try:
                line = lines.read(until, lambda: self._progress.tell(self._waiting))
            except _TooLate:
                doing = "the chief took this rank in, and then said nothing any more" if taken_in else "nobody answers"
                raise _Failed(f"{doing}: another program, or a chief that stands still") from None
            except OSError:
                line = None
            if line is None:
                raise _Failed(
                    "the chief took this rank in, and then was gone"
                    if taken_in
                    else "the connection was closed without an answer: another program, or a chief that is ending"
                )
            try:
                answer = protocol.decode_answer(line)
            except ValueError:
                raise _Failed("another program answers there: it doesn't talk npu_device's protocol") from None
            if isinstance(answer, Wait):
                taken_in = True
                until = time.monotonic() + answer.seconds + _VERDICT_MARGIN_SECONDS
            elif isinstance(answer, Refusal):
                raise RendezvousError(answer.text)
            else:
                return answer

    def _remaining(self) -> float:
        return self._deadline - time.monotonic()

    def _name(self) -> str:
        return f"{self._hello.name} of job {self._hello.job_id!r}"

    def _waiting(self) -> str:
        return f"{self._name()} has reached the chief, which waits for other ranks"

    def _lines(self) -> list[str]:
        return [f"{place} {outcome}" for place, outcome in self._outcomes.items()]

    def _complaint(self) -> str:
        membership, hello = self._membership, self._hello
        if membership.rank is None:
            chief = f"the process of CM_CHIEF_DEVICE on host {membership.chief_hosts[0]}"
            check = "CM_CHIEF_IP, CM_CHIEF_PORT and CM_CHIEF_DEVICE"
        else:
            chief = f"rank 0 on host {membership.expected_hosts[0]}"
            check = "TF_CONFIG" if membership.scheme == "TF_CONFIG" else "the rank table"
        lines = "\n".join(f"  {line}" for line in self._lines())
        return (
            f"EI0015: {self._name()} (machine {hello.machine}, pid {hello.pid}) had no answer from the chief, {chief}, "
            f"within {membership.connect_timeout:g} s (HCCL_CONNECT_TIMEOUT):\n{lines}\n"
            "Likely cause: the chief was not started, has ended, or was given another address or port.\n"
            f"What to do: look at the chief's output; compare {check} on both hosts; look for a firewall between them."
        )


class _Lines:
    """Reads lines from a connection, each until a given time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()

    def read(self, until: float, meanwhile: Callable[[], None]) -> bytes | None:
        """The next line; None when the other side has closed the connection or sends something without end.

        Args:
            until: when to give up, on the clock of time.monotonic().
            meanwhile: called about once a second.

        Raises:
            _TooLate: no line came in time.
            OSError: the connection broke.
        """
        while b"\n" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0:
                raise _TooLate
            self._connection.settimeout(min(1.0, left))
            try:
                data = self._connection.recv(1 << 16)
            except socket.timeout:
                meanwhile()
                continue
            self._buffer += data
            if not data or len(self._buffer) > protocol.ANSWER_LIMIT:
                return None
        line, _, rest = self._buffer.partition(b"\n")
        self._buffer = rest
        return bytes(line)


def _resolve(host: str, port: int, seconds: float) -> list[tuple[int, tuple[Any, ...]]]:
    """Families and socket addresses of a host.

    The system's resolver can block for much longer than ``seconds`` and doesn't listen to Ctrl-C; so it works in a
    thread of its own, which ends by itself.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return _addresses(host, port)
    answers: queue.SimpleQueue[list[tuple[int, tuple[Any, ...]]] | _Failed] = queue.SimpleQueue()

    def resolve() -> None:
        try:
            answers.put(_addresses(host, port))
        except _Failed as failure:
            answers.put(failure)

    threading.Thread(target=resolve, name="npu_device-resolve", daemon=True).start()
    try:
        answer = answers.get(timeout=max(0.1, seconds))
    except queue.Empty:
        raise _Failed("the name could not be resolved in time") from None
    if isinstance(answer, _Failed):
        raise answer
    return answer


def _addresses(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _Failed(f"the name can't be resolved ({getattr(error, 'strerror', None) or error})") from error
    return [(int(family), address) for family, _, _, _, address in found]
