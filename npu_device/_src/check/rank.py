"""Run a check on one rank, together with the others, from opening to the verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from npu_device._src import environment
from npu_device._src.check import judge, measurements
from npu_device._src.check.measurements import Facts, collect
from npu_device._src.collectives.engines.tensorflow import server
from npu_device._src.collectives.group import WORLD_GROUP, group_of
from npu_device._src.collectives.job import Job
from npu_device._src.collectives.operation import explained, open_ports
from npu_device._src.training import device

_SECONDS = 120.0  # the longest wait for another rank, which measures meanwhile


@dataclass(frozen=True)
class CheckResult:
    """The result on one rank."""

    works: bool  # whether training would work; the same on all ranks
    verdict: str  # that in a line
    report: str  # everything; "" on all ranks but rank 0
    leads: bool  # whether the rank is the lowest one of its host


def check() -> CheckResult:
    """Open the device of this rank, and check. Every rank of the job calls this."""
    device.open()
    job = device.running_job()
    found = judge.Findings([collect(None)]) if job is None else _found(job)
    problems = judge.problems(found)
    is_main = job is None or job.cluster.rank == 0
    report = judge.text(found, problems, judge.warnings(found)) if is_main else ""
    return CheckResult(not problems, judge.verdict(problems), report, job is None or job.cluster.local_rank == 0)


def _found(job: Job) -> judge.Findings:
    """Find out everything, the same on all ranks."""
    store, cluster = job.store, job.cluster
    facts = [Facts(**each) for each in store.gather("check/facts", asdict(collect(job)), _SECONDS)]
    hosts = list(dict.fromkeys(cluster.hosts))
    leaders = [cluster.hosts.index(host) for host in hosts]
    failed = {
        **measurements.unreachable(job, job.peers.addresses),
        **measurements.unreachable(job, job.server_addresses),
    }
    unreachable = [
        {int(rank): what for rank, what in each.items()} for each in store.gather("check/unreachable", failed, _SECONDS)
    ]
    engine, ports = explained(job, group_of(job, WORLD_GROUP)), open_ports(job)
    sharing = job.hosts.problems
    if any(unreachable):  # a collective would wait for the stall watch
        return judge.Findings(facts, engine, ports, sharing, unreachable)
    engines = _engines(job) if len(hosts) > 1 else []  # before the first tensor
    right = measurements.sum_is_right(job)
    within = measurements.within(job)
    store.barrier("check/within", _SECONDS)
    between = measurements.between(job, leaders, engines) if cluster.rank in leaders and engines else None
    measured = store.gather("check/speeds", [right, within, between], _SECONDS)
    return judge.Findings(
        facts,
        engine,
        ports,
        sharing,
        unreachable,
        _slowest(within for _, within, _ in measured),
        {name: _slowest(between[name] for *_, between in measured if between) for name in engines},
        job.hosts.engine,
        all(right for right, *_ in measured),
    )


def _engines(job: Job) -> list[str]:
    """Return the engines that can be measured between the hosts, that in use first; the same on all ranks."""
    found = [job.hosts.engine, *(["mpi"] if job.mpi_world else [])]
    if _has_server(job):
        found.append("tensorflow")
    return list(dict.fromkeys([*found, "tcp"]))


def _has_server(job: Job) -> bool:
    """Return whether TensorFlow's servers can be reached. They are started now if the engine doesn't need them,
    and if there are ports for them.
    """
    if job.server_addresses:
        return True
    ports, hosts = environment.NPU_DEVICE_PORT_RANGE.get(), job.cluster.hosts
    most = 2 * max(map(hosts.count, hosts)) + 1
    if job.hosts.late or (ports is not None and ports[1] - ports[0] + 1 < most):
        return False
    server.start(job)
    failed = measurements.unreachable(job, job.server_addresses)
    return not any(job.store.gather("check/servers", len(failed), _SECONDS))


def _slowest(seconds: Iterable[list[float] | None]) -> list[float]:
    """Return the most of all ranks for each size; empty if none has measured."""
    return [max(each) for each in zip(*(one for one in seconds if one is not None))]
