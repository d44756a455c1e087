"""Keep the list of attempts, and decide after each whether the job is started again. Processes are left to others."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from npu_device._src.cluster.rank_errors import RESUMABLE
from npu_device._src.cluster.time_limits import LONGEST_BACKOFF_SECONDS
from npu_device._src.wording import counted, ranges
from npu_device.launch.arguments import Options
from npu_device.launch.failures import in_order
from npu_device.launch.node_protocol import NodeOutcome
from npu_device.launch.preparation import CANNOT_START, FAILED

_LISTED = 100  # attempts that are listed in the end, at most


@dataclass
class AttemptRecord:
    """An attempt on all nodes: what they tell while it runs, and what the ledger makes of that."""

    count: int
    nodes: Sequence[int]
    began: float = field(default_factory=time.time)  # seconds since the epoch
    outcomes: dict[int, NodeOutcome] = field(default_factory=dict)
    loss: str | None = None  # the first loss of a node
    preempted: set[int] = field(default_factory=set)  # the nodes that were told to go
    is_granted: bool = False  # the ranks have ended for a node
    suspects: Sequence[int] = ()  # nodes that are dropped if it has failed
    step: str | None = None  # step of the newest checkpoint at its end, None if unknown
    # From here on, the ledger's
    seconds: float = 0.0  # how long it took
    ranks: int = 0
    code: int = 0  # 0, 75 (asked to stop, resumable), or another exit code
    why: str = ""  # the rank or node that failed first, and how
    origin: str | None = (
        None  # line of the script where it failed; None if the script isn't to blame
    )
    taken_away: Sequence[int] = ()  # the nodes that were taken away, if that has ended the attempt
    is_planned: bool = False  # the ranks have ended as they were asked, so that a node could join
    rejected: Sequence[int] = ()  # the nodes whose join has failed

    @property
    def is_failure(self) -> bool:
        """Return whether the end of the attempt costs a restart."""
        return not (self.taken_away or self.is_planned or self.rejected)

    def line(self, with_nodes: bool) -> str:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.began))
        ranks = counted(self.ranks, "rank")
        if with_nodes:
            ranks += f", {_nodes(self.nodes)}"
        line = f"{self.count}: {began}, {self.seconds:.0f} s, {ranks}: {self.why}"
        if self.step is not None:
            line += f" (newest checkpoint: step {self.step})"
        return line


class Decision(NamedTuple):
    """Whether the job is over after an attempt, or another one follows."""

    code: int  # the job's exit code, if it is over
    text: str = ""  # what the user is told
    wait: float = 0.0  # seconds until the next attempt
    is_over: bool = False


class Ledger:
    """The attempts of a job."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.attempts: list[AttemptRecord] = []
        self.count = 0  # number of the next attempt

    def add(self, attempt: AttemptRecord) -> Decision:
        """Add an attempt that has ended; return whether another one follows."""
        attempt.seconds = time.time() - attempt.began
        attempt.ranks = len(attempt.nodes) * self._options.nproc_per_node
        attempt.code, attempt.why, attempt.origin = _verdict(attempt)
        # Neither success nor a missing program is due to a node that was taken away.
        if attempt.preempted and attempt.code not in (0, CANNOT_START):
            attempt.taken_away = sorted(attempt.preempted)
            attempt.why = f"{_nodes(attempt.taken_away)} taken away: {attempt.why}"
            attempt.origin = None
        elif attempt.is_granted and attempt.code == RESUMABLE:
            attempt.is_planned = True
            attempt.why = "ended for a node to join"
        elif attempt.code not in (0, RESUMABLE):
            attempt.rejected = attempt.suspects
        self.attempts.append(attempt)
        self.count = attempt.count + 1
        return self._decide(attempt)

    def last_words(self, reason: str = "") -> str:
        """Return what the user is told at the end: why the job isn't started again, and its attempts, if several."""
        lines = []
        if reason:
            lines.append(reason)
        count = len(self.attempts)
        if count > 1:
            heading = "the attempts of this job"
            if count > _LISTED:
                heading += f" (the last {_LISTED} of {count})"
            with_nodes = any(list(attempt.nodes) != [0] for attempt in self.attempts)
            lines.append(f"{heading}:")
            lines += [f"  {attempt.line(with_nodes)}" for attempt in self.attempts[-_LISTED:]]
        return "\n".join(lines)

    def _decide(self, newest: AttemptRecord) -> Decision:
        """Return whether the job is started again after its newest attempt."""
        # Attempts that a preemption ended count separately: they aren't the fault of the script.
        failures = [attempt for attempt in self.attempts if attempt.is_failure]
        preemptions = sum(bool(attempt.taken_away) for attempt in self.attempts)
        restarts = self._options.max_restarts
        outlives = self._options.outlives_preemption
        # A launcher has received a signal that ends the job.
        is_interrupted = any(
            outcome.is_interrupted and not (outcome.is_preempted and outlives)
            for outcome in newest.outcomes.values()
        )
        # Without a node that is left, nobody could continue.
        is_over = newest.code == 0 or is_interrupted or set(newest.nodes) <= set(newest.taken_away)
        may_restart = newest.taken_away or (newest.code != RESUMABLE and restarts > 0)
        over = Decision(newest.code, is_over=True)
        if is_over:
            return over
        if newest.is_planned:
            return Decision(newest.code)
        if newest.rejected:
            text = f"a join of {_nodes(newest.rejected)} has failed, which costs no restart: {newest.why}"
            return Decision(newest.code, text, self._options.restart_backoff)
        if not may_restart:
            return over
        obstacle = _obstacle(failures, newest) or used_up(self._options, len(failures), preemptions)
        if obstacle:
            return Decision(newest.code, f"no restart: {obstacle}", is_over=True)
        wait = self._options.restart_backoff
        if newest.taken_away:
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
        return Decision(newest.code, text, wait)


def _obstacle(failures: Sequence[AttemptRecord], newest: AttemptRecord) -> str:
    """Return why another attempt would end as the newest one did; "" if it may not."""
    if newest.code == CANNOT_START:
        return "the ranks can't be started"
    # Without a place in the script, failures can't be told apart.
    if newest.origin is None or len(failures) < 2:
        return ""
    previous = failures[-2]
    if (previous.origin, previous.step) != (newest.origin, newest.step):
        return ""
    return (
        f"two attempts in a row failed at the same place, {newest.origin}, and wrote no checkpoint in "
        "between. This is a bug in the script, which a restart doesn't fix.\n"
        "What to do: fix it; or, if the script got further each time, write checkpoints more often, with "
        "npu.train.JobCheckpoint or to the file NPU_DEVICE_PROGRESS_FILE."
    )


def used_up(options: Options, failures: int, preemptions: int) -> str:
    """Return which limit so many failures and preemptions exceed; "" if they exceed none."""
    if failures > options.max_restarts:
        return f"all {options.max_restarts} restart(s) have been used"
    limit = options.max_preemptions
    if limit is not None and preemptions > limit:
        return f"nodes were taken away more than {limit} time(s) (--max-preemptions)"
    return ""


def _verdict(attempt: AttemptRecord) -> tuple[int, str, str | None]:
    """Return the exit code of an attempt, what has ended it, and where in the script."""
    outcomes = attempt.outcomes.values()
    loss = attempt.loss
    codes = [outcome.code for outcome in outcomes]
    if CANNOT_START in codes:
        return CANNOT_START, "the ranks could not be started", None
    for outcome in outcomes:
        # Over 128: ended by the signal itself, not by a rank that failed meanwhile.
        if outcome.is_interrupted and not outcome.failure and outcome.code > 128:
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


def resize(newest: AttemptRecord, ranks: int) -> str:
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
