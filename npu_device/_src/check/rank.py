"""Run a check on one rank, together with the others, from opening to the verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from npu_device._src import environment
from npu_device._src.check import check_page, judge, links, speeds
from npu_device._src.check.facts import Facts, collect
from npu_device._src.check.links import LinkSpeed
from npu_device._src.collectives.choice import explained, open_ports
from npu_device._src.collectives.engines.tensorflow import server
from npu_device._src.collectives.group import WORLD_GROUP, group_of
from npu_device._src.collectives.job import Job
from npu_device._src.training import device

_SECONDS = 120.0  # the longest wait for another rank, which measures meanwhile


@dataclass(frozen=True)
class CheckResult:
    """The result on one rank.

    Attributes:
        works: whether training would work; the same on all ranks.
        verdict: that in a line.
        report: everything; "" on all ranks but rank 0.
        leads: whether the rank is the lowest one of its host.
    """

    works: bool
    verdict: str
    report: str
    leads: bool


def check() -> CheckResult:
    """Open this rank's device, and check. Every rank of the job calls this."""
    device.open()
    runtime = device.cluster_runtime()
    found = judge.Findings([collect(None)]) if runtime is None else _found(runtime)
    problems = judge.problems(found)
    is_main = runtime is None or runtime.cluster.rank == 0
    report = check_page.text(found, problems, judge.warnings(found)) if is_main else ""
    return CheckResult(
        not problems, check_page.verdict(problems), report, runtime is None or runtime.cluster.local_rank == 0
    )


def _found(runtime: Job) -> judge.Findings:
    """Find out everything, the same on all ranks."""
    store, cluster = runtime.store, runtime.cluster
    facts = [Facts(**each) for each in store.gather("check/facts", asdict(collect(runtime)), _SECONDS)]
    hosts = list(dict.fromkeys(cluster.hosts))
    leaders = [cluster.hosts.index(host) for host in hosts]
    failed = {
        **links.unreachable(runtime, runtime.peers.addresses),
        **links.unreachable(runtime, runtime.server_addresses),
    }
    unreachable = [
        {int(rank): what for rank, what in each.items()} for each in store.gather("check/unreachable", failed, _SECONDS)
    ]
    engine, ports = explained(runtime, group_of(runtime, WORLD_GROUP)), open_ports(runtime)
    sharing = runtime.hosts.problems
    if any(unreachable):  # a collective would wait for the stall watch
        return judge.Findings(facts, engine, ports, sharing, unreachable)
    leads, several = cluster.rank in leaders, len(hosts) > 1
    link = links.measure(runtime, leaders, _SECONDS) if leads and several else None
    engines = _engines(runtime) if several else []  # before the first tensor
    right = speeds.sum_is_right(runtime)
    within = speeds.within(runtime)
    store.barrier("check/within", _SECONDS)
    between = speeds.between(runtime, leaders, engines) if leads and several else None
    mine = [asdict(link) if isinstance(link, LinkSpeed) else link, right, within, between]
    measured = store.gather("check/speeds", mine, _SECONDS)
    found_links = {
        host: link if isinstance(link, str) else LinkSpeed(**link)
        for host, (link, *_) in zip(hosts, (measured[rank] for rank in leaders))
        if link is not None
    }
    return judge.Findings(
        facts,
        engine,
        ports,
        sharing,
        unreachable,
        found_links,
        _slowest(within for _, _, within, _ in measured),
        {name: _slowest(between[name] for *_, between in measured if between) for name in engines},
        runtime.hosts.engine,
        all(right for _, right, *_ in measured),
    )


def _engines(runtime: Job) -> list[str]:
    """Return the engines that can be measured between the hosts, that in use first; the same on all ranks."""
    found = [runtime.hosts.engine, *(["mpi"] if runtime.mpi_world else [])]
    if _has_server(runtime):
        found.append("tensorflow")
    return list(dict.fromkeys([*found, "tcp"]))


def _has_server(runtime: Job) -> bool:
    """Return whether TensorFlow's servers can be reached. They are started now if the job's engine doesn't need them,
    and if there are ports for them.
    """
    if runtime.server_addresses:
        return True
    ports, hosts = environment.NPU_DEVICE_PORT_RANGE.get(), runtime.cluster.hosts
    most = 2 * max(map(hosts.count, hosts)) + 1
    if runtime.hosts.late or (ports is not None and ports[1] - ports[0] + 1 < most):
        return False
    server.start(runtime)
    failed = links.unreachable(runtime, runtime.server_addresses)
    return not any(runtime.store.gather("check/servers", len(failed), _SECONDS))


def _slowest(seconds: Iterable[list[float] | None]) -> list[float]:
    """Return the most of all ranks for each size; empty if none has measured."""
    return [max(each) for each in zip(*(one for one in seconds if one is not None))]
