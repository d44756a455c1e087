"""Judge what the ranks have found, each problem and warning with its remedy; the report of ``npurun check`` as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from npu_device._src.cluster.ports import is_loopback
from npu_device._src.cluster.time_limits import CLOCK_SECONDS
from npu_device._src.wording import counted, ranges

SIZES = {4: "4 B", 64 << 10: "64 KiB", 1 << 20: "1 MiB", 16 << 20: "16 MiB"}

_LEAST_MEMORY = 1 << 30  # bytes a rank; TensorFlow itself takes about half of that
_CLOSE = 1.1  # times the shortest time: as fast
_SLOW_LINK = 0.25  # of the speed that the interface claims; a core may be the limit of fast ones


@dataclass(frozen=True)
class Facts:
    """The facts of one rank. Serializable as JSON."""

    host: str  # name of its host in the job
    machine: str  # name of its host in the system
    kernel: str  # identifies the running kernel: the same on all ranks of a machine, in whatever container
    address: str  # address at which the others reach it
    interface: str | None  # name of the interface with this address; None if it is no address of this host
    bits: float | None  # bits per second of the interface; None if unknown
    versions: dict[str, str]  # of Python and of what is installed, by name
    cores: list[int]  # numbers of the cores that the process may use
    share: int  # how many of them are for this rank
    free: int  # bytes of memory that the machine has free
    clock: float | None  # seconds by which the clock of the host is ahead of that of rank 0; None if unknown


@dataclass(frozen=True)
class Findings:
    facts: Sequence[Facts]
    engine: str = ""  # how gradients will travel, and why
    ports: str = ""  # where the ranks serve whoever reaches them; "" if nowhere
    sharing: Sequence[str] = ()  # for each rank why it can't share memory with the lowest one of its host; "" if it can
    unreachable: Sequence[dict[int, str]] = ()  # for each rank those that it can't connect to: the address, and why
    within: Sequence[float] = ()  # seconds of an all_reduce on the slowest host, by size; empty if it has one rank
    between: dict[str, Sequence[float]] = field(default_factory=dict)  # the same among hosts, by engine
    in_use: str = ""  # the engine between hosts that the job uses
    right: bool = True  # False if a sum over all ranks was wrong

    @property
    def hosts(self) -> dict[str, list[int]]:
        return _ranks_by(facts.host for facts in self.facts)

    def name(self, rank: int) -> str:
        facts = self.facts[rank]
        return f"rank {rank} on host {facts.host} ({facts.machine})"

    @property
    def fastest(self) -> str:
        """Return the engine that is the fastest between hosts with the largest size; that in use, if it is close."""
        seconds = {name: each[-1] for name, each in self.between.items()}
        best = min(seconds, key=lambda name: seconds[name])
        return self.in_use if seconds.get(self.in_use, float("inf")) < _CLOSE * seconds[best] else best

    @property
    def link_speed(self) -> float:
        """Return the bits per second that the fastest engine sends from each host: 2(N-1)/N of the bytes, in a ring."""
        hosts = len(self.hosts)
        return 8 * max(SIZES) * 2 * (hosts - 1) / hosts / self.between[self.fastest][-1]


def _ranks_by(values: Iterable[str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def problems(found: Findings) -> list[str]:
    wrong_sum = (
        "an all_reduce over all ranks gave a wrong sum.\n"
        f"What to do: set NPU_DEVICE_BACKEND={'tcp' if found.in_use == 'tensorflow' else 'tensorflow'} or "
        "NPU_DEVICE_SHARED_MEMORY=off on all ranks and check again; report it as a bug."
    )
    different = _versions(found, ("Keras", "tf-keras"))
    return [*_blocked(found), *_loopback(found), *different, *([] if found.right else [wrong_sum])]


def warnings(found: Findings) -> list[str]:
    different = _versions(found, ("Python", "NumPy"))
    return [*different, *_not_shared(found), *_same_machine(found), *_conditions(found), *_slow_links(found)]


def _blocked(found: Findings) -> Iterator[str]:
    blocked: dict[tuple[str, str], tuple[int, int, str]] = {}  # the first ranks between two hosts
    for rank, failed in enumerate(found.unreachable):
        for other, what in failed.items():
            blocked.setdefault((found.facts[rank].host, found.facts[other].host), (rank, other, what))
    for (here, there), (rank, other, what) in blocked.items():
        back = f"host {there} can connect to host {here}"
        direction = "and not in the other direction either" if (there, here) in blocked else back
        yield (
            f"{found.name(rank)} can't connect to {found.name(other)} at {what}; {direction}.\n"
            f"Likely cause: a firewall on host {there}, or between the two, or an address of an internal network.\n"
            "What to do: let the hosts connect to all ports, or only to those of NPU_DEVICE_PORT_RANGE, "
            "set on all ranks; HCCL_SOCKET_IFNAME chooses another interface."
        )


def _loopback(found: Findings) -> Iterator[str]:
    for rank, facts in enumerate(found.facts):
        if is_loopback(facts.address) and any(other.kernel != facts.kernel for other in found.facts):
            yield (
                f"{found.name(rank)} is known to the others as {facts.address}, its own loopback.\n"
                "What to do: let HCCL_SOCKET_IFNAME name its interface to the network, or HCCL_IF_IP its address "
                "there, and check that host names don't resolve to the loopback (/etc/hosts)."
            )


def _versions(found: Findings, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        ranks = _ranks_by(facts.versions.get(name, "none") for facts in found.facts)
        if len(ranks) > 1:
            lines = "\n".join(f"  {version}: rank(s) {ranges(those)}" for version, those in ranks.items())
            yield f"the ranks have different versions of {name}:\n{lines}\nWhat to do: install the same one everywhere."


def _not_shared(found: Findings) -> Iterator[str]:
    for rank, why in enumerate(found.sharing):
        if why and len(found.hosts[found.facts[rank].host]) > 1:
            yield (
                f"{found.name(rank)} can't share memory with the others of its host: {why}. It uses the engine "
                f"between hosts ({found.in_use}), which is slower.\n"
                "What to do: start all ranks of a host as one user in one container."
            )


def _same_machine(found: Findings) -> Iterator[str]:
    for ranks in _ranks_by(facts.kernel for facts in found.facts).values():
        hosts = list(dict.fromkeys(found.facts[rank].host for rank in ranks))
        if len(hosts) > 1:
            yield (
                f"hosts {', '.join(hosts)} are the same machine: their ranks use the network, but could share memory."
                "\nWhat to do: start all ranks of a machine as one node, in one container."
            )


def _conditions(found: Findings) -> Iterator[str]:
    for host, ranks in found.hosts.items():
        facts = found.facts[ranks[0]]
        if facts.clock is not None and abs(facts.clock) > CLOCK_SECONDS:
            yield (
                f"the clock of host {host} ({facts.machine}) is {abs(facts.clock):.1f} s "
                f"{'ahead of' if facts.clock > 0 else 'behind'} that of rank 0: times in logs and files don't match.\n"
                "What to do: synchronize the clocks of the hosts (chrony, NTP)."
            )
        cores = len({core for rank in ranks for core in found.facts[rank].cores})
        if cores < len(ranks):
            yield (
                f"host {host} has {cores} core(s) for {len(ranks)} ranks: they wait for each other.\n"
                "What to do: start at most one rank per core."
            )
        free = min(found.facts[rank].free for rank in ranks)
        if free < _LEAST_MEMORY * len(ranks):
            yield (
                f"host {host} has {free / 2**30:.1f} GiB of free memory for {counted(len(ranks), 'rank')}.\n"
                "What to do: end other programs, or start fewer ranks."
            )


def _slow_links(found: Findings) -> Iterator[str]:
    rated = {facts.bits: facts for facts in found.facts if facts.bits is not None}
    if found.between and rated and found.link_speed < _SLOW_LINK * min(rated):
        facts = rated[min(rated)]
        yield (
            f"{facts.interface} of host {facts.host} is rated at {min(rated) / 1e9:g} Gbit/s, but the fastest engine "
            f"sends {found.link_speed / 1e9:.2g} Gbit/s.\nWhat to do: look for other traffic, a slower switch or cable "
            "between the hosts, and a limit of the virtual machine; HCCL_SOCKET_IFNAME chooses another interface."
        )


def text(found: Findings, problems: Sequence[str], warnings: Sequence[str]) -> str:
    ranks, hosts = counted(len(found.facts), "rank"), counted(len(found.hosts), "host")
    parts = [f"{ranks} on {hosts}: {verdict(problems)}", _hosts(found), _settings(found), _speeds(found)]
    for name, texts in ("problem", problems), ("warning", warnings):
        parts.append("\n".join(f"{name} {n}: " + each.replace("\n", "\n  ") for n, each in enumerate(texts, start=1)))
    return "\n\n".join(filter(None, parts))


def verdict(problems: Sequence[str]) -> str:
    return f"training would not work: {counted(len(problems), 'problem')}" if problems else "training would work"


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
    lines += [f"gradients travel through {found.engine}"] if found.engine else []
    return "\n".join([*lines, *([f"open ports: {found.ports}"] if found.ports else [])])


def _speeds(found: Findings) -> str:
    measured = {"within a host": found.within} if found.within else {}
    measured |= {f"between hosts, {name}": seconds for name, seconds in found.between.items()}
    columns = [[title, *(f"{1e3 * each:.3g} ms" for each in seconds)] for title, seconds in measured.items()]
    lines = [_table(list(zip(["all_reduce of", *SIZES.values()], *columns)))] if columns else []
    if found.between:
        fastest, speed = found.fastest, f"{found.link_speed / 1e9:.3g} Gbit/s"
        use = "which is in use" if fastest == found.in_use else f"with NPU_DEVICE_BACKEND={fastest} on all ranks"
        lines.append(f"fastest between these hosts: {fastest}, {use}; each host sends {speed}")
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
