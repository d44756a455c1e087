"""Record which ranks have come to the rendezvous, which are missing, and what doesn't match. Knows no sockets.

Source of the numbering without a rank table: Ascend's CM_* scheme (numeric order of host address, then device id).
"""

from __future__ import annotations

import ipaddress
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Union

from npu_device._src.cluster.time_limits import LONGEST_WAIT_SECONDS
from npu_device._src.wording import MOST_RANKS

_UNKNOWN_SHOWN = 5
_MISSING_SHOWN = 100
_MOST_GONE = 1000  # ranks of which it is remembered that they came and left, and of other jobs

# Must be unique in the job: the rank, or host and device if the hub numbers the ranks.
_Key = Union[int, tuple[str, int]]


@dataclass(frozen=True)
class Hello:
    """How a rank describes itself; ``settings`` are the environment variables that must be the same on all ranks."""

    job_id: str
    scheme: str
    world_size: int
    rank: int | None  # its rank; None when the hub numbers the ranks
    device_id: int
    host_key: str  # name of its host; "" for the address that the hub sees
    host: str | None  # address the others use to reach it; None for the address that the hub sees
    is_chief: bool  # True for the rank on whose host the others meet
    seconds: float  # how long it waits for the others
    versions: dict[str, str]  # versions that must be the same on all ranks, by name
    settings: dict[str, str]
    machine: str  # host name of the system that it runs on
    pid: int
    started: str = ""  # when that process started, for its children
    ancestors: tuple[tuple[int, str], ...] = ()  # number and start time of the processes that have started it
    candidate: int | None = None  # one of them, which may come as the rank itself

    @classmethod
    def read(cls, fields: Any) -> Hello:
        """Parse the hello in a message; ValueError, LookupError or TypeError if it is not a valid one."""
        kinds = {
            **dict.fromkeys(("job_id", "scheme", "host_key", "machine"), (str,)),
            **dict.fromkeys(("world_size", "device_id", "pid"), (int,)),
            **{"rank": (int, type(None)), "host": (str, type(None)), "is_chief": (bool,), "seconds": (int, float)},
            **dict.fromkeys(("versions", "settings"), (dict,)),
        }
        for name, allowed in kinds.items():
            if type(fields[name]) not in allowed:
                raise ValueError(f"unexpected {name}")
        for texts in (fields["versions"], fields["settings"]):
            if not all(isinstance(text, str) for text in texts.values()):
                raise ValueError("unexpected versions or settings")
        if not 0 < fields["world_size"] <= MOST_RANKS:
            raise ValueError("no such world size")
        if fields["rank"] is not None and not 0 <= fields["rank"] < fields["world_size"]:
            raise ValueError("no such rank")
        if not 0 <= fields["seconds"] <= LONGEST_WAIT_SECONDS:  # nor NaN
            raise ValueError("no such time")
        # Other versions may send more fields, or fewer of the following; the versions show the difference.
        started, ancestors = str(fields.get("started", "")), fields.get("ancestors", ())
        candidate = fields.get("candidate")
        if not all(map(_is_process, ancestors)) or not isinstance(candidate, (int, type(None))):
            raise ValueError("unexpected ancestors")
        known = {name: fields[name] for name in kinds}
        return cls(**known, started=started, ancestors=tuple(map(tuple, ancestors)), candidate=candidate)

    @property
    def name(self) -> str:
        return f"device {self.device_id}" if self.rank is None else f"rank {self.rank}"

    @property
    def process(self) -> str:
        return f"machine {self.machine}, pid {self.pid}"

    def is_child_of(self, other: Hello) -> bool:
        return self.machine == other.machine and other.started != "" and (other.pid, other.started) in self.ancestors

    @property
    def too_late(self) -> str:
        """Return the text of the error for a process one of whose children has become the rank."""
        return (
            f"{self.name}: a process that this one ({self.process}) has started called npu.open() long before it, and "
            "has become the rank.\nWhat to do: call npu.open() before starting processes that import the same script, "
            "or start them without the variables of the job."
        )

    @property
    def signature(self) -> tuple[Any, ...]:
        return self.scheme, self.world_size, *(tuple(sorted(each.items())) for each in (self.versions, self.settings))


def _is_process(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and list(map(type, value)) == [int, str]


def start_time(pid: int) -> str:
    """Return when a process started, in ticks of the kernel, as numbers of processes are used again; "" if unknown."""
    return _parent_and_start(pid)[1]


def ancestors() -> list[tuple[int, str]]:
    """Return number and start time of the parent of this process, of its parent, and so on, as far as known."""
    found: list[tuple[int, str]] = []
    pid = os.getppid()
    while pid > 0 and len(found) < 50:
        parent, started = _parent_and_start(pid)
        if not started:
            break
        found.append((pid, started))
        pid = parent
    return found


def _parent_and_start(pid: int) -> tuple[int, str]:
    """Read two fields behind the name of the program (``man proc_pid_stat``)."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return int(fields[1]), fields[19]
    except (OSError, IndexError, ValueError):
        return 0, ""


@dataclass(frozen=True)
class Arrival:
    """A rank that has come."""

    hello: Hello
    host: str  # name of its host
    seen_at: str | None  # its address as the hub sees it; None when it is on the hub's host

    @property
    def name(self) -> str:
        return f"{self.hello.name} on host {self.host}"

    @property
    def key(self) -> _Key:
        return (self.host, self.hello.device_id) if self.hello.rank is None else self.hello.rank


class Roster:
    """The ranks of a job. The hello of the chief is the reference, until the chief has come the first one."""

    def __init__(self, job_id: str, expected_hosts: Sequence[str]) -> None:
        self._job_id = job_id
        self._expected_hosts = expected_hosts
        self._present: dict[_Key, list[Arrival]] = {}
        self._left: dict[_Key, Arrival] = {}
        self._signatures: Counter[tuple[Any, ...]] = Counter()
        self._others: dict[str, None] = {}
        self._unknown_clients: dict[str, str] = {}
        self._chief: Hello | None = None
        self._first: Hello | None = None
        self._count = 0

    @property
    def reference(self) -> Hello | None:
        """Return the hello that the others are compared with; None while no rank has come."""
        return self._chief or self._first

    def refusal(self, hello: Hello, seen_at: str) -> str | None:
        """Return the text of the error for a rank of another job; None for a rank of this job."""
        if hello.job_id == self._job_id:
            return None
        who = f"{hello.process}, from {seen_at}"
        if len(self._others) < _MOST_GONE:
            self._others[f"{hello.name} of another job, {hello.job_id!r}: refused ({who})"] = None
        place = "" if self.reference is None else f" (its chief: {self.reference.process})"
        return (
            f"{hello.name} of job {hello.job_id!r} came to the meeting point of another job, {self._job_id!r}{place}.\n"
            "Likely cause: two jobs use the same port, or JOB_ID is not the same on all ranks of one job.\n"
            "What to do: give each job its own port, and all ranks of a job the same JOB_ID."
        )

    def has(self, arrival: Arrival) -> bool:
        return arrival.key in self._present

    def add(self, arrival: Arrival) -> None:
        hello = arrival.hello
        if not self._present:
            self._first = self._chief = None
        self._first = self._first or hello
        if hello.is_chief:
            self._chief = self._chief or hello
        self._present.setdefault(arrival.key, []).append(arrival)
        self._signatures[hello.signature] += 1
        self._count += 1

    def remove(self, arrival: Arrival) -> None:
        """Remove a rank that disconnected early: its process has ended, or it will reconnect."""
        same = self._present[arrival.key]
        same.remove(arrival)
        if not same:
            del self._present[arrival.key]
        self._signatures -= Counter([arrival.hello.signature])
        self._count -= 1
        self._left[arrival.key] = arrival
        if len(self._left) > _MOST_GONE:
            del self._left[next(iter(self._left))]
        hellos = [other.hello for other in self._arrivals()] or [arrival.hello]
        self._first = hellos[0] if arrival.hello is self._first else self._first
        if arrival.hello is self._chief:
            self._chief = next((hello for hello in hellos if hello.is_chief), None)

    def note_unknown_client(self, address: str, what: str) -> None:
        self._unknown_clients.pop(address, None)
        self._unknown_clients[address] = what
        if len(self._unknown_clients) > _UNKNOWN_SHOWN:
            del self._unknown_clients[next(iter(self._unknown_clients))]

    @property
    def is_crowded(self) -> bool:
        """Return True if so many have come that more can't tell anything new."""
        return self._count > 0 and self._count >= 2 * self._size + _MOST_GONE

    @property
    def contradictory(self) -> bool:
        """Return True if the ranks that have come can't form one job."""
        return len(self._signatures) > 1 or self._count > len(self._present)

    @property
    def complete(self) -> bool:
        return self.reference is not None and self._count == self._size and not self.contradictory

    @property
    def _size(self) -> int:
        assert self.reference is not None
        return self.reference.world_size

    @property
    def _numbers_ranks(self) -> bool:
        return self.reference is not None and self.reference.rank is None

    def _arrivals(self) -> list[Arrival]:
        return [arrival for same in self._present.values() for arrival in same]

    def in_order(self) -> list[Arrival]:
        """Return the arrivals by rank. Without a rank table, they get their numbers here."""
        return sorted((same[0] for same in self._present.values()), key=_order)

    def missing(self) -> str:
        if self._numbers_ranks:
            return f"{self._absent()} of {self._size} ranks"
        ranks = [self._rank_name(rank) for rank in range(self._size) if rank not in self._present]
        return ", ".join(ranks[:10]) + (f" and {len(ranks) - 10} more" if len(ranks) > 10 else "")

    def complaint(self) -> str:
        """Return the text of the error: what happened, one line per rank, likely cause, what to do."""
        assert self.reference is not None
        found = {kind for arrival in self._arrivals() for kind, _ in self._differences(arrival.hello)}
        found |= {"doubled rank"} if self._count > len(self._present) else set()
        found |= {"missing"} if self._absent() else set()
        kinds, timeout, job = [kind for kind in _REMEDIES if kind in found], self.reference.seconds, self._job_id
        head = (
            f"EI0015: {self._absent()} of the {self._size} ranks of job {job!r} did not come within {timeout:g} s "
            "(HCCL_CONNECT_TIMEOUT):"
        )
        if set(kinds) != {"missing"}:
            kinds = [kind for kind in kinds if kind != "missing"]  # the others would be wrong anyway
            head = f"the ranks that came to job {job!r} don't match ({', '.join(kinds)}):"
        return "\n".join([head, *(f"  {line}" for line in self._lines()), *(_REMEDIES[kind] for kind in kinds)])

    def _lines(self) -> list[str]:
        size = self._size
        names: list[_Key] = [] if self._numbers_ranks else list(range(size))
        names += sorted({*self._present, *self._left}.difference(names), key=str)
        lines, missing = [], 0
        for key in names:
            for arrival in self._present.get(key, []):
                states = ["doubled"] if len(self._present[key]) > 1 else []
                states += [f"{kind}, {values}" for kind, values in self._differences(arrival.hello)]
                lines.append(f"{arrival.name}: {'; '.join(states) or 'came'} ({arrival.hello.process})")
            if key not in self._present and key in self._left:
                gone = self._left[key]
                lines.append(f"{gone.name}: missing; it came, but left before the end ({gone.hello.process})")
            elif key not in self._present and isinstance(key, int):
                missing += 1
                if missing <= _MISSING_SHOWN:
                    lines.append(f"{self._rank_name(key)}: missing")
        if missing > _MISSING_SHOWN:
            lines.append(f"{missing - _MISSING_SHOWN} more ranks: missing")
        if self._numbers_ranks and self._absent():
            lines.append(f"{self._absent()} of {size}: missing (the chief would have numbered them)")
        lines += self._others
        for address, what in list(self._unknown_clients.items())[-_UNKNOWN_SHOWN:]:
            lines.append(f"an unknown client at {address} {what}; not counted")
        return lines

    def _absent(self) -> int:
        if self._numbers_ranks:
            return max(0, self._size - len(self._present))
        return sum(rank not in self._present for rank in range(self._size))

    def _differences(self, hello: Hello) -> list[tuple[str, str]]:
        chief, found = self.reference, []
        assert chief is not None
        if hello.scheme != chief.scheme:
            found.append(("another scheme", f"{hello.scheme} (the chief: {chief.scheme})"))
        if hello.world_size != chief.world_size:
            found.append(("another world size", f"{hello.world_size} (the chief: {chief.world_size})"))
        alike = ("another version", hello.versions, chief.versions), ("another setting", hello.settings, chief.settings)
        for kind, mine, chiefs in alike:
            for name in sorted({*mine, *chiefs}):
                theirs, ours = (values.get(name, "default") for values in (mine, chiefs))
                if theirs != ours:
                    found.append((kind, f"{name} {theirs} (the chief: {ours})"))
        return found

    def _rank_name(self, rank: int) -> str:
        known = rank < len(self._expected_hosts)
        return f"rank {rank} on host {self._expected_hosts[rank]}" if known else f"rank {rank}"


# Most important first.
_REMEDIES = {
    "doubled rank": (
        "Two processes were started as the same rank. What to do: give each process its own RANK_ID (with CM_*: its "
        "own ASCEND_DEVICE_ID on a host), and end processes left over from an earlier run."
    ),
    "another scheme": "The ranks describe the job in different ways. What to do: set the same variables everywhere.",
    "another world size": (
        "The ranks don't agree on how many they are. What to do: start all with the same RANK_SIZE and rank table, "
        "CM_WORKER_SIZE or TF_CONFIG, and end processes left over from an earlier run."
    ),
    "another version": "What to do: install the same versions of npu_device and TensorFlow for all ranks.",
    "another setting": "What to do: give these environment variables the same value on all ranks, or none.",
    "missing": (
        "A missing rank was not started, ended before it got here, or can't reach the chief. What to do: look at its "
        "output; start all ranks within HCCL_CONNECT_TIMEOUT seconds of each other, or raise this limit on all of them."
    ),
}


def _order(arrival: Arrival) -> tuple[int, int, str, int]:
    if arrival.hello.rank is not None:
        return arrival.hello.rank, 0, "", 0
    try:
        number = int(ipaddress.ip_address(arrival.host))
    except ValueError:
        number = -1
    return 0, number, arrival.host, arrival.hello.device_id
