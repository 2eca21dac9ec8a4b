"""Formats and rounding: every bit beside torch's casts, overflow pinned, chance without bias, and bugs that must show."""

import math

import pytest
import torch

from fourwalls.numerics.formats import FORMATS, IntFormat, decode, get_format, ticks
from fourwalls.numerics.rounding import accumulate, lost, quantum, round_to

CAST = ("bf16", "fp16", "fp8_e5m2", "fp8_e4m3")  # what torch can cast to
CHUNK = 62_500  # stays in a cache
INF = torch.tensor(torch.inf)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """So many small operations are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def uniform_patterns(count, seed=0):
    """float32 from uniform bit patterns, in chunks: every exponent is as likely, NaN and infinity too."""
    dice = torch.Generator().manual_seed(seed)
    for _ in range(count // CHUNK):
        yield torch.randint(-(2**31), 2**31, (CHUNK,), generator=dice, dtype=torch.int64).to(torch.int32).view(torch.float32)


def around_midpoints(name):
    """Every midpoint between neighbours of the format (the last to the tick that is missing), and its two float32 neighbours."""
    all_ticks = ticks(name)
    all_ticks = torch.cat([all_ticks, (2 * all_ticks[-1] - all_ticks[-2]).view(1)])
    middle = ((all_ticks[1:] + all_ticks[:-1]) / 2).float()
    assert torch.equal(middle.double(), (all_ticks[1:] + all_ticks[:-1]) / 2)  # float32 holds them exactly
    return torch.cat([middle, middle.nextafter(INF), middle.nextafter(-INF)])


def differs(got, want):
    """Elements whose bits differ; NaN is NaN."""
    assert got.dtype == want.dtype == torch.float32
    return (got.view(torch.int32) != want.view(torch.int32)) & ~(got.isnan() & want.isnan())


def wrong_bits(rounding, names, count):
    """How many results of `rounding` are not torch's, over uniform patterns, midpoints with neighbours, and special numbers."""
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1e-45, -1e-45])
    wrong = dict.fromkeys(names, 0)

    def look(x, name):
        wrong[name] += int(differs(rounding(x, name), x.to(get_format(name).dtype).float()).sum())

    for x in (*uniform_patterns(count), special):
        for name in names:
            look(x, name)
    for name in names:
        look(around_midpoints(name), name)
    return wrong


def test_ten_million_patterns_and_every_midpoint_have_torchs_bits():
    assert wrong_bits(round_to, CAST, 10_000_000) == dict.fromkeys(CAST, 0)


def half_up(x, name):
    q = quantum(x, name)
    y = ((x.double().abs() / q + 0.5).floor() * q).copysign(x.double()).float()
    return round_to(y, name)


def flushed(x, name):
    y = round_to(x, name)
    return torch.where(y.abs() < get_format(name).min_normal, y * 0, y)


def nan_lost(x, name):
    return round_to(x.nan_to_num(0.0, torch.inf, -torch.inf), name)


def cut_off(x, name):
    return round_to(x, name, mode="toward zero", saturate=True)


def sign_of_zero_lost(x, name):
    return round_to(x, name) + 0.0


def twice(x, name):  # first to fp16's neighbour in width, then to the format: a midpoint is lost on the way
    return round_to(round_to(x, "tf32"), name)


@pytest.mark.parametrize("mutant", [half_up, flushed, nan_lost, cut_off, sign_of_zero_lost, twice])
@pytest.mark.parametrize("name", CAST)
def test_a_wrong_rounding_shows(mutant, name):
    assert wrong_bits(mutant, [name], CHUNK)[name] > 0


@pytest.mark.parametrize("name", CAST)
def test_the_table_is_torchs(name):
    f = get_format(name)
    info = torch.finfo(f.dtype)
    assert (f.max, f.min_normal, f.epsilon, f.bits) == (info.max, info.tiny, info.eps, info.bits)
    assert f.min_subnormal == info.smallest_normal * info.eps
    patterns = torch.arange(2**f.bits)
    theirs = patterns.to(torch.uint8 if f.bits == 8 else torch.uint16).view(f.dtype).float()
    assert not differs(decode(patterns, f).float(), theirs).any()
    low, high = f.nan_patterns
    nan = [p for p in range(2 ** (f.bits - 1)) if math.isnan(theirs[p])]
    assert nan == list(range(low, high + 1))
    assert f.inf_pattern is None or theirs[f.inf_pattern] == torch.inf


def test_the_table_by_hand():
    fp32, tf32 = get_format("fp32"), get_format("tf32")
    assert (fp32.max, fp32.min_normal) == (torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny)
    assert (tf32.bits, tf32.bytes, tf32.epsilon, tf32.min_normal) == (19, 4, 2**-10, fp32.min_normal)
    assert (get_format("fp16").max, get_format("fp8_e5m2").max, get_format("fp8_e4m3").max) == (65504, 57344, 448)
    assert [f.bytes for f in FORMATS.values()] == [4, 4, 2, 2, 1, 1, 1, 0.5]
    assert (get_format("int8").min, get_format("int8").max, get_format("int4").min, get_format("int4").max) == (-128, 127, -8, 7)
    assert ticks("int4").tolist() == list(range(-8, 8)) and len(ticks("fp8_e4m3")) == 253
    with pytest.raises(ValueError, match="did you mean 'bf16'"):
        get_format("bf61")
    with pytest.raises(ValueError, match="at most 16 bits"):
        ticks("tf32")
    with pytest.raises(ValueError, match="0 to 15"):
        decode(torch.tensor([16]), "int4")


def test_what_torch_does_beyond_the_largest_number():
    """E5M2: infinity. E4M3 has none: torch 2.13 takes everything above 448, infinity too, to 448, and NaN to NaN."""
    beyond = torch.tensor([torch.inf, -torch.inf, 1e9, -1e9] * 9)  # long enough for torch's vector code and its remainder
    assert torch.equal(beyond.to(torch.float8_e5m2).float(), torch.tensor([torch.inf, -torch.inf] * 18))
    assert torch.equal(beyond.to(torch.float8_e4m3fn).float(), torch.tensor([448.0, -448.0] * 18))
    edges = torch.tensor([464.0, 464.0001, 61439.9, 61440.0])  # half way to the tick that is missing
    assert round_to(edges[:2], "fp8_e4m3", saturate=False).isnan().tolist() == [False, True]
    assert round_to(edges[2:], "fp8_e5m2").tolist() == [57344, torch.inf]


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8_e5m2", "fp8_e4m3"])
def test_saturation_on_and_off(name):
    f, x = get_format(name), torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38])
    on, off = round_to(x, name, saturate=True), round_to(x, name, saturate=False)
    assert torch.equal(on.nan_to_num(0), torch.tensor([f.max, -f.max, 0, f.max, -f.max])) and on[2].isnan()
    assert off.isnan().tolist() == [not f.has_inf, not f.has_inf, True, not f.has_inf, not f.has_inf]
    cut = round_to(x, name, mode="toward zero", saturate=False)
    assert cut[3:].tolist() == [f.max, -f.max] and not cut[:3].isfinite().any()


def test_tf32_keeps_ten_bits_of_the_nearest():
    """A processor reads fp32 and looks at 10 bits of the mantissa; here to the nearest, ties to even, as NVIDIA's conversion."""
    x = torch.cat([*uniform_patterns(CHUNK)])
    bits = x.view(torch.int32).to(torch.int64) & 0x7FFFFFFF
    rounded = bits + 0xFFF + (bits >> 13 & 1) & ~0x1FFF  # integer arithmetic on the pattern itself
    want = torch.where(x.isnan(), torch.nan, rounded.to(torch.int32).view(torch.float32).copysign(x))
    assert not differs(round_to(x, "tf32"), want).any()


def test_fp32_of_float64_is_torchs():
    x = torch.randn(CHUNK, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x *= 10.0 ** torch.arange(-45, 5).repeat(CHUNK // 50)
    assert round_to(x, "fp32").dtype == torch.float64 and torch.equal(round_to(x, "fp32"), x.float().double())


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4"])
def test_toward_zero_never_grows_and_misses_by_less_than_a_quantum(name):
    x = torch.randn(CHUNK, generator=torch.Generator().manual_seed(2)) * 2
    y = round_to(x, name, mode="toward zero")
    assert (y.abs() <= x.abs()).all() and ((x.double() - y.double()).abs() < quantum(x, name)).all()
    assert (round_to(y, name) == y).all()


@pytest.mark.parametrize(("name", "x"), [("bf16", 1.001), ("fp16", -3e-8), ("fp8_e4m3", 0.3), ("int8", 0.3), ("fp8_e5m2", -7.9)])
def test_chance_has_no_bias(name, x):
    n = 200_000
    y = round_to(torch.full((n,), x), name, mode="stochastic", generator=torch.Generator().manual_seed(3)).double()
    one = torch.tensor(x)
    q = float(quantum(one, name))
    assert len(y.unique()) == 2 and float(y.max() - y.min()) == q
    # each is off by at most q with a standard deviation of at most q / 2: six of those of the mean
    assert abs(float(y.mean()) - one.double().item()) < 6 * q / 2 / math.sqrt(n)
    biased = round_to(torch.full((n,), x), name).double().mean()
    assert abs(float(biased) - x) > 6 * q / 2 / math.sqrt(n)  # the nearest is, so this bound can tell


def test_chance_leaves_what_needs_no_rounding():
    x = torch.cat([ticks("fp8_e5m2").float(), torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])])
    assert not differs(round_to(x, "fp8_e5m2", mode="stochastic"), x).any()


def test_whole_numbers_saturate_and_refuse_nan():
    x = torch.tensor([0.5, 1.5, -0.5, 200.0, -200.0, torch.inf])
    assert round_to(x, "int8").tolist() == [0, 2, 0, 127, -128, 127] and round_to(x, "int4").tolist() == [0, 2, 0, 7, -8, 7]
    with pytest.raises(ValueError, match="1 of 2 elements are NaN, and int8"):
        round_to(torch.tensor([1.0, torch.nan]), "int8")
    assert isinstance(get_format("int8"), IntFormat)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3, 1, 2)])
def test_any_shape_and_dtype(shape):
    x = torch.full(shape, 1 / 3)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        y = round_to(x.to(dtype), "fp8_e5m2")
        assert y.shape == shape and y.dtype == torch.promote_types(dtype, torch.float32)
        assert (y == 0.3125).all()
    assert round_to(torch.full((4, 3), 1 / 3).t(), "bf16").stride() is not None
    with pytest.raises(ValueError, match="takes a float tensor"):
        round_to(torch.ones(2, dtype=torch.int32), "bf16")
    with pytest.raises(ValueError, match="allowed: nearest, stochastic, toward zero"):
        round_to(x, "bf16", mode="up")


def test_what_is_lost_is_counted():
    x = torch.tensor([1e-9, 0.0, 3e-6, 1.0, 1e6, -1e6, 6e4, 2e-8])
    found = lost(x, "fp16")
    assert (found["underflowed"], found["subnormal"], found["clipped"]) == (2 / 8, 1 / 8, 2 / 8)
    assert found["rms"] == pytest.approx(math.sqrt(2 * (1e6 - 65504) ** 2 / 8), rel=1e-6)
    assert lost(torch.zeros(0), "fp16")["rms"] == 0 and lost(torch.zeros(5), "int4")["underflowed"] == 0
    assert lost(torch.tensor([127.4, 127.6, -128.4, 0.4, 2.0]), "int8")["clipped"] == 1 / 5
    assert lost(torch.tensor([448.0, 464.0, 465.0]), "fp8_e4m3")["clipped"] == pytest.approx(1 / 3)


def test_many_small_updates():
    """c38: from 1.0 down by 6e-4 a hundred times. bf16's neighbour below 1 is 1 - 2^-8: half of that is out of reach."""
    ends = {name: accumulate(1.0, -6e-4, 100, name)[-1] for name in ("fp32", "bf16", "fp16")}
    assert ends["bf16"] == 1.0 and abs(ends["fp32"] - 0.94) < 1e-5
    assert ends["fp16"] == 1 - 100 * 2**-11  # each time one tick of 2^-11, which is nearest to 6e-4
    assert accumulate(1.0, -6e-4, 100, "bf16", mode="toward zero")[-1] < 0.7  # each step falls a whole tick
    by_chance = [accumulate(1.0, -6e-4, 100, "bf16", mode="stochastic", seed=s)[-1] for s in range(40)]
    # a sum of 100 draws, each with a standard deviation of at most 2^-9; the mean of 40: six of those
    assert abs(sum(by_chance) / 40 - 0.94) < 6 * 2**-9 * math.sqrt(100 / 40)
