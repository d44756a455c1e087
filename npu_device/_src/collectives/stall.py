"""Report missing ranks: a rank that waits in a collective for one that has left ends at once. One that waits too long
asks all others where they are, reports it, and finally gives up.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from npu_device._src import environment
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.cluster.time_limits import STALL_POLL_SECONDS, WHERE_SECONDS
from npu_device._src.collectives.call import Row
from npu_device._src.collectives.call_count import Count, Position
from npu_device._src.collectives.engines.context import EngineContext
from npu_device._src.collectives.group import Group
from npu_device._src.threads import start_thread
from npu_device._src.wording import ranges

_log = logging.getLogger("npu_device")

_MOST_LINES = 32


class StallWatch:
    """A thread that checks all groups until the job ends; that of the channel answers the other ranks' questions.

    Args:
        groups: made by the script of this rank, by name.
        held: by group, a call of this rank that can't begin yet, as another collective comes first; None if unknown.
    """

    def __init__(
        self, context: EngineContext, groups: Mapping[str, Group], held: Mapping[Group, Row | None]
    ) -> None:
        self._health = context.health
        self._cluster = context.cluster
        self._counts = context.counts
        self._groups = groups
        self._held = held
        # Both limits are seconds that a call has waited for other ranks.
        self.warn_after = environment.NPU_DEVICE_STALL_WARNING.get()
        self.give_up_after = environment.NPU_DEVICE_STALL_TIMEOUT.get()
        context.health.on_question("where", self._answer)
        context.health.count_transfers = self._counts.started
        start_thread("npu_device-stall", self._run)

    def _position(self, group: Group, count: Count) -> Position:
        position = count.position()
        held = self._held.get(group)
        if held is None or position["waiting"]:
            return position
        # A collective that a session holds back hasn't begun, but the rank is waiting.
        return {"begun": position["begun"] + 1, "waiting": True, "call": held, "held": True}

    def _run(self) -> None:
        # Kept by the object that counts, since a group that is destroyed and made again has a new one.
        since = weakref.WeakKeyDictionary[Count, tuple[int, float, bool]]()
        while not self._health.is_over:
            self._health.stop_if_missing(self._counts.waiting())
            for group, count in self._counts.of_all():
                position = self._position(group, count)
                started, began, warned = since.get(count, (-1, 0.0, False))
                if not position["waiting"]:
                    since.pop(count, None)
                elif position["begun"] != started:
                    since[count] = (position["begun"], time.monotonic(), False)
                else:
                    waited = time.monotonic() - began
                    if waited > self.give_up_after:
                        self._health.stop(self._text(group, position, waited, final=True))
                    elif waited > self.warn_after and not warned:
                        # One call warns only once.
                        since[count] = (started, began, True)
                        _log.warning("%s", self._text(group, position, waited, final=False))
            time.sleep(STALL_POLL_SECONDS)

    def _text(self, group: Group, position: Position, waited: float, final: bool) -> str:
        rank = self._cluster.rank
        question = {"group": group.name, "ranks": ranges(group.ranks), "begun": position["begun"]}
        lines = [
            f"rank {rank} has waited {waited:.0f} s in group {group.name!r} for other ranks to make the same call:"
        ]
        try:
            answers = self._health.ask("where", question, group.ranks, WHERE_SECONDS)
        except ClusterError as error:
            lines.append(f"  the others can't be asked where they are: {error}")
        else:
            lines += _table(group, self._cluster.hosts, answers, position["begun"])
        if final:
            lines.append(
                "This is the limit (NPU_DEVICE_STALL_TIMEOUT seconds), and the rank gives up.\n"
                "Likely cause: a rank that is stopped or overloaded, runs fewer steps or different code than the rest "
                "(for example a call inside `if rank == 0`), fetches other collectives in session.run, or has made the "
                "group with other ranks.\n"
                "What to do: look at the output of the ranks that haven't arrived; raise the limit if they only need "
                "longer."
            )
        else:
            lines.append(
                f"It keeps waiting for up to {self.give_up_after:g} s (NPU_DEVICE_STALL_TIMEOUT)."
            )
        return "\n".join(lines)

    def _answer(self, question: dict[str, Any]) -> Position:
        # Ranks at the same place give the same answer.
        for group, count in self._counts.of_all():
            if group.name == question["group"] and ranges(group.ranks) == question["ranks"]:
                position = self._position(group, count)
                call = position["call"]
                short = None
                if call is not None:
                    short = {"collective": call["collective"], "line": call["line"]}
                return {**position, "call": short}
        answer: Position = {"begun": 0, "call": None}
        namesake = self._groups.get(question["group"])
        if namesake is not None and ranges(namesake.ranks) != question["ranks"]:
            answer["members"] = namesake.ranks
        return answer


def _table(
    group: Group, hosts: Sequence[str], answers: Mapping[int, Position], wanted: int
) -> list[str]:
    """Return one line per rank; for a large group, list only some of the ranks that have come."""
    # A rank that has begun more transfers than wanted has gone on to a later one.
    arrived = [rank for rank in group.ranks if rank in answers and answers[rank]["begun"] >= wanted]
    # All missing ranks are shown, for the reader looks for them.
    omitted = arrived[max(0, _MOST_LINES - (group.size - len(arrived))) :]
    lines = []
    for rank in sorted(set(group.ranks).difference(omitted)):
        position = _position_text(answers.get(rank), wanted)
        lines.append(f"  rank {rank} on host {hosts[rank]}: {position}")
    if omitted:
        lines.append(f"  {len(omitted)} more ranks are waiting")
    return lines


def _position_text(position: Position | None, wanted: int) -> str:
    if position is None:
        return "does not answer: stopped, overloaded, or cut off"
    if "members" in position:
        members = ", ".join(map(str, position["members"]))
        return f"has made a different group of this name, with ranks {members}"
    call = position["call"]
    last_call = "none"
    if call is not None:
        last_call = f"{call['collective']} called at {call['line']}"
    if "held" in position:
        return f"waits in session.run for another collective ({last_call})"
    if position["begun"] >= wanted:
        return f"is waiting ({last_call})"
    return (
        f"hasn't arrived: {position['begun']} of {wanted} transfers begun; last call: {last_call}"
    )
