"""What a device computes, what a link carries, and how a cluster is wired: the few numbers that every prediction starts from.

A device is priced by its roofline: work takes as long as its arithmetic or its memory traffic, whichever is longer. A message
costs a fixed start and then its bytes. All times are whole picoseconds computed with exact fractions, so that a formula and a
simulated run can be compared to the last digit.

    message time = alpha + bytes / bandwidth        work time = max(FLOPs / peak, bytes / memory bandwidth)

Reference: Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994); Williams, Waterman, Patterson,
"Roofline", CACM 52 (2009). Each preset carries the source of its own numbers.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

__all__ = ["CLUSTERS", "DEVICES", "LINKS", "PS", "Cluster", "Device", "Link", "get_cluster", "get_device", "get_link", "uniform"]

PS = 10**12  # picoseconds in a second


def _nearest(word: str, name: object, table: Mapping) -> ValueError:
    close = difflib.get_close_matches(str(name).lower(), [k.lower() for k in table], n=3, cutoff=0.4)
    close = [k for k in table if k.lower() in close]
    hint = f"; did you mean {' or '.join(close)}?" if close else "."
    return ValueError(f"no {word} named {name!r}{hint} Known: {', '.join(table)}")


def _positive(owner: str, word: str, value: float, *, zero: bool = False) -> None:
    good = isinstance(value, (int, float, Fraction)) and not isinstance(value, bool) and (value > 0 or (zero and value == 0))
    good = good and not (zero and value == math.inf)  # a latency that never ends; an infinite bandwidth is a wish one may have
    if not good:
        raise ValueError(f"{owner}: {word} is {value!r}; it must be a number {'of at least' if zero else 'above'} 0")


@dataclass(frozen=True)
class Device:
    """One processor with its memory.

    flops: dtype name -> FLOP/s at peak, dense (a multiply-add is 2). memory_bytes in bytes, memory_bandwidth in bytes/s.
    efficiency: the share of the peak that large matrix products reach (1.0: price at the peak).
    """

    name: str
    flops: dict[str, float]
    memory_bytes: int
    memory_bandwidth: float
    source: str = ""
    efficiency: float = 1.0

    def __post_init__(self):
        if "float32" not in self.flops:
            raise ValueError(
                f"{self.name}: flops has {sorted(self.flops)}; it needs 'float32', the rate for dtypes that are not listed"
            )
        for dtype, rate in self.flops.items():
            _positive(self.name, f"flops[{dtype!r}]", rate)
        _positive(self.name, "memory_bandwidth", self.memory_bandwidth)
        _positive(self.name, "memory_bytes", self.memory_bytes, zero=True)
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"{self.name}: efficiency is {self.efficiency!r}; it is a share, above 0 and at most 1")

    def rate(self, dtype: object = "float32") -> float:
        """Peak FLOP/s for a dtype name (or torch dtype). One that is not listed runs at the float32 rate, as on real hardware."""
        return self.flops.get(str(dtype).removeprefix("torch."), self.flops["float32"])

    def picoseconds(self, flops: float = 0, bytes: float = 0, dtype: object = "float32") -> int:
        """Roofline time, rounded up to whole picoseconds."""
        arithmetic = Fraction(flops) / (Fraction(self.rate(dtype)) * Fraction(self.efficiency)) if flops else 0
        traffic = Fraction(bytes) / Fraction(self.memory_bandwidth) if bytes and self.memory_bandwidth != math.inf else 0
        return math.ceil(max(arithmetic, traffic) * PS)

    def seconds(self, flops: float = 0, bytes: float = 0, dtype: object = "float32") -> float:
        """Roofline time in seconds: the longer of arithmetic and memory traffic."""
        return max(flops / (self.rate(dtype) * self.efficiency), bytes / self.memory_bandwidth)

    def ridge(self, dtype: object = "float32") -> float:
        """FLOPs per byte above which arithmetic, and below which memory traffic, decides the time."""
        return self.rate(dtype) * self.efficiency / self.memory_bandwidth


@dataclass(frozen=True)
class Link:
    """A wire between two ranks, one direction. alpha in seconds per message, bandwidth in bytes/s (math.inf: bytes are free)."""

    name: str
    alpha: float
    bandwidth: float
    source: str = ""
    _alpha_ps: int = field(init=False, repr=False, compare=False)
    _rate: tuple[int, int] = field(init=False, repr=False, compare=False)  # picoseconds per byte as (numerator, denominator)

    def __post_init__(self):
        _positive(f"link {self.name}", "alpha", self.alpha, zero=True)
        _positive(f"link {self.name}", "bandwidth", self.bandwidth)
        per_byte = Fraction(0) if self.bandwidth == math.inf else PS / Fraction(self.bandwidth)
        object.__setattr__(self, "_alpha_ps", round(Fraction(self.alpha) * PS))
        object.__setattr__(self, "_rate", (per_byte.numerator, per_byte.denominator))

    def picoseconds(self, nbytes: int) -> int:
        """Time of one message of `nbytes`, in whole picoseconds: round(alpha) + ceil(bytes / bandwidth), exact."""
        numerator, denominator = self._rate
        return self._alpha_ps + -(-nbytes * numerator // denominator)

    def seconds(self, nbytes: int) -> float:
        return self.picoseconds(nbytes) / PS

    def slowed(self, factor: float) -> "Link":
        """The same wire when every message takes `factor` times as long."""
        _positive(f"link {self.name}", "factor", factor)
        return (
            self
            if factor == 1
            else replace(self, name=f"{self.name} x{factor:g}", alpha=self.alpha * factor, bandwidth=self.bandwidth / factor)
        )


@dataclass(frozen=True)
class Cluster:
    """Ranks on nodes: a fast link inside a node, a slower one between nodes.

    device None: computing takes no time. ranks_per_node None: one node holds all. shared_nic True: the ranks of a node share
    one port out and one port in to other nodes. slow[(src, dst)] and straggler[rank] are factors: messages or work take so many
    times as long.
    """

    name: str
    device: Device | None
    intra: Link
    inter: Link
    ranks_per_node: int | None = None
    shared_nic: bool = False
    slow: dict[tuple[int, int], float] = field(default_factory=dict)
    straggler: dict[int, float] = field(default_factory=dict)
    source: str = ""
    _links: dict = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self):
        n = self.ranks_per_node
        if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
            raise ValueError(
                f"cluster {self.name}: ranks_per_node is {n!r}; it is a whole number of at least 1, or None for one node"
            )
        for where, factor in {**self.slow, **self.straggler}.items():
            _positive(f"cluster {self.name}", f"the factor of {where}", factor)

    def node(self, rank: int) -> int:
        """The node on which `rank` lives: ranks fill one node after the other."""
        return 0 if self.ranks_per_node is None else rank // self.ranks_per_node

    def link(self, src: int, dst: int) -> Link:
        """The wire that a message from `src` to `dst` takes, slow factors applied."""
        found = self._links.get((src, dst))
        if found is None:
            base = self.intra if self.node(src) == self.node(dst) else self.inter
            found = self._links[src, dst] = base.slowed(self.slow.get((src, dst), 1))
        return found

    def compute_picoseconds(self, rank: int, flops: float = 0, bytes: float = 0, dtype: object = "float32") -> int:
        """Roofline time of work on `rank`, its straggler factor applied; 0 where the cluster has no device."""
        if self.device is None:
            return 0
        return math.ceil(self.device.picoseconds(flops, bytes, dtype) * Fraction(self.straggler.get(rank, 1)))

    def with_faults(self, *, slow: Mapping | None = None, straggler: Mapping | None = None) -> "Cluster":
        """The same cluster with slow links and slow ranks: `with_faults(slow={(0, 1): 10}, straggler={3: 2})`."""
        return replace(self, slow=dict(slow or {}), straggler=dict(straggler or {}))


def uniform(alpha: float, bandwidth: float, device: Device | None = None) -> Cluster:
    """Every pair of ranks has the same link: alpha in seconds, bandwidth in bytes/s. Without a device, computing takes no
    time.
    """
    link = Link("uniform", alpha, bandwidth, source="stated by the caller")
    return Cluster("uniform", device, link, link, source="stated by the caller")


T, GB, GBIT = 1e12, 1e9, 1e9 / 8

_DEVICES = [
    Device(
        "V100",
        {"float64": 7.8 * T, "float32": 15.7 * T, "float16": 125 * T},
        32 * 10**9,
        900 * GB,
        source="NVIDIA V100 datasheet (2020), SXM2 32 GB; no bfloat16, which then runs at the float32 rate",
    ),
    Device(
        "A100-40GB",
        {"float64": 9.7 * T, "float32": 19.5 * T, "tf32": 156 * T, "float16": 312 * T, "bfloat16": 312 * T, "int8": 624 * T},
        40 * 10**9,
        1555 * GB,
        source="NVIDIA A100 datasheet (2020), SXM4 40 GB, dense rates",
    ),
    Device(
        "A100",
        {"float64": 9.7 * T, "float32": 19.5 * T, "tf32": 156 * T, "float16": 312 * T, "bfloat16": 312 * T, "int8": 624 * T},
        80 * 10**9,
        2039 * GB,
        source="NVIDIA A100 datasheet (2021), SXM4 80 GB, dense rates",
    ),
    Device(
        "H100",
        {
            "float64": 34 * T,
            "float32": 67 * T,
            "tf32": 494.7 * T,
            "float16": 989.4 * T,
            "bfloat16": 989.4 * T,
            "float8_e4m3fn": 1978.9 * T,
            "float8_e5m2": 1978.9 * T,
            "int8": 1978.9 * T,
        },
        80 * 10**9,
        3350 * GB,
        source="NVIDIA H100 datasheet and white paper (2022), SXM5 80 GB, dense rates (half of those with sparsity)",
    ),
    Device(
        "laptop",
        {"float64": 80e9, "float32": 160e9},
        8 * 10**9,
        25.6 * GB,
        source="stated, not measured: 2 cores x 2.5 GHz x 32 FLOP a cycle (AVX2, 2 FMA); one channel of DDR4-3200",
    ),
]

_NCCL = "; alpha from NCCL's tuning table (src/graph/tuning.cc, ring, simple protocol)"
_TCP = ", each way; alpha stated: a round of TCP through the kernel, calibrate before you rely on it"
_LINKS = [
    Link("nvlink2", 3.4e-6, 150 * GB, "NVIDIA V100 datasheet: 6 links x 25 GB/s each way" + _NCCL),
    Link("nvlink3", 3.4e-6, 300 * GB, "NVIDIA A100 datasheet: 600 GB/s both ways together, 12 links x 25 GB/s each way" + _NCCL),
    Link("nvlink4", 3.4e-6, 450 * GB, "NVIDIA H100 datasheet: 900 GB/s both ways together, 18 links x 25 GB/s each way" + _NCCL),
    Link("pcie3", 5.7e-6, 16 * 8e9 * 128 / 130 / 8, "PCI Express 3.0 x16: 8 GT/s, 128b/130b, each way" + _NCCL),
    Link("pcie4", 5.7e-6, 16 * 16e9 * 128 / 130 / 8, "PCI Express 4.0 x16: 16 GT/s, 128b/130b, each way" + _NCCL),
    Link("pcie5", 5.7e-6, 16 * 32e9 * 128 / 130 / 8, "PCI Express 5.0 x16: 32 GT/s, 128b/130b, each way" + _NCCL),
    Link("infiniband-edr", 14e-6, 100 * GBIT, "InfiniBand EDR 4x: 100 Gbit/s each way" + _NCCL),
    Link("infiniband-hdr", 14e-6, 200 * GBIT, "InfiniBand HDR 4x: 200 Gbit/s each way" + _NCCL),
    Link("infiniband-ndr", 14e-6, 400 * GBIT, "InfiniBand NDR 4x: 400 Gbit/s each way" + _NCCL),
    Link("ethernet-10g", 30e-6, 10 * GBIT, "IEEE 802.3ae: 10 Gbit/s" + _TCP),
    Link("ethernet-25g", 30e-6, 25 * GBIT, "IEEE 802.3by: 25 Gbit/s" + _TCP),
    Link("ethernet-100g", 30e-6, 100 * GBIT, "IEEE 802.3ba: 100 Gbit/s" + _TCP),
    Link(
        "loopback",
        50e-6,
        1.5 * GB,
        "stated: TCP between two processes of one machine through gloo, order of magnitude; calibrate",
    ),
]

DEVICES: dict[str, Device] = {d.name: d for d in _DEVICES}
LINKS: dict[str, Link] = {link.name: link for link in _LINKS}

_CLUSTERS = [
    Cluster(
        "a100-selene",
        DEVICES["A100"],
        LINKS["nvlink3"],
        LINKS["infiniband-hdr"],
        8,
        source="Narayanan et al. 2021 (arXiv:2104.04473), section 5: nodes of 8 A100-80GB, NVSwitch, an HDR adapter each",
    ),
    Cluster(
        "dgx-h100",
        DEVICES["H100"],
        LINKS["nvlink4"],
        LINKS["infiniband-ndr"],
        8,
        source="NVIDIA DGX H100 datasheet: 8 H100 with NVSwitch, 8 NDR ports, one for each GPU",
    ),
    Cluster(
        "v100-ddp",
        DEVICES["V100"],
        LINKS["nvlink2"],
        LINKS["ethernet-100g"],
        8,
        shared_nic=True,
        source="Li et al. 2020 (arXiv:2006.15704), section 5: servers of 8 V100, one 100 Gbit/s adapter; NVLink as all to all",
    ),
    *(
        Cluster(
            f"ethernet-{g}g",
            DEVICES["V100"],
            LINKS["nvlink2"],
            LINKS[f"ethernet-{g}g"],
            1,
            source=f"stated: one V100 a machine, {g} Gbit/s Ethernet",
        )
        for g in (10, 25, 100)
    ),
    Cluster("laptop", DEVICES["laptop"], LINKS["loopback"], LINKS["loopback"], source="stated: processes of one small machine"),
]
CLUSTERS: dict[str, Cluster] = {c.name: c for c in _CLUSTERS}


def _get(word: str, kind: type, table: Mapping, item):
    if isinstance(item, kind):
        return item
    for name, found in table.items():
        if isinstance(item, str) and name.lower() == item.strip().lower():
            return found
    raise _nearest(word, item, table)


def get_cluster(cluster: "str | Cluster") -> Cluster:
    """The preset of that name, or the cluster itself. ValueError with close names for one that does not exist."""
    return _get("cluster", Cluster, CLUSTERS, cluster)


def get_device(device: "str | Device") -> Device:
    """The preset of that name, or the device itself. ValueError with close names for one that does not exist."""
    return _get("device", Device, DEVICES, device)


def get_link(link: "str | Link") -> Link:
    """The preset of that name, or the link itself. ValueError with close names for one that does not exist."""
    return _get("link", Link, LINKS, link)
