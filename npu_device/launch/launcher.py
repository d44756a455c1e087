"""One run of the launcher from start to exit code: the attempts of a job on this node, until it is over."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time

from npu_device._src.cluster.handshake import NO_SECRET
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.membership.schemes import secret
from npu_device._src.training.checkpoint.memory_slots import Memory, folder_in_memory
from npu_device.launch import last_copy
from npu_device.launch.arguments import Options
from npu_device.launch.attempt import USAGE, Attempt, AttemptObserver, Launch, prepare_rendezvous
from npu_device.launch.binding import Binding
from npu_device.launch.events import Events, SignalReceived
from npu_device.launch.guard import RankGuard
from npu_device.launch.leader import Leader
from npu_device.launch.ledger import Decision, Ledger
from npu_device.launch.member import Member
from npu_device.launch.neighbour import Neighbour
from npu_device.launch.output import Console
from npu_device.launch.reports import Starter


def run(options: Options, starter: Starter | None = None) -> int:
    """Run the job on this node; return the exit code."""
    starter = starter or Starter()
    console = starter.console
    # Signals are received before anything is started, so that none is lost.
    events = signals(options, console)
    prefix = f"{starter.name or 'npurun'}-"
    with contextlib.ExitStack() as opened:
        directory = opened.enter_context(tempfile.TemporaryDirectory(prefix=prefix))
        name = os.path.basename(directory)
        guard = opened.enter_context(RankGuard(directory, str(folder_in_memory(name))))
        try:
            binding = Binding(options)
            memory = None
            # Without restarts, the copies of several hosts would be of no use.
            if options.nnodes == 1 or options.nodes_meet:
                memory = Memory(options.nproc_per_node, options.nodes_meet, name)
            launch = Launch(options, console, guard, directory, events, starter, binding, memory)
            job_secret = secret()
            if options.nnodes > 1 and options.node_rank == 0 and not job_secret:
                console.say(NO_SECRET)
            if not options.nodes_meet:
                return _alone(launch)
            assert memory is not None
            with Neighbour(memory, job_secret, options.master_addr, console.say) as neighbour:
                if options.node_rank > 0:
                    return Member(launch, job_secret, options.master_addr, neighbour).run()
                # Node 0 leads the job, and carries out its own orders as a member.
                with Leader(launch, job_secret) as leader:
                    return Member(launch, job_secret, leader.address, neighbour).run()
        except (OSError, ClusterError, ValueError) as error:
            console.say(str(error))
            return USAGE


def signals(options: Options, console: Console) -> Events:
    """Return a queue of events that gets the signals from now on."""
    events = Events()

    def receive(number: int, _: object) -> None:
        console.end()
        events.put(SignalReceived(number))

    for number in {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, options.preempt_signal}:
        # nohup, and a shell script's background jobs, ask to ignore the signal.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, receive)
    return events


def _alone(launch: Launch) -> int:
    """Run the job without the launchers of other nodes."""
    say = launch.console.say
    ledger = Ledger(launch.options)
    ledger.count = launch.starter.count
    while True:
        rendezvous = prepare_rendezvous(launch.options, ledger.count)
        began = time.time()
        with rendezvous:
            outcome = Attempt(launch, rendezvous, AttemptObserver()).run()
        decision = ledger.add(began, rendezvous.nodes, [outcome], launch.step())
        if decision.wait is None:
            last_copy.write_alone(launch, ledger.count)
            say(ledger.last_words(decision))
            return outcome.code
        say(decision.text)
        # A rank that is left, cut off from the others, must not go on training.
        rendezvous.end()
        number = launch.events.wait_for_signal(decision.wait)
        if number is not None:
            last_copy.write_alone(launch, ledger.count)
            say(ledger.last_words(Decision(0, None, "")))
            return 128 + number
