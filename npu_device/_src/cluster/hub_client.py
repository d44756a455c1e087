"""A client of the hub: its connection, what it is to the hub by now, and what is known of it."""

from __future__ import annotations

import enum
import socket

from npu_device._src.cluster import frames
from npu_device._src.cluster.roster import Arrival
from npu_device._src.cluster.server_handshake import ServerHandshake


class State(enum.Enum):
    """What a client is to the hub; most become a rank, step by step."""

    UNKNOWN = enum.auto()  # the client hasn't sent its hello, or not even proved the secret
    ARRIVED = enum.auto()  # the client waits for the other ranks
    RANK = enum.auto()  # the client has met the other ranks
    # A rank has started this process, which waits to be told of which one it is a child.
    CHILD = enum.auto()


class Client:
    """A client with its connection. It is closed as soon as ``outbox`` has been sent if it ``is_ending``."""

    arrival: Arrival  # set once the client has ARRIVED, and for a RANK
    rank: int  # set for a RANK
    parent: Client  # set for a CHILD: the client that has started it, which may be a child, too

    def __init__(self, connection: socket.socket, address: str, secret: bytes) -> None:
        self.state = State.UNKNOWN
        self.socket = connection
        self.address = address
        self.handshake = ServerHandshake(secret)
        self.reader = frames.Reader(frames.LIMIT_BEFORE_PROOF)
        self.outbox = bytearray()
        self.is_ending = False

    @property
    def has_arrived(self) -> bool:
        """Return True if the client has come as a rank, whether or not it has met the others."""
        return self.state in (State.ARRIVED, State.RANK)
