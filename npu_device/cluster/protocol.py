"""What the ranks and the chief say to each other at the rendezvous: one line of JSON a message, and nothing else.

A rank sends its hello. The chief answers at once with "wait" (and for how long) or a refusal, and at the end with the
whole picture or a refusal. Whatever can't be read as such comes from a stranger.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Union

_MAGIC = "npu_device rendezvous"
PROTOCOL_VERSION = "1"

HELLO_LIMIT = 1 << 16
ANSWER_LIMIT = 1 << 24


@dataclass(frozen=True)
class Hello:
    """What a rank says of itself.

    Attributes:
        job_id: name of the job.
        scheme: how the environment describes the job.
        world_size: number of ranks.
        rank: its rank; None when the chief numbers the ranks.
        device_id: number of its device.
        host_key: name of its host; "" for the address that the chief sees.
        host: address at which the others reach it; None for the address that the chief sees.
        port: port for its TensorFlow server.
        versions: versions that must be the same on all ranks, by name.
        machine: host name of the system that it runs on.
        pid: its process id there.
    """

    job_id: str
    scheme: str
    world_size: int
    rank: int | None
    device_id: int
    host_key: str
    host: str | None
    port: int
    versions: dict[str, str]
    machine: str
    pid: int

    @property
    def name(self) -> str:
        """What the rank is called; without a rank table it has no number yet."""
        return f"device {self.device_id}" if self.rank is None else f"rank {self.rank}"


@dataclass(frozen=True)
class Wait:
    """The chief has taken the rank in; its final answer comes within ``seconds``."""

    seconds: float


@dataclass(frozen=True)
class Picture:
    """All have come: the rank of the receiver, and host and TensorFlow address of every rank."""

    rank: int
    hosts: tuple[str, ...]
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Refusal:
    """The ranks don't come together; ``text`` says why."""

    text: str


Answer = Union[Wait, Picture, Refusal]
_ANSWERS = {"wait": Wait, "picture": Picture, "refusal": Refusal}


def encode(message: Hello | Answer) -> bytes:
    """The message as one line."""
    kind = type(message).__name__.lower()
    return json.dumps({"magic": _MAGIC, "kind": kind, **asdict(message)}).encode() + b"\n"


def decode_hello(line: bytes) -> Hello:
    """The hello in a line.

    Raises:
        ValueError: it isn't one; whoever sent it is no rank.
    """
    fields = _fields(line)
    if fields.pop("kind") != "hello":
        raise ValueError("no hello")
    _check(fields, "job_id", str)
    _check(fields, "scheme", str)
    _check(fields, "host_key", str)
    _check(fields, "machine", str)
    for name in ("world_size", "device_id", "port", "pid"):
        _check(fields, name, int)
    _check(fields, "rank", int, type(None))
    _check(fields, "host", str, type(None))
    _check(fields, "versions", dict)
    if fields["rank"] is not None and not 0 <= fields["rank"] < fields["world_size"]:
        raise ValueError("no such rank")
    return _build(Hello, fields)


def decode_answer(line: bytes) -> Answer:
    """The chief's answer in a line.

    Raises:
        ValueError: it isn't one; another program listens on the chief's port.
    """
    fields = _fields(line)
    kind = _ANSWERS.get(str(fields.pop("kind")))
    if kind is None:
        raise ValueError("no answer")
    if kind is Wait:
        _check(fields, "seconds", int, float)
    elif kind is Refusal:
        _check(fields, "text", str)
    else:
        _check(fields, "rank", int)
        for name in ("hosts", "addresses"):
            _check(fields, name, list)
            fields[name] = tuple(str(item) for item in fields[name])
        if not 0 <= fields["rank"] < len(fields["hosts"]) == len(fields["addresses"]):
            raise ValueError("contradictory picture")
    return _build(kind, fields)


def _fields(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except RecursionError as error:  # a stranger's line of brackets
        raise ValueError("not our protocol") from error
    if not isinstance(message, dict) or message.pop("magic", None) != _MAGIC or "kind" not in message:
        raise ValueError("not our protocol")
    return message


def _check(fields: dict[str, Any], name: str, *kinds: type) -> None:
    if not isinstance(fields.get(name), kinds) or isinstance(fields.get(name), bool):
        raise ValueError(f"unexpected {name}")


def _build(kind: Any, fields: dict[str, Any]) -> Any:
    # A later version may say more; that it is another version is told by the versions in it.
    return kind(**{name: fields[name] for name in kind.__dataclass_fields__})
