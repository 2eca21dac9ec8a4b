"""The Triton kernels beside float64, on a GPU; without one, one plain sentence."""

import pytest
import torch

from fourwalls.kernels import triton_kernels
from fourwalls.kernels.attention import plain_attention
from fourwalls.kernels.triton_kernels import attention_triton, available, layer_norm_triton, softmax_triton

from .judge import norm_bound, numbers, softmax_bound, wrong

torch.set_num_threads(1)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(not available(), reason="Triton and a CUDA device are needed")


@needs_gpu
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # Triton's interpreter says so where inf meets inf
def test_softmax_is_float64s():
    for shape in ((7, 10), (2, 3, 33), (1, 9000), (4, 1), (0, 5), (3, 0)):
        x = numbers(*shape, dtype=torch.float32, scale=5.0).to(DEVICE)
        exact = torch.softmax(x.double(), -1)
        bound = softmax_bound(x, exact) * 4 if x.numel() else 0.0  # a GPU's exp is off by a little more
        assert wrong(softmax_triton(x), exact, bound) == 0
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[-inf] * 4, [inf, 0, 1, 2], [nan, 0, 1, 2], [-inf, 0, 1, 2]], device=DEVICE)
    assert wrong(softmax_triton(x), torch.softmax(x, -1).double(), 1e-6) == 0


@needs_gpu
@pytest.mark.gpu
def test_layer_norm_is_float64s():
    for shape, mean in (((7, 10), 0.0), ((2, 3, 33), 100.0), ((1, 9000), 1.0), ((4, 1), 3.0), ((0, 5), 0.0)):
        x = (numbers(*shape) + mean).float().to(DEVICE)
        w, b = (numbers(shape[-1], seed=s, dtype=torch.float32).to(DEVICE) for s in (1, 2))
        exact = torch.nn.functional.layer_norm(x.double(), x.shape[-1:], w.double(), b.double())
        assert wrong(layer_norm_triton(x, w, b), exact, norm_bound(x, w, b) if x.numel() else 0.0) == 0


@needs_gpu
@pytest.mark.gpu
def test_attention_is_float64s():
    for b, a, kv, s, n, d, causal in ((1, 2, 2, 70, 70, 16, True), (2, 4, 2, 5, 90, 20, False), (1, 1, 1, 1, 1, 8, True)):
        shapes = (b, a, s, d), (b, kv, n, d), (b, kv, n, d)
        q, k, v = (numbers(*shape, seed=i, dtype=torch.float32).to(DEVICE) for i, shape in enumerate(shapes))
        out, log_sum = attention_triton(q, k, v, causal=causal)
        wide = [x.double() for x in (q, k, v)]
        scores = wide[0] @ wide[1].repeat_interleave(a // kv, 1).transpose(-2, -1) / d**0.5
        if causal:
            scores = scores.masked_fill(torch.ones(s, n, device=DEVICE).triu(1).bool(), float("-inf"))
        bound = 2.0**-24 * (n + 8 * d + 32) * 4 * float(v.abs().max())
        assert wrong(out, plain_attention(*wide, causal=causal), bound) == 0
        assert wrong(log_sum, torch.logsumexp(scores, -1), bound + 1e-6 * scores[..., 0].abs().max().item()) == 0


def test_without_triton_or_a_gpu_one_sentence_says_so(monkeypatch):
    x = torch.ones(2, 4)
    w, q = torch.ones(4), torch.ones(1, 1, 2, 4)
    monkeypatch.setattr(triton_kernels, "triton", None)
    assert not available()
    for call in (lambda: softmax_triton(x), lambda: layer_norm_triton(x, w, w), lambda: attention_triton(q, q, q)):
        with pytest.raises(ValueError, match="needs Triton, which comes with torch's CUDA builds"):
            call()
    monkeypatch.setattr(triton_kernels, "triton", object())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="softmax_triton needs tensors on a CUDA device, and got cpu"):
        softmax_triton(x)


def test_what_the_kernels_cannot_do_is_refused_before_they_start(monkeypatch):
    monkeypatch.setattr(triton_kernels, "triton", object())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q = torch.ones(1, 2, 3, 4)
    for call, words in (
        (lambda: softmax_triton(torch.ones(2, 4, dtype=torch.float64)), "allowed: one dtype of float32, float16, bfloat16"),
        (lambda: layer_norm_triton(torch.ones(2, 4), torch.ones(3), torch.ones(4)), r"allowed: \(n,\)"),
        (lambda: attention_triton(q, q[:, :, :2], q[:, :, :2]), "n = s where causal"),
        (lambda: attention_triton(q[:, :1], q, q), "kv divides a"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
