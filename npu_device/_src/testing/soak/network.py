"""The network between the hosts of a soak: hosts that are namespaces, nodes behind proxies, or this host as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from npu_device._src.cluster.time_limits import PROXY_DELAY_SECONDS
from npu_device._src.membership.rank_environment import free_port
from npu_device._src.testing import hosts
from npu_device._src.testing.soak import connections
from npu_device._src.testing.soak.proxy import Proxy
from npu_device._src.testing.soak.running import Rank

FAULTS = ("drop", "delay", "reset", "half-close")
_GBIT = 10.0


class Here(ExitStack):
    """This host as a node of a cluster: connections of its processes to other hosts can be reset and half-closed.

    As a context manager, it removes the network that it has made.
    """

    faults: Sequence[str] = ("reset", "half-close")

    def __init__(self, count: int, fewest: int) -> None:
        super().__init__()
        self.nodes: Sequence[int] = range(count)
        # With how many nodes the job goes on.
        self._nnodes = str(count)
        if fewest < count:
            self._nnodes = f"{fewest}:{count}"

    def command(self, node: int, npurun: Sequence[str], arguments: Sequence[str]) -> list[str]:
        return [*npurun, *arguments]

    def _options(self, node: int, address: str) -> list[str]:
        return ["--nnodes", self._nnodes, "--node-rank", str(node), "--master-addr", address]

    def begin(self, fault: str, node: int, pids: Iterable[int]) -> None:
        """Begin a fault; ProcessLookupError if the processes have no connections to other hosts."""
        disturb = connections.half_close
        if fault == "reset":
            disturb = connections.reset
        if disturb(pids) == 0:
            # The error stands for a fault that hasn't happened: the soak then doesn't count it.
            raise ProcessLookupError

    def end(self, fault: str, node: int) -> None:
        """End a fault; one that has no duration has ended."""

    def follow(self, ranks: Iterable[Rank]) -> None:
        """Note the ranks that run now; called often."""


class Namespaces(Here):
    """Network namespaces of this machine, one for each node: all traffic between them feels the faults."""

    faults = FAULTS

    def __init__(self, count: int, fewest: int) -> None:
        super().__init__(count, fewest)
        self.enter_context(hosts.hosts(count, _GBIT))

    def command(self, node: int, npurun: Sequence[str], arguments: Sequence[str]) -> list[str]:
        options = self._options(node, hosts.address(0))
        return hosts.on_host(node, [*npurun, *options, *arguments])

    def begin(self, fault: str, node: int, pids: Iterable[int]) -> None:
        if fault == "drop":
            hosts.cut_off(node)
        elif fault == "delay":
            hosts.slow_down(node)
        else:
            super().begin(fault, node, pids)

    def end(self, fault: str, node: int) -> None:
        if fault == "drop":
            hosts.connect_again(node)
        elif fault == "delay":
            hosts.set_speed(node, _GBIT)


class Proxies(Here):
    """Nodes on the loopback interface, where all but node 0 reach node 0 through proxies, without root.

    The connections of npurun, and the ranks' control channel, feel the faults; tensors don't.
    """

    faults = FAULTS

    def __init__(self, count: int, fewest: int) -> None:
        super().__init__(count, fewest)
        self.nodes = range(1, count)
        self._proxies: dict[int, list[Proxy]] = {node: [] for node in self.nodes}
        self._forwarded = set[int]()
        # Chosen here, because each node's proxy has to listen on it before npurun starts.
        self._port = free_port()
        self._forward(self._port)

    def command(self, node: int, npurun: Sequence[str], arguments: Sequence[str]) -> list[str]:
        options = self._options(node, _address(node))
        return [*npurun, *options, "--master-port", str(self._port), *arguments]

    def begin(self, fault: str, node: int, pids: Iterable[int]) -> None:
        for proxy in self._proxies[node]:
            if fault == "drop":
                proxy.drop()
            elif fault == "delay":
                proxy.delay = PROXY_DELAY_SECONDS
            elif fault == "reset":
                proxy.reset()
            else:
                proxy.half_close()

    def end(self, fault: str, node: int) -> None:
        for proxy in self._proxies[node]:
            proxy.delay = 0.0
            proxy.resume()

    def follow(self, ranks: Iterable[Rank]) -> None:
        """Forward the connections to the hub of each attempt."""
        # Each attempt has a hub on another port.
        for port in {rank.hub for rank in ranks} - self._forwarded:
            self._forward(port)

    def _forward(self, port: int) -> None:
        self._forwarded.add(port)
        for node, proxies in self._proxies.items():
            proxy = Proxy(_address(0), port, (_address(node), port))
            self.callback(proxy.close)
            proxies.append(proxy)


def _address(node: int) -> str:
    return f"127.0.0.{node + 1}"
