"""How the nodes of ``npurun --tune`` keep in step: through files in a directory that they share.

Node 0 leads: it decides what is run next and writes it down; the others wait for it and do the same. They find each
other first, so that what a crashed tuning has left isn't mistaken for the leader's word.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

_POLL_SECONDS = 0.2
_MEETING_SECONDS = 120.0
_SESSION = "session.json"
_OVER: dict[str, Any] = {}  # instead of a job


@dataclass(frozen=True)
class Job:
    """What every node runs next.

    Attributes:
        name: of the run.
        measuring: arguments of ``launch.measuring``; None for the script.
        ends: the split to try; None for the script's own.
        iterations: traced iterations after which the script is stopped.
        key: the same on all nodes, and of no other job.
    """

    name: str
    measuring: list[str] | None
    ends: list[int] | None
    iterations: int
    key: str = field(default_factory=lambda: secrets.token_hex(6))


class Leader:
    """Node 0's side; a context manager that tells the others when all is over. On a single node it does nothing.

    Raises:
        OSError: on entering, when not all nodes have come.
    """

    def __init__(self, directory: Path, nnodes: int) -> None:
        self._directory = directory
        self._others = range(1, nnodes)
        self._number = 0
        self._session = secrets.token_hex(6)

    def __enter__(self) -> Leader:
        if not self._others:
            return self
        for old in (*self._directory.glob("node*"), *self._directory.glob("job_*"), self._directory / _SESSION):
            old.unlink(missing_ok=True)
        deadline = time.monotonic() + _MEETING_SECONDS
        tokens: dict[int, str] = {}
        while len(tokens) < len(self._others):
            if time.monotonic() > deadline:
                missing = ", ".join(str(node) for node in self._others if node not in tokens)
                raise OSError(
                    f"node(s) {missing} did not come to {self._directory} within {_MEETING_SECONDS:g} s.\n"
                    "What to do: run npurun --tune on every node, in a working directory that all nodes share."
                )
            for node in self._others:
                token = _read(self._directory / f"node{node}") if node not in tokens else None
                if token is not None:
                    tokens[node] = token
            time.sleep(_POLL_SECONDS)
        _write(self._directory / _SESSION, {"session": self._session, "tokens": sorted(tokens.values())})
        return self

    def announce(self, job: Job) -> None:
        """Let the other nodes run a job as well."""
        if self._others:
            _write(self._path(), asdict(job))
            self._number += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._others:
            _write(self._path(), _OVER)

    def _path(self) -> Path:
        return self._directory / f"job_{self._session}_{self._number}.json"


class Follower:
    """Another node's side: iterates over the jobs of the leader.

    Raises:
        OSError: on iterating, when the leader doesn't come.
    """

    def __init__(self, directory: Path, node_rank: int) -> None:
        self._directory = directory
        self._node_rank = node_rank

    def __iter__(self) -> Iterator[Job]:
        session = self._meet()
        number = 0
        while True:
            values = _read(self._directory / f"job_{session}_{number}.json")
            if values == _OVER:
                return
            if values is not None:
                yield Job(**values)
                number += 1
            time.sleep(_POLL_SECONDS)

    def _meet(self) -> str:
        token = secrets.token_hex(6)
        mine = self._directory / f"node{self._node_rank}"
        deadline = time.monotonic() + _MEETING_SECONDS
        while time.monotonic() < deadline:
            _write(mine, token)  # again and again: the leader clears the directory when it comes
            values = _read(self._directory / _SESSION)
            if values is not None and token in values["tokens"]:
                return str(values["session"])
            time.sleep(_POLL_SECONDS)
        raise OSError(
            f"node 0 did not come to {self._directory} within {_MEETING_SECONDS:g} s.\n"
            "What to do: run npurun --tune on every node, in a working directory that all nodes share."
        )


def _read(path: Path) -> Any:
    """What another node has written; None as long as it isn't there. The leader may remove it at any moment."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _write(path: Path, value: object) -> None:
    """Whoever reads meanwhile sees all of it or nothing."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(value), encoding="utf-8")
    os.replace(new, path)
