"""Keep the list of attempts, and decide after each whether the job is started again. Processes are left to others."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from npu_device._src.cluster.rank_errors import RESUMABLE
from npu_device._src.cluster.time_limits import LONGEST_BACKOFF_SECONDS
from npu_device._src.wording import counted, ranges
from npu_device.launch.arguments import Options
from npu_device.launch.attempt import CANNOT_START, FAILED, Outcome
from npu_device.launch.failures import in_order

_TOLD = 100  # attempts in the end


@dataclass(frozen=True)
class Ended:
    count: int
    began: float  # seconds since the epoch
    seconds: float  # how long it took
    nodes: tuple[int, ...]
    ranks: int
    code: int  # 0, 75 (asked to stop, resumable), or another exit code
    interrupted: bool  # a launcher received a signal that ends the job
    preempted: tuple[
        int, ...
    ]  # numbers of the nodes that were taken away, if that has ended the attempt
    why: str  # the rank or node that failed first, and how
    place: str | None  # where in the script it failed; None if the script isn't to blame
    step: str | None  # step of the newest checkpoint at its end, None if unknown

    def line(self, with_nodes: bool) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.began))
        where = f", {_nodes(self.nodes)}" if with_nodes else ""
        step = f" (newest checkpoint: step {self.step})" if self.step is not None else ""
        return f"{self.count}: {when}, {self.seconds:.0f} s, {counted(self.ranks, 'rank')}{where}: {self.why}{step}"


@dataclass(frozen=True)
class Decision:
    code: int  # the job's exit code, if it is over
    wait: float | None  # seconds until the next attempt; None if the job is over
    text: str  # what the user is told; may be empty


class Ledger:
    def __init__(self, options: Options) -> None:
        self._options = options
        self.attempts: list[Ended] = []
        self.count = 0  # number of the next attempt

    def add(
        self,
        began: float,
        nodes: Sequence[int],
        outcomes: Iterable[Outcome],
        step: str | None,
        lost: str | None = None,
        preempted: Sequence[int] = (),
    ) -> Decision:
        outcomes = list(outcomes)
        cause = next(
            iter(in_order(outcome.failure for outcome in outcomes if outcome.failure)), None
        )
        codes = [outcome.code for outcome in outcomes]
        outlives = self._options.outlives_preemption
        signalled = [
            one.code for one in outcomes if one.interrupted and not one.failure and one.code > 128
        ]
        code, why, place = 0, "succeeded", None
        if CANNOT_START in codes:
            code, why = CANNOT_START, "the ranks could not be started"
        elif signalled:
            code, why = signalled[0], "stopped by a signal to npurun"
        elif lost is not None:
            code, why = (
                FAILED,
                lost if cause is None or cause.is_consequence else f"{cause}; {lost}",
            )
        elif cause is not None:
            code = next(outcome.code for outcome in outcomes if cause is outcome.failure)
            why, place = str(cause), cause.place
        elif RESUMABLE in codes:
            code, why = RESUMABLE, "stopped on request, resumable"
        preempted = () if code in (0, CANNOT_START) else tuple(preempted)
        if preempted:
            why, place = f"{_nodes(preempted)} taken away: {why}", None
        self.attempts.append(
            Ended(
                count=self.count,
                began=began,
                seconds=time.time() - began,
                nodes=tuple(nodes),
                ranks=len(nodes) * self._options.nproc_per_node,
                code=code,
                interrupted=any(
                    one.interrupted and not (one.preempted and outlives) for one in outcomes
                ),
                preempted=preempted,
                why=why,
                place=place,
                step=step,
            )
        )
        self.count += 1
        return self._decide()

    def last_words(self, decision: Decision) -> str:
        """Return what the user is told at the end: why the job isn't started again, and its attempts, if several."""
        lines = [decision.text] if decision.text else []
        if len(self.attempts) > 1:
            with_nodes = any(attempt.nodes != (0,) for attempt in self.attempts)
            told = [f"  {attempt.line(with_nodes)}" for attempt in self.attempts[-_TOLD:]]
            of_those = (
                f" (the last {_TOLD} of {len(self.attempts)})" if len(self.attempts) > _TOLD else ""
            )
            lines += [f"the attempts of this job{of_those}:", *told]
        return "\n".join(lines)

    def _decide(self) -> Decision:
        last = self.attempts[-1]
        failures = [
            attempt for attempt in self.attempts if not attempt.preempted
        ]  # these count as restarts
        before = failures[-2] if len(failures) > 1 else None
        is_stuck = (
            before
            and last.place is not None
            and (before.place, before.step) == (last.place, last.step)
        )
        most, limit = self._options.max_restarts, self._options.max_preemptions
        preemptions = len(self.attempts) - len(failures)
        is_over = last.code == 0 or last.interrupted or set(last.nodes) <= set(last.preempted)
        if is_over or (not last.preempted and (last.code == RESUMABLE or most == 0)):
            return Decision(last.code, None, "")
        if last.code == CANNOT_START:
            text = "no restart: the ranks can't be started"
        elif is_stuck and not last.preempted:
            text = (
                f"no restart: two attempts in a row failed at the same place, {last.place}, and wrote no checkpoint in "
                "between. This is a bug in the script, which a restart doesn't fix.\n"
                "What to do: fix it; or, if the script got further each time, write checkpoints more often, with "
                "npu.train.JobCheckpoint or to the file NPU_DEVICE_PROGRESS_FILE."
            )
        elif len(failures) > most:
            text = f"no restart: all {most} restart(s) have been used"
        elif limit is not None and preemptions > limit:
            text = (
                f"no restart: nodes were taken away more than {limit} time(s) (--max-preemptions)"
            )
        elif last.preempted:
            wait = self._options.restart_backoff
            return Decision(
                last.code, wait, f"preemption {preemptions}, which costs no restart: {last.why}"
            )
        else:
            # How many restarts in a row have not come to another checkpoint.
            fruitless = (
                len(
                    list(itertools.takewhile(lambda one: one.step == last.step, reversed(failures)))
                )
                - 1
            )
            wait = min(
                self._options.restart_backoff * 2 ** min(fruitless, 10), LONGEST_BACKOFF_SECONDS
            )
            return Decision(
                last.code, wait, f"restart {len(failures)} of {most} in {wait:g} s: {last.why}"
            )
        return Decision(last.code, None, text)


def change(before: Sequence[int], after: Sequence[int], nproc_per_node: int) -> str:
    """Return what is different for an attempt with other nodes than the one before; "" if nothing is."""
    if tuple(before) == tuple(after):
        return ""
    changes = {
        "without": set(before).difference(after),
        "again with": set(after).difference(before),
    }
    parts = [f"{word} {_nodes(nodes)}" for word, nodes in changes.items() if nodes]
    return (
        f"the job goes on {' and '.join(parts)}: {counted(len(after) * nproc_per_node, 'rank')} instead of "
        f"{len(before) * nproc_per_node}, renumbered in the order of the nodes ({_nodes(after)}). "
        "A global batch that shard_and_rebatch_dataset divides stays the same."
    )


def _nodes(nodes: Collection[int]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {ranges(nodes)}"
