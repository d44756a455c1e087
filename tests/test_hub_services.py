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
        self.said: list[str] = []
        self.services = Services(
            ["a", "a", "b"],
            [7, 8, 9],
            lambda rank, frame: self.sent.append((rank, json.loads(frame[4:]))),
            self._call_later,
            self.said.append,
        )

    def _call_later(self, seconds: float, act: Callable[[], None]) -> Callable[[], object]:
        self.later.append(act)
        return lambda: None

    def gather(self, rank: int, value: Any, ranks: str | None = "0-2") -> None:
        fields = {
            "name": "calls",
            "seconds": 2,
            "value": value,
            "ranks": ranks,
        }
        self.services.handle(rank, {"do": "gather", "id": 10 + rank, **fields})

    def answers(self) -> dict[int, Any]:
        """Return what each rank has been answered since the last call."""
        sent, self.sent = self.sent, []
        return {rank: message.get("value", message.get("error")) for rank, message in sent}


def test_a_gather_ends_when_its_ranks_have_come_or_gone() -> None:
    job = Job()
    job.gather(0, "x", "0,2")
    assert job.answers() == {}
    job.gather(2, "x", "0,2")
    assert job.answers() == {0: [["x", "0,2"]], 2: [["x", "0,2"]]}, "equal values are sent once"
    job.gather(1, "y", None)
    job.services.closed(2)
    assert job.answers()[1] == "gone", "all ranks were asked for"
    job.gather(0, "x")
    assert job.answers() == {}
    job.gather(1, "y")
    assert job.answers() == {0: [["x", "0"], ["y", "1"]], 1: [["x", "0"], ["y", "1"]]}


def test_late_ranks_are_left_out_and_still_get_the_others_values() -> None:
    job = Job()
    job.gather(0, "x")
    job.gather(1, "y")
    assert job.answers() == {}
    job.later[0]()
    assert job.answers() == {0: [["x", "0"], ["y", "1"]], 1: [["x", "0"], ["y", "1"]]}
    job.gather(2, "z")
    assert job.answers() == {2: [["x", "0"], ["y", "1"], ["z", "2"]]}
    for act in job.later:
        act()
    assert job.answers() == {}


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


def test_a_rank_that_ends_with_an_error_is_no_loss() -> None:
    for do in ("failed", "stopped"):
        job = Job()
        job.services.handle(0, {"do": do, "event": {"error": "e", "traceback": "t"}})
        job.services.closed(0)
        job.services.report_losses()
        assert job.said == []


def test_a_post_is_answered_at_once_and_the_last_one_with_all_values() -> None:
    job = Job()

    def post(rank: int, name: str, value: Any) -> Any:
        job.services.handle(
            rank, {"do": "post", "id": 1, "seconds": 2, "name": name, "value": value}
        )
        return job.answers()[rank]

    posted = [post(rank, "end", value) for rank, value in [(0, "x"), (2, "x"), (0, "y"), (1, "x")]]
    assert posted == [[], [], [], [["y", "0"], ["x", "1-2"]]]
    for number in range(2000):
        post(0, str(number), 0)
    assert post(0, "end", "z") == [], "the oldest are forgotten"


def test_a_question_is_put_once_and_those_who_ask_it_share_the_answers() -> None:
    job = Job()
    job.services.closed(2)

    def ask(rank: int) -> dict[int, Any]:
        question = {"kind": "where", "body": [1], "ranks": "0-2"}
        job.services.handle(rank, {"do": "ask", "id": rank, "seconds": 2, **question})
        put = {to: message["question"] for to, message in job.sent if "question" in message}
        job.sent = [(to, message) for to, message in job.sent if "push" not in message]
        return put

    put = ask(0)
    assert list(put) == [0, 1], "rank 2 has gone"
    assert not ask(1)
    for rank, question in put.items():
        job.services.handle(rank, {"do": "reply", "question": question, "value": "here"})
    assert job.answers() == {0: [["here", "0-1"]], 1: [["here", "0-1"]]}
    assert not ask(1)
    assert job.answers() == {1: [["here", "0-1"]]}, "a little later, it has the same answers"
    for act in job.later:
        act()
    assert list(ask(1)) == [0, 1]
