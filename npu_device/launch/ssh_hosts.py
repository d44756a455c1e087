"""``npurun --hosts``: start npurun on every host, start it again where it was lost, and stop all hosts together.

``connection`` runs one client of ssh, ``on_host`` is the program that it starts on the host.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from npu_device._src import environment
from npu_device._src.cluster import time_limits as limits
from npu_device._src.cluster.rank_errors import RESUMABLE
from npu_device._src.membership.schemes import secret
from npu_device.launch import connection, launcher
from npu_device.launch.arguments import Options
from npu_device.launch.connection import SSH_FAILED, Connection
from npu_device.launch.events import Events, HostClosed, HostReported, handle_next
from npu_device.launch.ledger import used_up
from npu_device.launch.output import Console
from npu_device.launch.preparation import FAILED, START_ERRORS, USAGE
from npu_device.launch.reports import ATTEMPT, LEAVING, OVER, PREEMPTED, RUNNING, WRITING, Report

_PREFIXES = ("TF_", "KERAS_", "PYTHON")


def run(options: Options) -> int:
    """Run the job on all hosts; return its exit code."""
    console = Console()
    events = launcher.signals(options, console)
    try:
        hosts = LaunchedHosts(options, console, events)
    except UnicodeDecodeError:
        console.say(
            "the secret is not UTF-8 text, and can't be passed on to the hosts.\n"
            "What to do: write random text into its file (openssl rand -hex 32)."
        )
        return USAGE
    except START_ERRORS as error:
        # Hosts that were reached stop with this process.
        console.say(str(error))
        return USAGE
    return hosts.wait()


def _variables() -> dict[str, str]:
    """Return the variables that every host gets."""
    names = {variable.name for variable in environment.ALL}
    # This variable differs from host to host.
    names.remove("HCCL_IF_IP")
    variables = {}
    for name, text in os.environ.items():
        if name in names or name.startswith(_PREFIXES):
            variables[name] = text
    # Hosts can't read a file here, so the secret itself travels in the order.
    variables["NPU_DEVICE_SECRET"] = secret().decode() or secrets.token_hex(32)
    variables["NPU_DEVICE_SECRET_FILE"] = ""
    return variables


@dataclass
class Host:
    """The state of one host: npurun runs there, is to be started again at a time, or has ended for good."""

    name: str  # name of the host as in the list
    node: int
    client: Sequence[str]  # command line
    connection: Connection | None = None
    start_count: int = 0
    is_running: bool = False  # npurun has reported that it runs there
    attempt: int | None = None  # number of the newest attempt that has begun there
    end: Report | None = None  # the newest report that npurun ends there, or that the host does
    retry_at: float | None = None
    wait: float = limits.HOST_RETRY_SECONDS  # until the next try, which doubles it
    give_up_at: float | None = None
    is_optional: bool = False  # the job goes on without it, and takes it in when it can be reached

    def wakes_at(self) -> float | None:
        """Return when the host is started again, or its client is killed if npurun doesn't run there by then."""
        if self.connection is None:
            return self.retry_at
        # An npurun that runs has no such time.
        if self.is_optional:
            return None
        return self.give_up_at


class LaunchedHosts:
    """All hosts of a job, as the npurun sees them that was started by hand."""

    def __init__(self, options: Options, console: Console, events: Events) -> None:
        self._options = options
        self._console = console
        self._say = console.say
        self._events = events
        self._variables = _variables()
        self._job = f"npurun-{secrets.token_hex(8)}"
        with ThreadPoolExecutor(len(options.hosts)) as resolvers:
            # Names are looked up at the same time, since each may take seconds.
            clients = list(resolvers.map(connection.client, options.hosts))
        self._hosts = [Host(name, node, clients[node]) for node, name in enumerate(options.hosts)]
        self._count = 0  # number of the next attempt
        self._nodes: Sequence[int] = ()  # nodes of the newest attempt
        self._node_0_losses = 0
        self._node_0_preemptions = 0
        self._codes: list[int] = []  # exit codes of the hosts that have ended, in this order
        self._cause: int | None = (
            None  # the first code that doesn't follow from the failure of another host
        )
        self._verdict: int | None = None  # exit code of the job, if it is over
        self._signal: int | None = None
        self._is_stopping = False  # the hosts have been sent a signal
        # Time by which the hosts have to end by themselves, or after a signal.
        self._deadline: float | None = None

        for host in self._hosts:
            self._start(host)

    def wait(self) -> int:
        """Return the exit code of the job when it has ended on all hosts."""
        while self._has_hosts():
            handle_next(
                self._events,
                {
                    signal.Signals: self._on_signal,
                    HostReported: self._on_report,
                    HostClosed: self._on_closed,
                },
                self._deadline,
                *(host.wakes_at() for host in self._hosts),
            )
            self._check_time()
        # Without restarts, hosts that fail because of another one may end before it.
        if self._cause is not None and not self._options.restarts_hosts:
            return self._cause
        if self._verdict is not None:
            return self._verdict
        for code in self._codes:
            if code not in (0, RESUMABLE):
                return code
        if self._codes:
            return max(self._codes)
        if self._signal is not None:
            return 128 + self._signal
        return 0

    def _has_hosts(self) -> bool:
        """Return True while npurun runs on a host, or is started there again."""
        return any(host.connection or host.retry_at is not None for host in self._hosts)

    def _start(self, host: Host) -> None:
        host.start_count += 1
        host.retry_at = None
        # Each host is a node, and must not start further hosts.
        options = dataclasses.replace(self._options, hosts=(), node_rank=host.node)
        order = {
            "options": dataclasses.asdict(options),
            "variables": self._variables,
            "count": self._count,
            "nodes": self._nodes,
        }
        name = f"{self._job}-node{host.node}"
        host.connection = Connection(
            host.client, name, host.start_count, host.node, self._console, self._events
        )
        # The secret is in the order, since everybody can read command lines.
        host.connection.tell(json.dumps(order))

    def _check_time(self) -> None:
        time_now = time.monotonic()
        if self._deadline is not None and time_now >= self._deadline:
            self._stop_late_hosts()
        for host in self._hosts:
            wakes_at = host.wakes_at()
            if wakes_at is None or time_now < wakes_at:
                continue
            if host.connection is not None:
                host.connection.kill()
                continue
            try:
                self._start(host)
            except OSError as error:
                # There may be too many processes at this time.
                self._retry(host, f"not reached ({error})")

    def _on_signal(self, signum: int) -> None:
        # A second signal leaves the deadline of the first, unless that has been lifted.
        if self._signal is None or self._deadline is None:
            seconds = self._options.grace
            if signum == self._options.preempt_signal:
                seconds = self._options.preempt_timeout
            self._deadline = time.monotonic() + seconds + limits.HOSTS_END_SECONDS
            self._signal = signum
            self._is_stopping = True
        for host in self._hosts:
            # A job that was told to stop starts nothing again.
            host.retry_at = None
        self._send(signum, self._hosts)

    def _send(self, signum: int, hosts: Sequence[Host]) -> None:
        for host in hosts:
            if host.connection is None:
                continue
            if host.is_running:
                host.connection.tell(f"{signum:d}")
            else:
                # An npurun that is there by now ends with the connection.
                host.connection.kill()

    def _on_report(self, reported: HostReported) -> None:
        host = self._hosts[reported.node]
        report = reported.report
        if report.state == RUNNING:
            host.is_running = True
            host.is_optional = False
            host.wait = limits.HOST_RETRY_SECONDS
            host.give_up_at = None
        elif report.state == ATTEMPT:
            host.attempt = report.count
            if report.count >= self._count:
                self._count = report.count + 1
                self._nodes = report.nodes
        elif report.state == WRITING:
            # A large copy takes its time, which the user can end.
            self._deadline = None
        elif report.state in (PREEMPTED, LEAVING, OVER):
            host.end = report
        # A job without restarts has no node that speaks for all. And a node that doesn't match node 0 is turned away.
        if report.state == OVER and self._options.restarts_hosts and report.code != USAGE:
            self._end_job(report.code)
            # Hosts of the newest attempt learn it from node 0. The others may be waiting for it.
            newest = self._count - 1
            waiting = [
                host for host in self._hosts if host.attempt is None or host.attempt < newest
            ]
            self._send(signal.SIGINT, waiting)

    def _on_closed(self, closed: HostClosed) -> None:
        host = self._hosts[closed.node]
        code = closed.exit_code
        end = host.end
        was_running = host.is_running
        host.connection = None
        host.end = None
        host.is_running = False
        # A new npurun counts its attempts from what it is told.
        host.attempt = None
        # The shell there has failed, not ssh: a folder or Python is missing, and will be.
        is_misplaced = not was_running and host.start_count == 1 and code < 128
        is_over = (
            self._signal is not None
            or self._verdict is not None
            or not self._options.restarts_hosts
        )
        if end is not None and end.state == OVER:
            self._conclude(host, end.code, end.is_cause)
        elif is_over or is_misplaced:
            if self._signal is None or was_running:
                program = host.client[0]
                if code == SSH_FAILED and program != "sh":
                    self._say(
                        f"{host.name}: the connection failed or ended (exit code {code} of {program})"
                    )
                self._conclude(host, code, is_cause=not self._is_stopping)
        elif was_running:
            self._on_lost(host, end, code)
        else:
            self._retry(host, "not reached")

    def _conclude(self, host: Host, code: int, is_cause: bool) -> None:
        """Take note of the end of a host. If it has failed, the others have a moment to notice."""
        self._codes.append(code)
        if is_cause and self._cause is None:
            self._cause = code
        goes_on = code in (0, RESUMABLE) or (
            host.node > 0 and self._options.fewest_nodes < self._options.nnodes
        )
        if self._has_hosts() and not goes_on and self._verdict is None and self._signal is None:
            self._say(f"host {host.name} ended with exit code {code}; stopping the others")
            self._stop_job(code)

    def _on_lost(self, host: Host, end: Report | None, code: int) -> None:
        is_leaving = end is not None
        host.give_up_at = time.monotonic() + self._options.rejoin_timeout
        cause = f"lost (exit code {code} of {host.client[0]})"
        wait = None
        if is_leaving:
            cause = "taken away"
            # Until then, the host can often still be reached.
            wait = self._options.preempt_timeout
        problem = ""
        if host.node == 0:
            problem = self._problem_of_node_0(is_leaving)
        if not problem:
            self._retry(host, cause, wait)
            return
        self._say(f"host {host.name}, node 0: {cause}. no restart: {problem}")
        verdict = FAILED
        if end is not None and end.code == RESUMABLE:
            verdict = RESUMABLE
        self._stop_job(verdict)

    def _problem_of_node_0(self, is_leaving: bool) -> str:
        """Return why node 0 isn't started again; "" if it is. On the other nodes, the npurun of node 0 decides."""
        if is_leaving:
            self._node_0_preemptions += 1
        else:
            self._node_0_losses += 1
            if self._options.max_restarts == 0:
                return "--max-restarts is 0"
        return used_up(self._options, self._node_0_losses, self._node_0_preemptions)

    def _retry(self, host: Host, cause: str, wait: float | None = None) -> None:
        time_now = time.monotonic()
        # Tried in silence, as this may go on for days.
        if host.is_optional:
            host.retry_at = time_now + limits.LONGEST_BACKOFF_SECONDS
            return
        # Without a time, the first start has failed.
        if host.give_up_at is None:
            host.give_up_at = time_now + self._options.rejoin_timeout
        if time_now >= host.give_up_at:
            self._give_up(host)
            return
        if wait is None:
            wait = host.wait
            host.wait = min(2 * wait, limits.LONGEST_BACKOFF_SECONDS)
        wait = min(wait, host.give_up_at - time_now)
        host.retry_at = time_now + wait
        self._say(f"host {host.name}: {cause}, next try in {wait:.0f} s")

    def _give_up(self, host: Host) -> None:
        seconds = self._options.rejoin_timeout
        if host.node > 0:
            rest = "no more tries"
            if self._options.takes_nodes:
                rest = f"from now on a try every {limits.LONGEST_BACKOFF_SECONDS:g} s"
                host.is_optional = True
                self._retry(host, rest)
            self._say(
                f"host {host.name}: not reached within {seconds:g} s (--rejoin-timeout); {rest}"
            )
            return
        self._say(
            f"host {host.name}, node 0: not reached within {seconds:g} s (--rejoin-timeout); the job ends on all "
            "hosts.\n"
            "What to do: start the job again when the host is back, or with another host in its place: it continues "
            "from its newest checkpoint."
        )
        self._stop_job(FAILED)

    def _end_job(self, code: int) -> None:
        """Start no host again."""
        if self._verdict is None:
            self._verdict = code
        for host in self._hosts:
            host.retry_at = None

    def _stop_job(self, code: int) -> None:
        """Stop the hosts that haven't ended by themselves in a moment."""
        self._end_job(code)
        if self._deadline is None:
            self._deadline = time.monotonic() + limits.HOSTS_NOTICE_SECONDS

    def _stop_late_hosts(self) -> None:
        if self._is_stopping:
            for host in self._hosts:
                if host.connection is not None:
                    host.connection.kill()
        else:
            self._send(signal.SIGINT, self._hosts)
        self._is_stopping = True
        self._deadline = time.monotonic() + self._options.grace + limits.HOSTS_END_SECONDS
