"""What must hold for the reference kernel by itself, and that the numpy kernel agrees on any shape."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from expert_banks import KERNELS, bits, prepare, random_awq, random_nvfp4, raw
from sm70_kernels import reference, scale_tables
from sm70_kernels.spec import Projection, RawScaleError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

DATA = Path(__file__).parent / "data"
LAYOUTS = reference.AWQ_LAYOUTS + reference.NVFP4_LAYOUTS
ALL_FP16 = torch.arange(2**16).to(torch.int16).view(torch.float16)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


class Case(NamedTuple):
    gate: Projection
    up: Projection
    down: Projection
    layout: str
    interleave: bool
    tp_sizes: list[int]

    @property
    def expert(self) -> tuple[Projection, Projection, Projection]:
        return self.gate, self.up, self.down


@st.composite
def cases(draw: st.DrawFn, *layouts: str) -> Case:
    """An expert of any legal shape, and the TP sizes to cut it for."""
    layout = draw(st.sampled_from(layouts))
    interleave = draw(st.booleans())
    tp_sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3, unique=True))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if layout in reference.AWQ_LAYOUTS:
        group_size = draw(st.sampled_from([32, 64, 128]))
        hidden = group_size * draw(st.integers(1, 3))
        intermediate = group_size * int(np.lcm.reduce(tp_sizes))
        shapes = [(hidden, intermediate), (hidden, intermediate), (intermediate, hidden)]
        gate, up, down = (random_awq(rng, k, n, group_size) for k, n in shapes)
    else:
        step = 32 if layout == "nvfp4-raw" else 16
        hidden = 32 * draw(st.integers(1, 5))
        intermediate = step * draw(st.sampled_from([1, 3])) * int(np.lcm.reduce(tp_sizes))
        shapes = [(hidden, intermediate), (hidden, intermediate), (intermediate, hidden)]
        globals_ = 2.0 ** -rng.integers(1, 11, 3)
        if draw(st.booleans()):  # not a power of two: some of these the raw layout cannot hold
            globals_ *= rng.uniform(1, 2, 3)
        codes = (0, 256) if layout == "nvfp4-fp16" else (8, 0x7F)
        if interleave and layout == "nvfp4-raw":
            globals_[1] = globals_[0] * draw(st.sampled_from([1, 2]))
            codes = (0x20, 0x50)  # not spoilt by a factor of two
        gate, up, down = (random_nvfp4(rng, *shape, g, codes) for shape, g in zip(shapes, globals_, strict=True))
    return Case(gate, up, down, layout, interleave, tp_sizes)


def source_weights(projection: Projection) -> NDArray[Any]:
    """The fp32 weights [N, K] that a projection stands for, NVFP4 with its scales rounded to fp16."""
    if projection.global_scale is None:
        q, z = (
            np.empty((part.shape[0], 8 * part.shape[1]), np.float32) for part in (projection.weight, projection.zeros)
        )
        for column, nibble in enumerate((0, 4, 1, 5, 2, 6, 3, 7)):
            q[:, column::8] = (projection.weight >> np.uint32(4 * nibble)) & np.uint32(15)
            z[:, column::8] = (projection.zeros >> np.uint32(4 * nibble)) & np.uint32(15)
        scales = projection.scales.view(np.float16).astype(np.float32)
        repeats = q.shape[0] // scales.shape[0]
        return ((q - z.repeat(repeats, 0)) * scales.repeat(repeats, 0)).T
    weights = np.empty((projection.weight.shape[0], 2 * projection.weight.shape[1]), np.float32)
    weights[:, 0::2] = E2M1[projection.weight & 15]
    weights[:, 1::2] = E2M1[projection.weight >> 4]
    scales = (e4m3(projection.scales) * projection.global_scale).astype(np.float16).astype(np.float32)
    return weights * scales.repeat(16, 1)


def e4m3(codes: NDArray[Any]) -> NDArray[Any]:
    """1 sign bit, 4 exponent bits with bias 7, 3 mantissa bits; no inf, all ones is NaN."""
    exponent, mantissa = (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float32)
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    magnitude = np.where(codes & 0x7F == 0x7F, np.nan, magnitude)
    return np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)


def dequantised(case: Case, tp_size: int, **options: Any) -> list[NDArray[Any]]:
    """gate, up, down [N, K] put together again from the banks of all ranks."""
    ranks = []
    for rank in range(tp_size):
        tensors = reference.prepare_rank(
            *case.expert,
            layout=case.layout,
            interleave=case.interleave,
            rank=rank,
            tp_size=tp_size,
            **options,
        )
        ranks.append(reference.dequantise(tensors, layout=case.layout, interleave=case.interleave))
    gate, up, down = zip(*ranks, strict=True)
    return [torch.cat(gate).numpy(), torch.cat(up).numpy(), torch.cat(down, dim=1).numpy()]


# Words


def test_pack_weight_one_nibble_at_a_time() -> None:
    k_size, n_size = 24, 96
    logical = torch.from_numpy(np.random.default_rng(0).integers(0, 16, (k_size, n_size)))
    words = raw(reference.pack_weight(logical)).flatten()
    for k in range(k_size):
        for n in range(n_size):
            word = int(words[((n // 32) * (k_size // 8) + k // 8) * 32 + n % 32])
            nibble = [8 * (k // 8) + row for row in (0, 2, 4, 6, 1, 3, 5, 7)].index(k)
            assert word >> 4 * nibble & 15 == logical[k, n]
    assert torch.equal(reference.unpack_weight(reference.pack_weight(logical)), logical)


def test_interleave_pairs() -> None:
    joined = torch.tensor([[1, 2, 3, 10, 20, 30]])
    assert reference.interleave_pairs(joined).tolist() == [[1, 10, 2, 20, 3, 30]]
    assert torch.equal(reference.split_pairs(reference.interleave_pairs(joined)), joined)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_meta(layout: str) -> None:
    sign = -1 if layout in ("awq-compact", "awq-int4zero") else 1
    assert reference.meta(layout, 256, 96) == (8192, sign * 96)


# Numbers


def test_bf16_to_fp16_all_values() -> None:
    codes = np.arange(2**16, dtype=np.uint16)
    values = (codes.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        expected = np.where(np.isnan(values), 0x7FFF, values.astype(np.float16).view(np.uint16))
    converted = raw(reference.bf16_to_fp16(torch.from_numpy(codes.view(np.int16)).view(torch.bfloat16)))
    assert (converted == expected).all()
    assert (scale_tables.bf16_to_fp16(codes) == expected).all()


def test_e4m3_values() -> None:
    codes = np.arange(256, dtype=np.uint8)
    assert np.array_equal(bits(reference.e4m3_values(torch.from_numpy(codes)).numpy())[:127], bits(e4m3(codes))[:127])
    assert np.array_equal(reference.e4m3_values(torch.from_numpy(codes)).numpy(), e4m3(codes), equal_nan=True)


@quick
@given(st.floats(width=32))
def test_scale_table(global_scale: float) -> None:
    expected = raw(reference.scale_products(torch.arange(256), torch.tensor(global_scale)))
    assert (scale_tables.nvfp4_scale_table(np.float32(global_scale)) == expected).all()


def test_fma_rounds_once() -> None:
    """1.5 * 683/1024 = 1 + 2^-11, a tie in fp16, which fp32 could not tell from a sum with 2^-24."""
    sums = [reference._fma_fp16(1.5, 683 / 1024, tail) for tail in (-(2.0**-24), 0.0, 2.0**-24)]
    assert sums == [1.0, 1.0, 1 + 2.0**-10]


finite_fp16 = st.floats(width=16, allow_nan=False, allow_infinity=False)


@settings(quick, max_examples=500)
@given(finite_fp16, finite_fp16, finite_fp16)
def test_fma_gives_the_nearest_fp16(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    rounded = reference._fma_fp16(a, b, c)
    if abs(exact) >= 65520:
        assert rounded == np.copysign(np.inf, float(exact))
        return
    nearest = np.float16(rounded)
    assert float(nearest) == rounded
    with np.errstate(over="ignore", under="ignore"):
        neighbours = [np.nextafter(nearest, np.float16(side)) for side in (-np.inf, np.inf)]
    distance = abs(exact - Fraction(rounded))
    for neighbour in filter(np.isfinite, neighbours):
        other = abs(exact - Fraction(float(neighbour)))
        assert distance < other or (distance == other and nearest.view(np.uint16) % 2 == 0)


# Scales


@pytest.mark.parametrize("zero", range(16))
def test_every_half2_scale(zero: int) -> None:
    zeros = torch.full((1, 2**16), zero)
    half2 = reference.half2_scales(ALL_FP16[None], zeros)
    low, high = (raw(half2)[0] & 0xFFFF).astype(np.uint16), (raw(half2)[0] >> 16).astype(np.uint16)
    assert (low == raw(ALL_FP16)).all()
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        product = (np.float64(-1.0) * zero * low.view(np.float16).astype(np.float64)).astype(np.float16)
    expected = np.where(np.isnan(product), 0x7FFF, product.view(np.uint16))
    assert (high == expected).all()
    assert torch.equal(reference.expand_compact(reference.compact_scales(ALL_FP16[None], zeros)), half2)
    assert torch.equal(reference.expand_int4zero(reference.int4zero_scales(ALL_FP16[None], zeros)), half2)


def test_zero_of_zero_keeps_its_sign() -> None:
    half2 = raw(reference.half2_scales(torch.tensor([[1.0, -1.0]], dtype=torch.float16), torch.tensor([[0, 0]])))
    assert half2.tolist() == [[0x80003C00, 0x0000BC00]]


@quick
@given(cases("awq-half2"))
def test_half2_banks_from_smaller_layouts(case: Case) -> None:
    tp_size = case.tp_sizes[0]
    banks = {
        layout: reference.prepare_rank(
            *case.expert, layout=layout, interleave=case.interleave, rank=tp_size - 1, tp_size=tp_size
        )
        for layout in reference.AWQ_LAYOUTS
    }
    for matrix in ("w13", "w2"):
        name = f"{matrix}_tm_scales"
        half2 = banks["awq-half2"][name]
        assert torch.equal(reference.expand_compact(banks["awq-compact"][name]), half2)
        assert torch.equal(reference.expand_int4zero(banks["awq-int4zero"][name]), half2)
        words = [bank[f"{matrix}_tm_weight"] for bank in banks.values()]
        assert torch.equal(words[0], words[1])
        assert torch.equal(words[0], words[2])


# The raw layout's check


def check(code: int, global_scale: float) -> bool:
    """Whether the raw layout holds the product of one code and one global."""
    globals_ = torch.tensor([global_scale])
    products = reference.scale_products(torch.tensor([[code]]), globals_)
    return bool(reference.raw_scale_check(reference.raw_codes(products, globals_), products, globals_))


@pytest.mark.parametrize("global_scale", [2.0**-12, 0.0009765625, 0.25, 1.0, 3.5])
def test_raw_check_passes(global_scale: float) -> None:
    codes = torch.arange(8, 0x7F)[None]
    globals_ = torch.tensor([global_scale])
    products = reference.scale_products(codes, globals_)
    recomputed = reference.raw_codes(products, globals_)
    assert torch.equal(recomputed.long(), codes)
    assert reference.raw_scale_check(recomputed, products, globals_).all()


@pytest.mark.parametrize("code", [*range(8), 0x7F, 0x80, 0x87, 0x88, 0xB8, 0xC0, 0xFE, 0xFF])
@pytest.mark.parametrize("global_scale", [2.0**-12, 0.000123, 0.25, 1.0])
def test_raw_check_fails_for_code(code: int, global_scale: float) -> None:
    assert not check(code, global_scale)


@pytest.mark.parametrize("global_scale", [0.0, 4.0, 5.0, 1e4, 1e-7, float("inf"), float("nan")])
def test_raw_check_fails_for_global(global_scale: float) -> None:
    assert not any(check(code, global_scale) for code in (0x08, 0x11, 0x38, 0x55, 0x7E))


def raw_expert(**changed: Projection) -> dict[str, Projection]:
    rng = np.random.default_rng(1)
    shapes = {"gate": (64, 64), "up": (64, 64), "down": (64, 64)}
    return {name: random_nvfp4(rng, *shape, 0.25) for name, shape in shapes.items()} | changed


def raw_error(call: Callable[[], object]) -> RawScaleError | None:
    try:
        call()
    except RawScaleError as error:
        return error
    return None


def raises_for(expert: dict[str, Projection], *, interleave: bool) -> str | None:
    """The projection that the reference names; the numpy kernel has to name the same."""
    options: dict[str, Any] = {"layout": "nvfp4-raw", "interleave": interleave, "tp_sizes": [1]}
    errors = [raw_error(lambda kernel=kernel: prepare(kernel, **expert, **options)) for kernel in KERNELS]
    named = {None if error is None else error.projection for error in errors}
    assert len(named) == 1
    return named.pop()


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_raw_error_names_the_projection(name: str, interleave: bool) -> None:
    expert = raw_expert()
    assert raises_for(expert, interleave=interleave) is None
    scales = expert[name].scales.copy()
    scales[40, 2] = 3
    assert raises_for(expert | {name: expert[name]._replace(scales=scales)}, interleave=interleave) == name


def test_raw_refuses_unlike_globals_only_when_interleaved() -> None:
    expert = raw_expert()
    expert["up"] = expert["up"]._replace(global_scale=np.float32(0.3125))
    assert raises_for(expert, interleave=False) is None
    assert raises_for(expert, interleave=True) in ("gate", "up")


def test_raw_check_of_products_near_a_tie() -> None:
    """Where code * global is next to the middle of two fp16 values, the last bits decide."""
    named = []
    for middle in np.random.default_rng(7).integers(1024, 2048, 40):
        global_scale = (2 * middle + 1) / 2**14 / 1.125
        gate = random_nvfp4(np.random.default_rng(1), 64, 64, global_scale, codes=(0x39, 0x3A))  # 1.125
        named.append(raises_for(raw_expert(gate=gate), interleave=False))
    assert set(named) == {None, "gate"}


def test_raw_check_passes_where_everything_vanishes() -> None:
    """Products that all round to zero are held: code 0 gives 0 both ways."""
    assert check(0x38, 1e-30)


def test_raw_codes_are_recomputed() -> None:
    """Unlike globals a power of two apart pass when interleaved, with other codes than the source's."""
    rng = np.random.default_rng(2)
    gate, up = (random_nvfp4(rng, 64, 64, g, codes=(0x20, 0x50)) for g in (0.25, 0.5))
    expert = raw_expert(gate=gate, up=up)
    assert raises_for(expert, interleave=True) is None
    banks = {
        layout: reference.prepare_rank(**expert, layout=layout, interleave=True, rank=0, tp_size=1)
        for layout in reference.NVFP4_LAYOUTS
    }
    codes, globals_ = (banks["nvfp4-raw"][f"w13_raw_{part}"] for part in ("scale_codes", "global_scales"))
    assert torch.equal(reference.expand_raw(codes, globals_, interleave=True), banks["nvfp4-fp16"]["w13_tm_scales"])
    assert set(raw(codes)[:, 1].tolist()) == set((up.scales[0] + 8).tolist())


# Whole experts


@quick
@given(cases("awq-half2", "awq-compact", "awq-int4zero", "nvfp4-fp16"))
def test_dequantised_banks_are_the_source(case: Case) -> None:
    for tp_size in case.tp_sizes:
        for weights, projection in zip(dequantised(case, tp_size), case.expert, strict=True):
            assert np.array_equal(weights, source_weights(projection), equal_nan=True)


@quick
@given(cases("nvfp4-raw"))
def test_raw_banks_are_the_fp16_banks(case: Case) -> None:
    tp_size = case.tp_sizes[0]
    options: dict[str, Any] = {"interleave": case.interleave, "rank": tp_size - 1, "tp_size": tp_size}
    try:
        banks = reference.prepare_rank(*case.expert, layout="nvfp4-raw", **options)
    except RawScaleError:
        return
    fp16 = reference.prepare_rank(*case.expert, layout="nvfp4-fp16", **options)
    for matrix, interleave in (("w13", case.interleave), ("w2", False)):
        codes, globals_ = (banks[f"{matrix}_raw_{part}"] for part in ("scale_codes", "global_scales"))
        expanded = reference.expand_raw(codes, globals_, interleave=interleave)
        assert torch.equal(expanded, fp16[f"{matrix}_tm_scales"])
        assert torch.equal(banks[f"{matrix}_tm_weight"], fp16[f"{matrix}_tm_weight"])
    weights = reference.dequantise(banks, layout="nvfp4-raw", interleave=case.interleave)
    expected = reference.dequantise(fp16, layout="nvfp4-fp16", interleave=case.interleave)
    assert all(torch.equal(*pair) for pair in zip(weights, expected, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(quick, max_examples=40)
@given(data=st.data())
def test_numpy_kernel_agrees(layout: str, data: st.DataObject) -> None:
    case = data.draw(cases(layout))
    options: dict[str, Any] = {
        "layout": case.layout,
        "interleave": case.interleave,
        "tp_sizes": case.tp_sizes,
    }
    try:
        expected = prepare("reference", *case.expert, **options)
    except RawScaleError:
        with pytest.raises(RawScaleError):
            prepare("numpy", *case.expert, **options)
        return
    for banks, arrays in zip(prepare("numpy", *case.expert, **options), expected, strict=True):
        assert banks.keys() == arrays.keys()
        for name, array in arrays.items():
            assert banks[name].shape == array.shape
            assert banks[name].dtype == array.dtype
            assert (bits(banks[name]) == bits(array)).all(), name


@pytest.mark.parametrize("layout", reference.AWQ_LAYOUTS)
def test_regrouped_banks_are_the_source(layout: str) -> None:
    """Groups of 128 do not fit a quarter of 384 columns; the same groups in four parts of 32 do."""
    rng = np.random.default_rng(3)
    shapes = [(128, 384), (128, 384), (384, 128)]
    case = Case(*(random_awq(rng, k, n, 128) for k, n in shapes), layout, True, [4])
    for weights, projection in zip(dequantised(case, 4, group_size=32), case.expert, strict=True):
        assert np.array_equal(weights, source_weights(projection))
    with pytest.raises(ValueError, match="do not fall on groups of 128"):
        dequantised(case, 4)
    with pytest.raises(ValueError, match="cannot be split"):
        dequantised(case, 4, group_size=48)


def test_refuses_what_no_bank_can_hold() -> None:
    expert = raw_expert()
    options: dict[str, Any] = {"interleave": False, "rank": 0, "tp_size": 1}
    with pytest.raises(ValueError, match="unknown layout"):
        reference.prepare_rank(**expert, layout="awq", **options)
    with pytest.raises(ValueError, match="zeros"):
        reference.prepare_rank(**expert, layout="awq-half2", **options)
    with pytest.raises(ValueError, match="not divisible"):
        reference.prepare_rank(**expert, layout="nvfp4-fp16", **options | {"tp_size": 3})
    with pytest.raises(ValueError, match="N % 32"):
        reference.pack_weight(torch.zeros(8, 24, dtype=torch.int64))


# A real checkpoint


def checkpoint_projection(tensors: dict[str, torch.Tensor], prefix: str) -> Projection:
    if f"{prefix}.qweight" in tensors:
        qweight, scales, qzeros = (raw(tensors[f"{prefix}.{part}"]) for part in ("qweight", "scales", "qzeros"))
        return Projection(qweight, scales, qzeros, None)
    weight, scales = (raw(tensors[f"{prefix}.{part}"]) for part in ("weight", "weight_scale"))
    return Projection(weight, scales, None, np.float32(tensors[f"{prefix}.weight_scale_2"]))


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize(
    ("checkpoint", "layout", "tolerance"),
    [
        *(("autoawq-gemm-g64-qwen3moe", layout, 0.0) for layout in reference.AWQ_LAYOUTS),
        ("modelopt-w4a16nvfp4-qwen3moe", "nvfp4-fp16", 2.0**-11),  # the scales' rounding to fp16
    ],
)
def test_real_checkpoint(checkpoint: str, layout: str, tolerance: float, tp_size: int, interleave: bool) -> None:
    """The banks, dequantised, against what the exporter's own code gave for the same tensors."""
    tensors = load_file(DATA / checkpoint / "model.safetensors")
    recorded = {
        name: weights.numpy()
        for name, weights in load_file(DATA / f"{checkpoint}.reference.safetensors").items()
        if ".experts." in name
    }
    compared = 0
    for prefix in {name.rsplit(".", 2)[0] for name in recorded}:
        names = [f"{prefix}.{name}_proj" for name in ("gate", "up", "down")]
        expert = (checkpoint_projection(tensors, name) for name in names)
        case = Case(*expert, layout, interleave, [tp_size])
        for name, weights in zip(names, dequantised(case, tp_size), strict=True):
            if f"{name}.weight" in recorded:
                expected = recorded[f"{name}.weight"]
                assert (np.abs(weights - expected) <= tolerance * np.abs(expected)).all()
                compared += 1
    assert compared == len(recorded) >= 4
