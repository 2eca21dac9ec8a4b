"""The wirings among which the alpha-beta explorer chooses, and the hidden points at which it asks who wins.

One kind of wire for all ranks, or a fast one inside nodes and a slower one between them, with an adapter for each rank or one for
the whole node. The sliders move the wire between nodes, or the only one.

    time of a message = alpha + bytes / bandwidth

Reference: the presets of cost/hardware.py, each with its source.
"""

from dataclasses import dataclass

from ..cost.hardware import Cluster, Link, get_link

__all__ = ["POINTS", "RANKS", "WIRES", "Wire"]

RANKS = (2, 3, 4, 6, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
FEW_SEND = ("tree", "star")  # while the others wait


@dataclass(frozen=True)
class Wire:
    """Where a setting starts: alpha (s) and bandwidth (bytes/s) of the wire that the sliders change; inside nodes of `node` ranks
    there may be another, which they do not. shared: the ranks of a node have one adapter together. alone: (alpha, bandwidth) of a
    message while no other is under way, where that was measured.
    """

    name: str
    alpha: float
    bandwidth: float
    node: int | None = None
    inside: Link | None = None
    shared: bool = False
    alone: tuple[float, float] | None = None

    def cluster(self, alpha: float, bandwidth: float, algorithm: str = "") -> Cluster:
        """What prices `algorithm` where the sliders stand at alpha and bandwidth."""
        if self.alone and algorithm in FEW_SEND:
            alpha, bandwidth = self.alone[0] * alpha / self.alpha, self.alone[1] * bandwidth / self.bandwidth
        link = Link(self.name, alpha, bandwidth)
        return Cluster(self.name, None, self.inside or link, link, self.node, self.shared)

    def ranks(self) -> tuple[int, ...]:
        """Numbers of ranks that all algorithms can be priced for."""
        return tuple(n for n in RANKS if not self.shared or n & (n - 1) == 0)


def _preset(name: str, link: str, node: int | None = None, inside: str | None = None, shared: bool = False) -> Wire:
    found = get_link(link)
    return Wire(name, found.alpha, found.bandwidth, node, get_link(inside) if inside else None, shared)


WIRES = (
    _preset("A100 nodes of 8", "infiniband-hdr", 8, "nvlink3"),
    _preset("V100 nodes of 8, one adapter", "ethernet-100g", 8, "nvlink2", True),
    _preset("InfiniBand HDR", "infiniband-hdr"),
    _preset("Ethernet 10 Gbit/s", "ethernet-10g"),
    _preset("one machine, loopback", "loopback"),
)
# hidden points: wire, ranks, bytes; at each, somebody is clearly ahead
POINTS = (
    ("A100 nodes of 8", 64, 2**20),
    ("InfiniBand HDR", 24, 2**28),
    ("V100 nodes of 8, one adapter", 128, 2**14),
    ("A100 nodes of 8", 192, 2**29),
    ("Ethernet 10 Gbit/s", 96, 2**12),
    ("one machine, loopback", 6, 2**24),
)
