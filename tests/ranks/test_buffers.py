"""Questions about the bytes under tensors."""

import pytest
import torch

from fourwalls.ranks.buffers import checksum, overlaps, share_memory


def test_overlap_within_one_tensor():
    x = torch.arange(12.0)
    assert not overlaps(x) and not overlaps(x.view(3, 4).t()) and not overlaps(x[::3]) and not overlaps(x.view(3, 4)[:, 1])
    assert not overlaps(torch.tensor(1.0)) and not overlaps(torch.empty(0, 3)) and not overlaps(x[:1].expand(1))
    assert overlaps(x[:1].expand(5)) and overlaps(x.as_strided((3, 3), (1, 1))) and overlaps(x.as_strided((2, 3), (2, 1)))


def test_shared_memory_of_two_tensors():
    x = torch.arange(12.0)
    m = x.view(3, 4)
    assert share_memory(x, x) and share_memory(x, m) and share_memory(x[:4], x[3:]) and share_memory(m[:, 1], m[1])
    assert not share_memory(x, x.clone()) and not share_memory(x[:4], x[4:])
    assert not share_memory(m[:, 0], m[:, 1]) and not share_memory(x[::2], x[1::2])
    assert share_memory(x[::2], x[2:3]) and not share_memory(x[::2], x[3:4])
    assert not share_memory(x[:0], x) and not share_memory(x[3:3], x) and not share_memory(m, m[1, 2:2])  # no byte, none shared


def test_shared_memory_is_a_matter_of_bytes_not_elements():
    x = torch.zeros(8, dtype=torch.int32)
    halves = x.view(torch.int16)
    assert share_memory(x[1:2], halves[3:4]) and not share_memory(x[1:2], halves[4:5])
    assert share_memory(x[::2], halves[1::4]) and not share_memory(x[::2], halves[2::4])


@pytest.mark.parametrize("numel", [1, 5, 1000, 20_000, 300_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64])
def test_a_checksum_sees_any_change(numel, dtype):
    x = (torch.arange(numel) % 2).to(dtype)
    before = checksum(x)
    assert checksum(x.clone()) == before
    for place in {0, numel // 2, numel - 1}:
        y = x.clone()
        y[place] = 1 - x[place] if dtype is not torch.bool else ~x[place]
        assert checksum(y) != before
    if numel > 2:
        assert checksum(x.flip(0) if numel % 2 == 0 else x.roll(1)) != before


def test_a_checksum_sees_rows_swapped_and_order_changed():
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    y = x.clone()
    y[[3, 40]] = x[[40, 3]]
    assert checksum(x) != checksum(y)
    assert checksum(x) != checksum(x.t().contiguous())


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_checksum_does_not_depend_on_where_the_bytes_lie(start):
    x = torch.arange(40_000, dtype=torch.int16)
    room = torch.zeros(50_000, dtype=torch.int16)
    room[start : start + 40_000] = x
    assert checksum(room[start : start + 40_000]) == checksum(x)
    assert checksum(x.view(200, 200).t()) == checksum(x.view(200, 200).t().contiguous())
