"""The report of ``npurun check`` as text."""

from __future__ import annotations

from collections.abc import Sequence

from npu_device._src.check.judge import Findings
from npu_device._src.check.measurements import SIZES
from npu_device._src.cluster.frames import counted, ranges


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
    if found.engine:
        lines.append(f"gradients travel through {found.engine}")
    if found.ports:
        lines.append(f"open ports: {found.ports}")
    return "\n".join(lines)


def _speeds(found: Findings) -> str:
    columns = [["all_reduce of", *SIZES.values()]]
    if found.within:
        columns += _columns("within a host", found.within)
    for name, seconds in found.between.items():
        columns += _columns(f"between hosts, {name}", seconds)
    table = _table([list(row) for row in zip(*columns)])
    return f"{table}\n{_advice(found)}" if found.between else table


def _advice(found: Findings) -> str:
    """Return which engine is the fastest between the hosts, and what to set."""
    use = (
        "which is in use" if found.fastest == found.in_use else f"with NPU_DEVICE_BACKEND={found.fastest} on all ranks"
    )
    return f"fastest between these hosts: {found.fastest}, {use}; each host sends {found.link_speed / 1e9:.3g} Gbit/s"


def _columns(title: str, seconds: Sequence[float]) -> list[list[str]]:
    speeds = [f"{size / each / 1e9:.2f} GB/s" if size > 4 else "" for size, each in zip(SIZES, seconds)]
    return [[title, *(f"{1e3 * each:.3g} ms" for each in seconds)], ["", *speeds]]


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _listed(name: str, texts: Sequence[str]) -> str:
    return "\n".join(f"{name} {number}: " + each.replace("\n", "\n  ") for number, each in enumerate(texts, start=1))
