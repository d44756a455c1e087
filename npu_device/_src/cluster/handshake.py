"""The first exchange with the hub, or another rank, and the proof that both sides know the job secret."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import ipaddress
import logging
import secrets
import socket
import struct
import time
from concurrent.futures import Future
from typing import Any, Callable

from npu_device._src.cluster import frames
from npu_device._src.cluster.frames import Message
from npu_device._src.cluster.server_handshake import ServerHandshake
from npu_device._src.cluster.time_limits import (
    ACCEPT_PAUSE_SECONDS,
    ANSWER_SECONDS,
    CONNECT_SECONDS,
)
from npu_device._src.threads import start_thread

ANOTHER_PROGRAM = "another program answers there: it doesn't talk npu_device's protocol"

NO_SECRET = (
    "this job has no secret, and other hosts can reach the port where its ranks meet: anyone there can join it, read "
    "the ranks' messages, and end it.\n"
    "What to do: set NPU_DEVICE_SECRET_FILE on every host to a file with the same random text (openssl rand -hex 32)."
)

_MOST_UNPROVED = 256  # connections at once whose other side has yet to prove the secret

_log = logging.getLogger("npu_device")


class AttemptFailedError(ConnectionError):
    """One attempt failed; the text says what happened at that address."""


class TimedConnection:
    """Sends and receives frames, each with a time limit."""

    def __init__(self, connection: socket.socket, max_frame_bytes: int = frames.LIMIT) -> None:
        self.connection = connection
        self.reader = frames.Reader(max_frame_bytes)

    def send(self, message: Message) -> None:
        """Send a message, within ``ANSWER_SECONDS``. If that fails, ``receive`` says so."""
        with contextlib.suppress(OSError):
            self.connection.settimeout(ANSWER_SECONDS)
            self.connection.sendall(frames.encode(message))

    def receive(self, seconds: float, *, silent: str, closed: str) -> Message:
        until = time.monotonic() + seconds
        while True:
            try:
                message = self.reader.next_message()
            except frames.FrameError:
                raise AttemptFailedError(ANOTHER_PROGRAM) from None
            if message is not None:
                return message
            remaining = until - time.monotonic()
            if remaining <= 0:
                raise AttemptFailedError(silent)
            self.connection.settimeout(remaining)
            try:
                received = self.connection.recv(1 << 16)
            except socket.timeout:
                continue
            except OSError:
                received = b""
            if not received:
                raise AttemptFailedError(closed)
            self.reader.add(received)


def reach(host: str, port: int, seconds: float, secret: bytes, **said: Any) -> TimedConnection:
    """Connect to the first address of a host at which someone knows the job secret; or raise what happened at each."""
    until = time.monotonic() + seconds
    addresses = resolve(host, port, seconds)
    outcomes: list[str] = []
    for family, address in addresses:
        remaining = until - time.monotonic()
        if outcomes and remaining <= 0:
            break
        limit = max(0.1, min(CONNECT_SECONDS, remaining))
        try:
            return _attempt(family, address, limit, secret, said)
        except AttemptFailedError as failure:
            outcome = str(failure)
            if len(addresses) > 1:
                outcome = f"{address[0]} {outcome}"
            outcomes.append(outcome)
    raise AttemptFailedError(", ".join(outcomes))


def _attempt(
    family: int, address: tuple, seconds: float, secret: bytes, said: Message
) -> TimedConnection:
    with contextlib.ExitStack() as opened:
        try:
            connection = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
            connection.settimeout(seconds)
            connection.connect(address)
            if connection.getsockname() == connection.getpeername():
                # Connecting to an unused port of this host can connect to itself. Leave no TIME_WAIT, which would keep
                # the hub from listening there.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                raise ConnectionRefusedError
            frames.keep_alive(connection)
        except ConnectionRefusedError:
            raise AttemptFailedError("refused: nothing listens there") from None
        except socket.timeout:
            raise AttemptFailedError("timed out: the host doesn't answer") from None
        except OSError as error:
            raise AttemptFailedError(f"can't be reached: {error.strerror or error}") from error
        timed = TimedConnection(connection)
        authenticate(timed, secret, **said)
        opened.pop_all()
        return timed


def authenticate(timed: TimedConnection, secret: bytes, **said: Any) -> None:
    """Prove that this process knows the secret, and have the other side prove it."""
    own_nonce = secrets.token_hex()
    timed.send({**said, "npu_device": frames.PROTOCOL, "nonce": own_nonce})
    hub_nonce = timed.receive(
        ANSWER_SECONDS,
        silent="no answer: another program, or one that is stopped",
        closed="the connection was closed without an answer: another program, or one that is ending",
    ).get("nonce")
    if not isinstance(hub_nonce, str):
        raise AttemptFailedError(ANOTHER_PROGRAM)
    timed.send({"proof": frames.proof(secret, "client", own_nonce, hub_nonce, said)})
    answer = timed.receive(
        ANSWER_SECONDS,
        silent="no answer to the proof of the job secret",
        closed="the proof of the job secret was refused: a job with another secret answers there "
        "(NPU_DEVICE_SECRET_FILE, NPU_DEVICE_SECRET)",
    )
    expected = frames.proof(secret, "hub", own_nonce, hub_nonce, said)
    if not frames.is_proof(answer.get("proof"), expected):
        raise AttemptFailedError(
            "another program answers there: it can't prove that it knows the job secret"
        )


def serve(
    listener: socket.socket,
    secret: bytes,
    admitted: Callable[[TimedConnection, Message], None],
) -> None:
    """Accept connections until the listener is shut down. Of too many without a proof, the oldest is closed."""
    unproved: dict[socket.socket, None] = {}  # in the order in which they came, the oldest first

    def let_in(connection: socket.socket) -> None:
        try:
            try:
                timed, said = admit(connection, secret)
            finally:
                unproved.pop(connection, None)
            admitted(timed, said)
        except Exception as error:
            # The other side may also say what is wrong after its proof: a field is missing, or there is no such rank.
            connection.close()
            _log.debug("refused a connection: %r", error)

    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            # These errors tell that the listener has been shut down.
            if error.errno in (errno.EINVAL, errno.EBADF):
                return
            # The client has gone, or no file descriptor is free: both are temporary.
            time.sleep(ACCEPT_PAUSE_SECONDS)
            continue
        unproved[connection] = None
        if len(unproved) > _MOST_UNPROVED:
            oldest = next(iter(list(unproved)))
            unproved.pop(oldest, None)
            # The shutdown wakes the thread of the connection, which closes it.
            frames.shut_down(oldest)
        try:
            start_thread("npu_device-admit", let_in, connection)
        except RuntimeError:
            # No thread may be free for a moment. In Python 3.12, none can be started once the script has ended.
            let_in(connection)


def admit(connection: socket.socket, secret: bytes) -> tuple[TimedConnection, Message]:
    """Do the other side's part of ``authenticate``; return what else the client has said, too.

    Raises:
        AttemptFailedError, FrameError, UnprovedError: the client ends, talks another protocol, or proves nothing.
    """
    frames.keep_alive(connection)
    handshake = ServerHandshake(secret)
    timed = TimedConnection(connection, frames.LIMIT_BEFORE_PROOF)
    while not handshake.is_proved:
        message = timed.receive(ANSWER_SECONDS, silent="no answer", closed="it was closed")
        timed.send(handshake.answer(message))
    timed.reader.limit = frames.LIMIT
    return timed, handshake.said


def resolve(host: str, port: int, seconds: float) -> list[tuple[int, tuple]]:
    """Return the families and socket addresses of a host, in limited time."""
    infos = _look_up(host, port, seconds)
    return [(int(family), address) for family, _, _, _, address in infos]


def full_name_of_this_host(seconds: float) -> str:
    """Return what ``hostname -f`` prints, in limited time."""
    infos = _look_up(socket.gethostname(), None, seconds, socket.AI_CANONNAME)
    (_, _, _, name, _), *_ = infos
    return name


def _look_up(host: str, port: int | None, seconds: float, flags: int = 0) -> list:
    answer = Future[list]()

    def set_answer() -> None:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
            answer.set_result(infos)
        except (OSError, UnicodeError) as error:
            answer.set_exception(error)

    try:
        ipaddress.ip_address(host)
        set_answer()
    except ValueError:
        # The resolver of the system can block for much longer, and ignores Ctrl-C: its thread ends on its own.
        start_thread("npu_device-resolve", set_answer)
    try:
        return answer.result(max(0.1, seconds))
    except concurrent.futures.TimeoutError:
        raise AttemptFailedError("the name could not be resolved in time") from None
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise AttemptFailedError(f"the name can't be resolved ({reason})") from error
