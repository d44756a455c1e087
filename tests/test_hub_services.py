"""The hub's answers when ranks are late or gone; the sockets are tested in ``test_rendezvous``."""

from __future__ import annotations

import json
from typing import Any, Callable

from npu_device._src.cluster.services import Services


class Job:
    """Three ranks of a hub whose clock is turned by hand."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Any]] = []
        self.later: list[Callable[[], None]] = []
        self.services = Services(
            ["a", "a", "b"],
            lambda rank, frame: self.sent.append((rank, json.loads(frame[4:]))),
            lambda seconds, act: self.later.append(act),
        )

    def gather(self, rank: int, value: Any, ranks: str | None, partial: bool = True) -> None:
        """Send a rank's part."""
        fields = {"name": "calls", "seconds": 2, "value": value, "ranks": ranks, "partial": partial}
        self.services.handle(rank, {"do": "gather", "id": 10 + rank, **fields})

    def answers(self) -> dict[int, Any]:
        """Return what each rank has been answered since the last call."""
        sent, self.sent = self.sent, []
        return {rank: message.get("value", message.get("error")) for rank, message in sent}


def test_a_gather_from_some_ranks_ends_when_they_have_come() -> None:
    job = Job()
    job.gather(0, "x", "0,2")
    assert job.answers() == {}
    job.gather(2, "x", "0,2")
    assert job.answers() == {0: [["x", "0,2"]], 2: [["x", "0,2"]]}, "equal values are sent once"


def test_late_ranks_are_left_out_and_still_get_the_others_values() -> None:
    job = Job()
    job.gather(0, "x", "0-2")
    job.gather(1, "y", "0-2")
    job.later[0]()
    assert job.answers() == {0: [["x", "0"], ["y", "1"]], 1: [["x", "0"], ["y", "1"]]}
    job.gather(2, "z", "0-2")
    assert job.answers() == {2: [["x", "0"], ["y", "1"], ["z", "2"]]}
    for act in job.later:
        act()
    assert job.answers() == {}


def test_ranks_that_have_gone_are_not_waited_for() -> None:
    job = Job()
    job.services.closed(2)
    job.sent.clear()
    job.gather(0, "x", "0-2")
    assert job.answers() == {}
    job.gather(1, "y", "0-2")
    assert job.answers() == {0: [["x", "0"], ["y", "1"]], 1: [["x", "0"], ["y", "1"]]}


def test_a_gather_of_all_ranks_fails_with_a_rank() -> None:
    job = Job()
    job.gather(0, "x", None, partial=False)
    job.services.closed(1)
    assert job.answers() == {0: "gone"}
