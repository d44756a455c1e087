"""Report missing ranks: a rank that waits in a collective for one that has left ends at once. One that waits too long
asks all others where they are, reports it, and finally gives up.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Union, cast

import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.cluster.errors import ClusterError
from npu_device._src.cluster.health import GroupId
from npu_device._src.cluster.time_limits import STALL_POLL_SECONDS, WHERE_SECONDS
from npu_device._src.collectives.engines.host.queue import CallCount
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job
from npu_device._src.wording import ranges

_log = logging.getLogger("npu_device")

_MOST_LINES = 32
_LARGEST = 0x7FFFFFFF
_TRANSFER = {"operation": "a transfer of data", "line": "TensorFlow's backend"}


class TransferWatch:
    """A watch of TensorFlow's transfers: the ranks have agreed on a call, and one of them may stop amid its data."""

    def __init__(self, device: str) -> None:
        self._device = device
        with tf.init_scope(), tf.device(self._device):
            self._begun, self._ended = (compat.plain_variable(tf.constant(0, tf.int32)) for _ in range(2))

    def begin(self, tensor: tf.Tensor) -> None:
        self._count(self._begun, tensor)

    def end(self, result: tf.Tensor) -> None:
        self._count(self._ended, result)

    def _count(self, variable: Any, after: tf.Tensor) -> None:
        """Note that a tensor to be sent, or a result, is ready. Nothing waits for the note."""
        with tf.control_dependencies([after]), tf.device(self._device):
            counter = compat.through_outer_graphs(variable.handle)
            tf.raw_ops.ResourceCountUpTo(resource=counter, limit=_LARGEST, T=tf.int32)

    def position(self) -> dict[str, Any]:
        with compat.eager_mode():
            ended, begun = int(self._ended), int(self._begun)
        return {"begun": begun, "waiting": begun > ended, "call": _TRANSFER}


Watch = Union[TransferWatch, CallCount]


class StallWatch:
    """One thread that checks all groups, and answers the other ranks' questions. It ends with the job.

    Attributes:
        held: by group, a call of this rank that can't begin yet, as another collective comes first; None if unknown.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._watches: dict[Group, Watch] = {}
        self._making = threading.Lock()
        self.held: dict[Group, dict[str, Any] | None] = {}
        self._warn_after = environment.NPU_DEVICE_STALL_WARNING.get()
        self._give_up_after = environment.NPU_DEVICE_STALL_TIMEOUT.get()
        job.health.on_question("where", self._answer)
        job.health.count_calls = self._begun
        threading.Thread(target=self._run, name="npu_device-stall", daemon=True).start()

    def calls_of(self, group: Group) -> CallCount:
        """Return the count of the calls of a group, made at its first use."""
        with self._making:
            if group not in self._watches:
                self._watches[group] = CallCount()
            return cast(CallCount, self._watches[group])

    def transfers_of(self, group: Group, device: str) -> TransferWatch:
        """Return the watch of a group's transfers through TensorFlow, made at its first use on the CPU of this rank."""
        transfers = replace(group, name=f"{group.name}/transfers", parent=group.parent or group.name)
        with self._making:
            if transfers not in self._watches:
                self._watches[transfers] = TransferWatch(device)
            return cast(TransferWatch, self._watches[transfers])

    def forget(self, name: str) -> None:
        """Stop watching a group, and the groups made for its operations."""
        for group in [group for group in self._watches if name in (group.name, group.parent)]:
            del self._watches[group]

    def _begun(self) -> dict[GroupId, int]:
        watches = list(self._watches.items())
        return {(group.name, group.ranks): watch.begun for group, watch in watches if isinstance(watch, CallCount)}

    def _position(self, group: Group) -> dict[str, Any]:
        watch = self._watches.get(group)
        if watch is None:  # the group has just been destroyed
            return {"begun": 0, "waiting": False, "call": None}
        position, held = watch.position(), self.held.get(group)
        if held is None or position["waiting"]:
            return position
        return {"begun": position["begun"] + 1, "waiting": True, "call": held, "held": True}

    def _run(self) -> None:
        # By watch, since a group that is destroyed and made again has another one, which counts from the start.
        since: weakref.WeakKeyDictionary[Watch, tuple[int, float, bool]] = weakref.WeakKeyDictionary()
        while not self._job.health.is_over:
            self._job.health.look_for_missing()
            for group, watch in list(self._watches.items()):
                position = self._position(group)
                begun, began, warned = since.get(watch, (-1, 0.0, False))
                if not position["waiting"]:
                    since.pop(watch, None)
                elif position["begun"] != begun:
                    since[watch] = (position["begun"], time.monotonic(), False)
                else:
                    waited = time.monotonic() - began
                    if waited > self._give_up_after:
                        self._job.health.stop(self._text(group, position, waited, final=True))
                    elif waited > self._warn_after and not warned:
                        since[watch] = (begun, began, True)
                        _log.warning("%s", self._text(group, position, waited, final=False))
            time.sleep(STALL_POLL_SECONDS)

    def _text(self, group: Group, position: dict[str, Any], waited: float, final: bool) -> str:
        rank = self._job.cluster.rank
        question = {"group": group.name, "ranks": ranges(group.ranks), "begun": position["begun"]}
        lines = [
            f"rank {rank} has waited {waited:.0f} s in group {group.name!r} for other ranks to make the same call:"
        ]
        try:
            answers = self._job.health.ask("where", question, group.ranks, WHERE_SECONDS)
        except ClusterError as error:
            lines.append(f"  the others can't be asked where they are: {error}")
        else:
            lines += _table(group, self._job.cluster.hosts, answers, position["begun"])
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
            lines.append(f"It keeps waiting for up to {self._give_up_after:g} s (NPU_DEVICE_STALL_TIMEOUT).")
        return "\n".join(lines)

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        # Ranks at the same place give the same answer.
        for group in list(self._watches):
            if group.name == question["group"] and ranges(group.ranks) == question["ranks"]:
                position = self._position(group)
                call = position["call"]
                short = None if call is None else {"operation": call["operation"], "line": call["line"]}
                return {**position, "call": short}
        answer: dict[str, Any] = {"begun": 0, "call": None}
        other = self._job.groups.get(question["group"])
        if other is not None and ranges(other.ranks) != question["ranks"]:
            answer["members"] = other.ranks
        return answer


def _table(group: Group, hosts: Sequence[str], answers: Mapping[int, dict[str, Any]], wanted: int) -> list[str]:
    """Return one line per rank; for a large group, list only some of the ranks that have come."""
    ready = [rank for rank in group.ranks if rank in answers and answers[rank]["begun"] >= wanted]
    shown = max(0, _MOST_LINES - (group.size - len(ready)))
    omitted = ready[shown:]
    lines = []
    for rank in sorted(set(group.ranks).difference(omitted)):
        lines.append(f"  rank {rank} on host {hosts[rank]}: {_position_text(answers.get(rank), wanted)}")
    return lines + ([f"  {len(omitted)} more ranks are waiting"] if omitted else [])


def _position_text(position: dict[str, Any] | None, wanted: int) -> str:
    if position is None:
        return "does not answer: stopped, overloaded, or cut off"
    if "members" in position:
        members = ", ".join(map(str, position["members"]))
        return f"has made a different group of this name, with ranks {members}"
    call = position["call"]
    last = "no call so far" if call is None else f"{call['operation']} called at {call['line']}"
    if "held" in position:
        return f"waits in session.run for another collective ({last})"
    if position["begun"] >= wanted:
        return f"is waiting ({last})"
    return f"hasn't arrived: {position['begun']} of {wanted} calls made, the last one: {last}"
