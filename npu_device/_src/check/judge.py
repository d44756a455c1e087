"""Judge what the ranks have found, each problem and warning with its remedy; the report of ``npurun check`` as text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from npu_device._src.check.core_distance import SHARES_CACHE_BELOW
from npu_device._src.cluster.ports import is_loopback
from npu_device._src.cluster.time_limits import CLOCK_SECONDS
from npu_device._src.machine.core_sets import described
from npu_device._src.machine.topology import Core, Machine, Quota
from npu_device._src.wording import counted, ranges

SIZES = {4: "4 B", 64 << 10: "64 KiB", 1 << 20: "1 MiB", 16 << 20: "16 MiB"}

_DOMAINS = {"socket": "socket", "numa": "NUMA node", "l3cache": "L3 cache"}
_LEAST_MEMORY = 1 << 30  # bytes a rank; TensorFlow itself takes about half of that
_AS_FAST = 1.1  # an engine within this factor of the shortest time is as fast
_SLOWER = 3  # measured for 100 MiB on two ranks (docs/benchmarks.md)
# A link is slow below this fraction of the speed that its interface claims: a core may be the limit of fast ones.
_SLOW_LINK = 0.25


@dataclass(frozen=True)
class Facts:
    """The facts of one rank. Serializable as JSON."""

    host: str  # name of its host in the job
    machine: str  # name of its host in the system
    kernel: str  # identifies the running kernel: the same on all ranks of a machine, in whatever container
    address: str  # address at which the others reach it
    # Name of the interface with this address; None if it is no address of this host.
    interface: str | None
    bits: float | None  # bits per second of the interface; None if unknown
    versions: dict[str, str]  # versions of Python and of installed packages, by name
    layout: list[list]  # the cores that the process may use, each as the attributes of a Core
    share: int  # hardware threads of those cores that are for this rank
    quota: float | None  # CPUs whose time the process gets, None for all
    memory: int  # bytes of the machine or container
    free: int  # bytes of memory that it has free
    # Seconds by which the clock of the host is ahead of that of rank 0; None if unknown.
    clock: float | None

    @property
    def cores(self) -> list[int]:
        """Return the numbers of the threads of all cores that the process may use."""
        return sorted(cpu for core in self.physical_cores() for cpu in core.cpus)

    def physical_cores(self) -> list[Core]:
        return [Core(first_cpu, tuple(cpus), *place) for first_cpu, cpus, *place in self.layout]


@dataclass(frozen=True)
class CheckedJob:
    """What the ranks have found together. Lists have an item for each rank."""

    facts: Sequence[Facts]
    engine: str = ""  # how gradients will travel, and why
    ports: str = ""  # addresses at which the ranks serve whoever reaches them; "" if nowhere
    # Why each rank can't share memory with the lowest one of its host; "" if it can.
    sharing: Sequence[str] = ()
    # The ranks that each rank can't connect to: the address, and why.
    unreachable: Sequence[dict[int, str]] = ()
    # Seconds of an all_reduce on the slowest host, by size; empty if each host has one rank.
    within: Sequence[float] = ()
    # The same among hosts, by engine.
    between: dict[str, Sequence[float]] = field(default_factory=dict)
    engine_in_use: str = ""  # the engine between hosts that the job uses
    # nanoseconds of an exchange between cores of two ranks of a host, the longest; None if no two ranks share a host
    distance: float | None = None
    is_right: bool = True  # False if a sum over all ranks was wrong

    @property
    def hosts(self) -> dict[str, list[int]]:
        return ranks_by(facts.host for facts in self.facts)

    def name(self, rank: int) -> str:
        facts = self.facts[rank]
        return f"rank {rank} on host {facts.host} ({facts.machine})"

    def cores_of(self, host: str) -> list[int]:
        """Return a core of each rank of a host, as far as they have different ones."""
        facts = [self.facts[rank] for rank in self.hosts[host]]
        are_bound = len({tuple(rank.cores) for rank in facts}) > 1
        if are_bound:
            return list(dict.fromkeys(rank.cores[0] for rank in facts))
        cores = facts[0].cores
        apart = max(1, len(cores) // len(facts))
        return cores[::apart][: len(facts)]

    def machine_of(self, host: str) -> Machine:
        """Return all cores that the ranks of a host may use."""
        cores: dict[int, Core] = {}
        for rank in self.hosts[host]:
            for core in self.facts[rank].physical_cores():
                cpus = {*core.cpus, *cores.setdefault(core.first_cpu, core).cpus}
                cores[core.first_cpu] = replace(core, cpus=tuple(sorted(cpus)))
        quota = None
        cpu_time = self.facts[self.hosts[host][0]].quota
        if cpu_time is not None:
            quota = Quota(cpu_time, "")
        return Machine(tuple(cores.values()), quota)

    @property
    def fastest(self) -> str:
        """Return the engine that is the fastest between hosts with the largest size; that in use, if it is close."""
        by_engine = {engine: seconds[-1] for engine, seconds in self.between.items()}
        fastest = min(by_engine, key=lambda engine: by_engine[engine])
        if by_engine.get(self.engine_in_use, float("inf")) < _AS_FAST * by_engine[fastest]:
            return self.engine_in_use
        return fastest

    @property
    def link_speed(self) -> float:
        """Return the bits per second that the fastest engine sends from each host: 2(N-1)/N of the bytes, in a ring."""
        hosts = len(self.hosts)
        sent = max(SIZES) * 2 * (hosts - 1) / hosts  # bytes
        return 8 * sent / self.between[self.fastest][-1]


def ranks_by(keys: Iterable[str]) -> dict[str, list[int]]:
    """Return the ranks with equal keys together; there is a key for each rank."""
    ranks: dict[str, list[int]] = {}
    for rank, key in enumerate(keys):
        ranks.setdefault(key, []).append(rank)
    return ranks


def problems(job: CheckedJob) -> list[str]:
    return [
        *_blocked(job),
        *_loopback(job),
        *_versions(job, ("Keras", "tf-keras")),
        *_wrong_sum(job),
    ]


def warnings(job: CheckedJob) -> list[str]:
    return [
        *_versions(job, ("Python", "NumPy")),
        *_not_shared(job),
        *_same_machine(job),
        *_conditions(job),
        *_slow_links(job),
    ]


def _wrong_sum(job: CheckedJob) -> Iterator[str]:
    if not job.is_right:
        alternative = "tensorflow"
        if job.engine_in_use == "tensorflow":
            alternative = "tcp"
        yield (
            "an all_reduce over all ranks gave a wrong sum.\n"
            f"What to do: set NPU_DEVICE_BACKEND={alternative} or "
            "NPU_DEVICE_SHARED_MEMORY=off on all ranks and check again; report it as a bug."
        )


def _blocked(job: CheckedJob) -> Iterator[str]:
    """Yield a problem for each pair of hosts whose ranks can't connect, with the ranks that tried first."""
    blocked: dict[tuple[str, str], tuple[int, int, str]] = {}
    for rank, failures in enumerate(job.unreachable):
        for target, failure in failures.items():
            hosts = job.facts[rank].host, job.facts[target].host
            blocked.setdefault(hosts, (rank, target, failure))
    for (source_host, host), (rank, target, failure) in blocked.items():
        direction = f"host {host} can connect to host {source_host}"
        if (host, source_host) in blocked:
            direction = "and not in the other direction either"
        yield (
            f"{job.name(rank)} can't connect to {job.name(target)} at {failure}; {direction}.\n"
            f"Likely cause: a firewall on host {host}, or between the two, or an address of an internal network.\n"
            "What to do: let the hosts connect to all ports, or only to those of NPU_DEVICE_PORT_RANGE, "
            "set on all ranks; HCCL_SOCKET_IFNAME chooses another interface."
        )


def _loopback(job: CheckedJob) -> Iterator[str]:
    is_one_machine = len({facts.kernel for facts in job.facts}) == 1
    for rank, facts in enumerate(job.facts):
        if is_loopback(facts.address) and not is_one_machine:
            yield (
                f"{job.name(rank)} is known to the others as {facts.address}, its own loopback.\n"
                "What to do: let HCCL_SOCKET_IFNAME name its interface to the network, or HCCL_IF_IP its address "
                "there, and check that host names don't resolve to the loopback (/etc/hosts)."
            )


def _versions(job: CheckedJob, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        by_version = ranks_by(facts.versions.get(name, "none") for facts in job.facts)
        if len(by_version) > 1:
            lines = "\n".join(
                f"  {version}: rank(s) {ranges(ranks)}" for version, ranks in by_version.items()
            )
            yield f"the ranks have different versions of {name}:\n{lines}\nWhat to do: install the same one everywhere."


def _not_shared(job: CheckedJob) -> Iterator[str]:
    for rank, reason in enumerate(job.sharing):
        if reason and len(job.hosts[job.facts[rank].host]) > 1:
            yield (
                f"{job.name(rank)} can't share memory with the others of its host: {reason}. It uses the engine "
                f"between hosts ({job.engine_in_use}), which is slower.\n"
                "What to do: start all ranks of a host as one user in one container."
            )


def _same_machine(job: CheckedJob) -> Iterator[str]:
    for ranks in ranks_by(facts.kernel for facts in job.facts).values():
        hosts = list(dict.fromkeys(job.facts[rank].host for rank in ranks))
        if len(hosts) > 1:
            yield (
                f"hosts {', '.join(hosts)} are the same machine: their ranks use the network, but could share memory."
                "\nWhat to do: start all ranks of a machine as one node, in one container."
            )


def _conditions(job: CheckedJob) -> Iterator[str]:
    """Yield what is wrong with single hosts: the clock, too few cores, too little memory."""
    for host, ranks in job.hosts.items():
        facts = job.facts[ranks[0]]
        if facts.clock is not None and abs(facts.clock) > CLOCK_SECONDS:
            yield (
                f"the clock of host {host} ({facts.machine}) is {abs(facts.clock):.1f} s "
                f"{'ahead of' if facts.clock > 0 else 'behind'} that of rank 0: times in logs and files don't match.\n"
                "What to do: synchronize the clocks of the hosts (chrony, NTP)."
            )
        yield from _crowded(job, host, ranks)
        free = min(job.facts[rank].free for rank in ranks)
        if free < _LEAST_MEMORY * len(ranks):
            yield (
                f"host {host} has {free / 2**30:.1f} GiB of free memory for {counted(len(ranks), 'rank')}.\n"
                "What to do: end other programs, or start fewer ranks."
            )


def _crowded(job: CheckedJob, host: str, ranks: Sequence[int]) -> Iterator[str]:
    """Yield what makes the ranks of a host wait for each other's cores."""
    machine = job.machine_of(host)
    if len(machine.cores) < len(ranks):
        yield (
            f"host {host} has {len(machine.cores)} core(s) for {len(ranks)} ranks: they wait for each other.\n"
            "What to do: start at most one rank per core."
        )
    if machine.quota is not None and machine.is_limited:
        yield (
            f"the processes on host {host} get the time of {machine.quota.cpus:g} of its {len(machine.cores)} cores "
            "(a quota).\nWhat to do: raise the limit of the container if more is to be used; TensorFlow has fewer "
            "threads, so that they aren't stopped in turn."
        )
    sets = {rank: job.facts[rank].physical_cores() for rank in ranks}
    cpus = {rank: set(job.facts[rank].cores) for rank in ranks}
    numbers = {rank: {core.first_cpu for core in sets[rank]} for rank in ranks}
    caches = {rank: {core.l3cache for core in sets[rank]} for rank in ranks}
    share_caches = True
    for rank, other in itertools.combinations(ranks, 2):
        # Ranks that have the same cores aren't bound.
        if cpus[rank] & cpus[other]:
            continue
        share_caches &= not caches[rank].isdisjoint(caches[other])
        common = numbers[rank] & numbers[other]
        if common:
            yield (
                f"ranks {rank} and {other} on host {host} have threads of the same core(s), {ranges(common)}: they "
                "slow each other down.\nWhat to do: give npurun --bind-to core, which divides whole cores."
            )
    if not share_caches:
        yield (
            f"no cache joins the cores of all ranks on host {host}: sums of large tensors take up to {_SLOWER} times "
            "as long as with one.\nWhat to do: nothing if each rank needs the cores of its own cache or NUMA node; "
            "npurun speed compares."
        )


def _slow_links(job: CheckedJob) -> Iterator[str]:
    by_rate = {facts.bits: facts for facts in job.facts if facts.bits is not None}
    if not job.between or not by_rate:
        return
    rate = min(by_rate)
    if job.link_speed < _SLOW_LINK * rate:
        facts = by_rate[rate]
        yield (
            f"{facts.interface} of host {facts.host} is rated at {rate / 1e9:g} Gbit/s, but the fastest engine "
            f"sends {job.link_speed / 1e9:.2g} Gbit/s.\nWhat to do: look for other traffic, a slower switch or cable "
            "between the hosts, and a limit of the virtual machine; HCCL_SOCKET_IFNAME chooses another interface."
        )


def text(job: CheckedJob, problems: Sequence[str], warnings: Sequence[str]) -> str:
    """Return the report: the verdict, tables of hosts and speeds, then problems and warnings."""
    ranks = counted(len(job.facts), "rank")
    hosts = counted(len(job.hosts), "host")
    paragraphs = [f"{ranks} on {hosts}: {verdict(problems)}", _hosts(job)]
    paragraphs.append("\n".join(_machines(job)))
    paragraphs += [_settings(job), _speeds(job)]
    paragraphs += [_numbered("problem", problems), _numbered("warning", warnings)]
    return "\n\n".join(filter(None, paragraphs))


def _numbered(noun: str, texts: Sequence[str]) -> str:
    indented = [text.replace("\n", "\n  ") for text in texts]
    return "\n".join(f"{noun} {number}: {text}" for number, text in enumerate(indented, start=1))


def verdict(problems: Sequence[str]) -> str:
    if problems:
        return f"training would not work: {counted(len(problems), 'problem')}"
    return "training would work"


def _hosts(job: CheckedJob) -> str:
    rows = [
        [
            "host",
            "machine",
            "ranks",
            "address",
            "interface",
            "cores per rank",
            "free memory",
            "clock",
        ]
    ]
    for host, ranks in job.hosts.items():
        facts = job.facts[ranks[0]]
        interface = facts.interface or "of another host"
        if facts.bits is not None:
            interface += f", {facts.bits / 1e9:g} Gbit/s"
        cores = str(facts.share)
        memory = f"{facts.free / 2**30:.1f} GiB"
        clock = _clock(facts, ranks)
        names = [host, facts.machine, ranges(ranks), facts.address, interface]
        rows.append([*names, cores, memory, clock])
    return _table(rows)


def _machines(job: CheckedJob) -> Iterator[str]:
    """Yield what each host is made of, and the cores of each rank that doesn't share all of them."""
    for host, ranks in job.hosts.items():
        machine = job.machine_of(host)
        facts = [job.facts[rank] for rank in ranks]
        amounts = []
        for domain, noun in _DOMAINS.items():
            amounts.append(counted(len(machine.domains(domain)), noun))
        amounts.append(counted(len(machine.cores), "core"))
        threads = sum(len(core.cpus) for core in machine.cores)
        amounts.append(counted(threads, "thread"))
        amounts.append(f"{facts[0].memory / 2**30:.1f} GiB")
        yield f"{host}: {', '.join(amounts)}"
        sets = {tuple(rank.cores) for rank in facts}
        if len(sets) > 1:
            for rank in ranks:
                core_set = tuple(job.facts[rank].physical_cores())
                yield f"  rank {rank}: {described(core_set, machine)}"


def _clock(facts: Facts, ranks: Sequence[int]) -> str:
    if facts.clock is None:
        return "unknown"
    if 0 in ranks:
        return "rank 0's"
    return f"{1e3 * facts.clock:+.1f} ms"


def _settings(job: CheckedJob) -> str:
    versions_of_first = job.facts[0].versions
    versions = ", ".join(f"{name} {version}" for name, version in versions_of_first.items())
    subject = "rank 0 runs"
    if all(facts.versions == versions_of_first for facts in job.facts):
        subject = "all ranks run"
    lines = [f"{subject} {versions}"]
    if job.engine:
        lines.append(f"gradients travel through {job.engine}")
    if job.ports:
        lines.append(f"open ports: {job.ports}")
    return "\n".join(lines)


def _speeds(job: CheckedJob) -> str:
    columns = []
    if job.within:
        columns.append(_column("within a host", job.within))
    for engine, seconds in job.between.items():
        columns.append(_column(f"between hosts, {engine}", seconds))
    lines = []
    if columns:
        heads = ["all_reduce of", *SIZES.values()]
        rows = list(zip(heads, *columns))
        lines.append(_table(rows))
    if job.distance is not None:
        lines.append(_cores(job.distance))
    if job.between:
        use = "which is in use"
        if job.fastest != job.engine_in_use:
            use = f"with NPU_DEVICE_BACKEND={job.fastest} on all ranks"
        speed = f"{job.link_speed / 1e9:.3g} Gbit/s"
        lines.append(f"fastest between these hosts: {job.fastest}, {use}; each host sends {speed}")
    return "\n".join(lines)


def _cores(distance: float) -> str:
    time = f"a value takes {distance:.0f} ns between the cores of two ranks and back"
    if distance < SHARES_CACHE_BELOW:
        return f"{time}: they share a cache"
    return f"{time}: they share no cache, so sums of large tensors take up to {_SLOWER} times as long as if they did"


def _column(title: str, times: Sequence[float]) -> list[str]:
    return [title, *(f"{1e3 * seconds:.3g} ms" for seconds in times)]


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines)
