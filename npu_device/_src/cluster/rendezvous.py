"""Meet all ranks at the hub, and agree on one description of the job; the same for every scheme.

The hub may start later than this rank, and its name may become resolvable later still: everything is retried.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from npu_device._src import environment
from npu_device._src.cluster import frames, time_limits as limits
from npu_device._src.cluster.control_channel import ControlChannel
from npu_device._src.cluster.description import Cluster, Membership, ParentRank
from npu_device._src.cluster.handshake import (
    ANOTHER_PROGRAM,
    NO_SECRET,
    AttemptFailedError,
    TimedConnection,
    reach,
)
from npu_device._src.cluster.hub_process import HubProcess
from npu_device._src.cluster.ports import is_loopback, join_address
from npu_device._src.cluster.rank_errors import ChildOfRankError, PortTakenError, RendezvousError
from npu_device._src.cluster.roster import Hello, ancestors, start_time
from npu_device._src.version import __version__

# Names of the packages by which TensorFlow is installed; the first one found tells the version.
_TENSORFLOWS = """
tensorflow tensorflow-cpu tf-nightly tf-nightly-cpu tensorflow-intel tensorflow-macos tensorflow-rocm tensorflow-aarch64
tensorflow-cpu-aws
"""
_CANDIDATE = (
    "this process (%d) was started by process %s, which has the same variables, and hasn't called npu.open(). If it "
    "does so within %.0f s, it is the rank, and this process is its child. Otherwise this process is the rank.\n"
    "What to do if only this process is to be a rank: start it without NPU_DEVICE_RANK_PROCESS in its environment, so "
    "that the other ranks don't wait."
)

_log = logging.getLogger("npu_device")


def meet(membership: Membership) -> tuple[Cluster, ControlChannel]:
    """Wait for all ranks of the job; return its description, and the control channel.

    Raises RendezvousError, on all ranks that came with the same text, or ChildOfRankError.
    """
    search = _HubSearch(membership)
    if membership.starts_hub:
        cluster, channel = search.start_hub()
    else:
        cluster, channel = search.search(membership.chief_hosts)
    _log.info(
        "rank %d of %d has met the others on %s",
        cluster.rank,
        cluster.world_size,
        ", ".join(set(cluster.hosts)),
    )
    return cluster, channel


def _hello(membership: Membership) -> Hello:
    """Return how this process describes itself to the hub."""
    names = [field.name for field in fields(Hello) if hasattr(membership, field.name)]
    return Hello(
        **{name: getattr(membership, name) for name in names},
        seconds=membership.connect_timeout,
        versions={"protocol": str(frames.PROTOCOL), **installed_versions()},
        settings=environment.compared_settings(),
        machine=socket.gethostname(),
        pid=os.getpid(),
        started=start_time(os.getpid()),
        ancestors=list(map(list, ancestors())),
    )


def installed_versions() -> dict[str, str]:
    """Return the versions of npu_device and TensorFlow, without importing TensorFlow."""
    for name in _TENSORFLOWS.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return {"npu_device": __version__, "tensorflow": importlib.metadata.version(name)}
    return {"npu_device": __version__, "tensorflow": "unknown"}


_Met = tuple[Cluster, ControlChannel]


def _cluster(membership: Membership, rank: int, roster: Any) -> Cluster:
    hosts = tuple(map(str, roster["hosts"]))
    addresses = tuple(map(str, roster["addresses"]))
    if not 0 <= rank < len(hosts) == len(addresses):
        raise ValueError("no such rank")
    on_loopback = bool(roster["loopback"]) and all(map(is_loopback, membership.chief_hosts))
    trusted = bool(membership.secret) or on_loopback
    return Cluster(rank, membership.device_id, hosts, addresses, membership.job_id, trusted)


class _HubSearch:
    """The attempts of a rank to reach the hub."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._hello = _hello(membership)
        self._began = time.monotonic()
        self._deadline = self._began + membership.connect_timeout
        self._outcomes: dict[str, str] = {}
        self._name = f"{self._hello.name} of job {membership.job_id!r}"
        self._is_busy = False
        self._next_progress = limits.FIRST_PROGRESS_SECONDS  # from the beginning on

    def start_hub(self) -> _Met:
        """Start the hub and meet the others there, or at a hub that another process of this rank has started."""
        membership = self._membership
        if membership.secret == b"" and not all(map(is_loopback, membership.chief_hosts)):
            _log.warning("%s", NO_SECRET)
        copied = ("job_id", "world_size", "expected_hosts", "host_key")
        settings = {name: getattr(membership, name) for name in copied}
        while True:
            try:
                hub = HubProcess(
                    secret=membership.secret,
                    hosts=membership.chief_hosts,
                    ports=(membership.chief_port, membership.chief_port),
                    stays=False,
                    speaks=membership.under_mpiexec,
                    **settings,
                )
            except PortTakenError:
                # The port is taken by the hub of an earlier process of this rank, or of a second process started as
                # this rank, which every rank must be told of. A hub whose job is ending frees the port soon.
                met = self._try_each_once(membership.chief_hosts)
                if met is not None:
                    return met
                if self._remaining() <= 0 or (
                    not self._is_busy and time.monotonic() > self._began + limits.OLD_HUB_SECONDS
                ):
                    raise
                self._report_progress("waits for its port")
                time.sleep(limits.OLD_HUB_PAUSE_SECONDS)
                continue
            return self.search((hub.host,))

    def _remaining(self) -> float:
        return self._deadline - time.monotonic()

    def _report_progress(self, activity: str) -> None:
        """Tell the user from time to time what this rank does, and what it has met there."""
        waited = time.monotonic() - self._began
        if waited >= self._next_progress:
            self._next_progress = waited + limits.NEXT_PROGRESS_SECONDS
            outcomes = "; ".join(self._lines)
            _log.warning("after %.0f s: %s %s: %s", waited, self._name, activity, outcomes)

    def search(self, hosts: Iterable[str]) -> _Met:
        """Try the addresses of the hub in turn until it answers."""
        pause = limits.FIRST_PAUSE_SECONDS
        while True:
            met = self._try_each_once(hosts)
            if met is not None:
                return met
            if self._remaining() <= 0:
                raise RendezvousError(self._complaint())
            self._report_progress("is looking for the chief")
            time.sleep(max(0.0, min(pause, self._remaining())))
            pause = min(2 * pause, limits.LONGEST_PAUSE_SECONDS)

    def _try_each_once(self, hosts: Iterable[str]) -> _Met | None:
        """Try each address once; return None if the hub of this job is at none of them."""
        port = self._membership.chief_port
        for host in hosts:
            try:
                return self._join(reach(host, port, self._remaining(), self._membership.secret))
            except AttemptFailedError as failure:
                self._outcomes[join_address(host, port)] = str(failure)
            if self._remaining() <= 0:
                break
        return None

    def _join(self, timed: TimedConnection) -> _Met:
        try:
            timed.send({"hello": asdict(self._hello)})
            return self._await_roster(timed)
        except frames.WRONG_FORM as error:
            # A hub doesn't answer in another form.
            timed.connection.close()
            raise AttemptFailedError(ANOTHER_PROGRAM) from error
        except (
            BaseException
            # Above all Ctrl-C, which must not leave the others waiting until the time is up.
        ) as error:
            if self._hello.is_chief and not isinstance(
                error, (AttemptFailedError, RendezvousError, ChildOfRankError)
            ):
                text = f"the chief ({self._hello.process}) stopped while the ranks were meeting: {error!r}."
                timed.send({"stopping": f"{text}\nLook at its output."})
            timed.connection.close()
            raise

    def _await_roster(self, timed: TimedConnection) -> _Met:
        rank = None
        seconds = limits.ANSWER_SECONDS
        silence = "no answer"
        closure = "the connection was closed without an answer: a hub that is ending"
        self._is_busy = False
        while True:
            answer = timed.receive(seconds, silent=f"{silence}: the hub is stopped", closed=closure)
            said: Any
            # The first key tells what the answer is.
            verdict, said = next(iter(answer.items()), ("", None))
            if verdict == "wait":
                wait = float(said)
                # This comparison refuses NaN, too.
                if not 0 <= wait <= limits.LONGEST_WAIT_SECONDS:
                    raise ValueError("no such time")
                seconds = wait + limits.VERDICT_MARGIN_SECONDS
                silence = "the chief accepted this rank, and then sent nothing more"
                closure = "the chief accepted this rank, and then was gone"
                if answer.get("for") is not None:
                    _log.warning(_CANDIDATE, os.getpid(), self._hello.candidate, wait)
            elif verdict == "waits_for":
                waited = time.monotonic() - self._began
                text = f"the chief waits for {said} of job {self._hello.job_id!r}"
                # One line says which ranks are missing.
                if not self._hello.is_chief:
                    text = f"{self._name} has reached the chief, which waits for other ranks"
                _log.warning("after %.0f s: %s", waited, text)
            elif verdict == "refused":
                raise RendezvousError(str(said))
            elif verdict == "busy":
                self._is_busy = True
                raise AttemptFailedError(str(said))
            elif verdict == "child_of":
                raise ChildOfRankError(frames.checked(ParentRank, said))
            elif verdict == "rank":
                # The roster follows in a message of its own.
                rank = int(said)
            elif verdict == "roster" and rank is not None:
                cluster = _cluster(self._membership, rank, said)
                return cluster, ControlChannel(timed.connection, timed.reader)
            else:
                raise ValueError("no answer that a rank expects")

    @property
    def _lines(self) -> list[str]:
        return [f"{address} {outcome}" for address, outcome in self._outcomes.items()]

    def _complaint(self) -> str:
        membership = self._membership
        if membership.rank is None:
            chief = f"the process of CM_CHIEF_DEVICE on host {membership.chief_hosts[0]}"
            check = "CM_CHIEF_IP, CM_CHIEF_PORT and CM_CHIEF_DEVICE"
        else:
            chief = f"rank 0 on host {(membership.expected_hosts or membership.chief_hosts)[0]}"
            descriptions = {
                "rank table": "the rank table (with npurun: --master-addr and --master-port)",
                "TF_CONFIG": "TF_CONFIG",
            }
            launcher = "MASTER_ADDR, MASTER_PORT and the variables of the launcher"
            check = descriptions.get(membership.scheme, launcher)
        lines = "\n".join(f"  {line}" for line in self._lines)
        return (
            f"EI0015: {self._name} ({self._hello.process}) got no answer from the chief, {chief}, "
            f"within {membership.connect_timeout:g} s (HCCL_CONNECT_TIMEOUT):\n{lines}\n"
            "Likely cause: the chief was not started, has ended, or has a different address or port.\n"
            f"What to do: look at the output of the chief; compare {check} on both hosts; look for a firewall."
        )
