"""Keep the list of attempts, and decide after each whether the job is started again. Processes are left to others."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from npu_device._src.cluster.rank_errors import RESUMABLE
from npu_device._src.cluster.time_limits import LONGEST_BACKOFF_SECONDS
from npu_device._src.wording import counted, ranges
from npu_device.launch.arguments import Options
from npu_device.launch.attempt import CANNOT_START, FAILED, NodeOutcome
from npu_device.launch.failures import in_order

_LISTED = 100  # attempts that are listed in the end, at most


@dataclass(frozen=True)
class PastAttempt:
    """An attempt that has ended, on all nodes."""

    count: int
    began: float  # seconds since the epoch
    seconds: float  # how long it took
    nodes: tuple[int, ...]
    ranks: int
    code: int  # 0, 75 (asked to stop, resumable), or another exit code
    interrupted: bool  # a launcher received a signal that ends the job
    preempted: tuple[int, ...]  # the nodes that were taken away, if that has ended the attempt
    is_planned: bool  # the ranks have ended as they were asked, so that a node could join
    rejected: tuple[int, ...]  # the nodes whose join has failed
    why: str  # the rank or node that failed first, and how
    origin: str | None  # line of the script where it failed; None if the script isn't to blame
    step: str | None  # step of the newest checkpoint at its end, None if unknown

    @property
    def is_failure(self) -> bool:
        """Return whether the end of the attempt costs a restart."""
        return not (self.preempted or self.is_planned or self.rejected)

    def line(self, with_nodes: bool) -> str:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.began))
        ranks = counted(self.ranks, "rank")
        if with_nodes:
            ranks += f", {_nodes(self.nodes)}"
        line = f"{self.count}: {began}, {self.seconds:.0f} s, {ranks}: {self.why}"
        if self.step is not None:
            line += f" (newest checkpoint: step {self.step})"
        return line


@dataclass(frozen=True)
class Decision:
    code: int  # the job's exit code, if it is over
    wait: float | None  # seconds until the next attempt; None if the job is over
    text: str  # what the user is told; may be empty


class Ledger:
    """The attempts of a job."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.attempts: list[PastAttempt] = []
        self.count = 0  # number of the next attempt

    def add(
        self,
        began: float,
        nodes: Sequence[int],
        outcomes: Iterable[NodeOutcome],
        step: str | None,
        loss: str | None = None,
        preempted: Sequence[int] = (),
        is_asked: bool = False,
        joined: Sequence[int] = (),
    ) -> Decision:
        """Add an attempt that has ended, with the outcomes and the first loss of its nodes.

        ``is_asked``: its ranks were asked to end for a node; ``joined``: nodes that are dropped if it has failed.
        """
        outcomes = list(outcomes)
        code, why, origin = _verdict(outcomes, loss)
        taken_away = tuple(preempted)
        # Neither success nor a missing program is due to a node that was taken away.
        if code in (0, CANNOT_START):
            taken_away = ()
        if taken_away:
            why = f"{_nodes(taken_away)} taken away: {why}"
            origin = None
        is_planned = is_asked and code == RESUMABLE and not taken_away
        if is_planned:
            why = "ended for a node to join"
        rejected: tuple[int, ...] = ()
        if code not in (0, RESUMABLE) and not taken_away:
            rejected = tuple(joined)
        outlives = self._options.outlives_preemption
        self.attempts.append(
            PastAttempt(
                count=self.count,
                began=began,
                seconds=time.time() - began,
                nodes=tuple(nodes),
                ranks=len(nodes) * self._options.nproc_per_node,
                code=code,
                interrupted=any(
                    outcome.interrupted and not (outcome.preempted and outlives)
                    for outcome in outcomes
                ),
                preempted=taken_away,
                is_planned=is_planned,
                rejected=rejected,
                why=why,
                origin=origin,
                step=step,
            )
        )
        self.count += 1
        return self._decide()

    def last_words(self, decision: Decision) -> str:
        """Return what the user is told at the end: why the job isn't started again, and its attempts, if several."""
        lines = []
        if decision.text:
            lines.append(decision.text)
        number = len(self.attempts)
        if number > 1:
            heading = "the attempts of this job"
            if number > _LISTED:
                heading += f" (the last {_LISTED} of {number})"
            with_nodes = any(attempt.nodes != (0,) for attempt in self.attempts)
            lines.append(f"{heading}:")
            lines += [f"  {attempt.line(with_nodes)}" for attempt in self.attempts[-_LISTED:]]
        return "\n".join(lines)

    def _decide(self) -> Decision:
        """Return whether the job is started again after its newest attempt."""
        # Attempts that a preemption ended count separately: they aren't the fault of the script.
        newest = self.attempts[-1]
        failures = [attempt for attempt in self.attempts if attempt.is_failure]
        preemptions = sum(bool(attempt.preempted) for attempt in self.attempts)
        restarts = self._options.max_restarts
        # Without a node that is left, nobody could continue.
        is_over = (
            newest.code == 0 or newest.interrupted or set(newest.nodes) <= set(newest.preempted)
        )
        may_restart = newest.preempted or (newest.code != RESUMABLE and restarts > 0)
        if newest.is_planned and not is_over:
            return Decision(newest.code, 0.0, "")
        if newest.rejected and not is_over:
            text = f"a join of {_nodes(newest.rejected)} has failed, which costs no restart: {newest.why}"
            return Decision(newest.code, self._options.restart_backoff, text)
        if is_over or not may_restart:
            return Decision(newest.code, None, "")
        obstacle = self._obstacle(newest, failures, preemptions)
        if obstacle:
            return Decision(newest.code, None, f"no restart: {obstacle}")
        wait = self._options.restart_backoff
        if newest.preempted:
            text = f"preemption {preemptions}, which costs no restart: {newest.why}"
        else:
            # How many restarts in a row have not come to another checkpoint.
            fruitless = 0
            for failure in reversed(failures[:-1]):
                if failure.step != newest.step:
                    break
                fruitless += 1
            # The limit keeps the power from becoming huge.
            wait = min(wait * 2 ** min(fruitless, 10), LONGEST_BACKOFF_SECONDS)
            text = f"restart {len(failures)} of {restarts} in {wait:g} s: {newest.why}"
        return Decision(newest.code, wait, text)

    def _obstacle(
        self, newest: PastAttempt, failures: Sequence[PastAttempt], preemptions: int
    ) -> str:
        """Return why a job that may restart doesn't; "" if it does."""
        restarts = self._options.max_restarts
        limit = self._options.max_preemptions
        if newest.code == CANNOT_START:
            return "the ranks can't be started"
        if not newest.preempted and _is_stuck(failures):
            return (
                f"two attempts in a row failed at the same place, {newest.origin}, and wrote no checkpoint in "
                "between. This is a bug in the script, which a restart doesn't fix.\n"
                "What to do: fix it; or, if the script got further each time, write checkpoints more often, with "
                "npu.train.JobCheckpoint or to the file NPU_DEVICE_PROGRESS_FILE."
            )
        if len(failures) > restarts:
            return f"all {restarts} restart(s) have been used"
        if limit is not None and preemptions > limit:
            return f"nodes were taken away more than {limit} time(s) (--max-preemptions)"
        return ""


def _verdict(outcomes: Sequence[NodeOutcome], loss: str | None) -> tuple[int, str, str | None]:
    """Return the exit code of an attempt, what has ended it, and where in the script."""
    codes = [outcome.code for outcome in outcomes]
    if CANNOT_START in codes:
        return CANNOT_START, "the ranks could not be started", None
    for outcome in outcomes:
        # Over 128: ended by the signal itself, not by a rank that failed meanwhile.
        if outcome.interrupted and not outcome.failure and outcome.code > 128:
            return outcome.code, "stopped by a signal to npurun", None
    codes_of_failures = {outcome.failure: outcome.code for outcome in outcomes if outcome.failure}
    cause = next(iter(in_order(codes_of_failures)), None)
    if loss is not None:
        # Errors that follow from the loss don't explain it.
        if cause is None or cause.is_consequence:
            return FAILED, loss, None
        return FAILED, f"{cause}; {loss}", None
    if cause is not None:
        return codes_of_failures[cause], str(cause), cause.origin
    if RESUMABLE in codes:
        return RESUMABLE, "stopped on request, resumable", None
    return 0, "succeeded", None


def _is_stuck(failures: Sequence[PastAttempt]) -> bool:
    """Return True if the last two attempts failed at the same place of the script and step."""
    # Without a place in the script, failures can't be told apart.
    if len(failures) < 2 or failures[-1].origin is None:
        return False
    previous, newest = failures[-2:]
    return (previous.origin, previous.step) == (newest.origin, newest.step)


def change(old_nodes: Sequence[int], new_nodes: Sequence[int], nproc_per_node: int) -> str:
    """Return what is different for an attempt with other nodes than the one before; "" if nothing is."""
    if tuple(old_nodes) == tuple(new_nodes):
        return ""
    changes = []
    removed = set(old_nodes).difference(new_nodes)
    if removed:
        changes.append(f"without {_nodes(removed)}")
    added = set(new_nodes).difference(old_nodes)
    if added:
        changes.append(f"again with {_nodes(added)}")
    return (
        f"the job goes on {' and '.join(changes)}: {counted(len(new_nodes) * nproc_per_node, 'rank')} instead of "
        f"{len(old_nodes) * nproc_per_node}, renumbered in the order of the nodes ({_nodes(new_nodes)}). "
        "A global batch that shard_and_rebatch_dataset divides stays the same."
    )


def resize(newest: PastAttempt, ranks: int) -> str:
    """Return how the number of ranks changes after an attempt that lost no step; "" if it doesn't."""
    if newest.code != RESUMABLE or newest.ranks == ranks:
        return ""
    change = "grows"
    if ranks < newest.ranks:
        change = "shrinks"
    text = f"the job {change} from {newest.ranks} to {counted(ranks, 'rank')}"
    if newest.step is not None:
        text += f" at step {newest.step}"
    return text


def _nodes(nodes: Collection[int]) -> str:
    word = "node"
    if len(nodes) > 1:
        word = "nodes"
    return f"{word} {ranges(nodes)}"
