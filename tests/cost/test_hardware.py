"""Links and devices: whole picoseconds, exact; presets with sources; names that do not exist."""

import math
import subprocess
import sys
from fractions import Fraction

import pytest

from fourwalls.cost.hardware import (
    CLUSTERS,
    DEVICES,
    LINKS,
    PS,
    Cluster,
    Device,
    Link,
    get_cluster,
    get_device,
    get_link,
    uniform,
)
from fourwalls.cost.machine import fit_link, measure_device, this_machine


@pytest.mark.parametrize("nbytes", [0, 1, 3, 7, 10**3, 2**20 + 1, 350 * 10**9])
@pytest.mark.parametrize("bandwidth", [1e9, 3e9, 1.25e9, 300e9, 16 * 8e9 * 128 / 130 / 8])
def test_message_time_is_exact(nbytes, bandwidth):
    link = Link("x", 1.5e-6, bandwidth)
    assert link.picoseconds(nbytes) == 1_500_000 + math.ceil(Fraction(nbytes) * PS / Fraction(bandwidth))
    assert type(link.picoseconds(nbytes)) is int


def test_rounds_up_by_hand():
    assert Link("x", 0, 3e12).picoseconds(1) == 1  # a third of a picosecond takes one
    assert Link("x", 0, 3e12).picoseconds(3) == 1
    assert Link("x", 0, 3e12).picoseconds(4) == 2
    assert Link("x", 2e-6, math.inf).picoseconds(10**15) == 2_000_000


def test_roofline_takes_the_longer():
    device = Device("d", {"float32": 1e12, "float16": 4e12}, 10**9, 1e9, efficiency=0.5)
    assert device.picoseconds(1e6, 0) == 2 * 10**6  # half the peak
    assert device.picoseconds(1e6, 10**6) == 10**9  # the bytes are slower
    assert device.picoseconds(1e6, 0, "float16") == 5 * 10**5
    assert device.picoseconds(1e6, 0, "torch.float16") == 5 * 10**5
    assert device.picoseconds(1e6, 0, "int64") == 2 * 10**6  # not listed: the float32 rate
    assert device.seconds(1e6, 10**6) == pytest.approx(1e-3, rel=1e-12)
    assert device.ridge() == pytest.approx(500.0)


def test_cluster_nodes_links_and_faults():
    a, b = Link("fast", 1e-6, 1e9), Link("slow", 1e-5, 1e8)
    cluster = Cluster("c", DEVICES["A100"], a, b, 4, slow={(0, 1): 10}, straggler={3: 2})
    assert [cluster.node(r) for r in range(9)] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert cluster.link(1, 0) is a and cluster.link(3, 4) is b
    assert cluster.link(0, 1).picoseconds(1000) == 10 * a.picoseconds(1000)
    assert cluster.compute_picoseconds(3, 1e12) == 2 * cluster.compute_picoseconds(2, 1e12) > 0
    assert uniform(1e-6, 1e9).compute_picoseconds(0, 1e12) == 0
    assert uniform(1e-6, 1e9).link(0, 7) == uniform(1e-6, 1e9).link(5, 6)
    assert cluster.with_faults(straggler={0: 3}).slow == {}


def test_every_preset_names_its_source():
    for table in (DEVICES, LINKS, CLUSTERS):
        for name, item in table.items():
            assert item.name == name and len(item.source) > 15, name


def test_preset_figures():
    assert DEVICES["A100"].rate("bfloat16") == 312e12 and DEVICES["A100"].memory_bandwidth == 2039e9
    assert LINKS["infiniband-hdr"].bandwidth == 25e9 and LINKS["nvlink3"].bandwidth == 300e9
    assert LINKS["pcie3"].bandwidth == pytest.approx(15.754e9, rel=1e-4)
    assert get_cluster("a100-selene").link(7, 8).name == "infiniband-hdr"
    assert get_cluster("V100-DDP").shared_nic


@pytest.mark.parametrize(
    "get, wrong, near", [(get_cluster, "a100selene", "a100-selene"), (get_device, "A10", "A100"), (get_link, "nvlink", "nvlink3")]
)
def test_unknown_names_get_near_ones(get, wrong, near):
    with pytest.raises(ValueError, match=near):
        get(wrong)
    with pytest.raises(ValueError, match="Known"):
        get(7)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Link("x", -1e-6, 1e9),
        lambda: Link("x", 1e-6, 0),
        lambda: Link("x", 1e-6, float("nan")),
        lambda: Link("x", "1us", 1e9),
        lambda: Device("d", {"float16": 1e12}, 1, 1e9),
        lambda: Device("d", {"float32": 1e12}, 1, 1e9, efficiency=1.5),
        lambda: Cluster("c", None, LINKS["nvlink3"], LINKS["nvlink3"], 0),
        lambda: Cluster("c", None, LINKS["nvlink3"], LINKS["nvlink3"], slow={(0, 1): 0}),
        lambda: fit_link([(1, 1e-6)]),
        lambda: fit_link([(1, 2e-6), (1000, 1e-6)]),
    ],
)
def test_bad_numbers_are_refused(make):
    with pytest.raises(ValueError):
        make()


def test_calibration_finds_the_line_again():
    true = Link("t", 40e-6, 2e9)
    link = fit_link([(n, true.seconds(n)) for n in (64, 4096, 2**20, 2**24)])
    assert link.alpha == pytest.approx(40e-6, rel=1e-6) and link.bandwidth == pytest.approx(2e9, rel=1e-6)


def test_this_machine_is_measured():
    device = measure_device(size=128, copy_bytes=2**20, repeats=1)
    assert all(rate > 1e7 for rate in device.flops.values()) and device.memory_bytes > 2**28 and "measured" in device.source
    assert this_machine(LINKS["loopback"], device=device).node(99) == 0


def test_cost_never_imports_torch():
    """The arithmetic must start in a moment, in a process that has no torch at all."""
    code = (
        "import sys; sys.modules['torch'] = None\n"  # any import of torch fails
        "import fourwalls.cost.hardware, fourwalls.cost.flops, fourwalls.cost.memory, fourwalls.cost.collectives\n"
        "import fourwalls.cost.published, fourwalls.cost.units, fourwalls.cost.shape, fourwalls.cost.machine\n"
        "assert sys.modules['torch'] is None and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
