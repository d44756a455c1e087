"""Who is missing: a rank that waits too long in an agreement asks all the others where they are, says it, and gives up
in the end.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Any, Callable, Protocol, cast

import tensorflow as tf

from npu_device import _compat, environment
from npu_device.cluster.runtime import Runtime
from npu_device.collectives.group import Group, made_group

_log = logging.getLogger("npu_device")

_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 2.0
_LARGEST = 0x7FFFFFFF


class Watch(Protocol):
    """How far one group's collectives have come on this rank."""

    def position(self) -> dict[str, Any]:
        """How many this rank has begun, whether it waits for others in the last one, and which call that is."""


class GraphWatch:
    """A watch whose counters live in TensorFlow, so that the operations of a graph can move them."""

    def __init__(self, runtime: Runtime) -> None:
        with tf.init_scope(), tf.device(runtime.device("CPU")):
            self._begun = _compat.plain_variable(tf.constant(0, tf.int32))
            self._ended = _compat.plain_variable(tf.constant(0, tf.int32))
            self._current = _compat.plain_variable(tf.constant(0, tf.int32))
        self._calls: list[dict[str, Any]] = []
        self._numbers: dict[str, int] = {}

    def begin(self, call: dict[str, Any]) -> tf.Tensor:
        """Note, when it is run, that this rank has come to a call."""
        number = self._numbers.setdefault(repr(call), len(self._calls))
        if number == len(self._calls):
            self._calls.append(call)
        with tf.device("CPU:0"):
            self._current.assign(number, read_value=False)
            return tf.raw_ops.ResourceCountUpTo(resource=self._begun.handle, limit=_LARGEST, T=tf.int32)

    def end(self) -> tf.Tensor:
        """Note that all have come; the position of the call in the group's sequence of calls."""
        return tf.raw_ops.ResourceCountUpTo(resource=self._ended.handle, limit=_LARGEST, T=tf.int32)

    def position(self) -> dict[str, Any]:
        """Where this rank is."""
        with _compat.eager_mode():
            begun, ended, current = int(self._begun), int(self._ended), int(self._current)
        call = self._calls[current] if current < len(self._calls) else None
        return {"begun": begun, "waiting": begun > ended, "call": call}


class LocalWatch:
    """A watch whose counters live in Python, for collectives that Python runs."""

    def __init__(self) -> None:
        self._begun = 0
        self._ended = 0
        self._call: dict[str, Any] | None = None

    def begin(self, call: dict[str, Any] | None) -> int:
        """Note that this rank has begun a collective; its position in the group's sequence. None is another one of the
        same call.
        """
        self._begun += 1
        self._call = call or self._call
        return self._begun - 1

    def end(self) -> None:
        """Note that one is over."""
        self._ended += 1

    def position(self) -> dict[str, Any]:
        """Where this rank is."""
        return {"begun": self._begun, "waiting": self._begun > self._ended, "call": self._call}


class StallWatch:
    """One daemon thread a process that looks at all groups."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = weakref.ref(runtime)
        self._watches: dict[Group, Watch] = {}
        self._answers: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
        self._warn_after = environment.NPU_DEVICE_STALL_WARNING.get()
        self._give_up_after = environment.NPU_DEVICE_STALL_TIMEOUT.get()
        runtime.health.on_event("where", self._answer)
        runtime.health.on_event("here", self._note)
        threading.Thread(target=self._run, name="npu_device-stall", daemon=True).start()

    def watch(self, runtime: Runtime, group: Group, make: Callable[[], Watch]) -> Watch:
        """The watch of a group, made at its first use."""
        if group not in self._watches:
            watch = self._watches[group] = make()
            runtime.health.count_collectives_with(group.name, group.ranks, lambda: watch.position()["begun"])
        return self._watches[group]

    def _run(self) -> None:
        since: dict[Group, tuple[int, float, bool]] = {}
        while True:
            time.sleep(_POLL_SECONDS)
            runtime = self._runtime()
            if runtime is None or runtime.health.is_over:
                return
            for group, watch in list(self._watches.items()):
                position = watch.position()
                begun, began, warned = since.get(group, (-1, 0.0, False))
                if not position["waiting"]:
                    since.pop(group, None)
                elif position["begun"] != begun:
                    since[group] = (position["begun"], time.monotonic(), False)
                else:
                    waited = time.monotonic() - began
                    if waited > self._give_up_after:
                        runtime.health.stop(self._text(runtime, group, position, waited, final=True))
                    elif waited > self._warn_after and not warned:
                        since[group] = (begun, began, True)
                        _log.warning("%s", self._text(runtime, group, position, waited, final=False))
            del runtime

    def _text(self, runtime: Runtime, group: Group, position: dict[str, Any], waited: float, final: bool) -> str:
        rank = runtime.cluster.rank
        question = (group.name, position["begun"])
        self._answers[question] = {}
        runtime.health.tell(
            {"kind": "where", "rank": rank, "group": group.name, "ranks": group.ranks, "id": position["begun"]}
        )
        time.sleep(_ANSWER_SECONDS)
        answers = self._answers.pop(question)
        lines = [
            f"rank {rank} has waited {waited:.0f} s in group {group.name!r} for other ranks to make the same call:"
        ]
        for member in group.ranks:
            lines.append(
                f"  rank {member} on host {runtime.cluster.hosts[member]}: "
                f"{_whereabouts(answers.get(member), position['begun'])}"
            )
        if final:
            lines.append(
                "This is the limit (NPU_DEVICE_STALL_TIMEOUT seconds), and the rank gives up.\n"
                "Likely cause: a rank that is stopped or overloaded, runs fewer steps or other code than the rest, or "
                "has made the group of other ranks.\n"
                "What to do: look at the output of the ranks that have not come; raise the limit if they only need "
                "longer."
            )
        else:
            lines.append(f"It goes on waiting up to {self._give_up_after:g} s (NPU_DEVICE_STALL_TIMEOUT).")
        return "\n".join(lines)

    def _answer(self, event: dict[str, Any]) -> None:
        runtime = self._runtime()
        if runtime is None or runtime.cluster.rank not in event["ranks"]:
            return
        for group, watch in list(self._watches.items()):
            if group.name == event["group"] and list(group.ranks) == list(event["ranks"]):
                position = watch.position()
                break
        else:
            position = {"begun": 0, "waiting": False, "call": None}
            other = made_group(event["group"])
            if other is not None and list(other.ranks) != list(event["ranks"]):
                position["members"] = other.ranks
        answer = {
            "kind": "here",
            "rank": runtime.cluster.rank,
            "to": event["rank"],
            "group": event["group"],
            "id": event["id"],
        }
        runtime.health.tell({**answer, "position": position})

    def _note(self, event: dict[str, Any]) -> None:
        runtime = self._runtime()
        answers = self._answers.get((event["group"], event["id"]))
        # Others may ask about a group of the same name.
        if answers is not None and runtime is not None and event["to"] == runtime.cluster.rank:
            answers[event["rank"]] = event["position"]


def _whereabouts(position: dict[str, Any] | None, wanted: int) -> str:
    if position is None:
        return "does not answer: stopped, overloaded, or cut off"
    if "members" in position:
        members = ", ".join(map(str, position["members"]))
        return f"has made another group of this name, of ranks {members}"
    call = position["call"]
    last = "no call so far" if call is None else f"{call['operation']} called at {call['line']}"
    if position["begun"] >= wanted:
        return f"is there ({last})"
    return f"has not come: {position['begun']} of {wanted} calls made, the last one: {last}"


_watches: weakref.WeakKeyDictionary[Runtime, StallWatch] = weakref.WeakKeyDictionary()


def watch_for_stalls(runtime: Runtime) -> None:
    """Begin to answer the others' questions, and to ask them. Called once, when the cluster is up."""
    _watches[runtime] = StallWatch(runtime)


def graph_watch_of(runtime: Runtime, group: Group) -> GraphWatch:
    """The watch of a group that TensorFlow serves."""
    return cast(GraphWatch, _watches[runtime].watch(runtime, group, lambda: GraphWatch(runtime)))


def local_watch_of(runtime: Runtime, group: Group) -> LocalWatch:
    """The watch of a group that shares memory."""
    return cast(LocalWatch, _watches[runtime].watch(runtime, group, LocalWatch))
