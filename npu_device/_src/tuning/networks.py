"""Cost models of an all-reduce over N ranks: rings and trees, over networks of known latency and bandwidth.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), for the
ring; Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009), for the
tree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable

from npu_device._src.tuning.cost_model import CostModel


@dataclass(frozen=True)
class Network:
    """The cost of one message between two ranks.

    Attributes:
        name: for the table.
        alpha: seconds per message, whatever its size.
        beta: seconds per byte.
        pack, load, pace: as in ``CostModel``: the cost of communication to the ranks' processors.
    """

    name: str
    alpha: float
    beta: float
    pack: float = 0.0
    load: float = 0.0
    pace: float = 1.0


# The latency of a message: 30 us over TCP and 10 GbE is what 16 ranks in a ring with 9.08e-4 s in all (MG-WFBP, see
# docs/notes.md) come to; the faster ones are usual figures of TCP over 25 GbE and of RDMA over 100 Gb. The bandwidth
# is 94 % of the line's, which Ethernet's and TCP's headers leave.
PRESETS = {
    "10gbe": Network("10 GbE", 30e-6, 8 / (0.94 * 10e9)),
    "25gbe": Network("25 GbE", 20e-6, 8 / (0.94 * 25e9)),
    "100gb": Network("100 Gb", 5e-6, 8 / (0.94 * 100e9)),
}


def ring(network: Network, ranks: int) -> CostModel:
    """Return the cost of a ring: each rank sends 2(N-1) pieces of 1/N of the bytes to its neighbour, one by one."""
    rounds = 2 * (ranks - 1)
    return _one_after_the_other(rounds * network.alpha, rounds / ranks * network.beta, network)


def tree(network: Network, ranks: int) -> CostModel:
    """Return the cost of two trees, each of which reduces and broadcasts one half in pipelined pieces: up and down
    log2(N) levels, and every rank sends the bytes at most twice.
    """
    levels = math.ceil(math.log2(ranks))
    sent = 2 * (ranks - 1) / ranks if ranks <= 2 else 2.0
    return _one_after_the_other(2 * levels * network.alpha, sent * network.beta, network)


def link_of(cost: CostModel, ranks: int) -> Network:
    """Return the network over which a ring of ``ranks`` ranks has this cost: for more ranks of the same kind.

    Raises:
        ValueError: fewer than two ranks, which have no ring.
    """
    if ranks < 2:
        raise ValueError(f"{ranks} rank(s) have no ring; expected at least 2")
    rounds = 2 * (ranks - 1)
    return Network("as measured", cost.alpha / rounds, cost.beta * ranks / rounds, cost.pack, cost.load, cost.pace)


SHAPES: dict[str, Callable[[Network, int], CostModel]] = {"ring": ring, "tree": tree}


def _one_after_the_other(alpha: float, beta: float, network: Network) -> CostModel:
    return CostModel(alpha, beta, busy=alpha, pack=network.pack, load=network.load, pace=network.pace)
