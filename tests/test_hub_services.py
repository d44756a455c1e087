"""The hub's answers when ranks are late or gone; the sockets are tested in ``test_rendezvous``."""

from __future__ import annotations

import json
from typing import Any, Callable

import pytest

from npu_device._src.cluster.services import Services


class Job:
    """Three ranks of a hub whose clock is turned by hand."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Any]] = []
        self.later: list[Callable[[], None]] = []
        self.said: list[str] = []
        self.services = Services(
            ["a", "a", "b"],
            [7, 8, 9],
            lambda rank, frame: self.sent.append((rank, json.loads(frame[4:]))),
            lambda seconds, act: self.later.append(act),
            self.said.append,
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


def test_a_loss_is_told_once_with_what_came_before_and_after() -> None:
    job = Job()
    job.services.handle(1, {"do": "left", "issued": {}})
    job.services.closed(1)
    job.services.report_losses()
    assert job.said == []
    job.services.closed(2)
    job.services.closed(0)
    job.services.report_losses()
    assert [text.splitlines()[0] for text in job.said] == [
        "rank 2 on host b (process 9) is gone: its process ended or was killed, or its host can't be reached any more. "
        "The script of rank(s) 1 had ended before. Then rank(s) 0 went, too."
    ]


@pytest.mark.parametrize("do", ["failed", "stopped"])
def test_a_rank_that_ends_with_an_error_is_no_loss(do: str) -> None:
    job = Job()
    job.services.handle(0, {"do": do, "event": {"error": "e", "traceback": "t"}})
    job.services.closed(0)
    job.services.report_losses()
    assert job.said == []


def test_a_post_is_answered_at_once_and_the_last_one_with_all_values() -> None:
    job = Job()
    for number, (rank, value) in enumerate([(0, "x"), (2, "x"), (0, "y"), (1, "x")]):
        job.services.handle(rank, {"do": "post", "id": number, "seconds": 2, "name": "end", "value": value})
    assert [message["value"] for _, message in job.sent] == [
        [],
        [],
        [],
        [["y", "0"], ["x", "1-2"]],
    ]
    for number in range(2000):
        job.services.handle(0, {"do": "post", "id": 1, "seconds": 2, "name": str(number), "value": 0})
    job.sent.clear()
    job.services.handle(0, {"do": "post", "id": 1, "seconds": 2, "name": "end", "value": "z"})
    assert job.answers() == {0: []}, "the oldest are forgotten"
