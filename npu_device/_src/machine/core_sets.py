"""Which cores each rank of a host gets, with mpirun's words (``--bind-to``)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from npu_device._src.machine.topology import Core, Machine
from npu_device._src.wording import counted, ranges

NONE = "none"
AUTO = "auto"
CORE = "core"
_DOMAINS = {"numa": "NUMA node", "socket": "socket", "l3cache": "L3 cache"}
BINDINGS = (NONE, CORE, "l3cache", "numa", "socket", AUTO)

CoreSet = tuple[Core, ...]


def core_sets(machine: Machine, ranks: int, binding: str) -> list[CoreSet]:
    """Return equal, disjoint sets of whole cores, one for each rank; none if nothing is to be bound.

    Raises:
        ValueError: the cores, or the domains that a set must not cross, can't be divided among the ranks.
    """
    if binding == NONE or ranks == 1:
        return []
    if binding == AUTO:
        return _widest_sets(machine, ranks)
    # The domain of ``core`` is the whole host.
    domains = machine.domains(binding)
    noun = _DOMAINS.get(binding, "host")
    if ranks % len(domains):
        raise ValueError(
            f"--bind-to {binding}: {counted(ranks, 'rank')} can't be divided equally among the "
            f"{counted(len(domains), noun)} of this host.\n"
            f"What to do: start a multiple of {len(domains)} ranks, or give --bind-to core."
        )
    share = ranks // len(domains)
    count = min(map(len, domains)) // share
    if not count:
        raise ValueError(
            f"--bind-to {binding}: there is no core for each of {counted(ranks, 'rank')}: this process may use "
            f"{counted(len(machine.cores), 'core')}.\nWhat to do: start fewer ranks, or give --bind-to none."
        )
    # The sets are equal, since the slowest rank decides. Some cores may be left over.
    sets = []
    for domain in domains:
        for start in range(0, share * count, count):
            sets.append(tuple(domain[start : start + count]))
    return sets


def _widest_sets(machine: Machine, ranks: int) -> list[CoreSet]:
    """Return the sets of the widest level with several domains, among which the ranks can be divided; none without."""
    for level in ("socket", "numa", "l3cache"):
        if len(machine.domains(level)) > 1:
            with contextlib.suppress(ValueError):
                return core_sets(machine, ranks, level)
    return []


def cpus_of(core_set: CoreSet) -> list[int]:
    """Return the numbers of all threads of cores."""
    return sorted(cpu for core in core_set for cpu in core.cpus)


def described(core_set: CoreSet, machine: Machine) -> str:
    """Return the CPUs of a set, and the domain around it: ``cores 0-15 (NUMA node 0)``."""
    text = f"cores {ranges(cpus_of(core_set))}"
    # The name that says most about memory comes first.
    for level, noun in _DOMAINS.items():
        numbers = {getattr(core, level) for core in core_set}
        if len(numbers) == 1 and len(machine.domains(level)) > 1:
            # A cache has no number to show.
            if level == "l3cache":
                return f"{text} (one L3 cache)"
            return f"{text} ({noun} {numbers.pop()})"
    return text


def threads_of_rank(machine: Machine, ranks: int, sets: Sequence[CoreSet]) -> int | None:
    """Return how many threads TensorFlow is to have on each rank of this host, if they are bound or there is a quota;
    None if nothing is known better than the number of CPUs.
    """
    # Cores count, not their threads: the second thread adds little to what TensorFlow computes.
    limits = [len(core_set) for core_set in sets[:1]]
    if machine.quota is not None and machine.is_limited:
        limits.append(max(1, int(machine.quota.cpus / ranks)))
    return min(limits, default=None)
