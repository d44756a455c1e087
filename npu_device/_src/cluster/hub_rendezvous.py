"""The rendezvous of one job in the hub: which clients have come as ranks, whom they wait for, and until when.

Knows no sockets: it gets hellos, and sends messages through the hub. ``roster.py`` knows what doesn't match.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from typing import Any, Callable

from npu_device._src.cluster import ports, time_limits as limits
from npu_device._src.cluster.frames import Message
from npu_device._src.cluster.hub_client import Client, State
from npu_device._src.cluster.roster import Arrival, Hello, Roster


class HubRendezvous:
    """Lets clients wait for each other until all ranks have come, and answers later ones.

    Attributes:
        ranks: the clients by rank, once all have met.
        roster: the clients that have come as ranks.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        clients: Collection[Client],
        send: Callable[[Client, Message], None],
        send_last: Callable[[Client, Message], None],
    ) -> None:
        self.ranks: list[Client] = []
        self._settings = settings
        self._clients = clients  # clients that are connected, which the hub adds and removes
        self._send = send
        self._send_last = send_last
        self.roster = Roster(settings["job_id"], settings["expected_hosts"])
        # Address by which other hosts reach the hub's host; loopback until a rank has come by another one.
        self._address = "127.0.0.1"
        self._began: float | None = None  # when the first rank came
        self._contradiction_end = math.inf  # when ranks that contradict each other get the error
        self._next_progress = 0.0
        self._candidates_until: float | None = None

    def arrivals(self) -> list[Client]:
        return [client for client in self._clients if client.has_arrived and not client.is_ending]

    def children(self) -> list[Client]:
        waiting = [client for client in self._clients if not client.is_ending]
        return [client for client in waiting if client.state is State.CHILD]

    def hosts(self) -> list[str]:
        """Return the name of the host of each rank."""
        return [client.arrival.host for client in self.ranks]

    def addresses(self) -> list[str]:
        """Return the address at which the others reach each rank."""
        arrivals = [client.arrival for client in self.ranks]
        return [arrival.hello.host or arrival.seen_at or self._address for arrival in arrivals]

    def receive(self, client: Client, hello: Hello) -> None:
        """Let a client wait for the others, or tell it why it can't."""
        refusal = self.roster.refusal(hello, client.address)
        if refusal is not None:
            self._send_last(client, {"refused": refusal})
            return
        seen_at = None
        if not ports.is_loopback(client.address):
            seen_at = client.address
        arrival = Arrival(hello, hello.host_key or seen_at or self._settings["host_key"], seen_at)
        rivals = self._rivals(arrival)
        for rival in rivals:
            if hello.is_child_of(rival.arrival.hello):
                client.state = State.CHILD
                client.parent = rival
                self._tell_child(client)
                return
        # Children may have come before the process that started them.
        children = [rival for rival in rivals if rival.arrival.hello.is_child_of(hello)]
        if self.ranks and children:
            self._send_last(client, {"refused": hello.too_late})
        elif self.ranks:
            self._send_last(client, {"busy": "the ranks of this job have met already"})
        elif self.roster.is_crowded:
            self._send_last(client, {"busy": "too many processes have come as ranks of this job"})
        else:
            self._admit(client, arrival, children)

    def _rivals(self, arrival: Arrival) -> list[Client]:
        """Return the clients that have come as the same rank."""
        # As a rule no other client has come as this rank, which saves a search through all clients.
        if not self.roster.has(arrival):
            return []
        return [client for client in self.arrivals() if client.arrival.key == arrival.key]

    def _admit(self, client: Client, arrival: Arrival, children: list[Client]) -> None:
        """Let a client wait for the other ranks, in place of children of it that have come before."""
        if ports.is_loopback(self._address):
            # The others reach this host at the address this rank used; any address is better than loopback.
            self._address = ports.plain(client.socket.getsockname()[0])
        reference = self.roster.reference
        client.state = State.ARRIVED
        client.arrival = arrival
        self.roster.add(arrival)
        for child in children:
            self.roster.remove(child.arrival)
            child.state = State.CHILD
            child.parent = client
        if self._began is None:
            self._began = time.monotonic()
            self._next_progress = self._began + limits.FIRST_PROGRESS_SECONDS
        if reference is self.roster.reference:
            self._send_wait(client)
            return
        # The new reference may wait for longer or shorter than the old one, so that all get a new limit.
        for waiting in self.arrivals():
            self._send_wait(waiting)

    def _send_wait(self, client: Client) -> None:
        """Tell a client how long it will have to wait for the ranks, in seconds."""
        self._send(client, {"wait": max(0.0, self._end_of_waiting() - time.monotonic())})

    def _tell_child(self, client: Client) -> None:
        """Tell a client whose child it is, once the ranks have met; it waits with them until then."""
        parent = client
        while parent.state is State.CHILD:
            parent = parent.parent
        if not self.ranks or parent.state is not State.RANK:
            self._send_wait(client)
            return
        hosts = self.hosts()
        neighbours = [rank for rank, host in enumerate(hosts) if host == hosts[parent.rank]]
        hello = parent.arrival.hello
        position = {"rank": parent.rank, "world_size": len(hosts), "neighbours": neighbours}
        self._send_last(
            client, {"child_of": {"pid": hello.pid, **position, "device_id": hello.device_id}}
        )

    # When the waiting ends

    @property
    def is_waiting(self) -> bool:
        """Return True while clients wait for each other."""
        return self._began is not None and not self.ranks

    def _end_of_waiting(self) -> float:
        assert self._began is not None and self.roster.reference is not None
        return self._began + self.roster.reference.seconds

    def check_complete(self, time_now: float) -> bool:
        """Return True once all ranks have come; before, ask processes that may replace one, and wait for them."""
        if not self.roster.complete:
            self._candidates_until = None
            return False
        candidates = {client: client.arrival.hello.candidate for client in self.arrivals()}
        if not any(candidate is not None for candidate in candidates.values()):
            return True
        if self._candidates_until is None:
            self._candidates_until = time_now + limits.CANDIDATE_SECONDS
            for client, candidate in candidates.items():
                self._send(client, {"wait": limits.CANDIDATE_SECONDS, "for": candidate})
        return time_now >= self._candidates_until

    def complaint(self, time_now: float) -> str | None:
        """Return the error that ends the rendezvous: the time is up, or the ranks contradict each other."""
        if self._began is None or self.roster.complete:
            return None
        if not self.roster.contradictory:
            self._contradiction_end = math.inf
        elif self._contradiction_end == math.inf:
            self._contradiction_end = time_now + limits.CONTRADICTION_SECONDS
        if time_now >= min(self._end_of_waiting(), self._contradiction_end):
            return self.roster.complaint()
        if time_now >= self._next_progress:
            self._report_progress(time_now)
        return None

    def _report_progress(self, time_now: float) -> None:
        """Tell those who wait which ranks are missing."""
        self._next_progress = time_now + limits.NEXT_PROGRESS_SECONDS
        absent = self.roster.absent_ranks()
        for client in self.arrivals():
            self._send(client, {"waits_for": absent})

    def number_ranks(self) -> None:
        """Give the clients that have come their ranks, and tell children of which of them they are one."""
        self.ranks = sorted(self.arrivals(), key=lambda client: client.arrival.order)
        for rank, client in enumerate(self.ranks):
            client.state = State.RANK
            client.rank = rank
        for child in self.children():
            self._tell_child(child)
