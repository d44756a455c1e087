"""The job's event log: what each rank tells all the others about itself (that it has failed, that it has left).

An append-only list in the key-value store (``event/0``, ``event/1``, …) that a daemon thread of each rank follows.
What a rank does about an event belongs to ``health``.
"""

from __future__ import annotations

import json
import threading
from typing import Any, Callable

from npu_device.cluster.errors import ClusterError
from npu_device.cluster.store import Store


class EventLog:
    """Append to the log, and follow it from its beginning.

    Args:
        store: the job's key-value store.
        on_event: called for each event in the log's order, in the following thread.
        on_lost: called once when the store stops answering: rank 0, where it lives, is gone.
    """

    def __init__(
        self,
        store: Store,
        on_event: Callable[[dict[str, Any]], None],
        on_lost: Callable[[ClusterError], None],
    ) -> None:
        self._store = store
        self._on_event = on_event
        self._on_lost = on_lost
        self._seen = 0
        self._thread = threading.Thread(target=self._follow, name="npu_device-events", daemon=True)
        self._thread.start()

    def append(self, event: dict[str, Any]) -> None:
        """Add an event at the end; every rank, this one too, is told of it.

        Raises:
            ClusterError: the store doesn't answer.
        """
        text = json.dumps(event)
        position = self._seen
        while True:
            try:
                self._store.set(f"event/{position}", text)
                return
            except KeyError:  # another rank was faster; its event stands here
                position += 1

    def _follow(self) -> None:
        while True:
            try:
                text = self._store.get(f"event/{self._seen}", timeout=0)
            except ClusterError as error:
                self._on_lost(error)
                return
            self._seen += 1
            self._on_event(json.loads(text))
