"""Run a check on one rank, together with the others, from opening to the verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from npu_device._src.check import judge, links, page, speeds
from npu_device._src.check.facts import Facts, collect
from npu_device._src.check.links import LinkSpeed
from npu_device._src.collectives.choice import explained
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
    report = page.text(found, problems, judge.warnings(found)) if is_main else ""
    return CheckResult(not problems, page.verdict(problems), report, runtime is None or runtime.cluster.local_rank == 0)


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
    engine, sharing = explained(runtime, group_of(runtime, WORLD_GROUP)), runtime.hosts.problems
    if any(unreachable):  # a collective would wait for the stall watch
        return judge.Findings(facts, engine, sharing, unreachable)
    leads, several = cluster.rank in leaders, len(hosts) > 1
    link = links.measure(runtime, leaders, _SECONDS) if leads and several else None
    right = speeds.sum_is_right(runtime)
    within = speeds.within(runtime)
    store.barrier("check/within", _SECONDS)
    between = speeds.between(runtime, leaders) if leads and several else None
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
        sharing,
        unreachable,
        found_links,
        _slowest(within for _, _, within, _ in measured),
        _slowest(between for *_, between in measured),
        all(right for _, right, *_ in measured),
    )


def _slowest(seconds: Iterable[list[float] | None]) -> list[float]:
    """Return the most of all ranks for each size; empty if none has measured."""
    return [max(each) for each in zip(*(one for one in seconds if one is not None))]
