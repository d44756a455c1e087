"""One run of the launcher from start to exit code: the attempts of a job on this node, until it is over."""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import shutil
import signal
import tempfile

from npu_device._src import environment
from npu_device._src.cluster.handshake import NO_SECRET
from npu_device._src.membership.schemes import secret
from npu_device._src.training.checkpoint.memory_slots import Memory, folder_in_memory
from npu_device.launch import last_copy
from npu_device.launch.arguments import Options
from npu_device.launch.attempt import Attempt
from npu_device.launch.events import Events, wait_for_signal
from npu_device.launch.guard import RankGuard
from npu_device.launch.leader import Leader
from npu_device.launch.ledger import AttemptRecord, Ledger
from npu_device.launch.member import Member
from npu_device.launch.neighbour import Neighbour
from npu_device.launch.output import Console
from npu_device.launch.preparation import START_ERRORS, USAGE, Launch, prepare_rendezvous
from npu_device.launch.reports import Reporter


def run(options: Options, reporter: Reporter | None = None) -> int:
    """Run the job on this node; return the exit code."""
    reporter = reporter or Reporter()
    console = reporter.console
    # Signals are received before anything is started, so that none is lost.
    events = signals(options, console)
    try:
        with contextlib.ExitStack() as opened:
            directory = _directory(f"{reporter.name or 'npurun'}-", opened)
            name = os.path.basename(directory)
            guard = opened.enter_context(RankGuard(directory, folder_in_memory(name)))
            # Found now, and told once: each rank would find it after its imports.
            environment.check_own_variables(warns=False)
            memory = None
            # Without restarts, the copies of several hosts would be of no use.
            if options.nnodes == 1 or options.nodes_meet:
                memory = Memory(options.nproc_per_node, options.nodes_meet, name)
            launch = Launch(options, console, guard, directory, events, reporter, memory, secret())
            if options.nnodes > 1 and options.node_rank == 0 and not launch.secret:
                console.say(NO_SECRET)
            if memory is not None and options.nodes_meet:
                return _beside_others(launch, memory)
            return _alone(launch)
    except START_ERRORS as error:
        console.say(str(error))
        return USAGE


def _directory(prefix: str, opened: contextlib.ExitStack) -> str:
    """Make a temporary directory that stays as long as the job, and is removed in the end."""
    directory = tempfile.mkdtemp(prefix=prefix)
    # A file that a process still uses on a network file system changes nothing about the outcome of the job.
    opened.callback(shutil.rmtree, directory, ignore_errors=True)
    descriptor = os.open(directory, os.O_RDONLY)
    opened.callback(os.close, descriptor)
    # systemd-tmpfiles removes what is older than ten days, but nothing in a locked directory (man tmpfiles.d).
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return directory


def _beside_others(launch: Launch, memory: Memory) -> int:
    """Run the job together with the launchers of other nodes."""
    options = launch.options
    with Neighbour(memory, launch.secret, options.master_addr, launch.console.say) as neighbour:
        if options.node_rank > 0:
            return Member(launch, options.master_addr, neighbour).run()
        # Node 0 leads the job, and carries out its own orders as a member.
        with Leader(launch) as leader:
            return Member(launch, leader.address, neighbour).run()


def signals(options: Options, console: Console) -> Events:
    """Return a queue of events that gets the signals from now on."""
    # A signal handler can put an event in while its own thread takes one out.
    events: Events = queue.SimpleQueue()

    def receive(signum: int, _: object) -> None:
        console.end()
        events.put(signal.Signals(signum))

    for signum in {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, options.preempt_signal}:
        # nohup, and a shell script's background jobs, ask to ignore the signal.
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, receive)
    return events


def _alone(launch: Launch) -> int:
    """Run the job without the launchers of other nodes."""
    say = launch.console.say
    ledger = Ledger(launch.options)
    ledger.count = launch.reporter.count
    while True:
        with prepare_rendezvous(launch.options, ledger.count) as rendezvous:
            attempt = AttemptRecord(ledger.count, rendezvous.plan.nodes)
            outcome = Attempt(launch, rendezvous).run()
        attempt.outcomes[launch.options.node_rank] = outcome
        attempt.step = launch.step()
        decision = ledger.add(attempt)
        if decision.is_over:
            last_copy.write_alone(launch, ledger.count)
            say(ledger.last_words(decision.text))
            failure = outcome.failure
            launch.reporter.is_cause = failure is not None and not failure.is_consequence
            return outcome.code
        say(decision.text)
        # A rank that is left, cut off from the others, must not go on training.
        rendezvous.end()
        signum = wait_for_signal(launch.events, decision.wait)
        if signum is not None:
            last_copy.write_alone(launch, ledger.count)
            say(ledger.last_words())
            return 128 + signum
