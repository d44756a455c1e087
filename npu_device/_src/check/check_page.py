"""The report of ``npurun check`` as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from npu_device._src.check.judge import Findings, fastest
from npu_device._src.check.links import LinkSpeed
from npu_device._src.check.speeds import SIZES
from npu_device._src.cluster.frames import counted, ranges

_UNITS = {4: "4 B", 64 << 10: "64 KiB", 1 << 20: "1 MiB", 16 << 20: "16 MiB"}


def text(found: Findings, problems: Sequence[str], warnings: Sequence[str]) -> str:
    """Return the whole report."""
    parts = [_headline(found, problems), _hosts(found), _settings(found)]
    if found.within or found.between:
        parts.append(_speeds(found))
    parts += [_listed(name, texts) for name, texts in (("problem", problems), ("warning", warnings)) if texts]
    return "\n\n".join(parts)


def verdict(problems: Sequence[str]) -> str:
    """Return whether training would work, in one line."""
    if problems:
        return f"training would not work: {counted(len(problems), 'problem')}"
    return "training would work"


def _headline(found: Findings, problems: Sequence[str]) -> str:
    return f"{counted(len(found.facts), 'rank')} on {counted(len(found.hosts), 'host')}: {verdict(problems)}"


def _hosts(found: Findings) -> str:
    rows = [["host", "machine", "ranks", "address", "interface", "cores per rank", "free memory", "clock"]]
    for host, ranks in found.hosts.items():
        facts = found.facts[ranks[0]]
        interface = facts.interface or "of another host"
        if facts.bits is not None:
            interface += f", {facts.bits / 1e9:g} Gbit/s"
        ahead = "unknown" if facts.clock is None else f"{1e3 * facts.clock:+.1f} ms" if 0 not in ranks else "rank 0's"
        cores, memory = str(facts.share), f"{facts.free / 2**30:.1f} GiB"
        rows.append([host, facts.machine, ranges(ranks), facts.address, interface, cores, memory, ahead])
    return _table(rows)


def _settings(found: Findings) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found.facts[0].versions.items())
    same = all(facts.versions == found.facts[0].versions for facts in found.facts)
    lines = [f"{'all ranks run' if same else 'rank 0 runs'} {versions}"]
    if len(found.hosts) > 1:
        chosen = dict.fromkeys(facts.chosen for facts in found.facts)
        lines.append(f"addresses chosen by {' and '.join(chosen)}")
    if found.engine:
        lines.append(f"gradients travel through {found.engine}")
    if found.ports:
        lines.append(f"open ports: {found.ports}")
    for host, link in found.links.items():
        if isinstance(link, LinkSpeed):
            speed = f"{8 * link.speed / 1e9:.3g} Gbit/s, {1e6 * link.round_trip:.0f} us round trip"
            lines.append(f"link from {host} to the next host, over bare sockets: {speed}")
    return "\n".join(lines)


def _speeds(found: Findings) -> str:
    """Return the table of measured times. The limit within a host is a single copy of the bytes, between hosts a ring
    over bare sockets at the speed of the slowest link.
    """
    columns: list[list[str]] = [["all_reduce of", *(_UNITS[size] for size in SIZES)]]
    if found.within:
        copy = statistics.median(facts.copy for facts in found.facts)
        columns += _columns("within a host", found.within)
        columns.append(_limits("a copy", [size / copy if size > 4 else None for size in SIZES]))
    if found.between:
        limits: list[float | None] = [None] * len(SIZES)
        links = [link for link in found.links.values() if isinstance(link, LinkSpeed)]
        if links:
            hosts, one_way = len(found.hosts), max(link.round_trip for link in links) / 2
            # In a ring, each host sends 2(N-1) pieces of 1/N of the bytes to its neighbour, one by one.
            limits = [2 * (hosts - 1) * (one_way + size / hosts / min(link.speed for link in links)) for size in SIZES]
        for name, seconds in found.between.items():
            columns += _columns(f"between hosts, {name}", seconds)
        columns.append(_limits("the wire", limits))
    table = _table([list(row) for row in zip(*columns)])
    return f"{table}\n{_advice(found)}" if len(found.between) > 1 else table


def _advice(found: Findings) -> str:
    """Return which engine is the fastest between the hosts, and what to set."""
    best = fastest(found)
    if best == found.in_use:
        return f"fastest between these hosts: {best}, which is in use"
    return f"fastest between these hosts: {best}. To use it, set NPU_DEVICE_BACKEND={best} on all ranks"


def _columns(title: str, seconds: Sequence[float]) -> list[list[str]]:
    speeds = [f"{size / each / 1e9:.2f} GB/s" if size > 4 else "" for size, each in zip(SIZES, seconds)]
    return [[title, *map(_milliseconds, seconds)], ["", *speeds]]


def _limits(title: str, seconds: Sequence[float | None]) -> list[str]:
    return [title, *("" if each is None else _milliseconds(each) for each in seconds)]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _listed(name: str, texts: Sequence[str]) -> str:
    return "\n".join(f"{name} {number}: " + each.replace("\n", "\n  ") for number, each in enumerate(texts, start=1))
