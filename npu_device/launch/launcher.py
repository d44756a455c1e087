"""One run of the launcher from start to exit code: the attempts of a job on this node, until it is over."""

from __future__ import annotations

import contextlib
import queue
import signal
import tempfile
import time
from typing import Any

from npu_device._src.cluster.handshake import NO_SECRET
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.membership.schemes import secret
from npu_device.launch.arguments import Options
from npu_device.launch.attempt import USAGE, Attempt, Launch, prepare_meeting
from npu_device.launch.guard import Guard
from npu_device.launch.leader import Leader
from npu_device.launch.ledger import Decision, Ledger
from npu_device.launch.member import Member
from npu_device.launch.output import Console
from npu_device.launch.reports import Starter


def run(options: Options, starter: Starter | None = None) -> int:
    starter = starter or Starter()
    console = starter.console
    events = signals(options, console)
    prefix = f"{starter.name or 'npurun'}-"
    with tempfile.TemporaryDirectory(prefix=prefix) as directory, Guard(directory) as guard:
        launch = Launch(options, console, guard, directory, events, starter)
        try:
            given = secret()
            if options.nnodes > 1 and options.node_rank == 0 and not given:
                console.say(NO_SECRET)
            if not options.nodes_meet:
                return _alone(launch)
            if options.node_rank > 0:
                return Member(launch, given, options.master_addr).run()
            with Leader(launch, given) as leader:
                return Member(launch, given, leader.address).run()
        except (OSError, ClusterError, ValueError) as error:
            console.say(str(error))
            return USAGE


def signals(options: Options, console: Console) -> queue.SimpleQueue[Any]:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def receive(number: int, _: object) -> None:
        console.end()
        events.put(number)

    for number in {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, options.preempt_signal}:
        # nohup, and a shell script's background jobs, ask to ignore the signal.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, receive)
    return events


def _alone(launch: Launch) -> int:
    options, say = launch.options, launch.console.say
    attempts = Ledger(options)
    attempts.count = launch.starter.count
    while True:
        place = prepare_meeting(options, attempts.count)
        began = time.time()
        with place:
            outcome = Attempt(launch, place, lambda *_: None).run()
        decision = attempts.add(began, place.nodes, [outcome], launch.step())
        if decision.wait is None:
            say(attempts.last_words(decision))
            return outcome.code
        say(decision.text)
        place.end()
        interrupted = _pause(launch, decision.wait)
        if interrupted is not None:
            say(attempts.last_words(Decision(0, None, "")))
            return 128 + interrupted


def _pause(launch: Launch, seconds: float) -> int | None:
    """Wait before a restart. Return the number of a signal that the launcher receives meanwhile, or None."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty):
            event = launch.events.get(timeout=left)
            if isinstance(event, int):
                return event
    return None
