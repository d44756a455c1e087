"""The messages of a control channel: a length in four bytes and a JSON object; the proof of the job secret.
It imports little, because the hub has to start quickly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from npu_device._src.cluster.time_limits import KEEPALIVE_AFTER_SECONDS, UNACKNOWLEDGED_MILLISECONDS
from npu_device._src.wording import ranges

PROTOCOL = 2  # the first frames and the hello never change: ranks with different versions recognize each other

LIMIT_BEFORE_PROOF = 1 << 10
LIMIT_OF_HELLO = 1 << 16
LIMIT_FROM_RANK = 1 << 24
LIMIT = 1 << 26
"""Longest frame in bytes: of an unknown client, with a hello, from a rank to the hub, and of anyone else. A longer one
ends the connection. Parsed, JSON can take 20 times as much memory."""

Message = dict[str, Any]
"""A message: names that JSON can write, with what they stand for."""

_HEADER = struct.Struct(">I")
_LARGEST = 1e10  # numbers, and times in seconds since the epoch


WRONG_FORM = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What reading a message of a wrong form may raise: the message is refused then, and the process goes on."""


class FrameError(ValueError):
    """The data received isn't a frame of this protocol, or the frame is too long."""


def encode(message: Message) -> bytes:
    return join(json.dumps(message, separators=(",", ":")).encode())


def join(*contents: bytes) -> bytes:
    """Return a frame of JSON text that is already encoded."""
    return _HEADER.pack(sum(map(len, contents))) + b"".join(contents)


class Reader:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def add(self, received: bytes) -> None:
        self._buffer += received

    def next_message(self) -> Message | None:
        """Return the next whole message, None while it is incomplete; FrameError if it is too long, or no object."""
        if len(self._buffer) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._buffer)
        if length > self.limit:
            raise FrameError(f"a frame of {length} bytes")
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        try:
            # Python itself refuses a number with thousands of digits, which would take long to parse.
            message = json.loads(self._buffer[_HEADER.size : end])
        except (ValueError, RecursionError) as error:
            raise FrameError("no JSON") from error
        if not isinstance(message, dict):
            raise FrameError("no object")
        del self._buffer[:end]
        return message

    def messages(self, connection: socket.socket) -> Iterator[Message]:
        """Iterate over the messages of a connection until the other side has closed it."""
        while True:
            while (message := self.next_message()) is not None:
                yield message
            received = connection.recv(1 << 18)
            if not received:
                return
            self.add(received)


def checked(message_type: type[Any], fields: Any, **inner_types: type[Any]) -> Any:
    """Return a message of a type, a dataclass; an error of WRONG_FORM if the fields don't have the forms that its
    annotations name: they are used unchecked.
    """
    contents = {}
    # Fields that only another version knows are left out.
    for field in dataclasses.fields(message_type):
        if field.name in fields:
            form = str(field.type)
            contents[field.name] = _checked_content(fields[field.name], form, inner_types)
    return message_type(**contents)


def _checked_content(content: Any, form: str, inner_types: Mapping[str, type[Any]]) -> Any:
    form, _, alternative = form.partition(" | ")
    if content is None and alternative:
        return None
    if form in inner_types:
        return checked(inner_types[form], content)
    outer, _, inner = form.rstrip("]").partition("[")
    if outer == "Sequence" and isinstance(content, list):
        return [_checked_content(part, inner, inner_types) for part in content]
    if inner == "str, str" and isinstance(content, dict):
        return {name: _checked_content(text, "str", inner_types) for name, text in content.items()}
    name = type(content).__name__
    # JSON writes a float without a fraction as an integer.
    if name != form and (name, form) != ("int", "float"):
        raise FrameError(f"{name} instead of {form}")
    # This comparison refuses NaN, too.
    if name in ("int", "float") and not abs(content) < _LARGEST:
        raise FrameError("too large a number")
    return content


def proof(
    secret: bytes,
    side: str,
    client_nonce: str,
    hub_nonce: str,
    said: Mapping[str, Any] | None = None,
) -> str:
    """Return the proof that only a holder of the secret can compute, and that covers what the client has said."""
    text = f"npu_device {side} {client_nonce} {hub_nonce}"
    if said:
        text += " " + json.dumps(said, sort_keys=True, separators=(",", ":"))
    # A stranger's nonce may be text that JSON allows and UTF-8 doesn't, which must not raise.
    return hmac.new(secret, text.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()


def is_proof(claim: object, expected: str) -> bool:
    # compare_digest raises for text that isn't ASCII, which a stranger may send.
    return isinstance(claim, str) and claim.isascii() and hmac.compare_digest(claim, expected)


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel detect a lost host within 15 s, and send small messages at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_AFTER_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_AFTER_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MILLISECONDS)


def shut_down(connection: socket.socket) -> None:
    """End a connection for both sides, or a listener, which wakes the threads that use it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def joined(texts: dict[int, str]) -> bytes:
    """Return values, as JSON text, each with its ranks: most ranks send the same, so all are little longer than one."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks_by_text.setdefault(text, []).append(rank)
    pairs = [f"[{text},{json.dumps(ranges(ranks))}]" for text, ranks in ranks_by_text.items()]
    return f"[{','.join(pairs)}]".encode()
