"""Cores by affinity and quota, seeds that share nothing, and counters of the kernel, from files made up for the test."""

import os
import random

import numpy as np
import pytest
import torch

from fourwalls.ranks import machine
from fourwalls.ranks.machine import allowed_cores, loopback_interface, seed_everything, seed_of, threads_per_rank


def group(tmp_path, own, files):
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return machine._quota(tmp_path / "root", tmp_path / "own")


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, 0.5),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "200000 100000"}, 2.0),
        ("0::/\n", {"cpu.max": "300000 100000"}, 3.0),
        ("0::/a\n", {"a/cpu.max": "max 100000"}, None),
        ("4:cpu,cpuacct:/x\n", {"cpu,cpuacct/x/cpu.cfs_quota_us": "250000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"}, 2.5),
        ("4:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, None),
        ("", {}, None),
        ("0::/a\n", {"a/cpu.max": "nonsense"}, None),
    ],
)
def test_h23_quotas_of_both_versions(tmp_path, own, files, quota):
    assert group(tmp_path, own, files) == quota


@pytest.mark.parametrize(("quota", "mask", "cores"), [(None, 6, 6), (1.5, 6, 1), (0.2, 6, 1), (8.0, 3, 3), (2.0, 6, 2)])
def test_h23_the_smaller_of_mask_and_quota_and_at_least_one(monkeypatch, quota, mask, cores):
    monkeypatch.setattr(machine, "_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(mask)), raising=False)
    assert allowed_cores() == cores
    assert threads_per_rank(4) == max(1, cores // 4)
    assert threads_per_rank(1) == cores


def test_seeds_of_neighbours_share_nothing():
    seeds = {seed_of(s, r) for s in range(50) for r in range(50)}
    assert len(seeds) == 2500 and all(0 <= s < 2**63 for s in seeds)
    assert seed_of(0, 0) == 3316799032941286238  # a change here changes every recorded result


def test_everything_is_seeded():
    draws = []
    for _ in range(2):
        assert seed_everything(3, 1) == seed_of(3, 1)
        draws.append((random.random(), torch.rand(1).item(), float(np.random.rand())))
    assert draws[0] == draws[1]
    seed_everything(3, 2)
    assert all(a != b for a, b in zip(draws[0], (random.random(), torch.rand(1).item(), float(np.random.rand())), strict=True))


def test_the_loopback_interface_is_there():
    assert loopback_interface() in ("lo", "lo0")


def test_a16_kernel_counters(tmp_path, monkeypatch):
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    monkeypatch.setattr(machine, "_memory_events", lambda: [(tmp_path / "missing", "oom_kill"), (events, "oom_kill")])
    assert machine.oom_kills() == 2
    events.write_text("low 0\n")
    assert machine.oom_kills() is None
