"""What travels to the judge is plain data, bit for bit, and nothing else does."""

import json
import math
import socket
import struct

import pytest
import torch

from fourwalls.ranks import plain


def there_and_back(value):
    a, b = socket.socketpair()
    with a, b:
        plain.write(a, value)
        return plain.read(b)


@pytest.mark.parametrize("dtype", sorted(plain.DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (4, 5)])
def test_tensors_arrive_bit_for_bit(dtype, shape):
    x = (torch.randn(shape, dtype=torch.float64) * 100).to(plain.DTYPES[dtype])
    back = there_and_back(x)
    assert back.dtype == x.dtype and back.shape == x.shape and torch.equal(back, x)


def test_strides_conjugates_and_parameters_arrive_as_what_they_hold():
    z = torch.randn(3, 4, dtype=torch.complex64)
    for x in (torch.randn(3, 4).t(), torch.randn(6)[::2], z.conj(), torch.nn.Parameter(torch.ones(2)), torch.ones(1).expand(5)):
        back = there_and_back(x)
        assert type(back) is torch.Tensor and torch.equal(back, x.detach()) and not back.requires_grad


def test_numbers_texts_and_containers_keep_their_types():
    value = [1, -(2**80), 2.5, None, True, "é\n", (1, [2]), {"a": 1, 3: (4.0,)}, float("inf"), -0.0]
    back = there_and_back(value)
    assert back == value and [type(v) for v in back] == [type(v) for v in value]
    assert math.isnan(there_and_back(float("nan"))) and math.copysign(1, back[-1]) == -1


class AlwaysRight(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return True


class Agrees:
    def __eq__(self, other):
        return True

    __hash__ = None


class Shouts(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


def test_a_tensor_with_its_own_comparisons_arrives_as_a_plain_one():
    back = there_and_back(torch.zeros(2).as_subclass(AlwaysRight))
    assert type(back) is torch.Tensor and not torch.equal(back, torch.ones(2))


ODD = [Agrees(), [Agrees()], Shouts(3), {1.5: 2}, lambda: 1, torch.ones(2).to_sparse(), 1j, b"x", {1}]


@pytest.mark.parametrize("value", ODD)
def test_objects_are_refused_where_they_are_sent(value):
    with pytest.raises(plain.NotPlain):
        plain.pack(value)


def test_lists_without_end_are_refused():
    endless = []
    endless.append(endless)
    with pytest.raises(plain.NotPlain, match="deep"):
        plain.pack(endless)


def frame(head, body=b""):
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<QQ", len(text), len(body)) + text + body


@pytest.mark.parametrize(
    "sent",
    [
        frame(b"not json"),
        frame({"q": 1}),
        frame({"x": ["float32", [4], "cpu"]}, b"abc"),
        frame({"x": ["float32", [-1], "cpu"]}),
        frame({"x": ["object", [1], "cpu"]}, b"abcd"),
        frame({"x": ["float32", [2**40, 2**40], "cpu"]}),
        frame({"v": 1}, b"left over"),
        frame({"d": [[1, 2, 3]]}),
        frame({"l": 5}),
        frame({"v": [1]}),
        frame({"i": "9" * 5000}),
        struct.pack("<QQ", 2**62, 2**62),
    ],
)
def test_a_frame_made_up_by_the_other_side_is_refused(sent):
    a, b = socket.socketpair()
    with a, b:
        a.sendall(sent)
        with pytest.raises(plain.NotPlain):
            plain.read(b)


def test_a_side_that_has_gone_or_is_silent_is_told_apart():
    a, b = socket.socketpair()
    with b:
        b.settimeout(0.05)
        with pytest.raises(TimeoutError):
            plain.read(b)
        a.sendall(b"\0\0\0")
        a.close()
        with pytest.raises(EOFError):
            plain.read(b)
