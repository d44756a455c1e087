"""Keep the nodes of ``npurun --tune`` in step, through files in a directory that they share.

Node 0 leads: it decides what to run next and writes it to a file; the others wait for it and do the same. They find
each other first, so that files left by a crashed tuning aren't mistaken for the leader's.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.2
_MEETING_SECONDS = 120.0
_BEAT_SECONDS = 2.0
_SILENT_SECONDS = 30.0  # a leader silent for this long has been killed, or can't write any more
_SESSION = "session.json"
_BEAT = "heartbeat.json"
_OVER: dict[str, Any] = {}  # instead of a run


@dataclass(frozen=True)
class TuningRun:
    """The next run of every node.

    Attributes:
        name: name of the run.
        measuring: arguments of ``launch.measuring``; None for the script.
        ends: the split to try; None for the script's own.
        iterations: traced iterations after which the script is stopped.
        key: the same on all nodes, and different for every run.
    """

    name: str
    measuring: list[str] | None
    ends: list[int] | None
    iterations: int
    key: str = field(default_factory=lambda: secrets.token_hex(6))


class TuningLeader:
    """Node 0's side; a context manager that tells the others when the tuning is over. On a single node it does nothing.

    Raises:
        OSError: on entering, if not all nodes have come.
    """

    def __init__(self, directory: Path, nnodes: int) -> None:
        self._directory = directory
        self._others = range(1, nnodes)
        self._number = 0
        self._session = secrets.token_hex(6)
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="npurun-heartbeat", daemon=True)

    def __enter__(self) -> TuningLeader:
        if not self._others:
            return self
        left = [self._directory / name for name in (_SESSION, _BEAT)]
        for old in (*self._directory.glob("node*"), *self._directory.glob("job_*"), *left):
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
        self._beating.start()
        return self

    def announce(self, tuning_run: TuningRun) -> None:
        """Tell the other nodes about the next run."""
        if self._others:
            _write(self._path(), asdict(tuning_run))
            self._number += 1

    def __exit__(self, *_: object) -> None:
        if self._others:
            self._over.set()
            _write(self._path(), _OVER)

    def _beat(self) -> None:
        """Show the others that the leader is alive."""
        for number in itertools.count():
            with contextlib.suppress(OSError):
                _write(self._directory / _BEAT, number)
            if self._over.wait(_BEAT_SECONDS):
                return

    def _path(self) -> Path:
        return self._directory / f"job_{self._session}_{self._number}.json"


class TuningFollower:
    """Another node's side: iterates over the runs of the leader.

    Raises:
        OSError: on iterating, if the leader doesn't come, or falls silent.
    """

    def __init__(self, directory: Path, node_rank: int) -> None:
        self._directory = directory
        self._node_rank = node_rank

    def __iter__(self) -> Iterator[TuningRun]:
        session = self._meet()
        number = 0
        heartbeat, seen = None, time.monotonic()
        while True:
            if (found := _read(self._directory / _BEAT)) != heartbeat:
                heartbeat, seen = found, time.monotonic()
            elif time.monotonic() - seen > _SILENT_SECONDS:
                raise OSError(
                    f"node 0 has been silent for {_SILENT_SECONDS:g} s in {self._directory}: its npurun has been "
                    "killed, or the directory is no longer shared.\nWhat to do: look at its output, and start again."
                )
            values = _read(self._directory / f"job_{session}_{number}.json")
            if values == _OVER:
                return
            if values is not None:
                yield TuningRun(**values)
                number += 1
                seen = time.monotonic()
            time.sleep(_POLL_SECONDS)

    def _meet(self) -> str:
        token = secrets.token_hex(6)
        mine = self._directory / f"node{self._node_rank}"
        deadline = time.monotonic() + _MEETING_SECONDS
        while time.monotonic() < deadline:
            _write(mine, token)  # repeatedly: the leader clears the directory when it comes
            values = _read(self._directory / _SESSION)
            if values is not None and token in values["tokens"]:
                return str(values["session"])
            time.sleep(_POLL_SECONDS)
        raise OSError(
            f"node 0 did not come to {self._directory} within {_MEETING_SECONDS:g} s.\n"
            "What to do: run npurun --tune on every node, in a working directory that all nodes share."
        )


def _read(path: Path) -> Any:
    """Return what another node has written; None if it isn't there. The leader may remove it at any moment."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _write(path: Path, value: object) -> None:
    """Write atomically: a concurrent reader sees all of it or nothing."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(value), encoding="utf-8")
    os.replace(new, path)
