"""Record which ranks have come to the rendezvous, which are missing, and what doesn't match. Knows no sockets.

Source of the numbering without a rank table: Ascend's CM_* scheme (numeric order of host address, then device id).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Union

from npu_device._src.cluster import frames
from npu_device._src.cluster.time_limits import LONGEST_WAIT_SECONDS
from npu_device._src.wording import MOST_RANKS, shortened

_UNKNOWN_SHOWN = 5
_MISSING_SHOWN = 100
_MOST_GONE = 1000  # ranks of which it is remembered that they came and left, and of other jobs

# The key is unique in the job: the rank, or host and device if the hub numbers the ranks.
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
    started: str = ""  # start time of that process, for its children
    # The number and start time of each process that has started it.
    ancestors: Sequence[list] = ()
    candidate: int | None = None  # the number of an ancestor that may come as the rank itself

    @classmethod
    def read(cls, fields: Any) -> Hello:
        """Parse the hello in a message; ValueError, LookupError or TypeError if it is not a valid one."""
        # Other versions may send more fields, or fewer of the last ones; the versions show the difference.
        hello: Hello = frames.checked(cls, fields)
        if not 0 < hello.world_size <= MOST_RANKS:
            raise ValueError("no such world size")
        if hello.rank is not None and not 0 <= hello.rank < hello.world_size:
            raise ValueError("no such rank")
        if not 0 <= hello.seconds <= LONGEST_WAIT_SECONDS:
            raise ValueError("no such time")
        return hello

    @property
    def name(self) -> str:
        if self.rank is None:
            return f"device {self.device_id}"
        return f"rank {self.rank}"

    @property
    def process(self) -> str:
        return f"machine {self.machine}, pid {self.pid}"

    def is_child_of(self, parent: Hello) -> bool:
        process = [parent.pid, parent.started]
        return self.machine == parent.machine and parent.started != "" and process in self.ancestors

    @property
    def too_late(self) -> str:
        """Return the text of the error for a process one of whose children has become the rank."""
        return (
            f"{self.name}: a process that this one ({self.process}) has started called npu.open() long before it, and "
            "has become the rank.\nWhat to do: call npu.open() before starting processes that import the same script, "
            "or start them without the variables of the job."
        )

    @property
    def compared(self) -> dict[tuple[str, str], str]:
        """Return what must be the same on all ranks, by the problem that it is otherwise, and its name."""
        texts = {("another scheme", ""): self.scheme}
        texts["another world size", ""] = str(self.world_size)
        for name, version in sorted(self.versions.items()):
            texts["another version", f"{name} "] = version
        for name, setting in sorted(self.settings.items()):
            texts["another setting", f"{name} "] = setting
        return texts

    @property
    def signature(self) -> frozenset:
        return frozenset(self.compared.items())


def start_time(pid: int) -> str:
    """Return when a process started, in ticks of the kernel, as numbers of processes are used again; "" if unknown."""
    return parent_and_start(pid)[1]


def is_running(pid: int, started: str) -> bool:
    """Return True if the process with this id and start time is running; a later process may have the id."""
    return started != "" and start_time(pid) == started


def ancestors() -> list[tuple[int, str]]:
    """Return number and start time of the parent of this process, of its parent, and so on, as far as known."""
    processes: list[tuple[int, str]] = []
    pid = os.getppid()
    while pid > 0 and len(processes) < 50:
        parent, started = parent_and_start(pid)
        if not started:
            break
        processes.append((pid, started))
        pid = parent
    return processes


def parent_and_start(pid: int) -> tuple[int, str]:
    """Return the parent and the start time of a process; 0 and "" if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            # The program's name is in parentheses, and may hold spaces and parentheses itself (man proc_pid_stat).
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0, ""
    # A zombie has ended, though its parent hasn't noticed.
    if fields[0] in "ZX":
        return 0, ""
    return int(fields[1]), fields[19]


@dataclass(frozen=True)
class Arrival:
    """A rank that has come."""

    hello: Hello
    host: str  # name of its host
    seen_at: str | None  # address of the rank as the hub sees it; None when it is on the hub's host

    @property
    def name(self) -> str:
        return f"{self.hello.name} on host {self.host}"

    @property
    def key(self) -> _Key:
        if self.hello.rank is None:
            return (self.host, self.hello.device_id)
        return self.hello.rank

    @property
    def order(self) -> tuple:
        """Return by what arrivals are sorted to be numbered: the rank; address and device without a rank table."""
        if self.hello.rank is not None:
            return (self.hello.rank,)
        address_value = -1
        with contextlib.suppress(ValueError):
            address_value = int(ipaddress.ip_address(self.host))
        return address_value, self.host, self.hello.device_id


class Roster:
    """The ranks of a job.

    Attributes:
        reference: the hello that the others are compared with: that of the chief, or of an early rank until the chief
            has come; None while no rank has.
    """

    def __init__(self, job_id: str, expected_hosts: Sequence[str]) -> None:
        self._job_id = job_id
        self._expected_hosts = expected_hosts
        # Several arrivals of one key are a contradiction.
        self._arrivals: dict[_Key, list[Arrival]] = {}
        self._departures: dict[_Key, Arrival] = {}
        self._signatures = Counter[frozenset]()
        self._strangers: dict[str, None] = {}  # ranks of other jobs, as lines of the error
        self._unknown_clients: dict[str, str] = {}
        self.reference: Hello | None = None
        self._count = 0  # number of all arrivals

    def refusal(self, hello: Hello, seen_at: str) -> str | None:
        """Return the text of the error for a rank of another job; None for a rank of this job."""
        if hello.job_id == self._job_id:
            return None
        if len(self._strangers) < _MOST_GONE:
            line = f"{hello.name} of another job, {hello.job_id!r}: refused ({hello.process}, from {seen_at})"
            self._strangers[line] = None
        job = repr(self._job_id)
        if self.reference is not None:
            job += f" (its chief: {self.reference.process})"
        return (
            f"{hello.name} of job {hello.job_id!r} came to the meeting point of another job, {job}.\n"
            "Likely cause: two jobs use the same port, or JOB_ID is not the same on all ranks of one job.\n"
            "What to do: give each job its own port (npurun --master-port), and all ranks of a job the same JOB_ID."
        )

    def has(self, arrival: Arrival) -> bool:
        return arrival.key in self._arrivals

    def add(self, arrival: Arrival) -> None:
        hello = arrival.hello
        reference = self.reference
        # Without arrivals, the reference is from a rank that has left.
        if not self._arrivals or reference is None or (hello.is_chief and not reference.is_chief):
            self.reference = hello
        self._arrivals.setdefault(arrival.key, []).append(arrival)
        self._signatures[hello.signature] += 1
        self._count += 1

    def remove(self, arrival: Arrival) -> None:
        """Remove a rank that disconnected early: its process has ended, or it will reconnect."""
        rivals = self._arrivals[arrival.key]
        rivals.remove(arrival)
        if not rivals:
            del self._arrivals[arrival.key]
        self._signatures -= Counter([arrival.hello.signature])
        self._count -= 1
        self._departures[arrival.key] = arrival
        if len(self._departures) > _MOST_GONE:
            del self._departures[next(iter(self._departures))]
        # The last rank that leaves stays the reference, for the text of the error.
        hellos = [waiting.hello for waiting in self._all_arrivals()] or [arrival.hello]
        if arrival.hello is self.reference:
            self.reference = next((hello for hello in hellos if hello.is_chief), hellos[0])

    def note_unknown_client(self, address: str, behaviour: str) -> None:
        # Put at the end of the dictionary, of which the newest entries are shown.
        self._unknown_clients.pop(address, None)
        self._unknown_clients[address] = behaviour
        if len(self._unknown_clients) > _UNKNOWN_SHOWN:
            del self._unknown_clients[next(iter(self._unknown_clients))]

    @property
    def is_crowded(self) -> bool:
        """Return True if so many have come that more can't tell anything new."""
        return self._count > 0 and self._count >= 2 * self._size + _MOST_GONE

    @property
    def contradictory(self) -> bool:
        """Return True if the ranks that have come can't form one job."""
        return len(self._signatures) > 1 or self._has_doubles

    @property
    def _has_doubles(self) -> bool:
        return self._count > len(self._arrivals)

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

    def _all_arrivals(self) -> list[Arrival]:
        return [arrival for rivals in self._arrivals.values() for arrival in rivals]

    def absent_ranks(self) -> str:
        """Return the names of the ranks that haven't come, or only how many if the chief numbers them."""
        if self._numbers_ranks:
            return f"{self._absent()} of {self._size} ranks"
        ranks = [self._rank_name(rank) for rank in range(self._size) if rank not in self._arrivals]
        return shortened(ranks, 10)

    def complaint(self) -> str:
        """Return the text of the error: what happened, one line per rank, likely cause, what to do."""
        assert self.reference is not None
        problems = self._problems()
        # Where ranks contradict each other, the count of the missing ones would be wrong anyway.
        if problems:
            headline = (
                f"the ranks that came to job {self._job_id!r} don't match ({', '.join(problems)}):"
            )
        else:
            problems = ["missing"]
            headline = (
                f"EI0015: {self._absent()} of the {self._size} ranks of job {self._job_id!r} did not come within "
                f"{self.reference.seconds:g} s (HCCL_CONNECT_TIMEOUT):"
            )
        lines = [f"  {line}" for line in self._lines()]
        remedies = [_REMEDIES[problem] for problem in problems]
        return "\n".join([headline, *lines, *remedies])

    def _problems(self) -> list[str]:
        """Return how ranks contradict each other, the most important problem first."""
        problems = {
            problem
            for arrival in self._all_arrivals()
            for problem, _ in self._differences(arrival.hello)
        }
        if self._has_doubles:
            problems.add("doubled rank")
        return [problem for problem in _REMEDIES if problem in problems]

    def _lines(self) -> list[str]:
        """Return what is known about each rank, then about clients that are no rank of the job."""
        keys: list[_Key] = []
        if not self._numbers_ranks:
            keys += range(self._size)
        keys += sorted({*self._arrivals, *self._departures}.difference(keys), key=str)
        lines = []
        number_missing = 0
        for key in keys:
            if key in self._arrivals:
                lines += self._lines_of_arrivals(self._arrivals[key])
            elif key in self._departures:
                departure = self._departures[key]
                came = "missing; it came, but left before the end"
                lines.append(f"{departure.name}: {came} ({departure.hello.process})")
            elif isinstance(key, int):
                number_missing += 1
                if number_missing <= _MISSING_SHOWN:
                    lines.append(f"{self._rank_name(key)}: missing")
        if number_missing > _MISSING_SHOWN:
            lines.append(f"{number_missing - _MISSING_SHOWN} more ranks: missing")
        if self._numbers_ranks and self._absent():
            lines.append(
                f"{self._absent()} of {self._size}: missing (the chief would have numbered them)"
            )
        lines += self._strangers
        for address, behaviour in self._unknown_clients.items():
            lines.append(f"an unknown client at {address} {behaviour}; not counted")
        return lines

    def _lines_of_arrivals(self, rivals: list[Arrival]) -> list[str]:
        lines = []
        for arrival in rivals:
            states = [
                f"{problem}, {detail}" for problem, detail in self._differences(arrival.hello)
            ]
            if len(rivals) > 1:
                states.insert(0, "doubled")
            lines.append(f"{arrival.name}: {'; '.join(states) or 'came'} ({arrival.hello.process})")
        return lines

    def _absent(self) -> int:
        if self._numbers_ranks:
            return max(0, self._size - len(self._arrivals))
        return sum(rank not in self._arrivals for rank in range(self._size))

    def _differences(self, hello: Hello) -> list[tuple[str, str]]:
        """Return how a rank differs from the chief: each problem, a key of ``_REMEDIES``, with its details."""
        assert self.reference is not None
        texts = hello.compared
        expected = self.reference.compared
        differences = []
        for key in {**expected, **texts}:
            text = texts.get(key, "default")
            expected_text = expected.get(key, "default")
            if text != expected_text:
                problem, name = key
                differences.append((problem, f"{name}{text} (the chief: {expected_text})"))
        return differences

    def _rank_name(self, rank: int) -> str:
        if rank < len(self._expected_hosts):
            return f"rank {rank} on host {self._expected_hosts[rank]}"
        return f"rank {rank}"


# The most important contradiction comes first, and decides the remedy.
_REMEDIES = {
    "doubled rank": (
        "Two processes were started as the same rank. What to do: give each process its own RANK_ID (with CM_*: its "
        "own ASCEND_DEVICE_ID on a host; with npurun: each node its own --node-rank, and each job its own "
        "--master-port), and end processes left over from an earlier run."
    ),
    "another scheme": "The ranks describe the job in different ways. What to do: set the same variables everywhere.",
    "another world size": (
        "The ranks don't agree on how many they are. What to do: start all with the same RANK_SIZE and rank table, "
        "CM_WORKER_SIZE or TF_CONFIG (with npurun: the same -n and --nnodes), and end processes left over from an "
        "earlier run."
    ),
    "another version": "What to do: install the same versions of npu_device and TensorFlow for all ranks.",
    "another setting": "What to do: give these environment variables the same value on all ranks, or none.",
    "missing": (
        "A missing rank was not started, ended before it got here, or can't reach the chief. What to do: look at its "
        "output; start all ranks within HCCL_CONNECT_TIMEOUT seconds of each other, or raise this limit on all of them."
    ),
}
