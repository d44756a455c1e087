"""Who has come to the rendezvous and who hasn't, and whether they fit together, in words. Knows no sockets.

Source of the numbering without a rank table: Ascend's CM_* scheme (numeric order of host address, then device id).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

from npu_device.cluster.description import join_address
from npu_device.cluster.protocol import Hello

_STRANGERS_SHOWN = 5

# What must be unique in the job: the rank, or host and device where the chief numbers the ranks.
_Key = Union[int, tuple[str, int]]


@dataclass(frozen=True)
class Attendance:
    """A rank that has come.

    Attributes:
        hello: what it says of itself.
        host: name of its host.
        seen_at: its address as the chief sees it; None when it is on the chief's host.
    """

    hello: Hello
    host: str
    seen_at: str | None

    @property
    def key(self) -> _Key:
        """What no other rank of the job may have."""
        return (self.host, self.hello.device_id) if self.hello.rank is None else self.hello.rank

    def who(self) -> str:
        """Where to look for the process."""
        return f"machine {self.hello.machine}, pid {self.hello.pid}"


class RollCall:
    """The chief's list. The chief itself is the first on it, and what it says is what the others are held against.

    Args:
        chief: the chief's own hello.
        expected_hosts: host of each rank where the scheme tells it, else empty.
    """

    def __init__(self, chief: Hello, expected_hosts: Sequence[str]) -> None:
        self._chief = chief
        self._expected_hosts = expected_hosts
        self._present: dict[_Key, list[Attendance]] = {}
        self._left: dict[_Key, Attendance] = {}
        self._others: dict[str, None] = {}
        self._strangers: dict[str, str] = {}
        self._misfits = 0
        self._count = 0
        self.admit(chief, None)

    def refuses(self, hello: Hello, seen_at: str) -> str | None:
        """The refusal for a rank of another job, who has nothing to do with this one; None for a rank of this job."""
        if hello.job_id == self._chief.job_id:
            return None
        who = f"machine {hello.machine}, pid {hello.pid}, from {seen_at}"
        self._others[f"{hello.name} of another job, {hello.job_id!r}: refused ({who})"] = None
        return (
            f"{hello.name} of job {hello.job_id!r} came to the meeting point of another job, {self._chief.job_id!r} "
            f"(its chief: machine {self._chief.machine}, pid {self._chief.pid}).\n"
            "Likely cause: two jobs use the same port, or JOB_ID is not the same on all ranks of one job.\n"
            "What to do: give each job its own port, and all ranks of a job the same JOB_ID."
        )

    def admit(self, hello: Hello, seen_at: str | None) -> Attendance:
        """Put a rank of this job on the list."""
        attendance = Attendance(hello, hello.host_key or seen_at or self._chief.host_key, seen_at)
        self._present.setdefault(attendance.key, []).append(attendance)
        self._count += 1
        self._misfits += bool(self._differences(hello))
        return attendance

    def strike(self, attendance: Attendance) -> None:
        """Take a rank from the list that has gone before the end: its process has ended, or it will come again."""
        same = self._present[attendance.key]
        same.remove(attendance)
        if not same:
            del self._present[attendance.key]
        self._count -= 1
        self._misfits -= bool(self._differences(attendance.hello))
        self._left[attendance.key] = attendance

    def note_stranger(self, address: str, what: str) -> None:
        """Remember somebody who connected and is no rank."""
        self._strangers[address] = what

    @property
    def contradictory(self) -> bool:
        """True when those who have come can't be one job, whoever is still to come."""
        return self._misfits > 0 or self._count > len(self._present)

    @property
    def complete(self) -> bool:
        """True when everybody is here and all fit together."""
        return self._count == self._chief.world_size and not self.contradictory

    def in_order(self) -> list[Attendance]:
        """The ranks, by rank. Without a rank table they get their numbers here."""
        return sorted((same[0] for same in self._present.values()), key=_order)

    def missing(self) -> str:
        """Who hasn't come, in a few words."""
        if self._chief.rank is None:
            return f"{self._absent()} of {self._chief.world_size} ranks"
        ranks = [self._rank_name(rank) for rank in range(self._chief.world_size) if rank not in self._present]
        return ", ".join(ranks[:10]) + (f" and {len(ranks) - 10} more" if len(ranks) > 10 else "")

    # The text that every rank gets when they don't come together

    def complaint(self, timeout: float) -> str:
        """What happened, one line a rank, likely cause, what to do. The same text goes to every rank.

        Args:
            timeout: seconds that the ranks had.
        """
        kinds = self._kinds()
        size, job = self._chief.world_size, self._chief.job_id
        if set(kinds) == {"missing"}:
            head = (
                f"EI0015: {self._absent()} of the {size} ranks of job {job!r} did not come within {timeout:g} s "
                "(HCCL_CONNECT_TIMEOUT):"
            )
        else:
            kinds = [kind for kind in kinds if kind != "missing"]  # the others would be wrong all the same
            head = f"the ranks that came to job {job!r} don't fit together ({', '.join(kinds)}):"
        remedies = [_REMEDIES[kind] for kind in kinds]
        return "\n".join([head, *(f"  {line}" for line in self._lines()), *remedies])

    def _lines(self) -> list[str]:
        size = self._chief.world_size
        names: list[_Key] = [] if self._chief.rank is None else list(range(size))
        names += sorted({*self._present, *self._left}.difference(names), key=str)
        lines = []
        for key in names:
            for attendance in self._present.get(key, []):
                states = ["doubled"] if len(self._present[key]) > 1 else []
                states += self._differences(attendance.hello)
                lines.append(f"{_name(attendance)}: {'; '.join(states) or 'came'} ({attendance.who()})")
            if key not in self._present and key in self._left:
                gone = self._left[key]
                lines.append(f"{_name(gone)}: missing; it came, and was gone before the end ({gone.who()})")
            elif key not in self._present and isinstance(key, int):
                lines.append(f"{self._rank_name(key)}: missing")
        if self._chief.rank is None and self._absent():
            lines.append(f"{self._absent()} of {size}: missing (the chief would have numbered them)")
        lines += self._others
        for address, what in list(self._strangers.items())[-_STRANGERS_SHOWN:]:
            lines.append(f"a stranger from {address}: {what}; not counted")
        return lines

    def _kinds(self) -> list[str]:
        """What is wrong, in the order of importance."""
        hellos = [attendance.hello for same in self._present.values() for attendance in same]
        found = []
        if any(len(same) > 1 for same in self._present.values()):
            found.append("doubled rank")
        if any(hello.scheme != self._chief.scheme for hello in hellos):
            found.append("another scheme")
        if any(hello.world_size != self._chief.world_size for hello in hellos):
            found.append("another world size")
        if any(hello.versions != self._chief.versions for hello in hellos):
            found.append("another version")
        if self._absent():
            found.append("missing")
        return found

    def _absent(self) -> int:
        """How many have not come."""
        if self._chief.rank is None:
            return max(0, self._chief.world_size - len(self._present))
        return sum(rank not in self._present for rank in range(self._chief.world_size))

    def _differences(self, hello: Hello) -> list[str]:
        """What of a rank is not as it is at the chief."""
        chief, found = self._chief, []
        if hello.scheme != chief.scheme:
            found.append(f"another scheme, {hello.scheme} (the chief: {chief.scheme})")
        if hello.world_size != chief.world_size:
            found.append(f"another world size, {hello.world_size} (the chief: {chief.world_size})")
        for name in sorted({*hello.versions, *chief.versions}):
            theirs, ours = hello.versions.get(name), chief.versions.get(name)
            if theirs != ours:
                found.append(f"another version, {name} {theirs} (the chief: {ours})")
        return found

    def _rank_name(self, rank: int) -> str:
        return f"rank {rank} on host {self._expected_hosts[rank]}" if self._expected_hosts else f"rank {rank}"

    def addresses(self, chief_address: str) -> list[str]:
        """``host:port`` of the TensorFlow server of each rank, by rank.

        Args:
            chief_address: address at which the others reach the chief's host.
        """
        return [
            join_address(attendance.hello.host or attendance.seen_at or chief_address, attendance.hello.port)
            for attendance in self.in_order()
        ]


_REMEDIES = {
    "doubled rank": (
        "Two processes were started as the same rank. What to do: give each process its own RANK_ID (with CM_*: its "
        "own ASCEND_DEVICE_ID on a host), and end what is left of an earlier run."
    ),
    "another scheme": (
        "The ranks' environments describe the job in different ways. What to do: set the same variables everywhere."
    ),
    "another world size": (
        "The ranks don't agree on how many they are. What to do: start all with the same RANK_SIZE and rank table, "
        "CM_WORKER_SIZE or TF_CONFIG, and end what is left of an earlier run."
    ),
    "another version": "What to do: install the same versions of npu_device and TensorFlow for all ranks.",
    "missing": (
        "A missing rank was not started, ended before it came here, or can't reach the chief. What to do: look at its "
        "output; start all ranks within HCCL_CONNECT_TIMEOUT seconds of each other, or raise it on all of them."
    ),
}


def _name(attendance: Attendance) -> str:
    return f"{attendance.hello.name} on host {attendance.host}"


def _order(attendance: Attendance) -> tuple[int, int, str, int]:
    """By rank; without one by the number that the host's address is, then by device."""
    if attendance.hello.rank is not None:
        return attendance.hello.rank, 0, "", 0
    try:
        number = int(ipaddress.ip_address(attendance.host))
    except ValueError:
        number = -1
    return 0, number, attendance.host, attendance.hello.device_id
