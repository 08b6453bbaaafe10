"""The numpy kernel against recorded banks and against the closed form written out plainly."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from host_kernels import HOST_KERNELS
from sm70_kernels import numpy_sm70, scale_tables
from sm70_kernels.numpy_sm70 import NumpyKernel
from sm70_kernels.scale_tables import bf16_to_fp16, e4m3_rne, nvfp4_scale_table
from sm70_kernels.spec import HostKernel, Projection, RawScaleError

Array = np.ndarray[Any, Any]
GOLDEN = Path(__file__).parent / "golden"
AWQ_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)
TARGET_K = (0, 2, 4, 6, 1, 3, 5, 7)


def load(path: Path) -> dict[str, Array]:
    """Raw bits of every tensor."""
    bits = {torch.int32: torch.uint32, torch.float16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {name: tensor.view(bits.get(tensor.dtype, tensor.dtype)).numpy() for name, tensor in tensors.items()}


@pytest.fixture(params=HOST_KERNELS)
def kernel(request: pytest.FixtureRequest) -> HostKernel:
    return HOST_KERNELS[request.param]()


# ------------------------------------------------------------ the closed form


def logical(projection: Projection) -> Array:
    """[K, N] 4-bit values."""
    weight = projection.weight
    if projection.zeros is None:
        n, k = weight.shape[0], weight.shape[1] * 2
        return np.array([[weight[i, j // 2] >> 4 * (j % 2) & 15 for i in range(n)] for j in range(k)], np.uint32)
    return columns_of_words(weight)


def columns_of_words(words: Array) -> Array:
    out = np.empty((words.shape[0], words.shape[1] * 8), np.uint32)
    for column in range(out.shape[1]):
        out[:, column] = words[:, column // 8] >> np.uint32(4 * AWQ_NIBBLE[column % 8]) & 15
    return out


def pack(values: Array) -> Array:
    """Target words of [K, N] values, as [K, N/8]."""
    k, n = values.shape
    flat = np.zeros(k * n // 8, np.uint32)
    column = np.arange(n)
    for row in range(k):
        index = ((column // 32) * (k // 8) + row // 8) * 32 + column % 32
        flat[index] |= values[row] << np.uint32(4 * TARGET_K.index(row % 8))
    return flat.reshape(k, n // 8)


def half2(scales: Array, zeros: Array) -> Array:
    with np.errstate(all="ignore"):
        product = (-zeros.astype(np.float32)) * scales.view(np.float16).astype(np.float32)
        high = product.astype(np.float16).view(np.uint16).copy()
    high[np.isnan(product)] = 0x7FFF
    return high.astype(np.uint32) << 16 | scales


def nvfp4_scales(projection: Projection) -> Array:
    values = torch.from_numpy(projection.scales.copy()).view(torch.float8_e4m3fn).float()
    half = (values * torch.tensor(projection.global_scale)).half()
    bits: Array = half.view(torch.uint16).numpy()
    return np.where(torch.isnan(half).numpy(), np.uint16(0x7FFF), bits).T


def logical_scales(projection: Projection) -> Array:
    """[G, N] awq-half2 or nvfp4-fp16 scales."""
    if projection.zeros is None:
        return nvfp4_scales(projection)
    return half2(projection.scales, columns_of_words(projection.zeros))


def join(gate: Array, up: Array, interleave: bool) -> Array:
    return np.stack([gate, up], 2).reshape(gate.shape[0], -1) if interleave else np.concatenate([gate, up], 1)


def expected(gate: Projection, up: Projection, down: Projection, interleave: bool, ranks: int) -> dict[str, Array]:
    """The banks of all ranks in the layouts awq-half2 and nvfp4-fp16."""
    local = down.weight.shape[0] // ranks if down.zeros is not None else gate.weight.shape[0] // ranks
    values, scales = [logical(p) for p in (gate, up, down)], [logical_scales(p) for p in (gate, up, down)]
    group = values[0].shape[0] // scales[0].shape[0]
    out: dict[str, list[Array]] = {}
    for rank in range(ranks):
        cut, groups = slice(rank * local, (rank + 1) * local), local // group
        bank = {
            "w13_tm_weight": pack(join(values[0][:, cut], values[1][:, cut], interleave)),
            "w13_tm_scales": join(scales[0][:, cut], scales[1][:, cut], interleave),
            "w2_tm_weight": pack(values[2][cut]),
            "w2_tm_scales": scales[2][rank * groups : (rank + 1) * groups],
        }
        for name, tensor in bank.items():
            out.setdefault(name, []).append(tensor)
    return {name: np.stack(tensors) for name, tensors in out.items()}


def random_awq(rng: np.random.Generator, k: int, n: int, group: int) -> Projection:
    words, zeros = (rng.integers(0, 2**32, (rows, n // 8), dtype=np.uint32) for rows in (k, k // group))
    scales = rng.integers(0, 2**16, (k // group, n), dtype=np.uint16)  # any bits: inf, NaN and subnormals too
    return Projection(words, scales, zeros, None)


def random_nvfp4(rng: np.random.Generator, k: int, n: int, scale: float | None = None) -> Projection:
    weight = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    codes = rng.integers(0, 256, (n, k // 16), dtype=np.uint8)
    return Projection(weight, codes, None, np.float32(rng.lognormal(-6, 3) if scale is None else scale))


def empty(layout: str, hidden: int, intermediate: int, group: int, ranks: int) -> dict[str, Array]:
    out: dict[str, Array] = {}
    local = intermediate // ranks
    for name, k, n in (("w13", hidden, 2 * local), ("w2", local, hidden)):
        shape = (ranks, k // group, n)
        out[f"{name}_tm_weight"] = np.full((ranks, k, n // 8), 0xDEADBEEF, np.uint32)
        match layout:
            case "awq-half2":
                out[f"{name}_tm_scales"] = np.full(shape, 0xDEADBEEF, np.uint32)
            case "awq-compact":
                out[f"{name}_tm_scales"] = np.full((*shape, 3), 0xA5, np.uint8)
            case "awq-int4zero":
                out[f"{name}_tm_scales"] = np.full((*shape[:2], n // 2, 5), 0xA5, np.uint8)
            case "nvfp4-fp16":
                out[f"{name}_tm_scales"] = np.full(shape, 0xDEAD, np.uint16)
            case "nvfp4-raw":
                out[f"{name}_raw_scale_codes"] = np.full(shape, 0xA5, np.uint8)
                out[f"{name}_raw_global_scales"] = np.full((ranks, 2 if name == "w13" else 1), -1, np.float32)
    return out


def assert_same(actual: dict[str, Array], wanted: dict[str, Array]) -> None:
    assert actual.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert actual[name].dtype == tensor.dtype
        np.testing.assert_array_equal(actual[name], tensor, err_msg=name)


# ------------------------------------------------------------ recordings


def single(projections: list[Projection], k: int, n: int) -> Array:
    """The words of one matrix; two projections are interleaved."""
    out = np.zeros((1, k, n // 8), np.uint32)
    kernel = NumpyKernel()
    weights = kernel._awq_weights if projections[0].zeros is not None else kernel._nvfp4_weights
    weights(projections, len(projections) == 2, [out])
    return out[0]


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("awq_*.safetensors")), ids=lambda path: path.stem)
def test_awq_matrix_recording(path: Path) -> None:
    tensors, kernel = load(path), NumpyKernel()
    weight, zeros, scales = tensors["qweight"], tensors["qzeros"], tensors["scales"]
    k, words = weight.shape
    parts = [Projection(weight, scales, zeros, None)]
    if path.stem.endswith("interleaved"):
        cuts = (slice(0, words // 2), slice(words // 2, words))
        columns = (slice(0, words * 4), slice(words * 4, words * 8))
        parts = [Projection(weight[:, c], scales[:, n], zeros[:, c], None) for c, n in zip(cuts, columns, strict=True)]
    np.testing.assert_array_equal(single(parts, k, words * 8), tensors["tm_weight"])
    half = kernel._awq_scales(parts, len(parts) == 2, "awq-half2")
    np.testing.assert_array_equal(half.reshape(tensors["tm_scales"].shape), tensors["tm_scales"])


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("nvfp4_k*.safetensors")), ids=lambda path: path.stem)
def test_nvfp4_matrix_recording(path: Path) -> None:
    tensors = load(path)
    weight = tensors["weight_packed"]
    n, k = weight.shape[0], weight.shape[1] * 2
    codes = np.zeros((n, k // 16), np.uint8)
    parts = [Projection(weight, codes, None, np.float32(1))]
    if path.stem.endswith("interleaved"):
        parts = [Projection(weight[rows], codes, None, np.float32(1)) for rows in (slice(n // 2), slice(n // 2, n))]
    np.testing.assert_array_equal(single(parts, k, n), tensors["tm_weight"])


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("source", sorted(GOLDEN.glob("moe_*.hf.safetensors")), ids=lambda path: path.name)
def test_moe_recording(kernel: HostKernel, source: Path, interleave: bool) -> None:
    tensors = load(source)
    pattern = source.name.replace(".hf.", ".tp[0-9].interleaved." if interleave else ".tp[0-9].")
    banks = [load(path) for path in sorted(GOLDEN.glob(pattern))]
    assert banks
    layout = "awq-half2" if "awq" in source.name else "nvfp4-fp16"
    for expert in range(4):
        parts = []
        for name in ("gate", "up", "down"):
            prefix = f"experts.{expert}.{name}_proj."
            if layout == "awq-half2":
                weight, scales, zeros = (tensors[prefix + x] for x in ("qweight", "scales", "qzeros"))
                parts.append(Projection(weight, scales, zeros, None))
            else:
                weight, codes = tensors[prefix + "weight"], tensors[prefix + "weight_scale"]
                scale = np.float32(tensors[prefix + "weight_scale_2"])
                parts.append(Projection(weight, codes, None, scale))
        wanted = []
        for bank in banks:
            names = {name.removeprefix("rank0.") for name in bank if name.startswith("rank0.")}
            ranks = len(bank) // len(names)
            stacked = {n: np.stack([bank[f"rank{r}.{n}"][expert] for r in range(ranks)]) for n in names}
            wanted.append(stacked)
        outs = [{name: np.zeros_like(tensor) for name, tensor in bank.items()} for bank in wanted]
        kernel.prepare(*parts, layout=layout, interleave=interleave, outs=outs)
        for out, bank in zip(outs, wanted, strict=True):
            assert_same(out, bank)


def test_scale_product_table_recording() -> None:
    tensors = load(GOLDEN / "nvfp4_scale_product_table.safetensors")
    for scale, bits in zip(tensors["globals_f32"], tensors["scale_f16"], strict=True):
        np.testing.assert_array_equal(nvfp4_scale_table(scale)[tensors["codes_e4m3"]], bits)


# ------------------------------------------------------------ the closed form

# (hidden, intermediate, TP sizes): I_l of 16, 48, 80 ends a half tile; blocks start and end inside ranks
SHAPES = [
    (32, 16, (1,)),
    (96, 48, (1, 3)),
    (160, 80, (1, 5)),
    (32, 160, (1, 2, 5)),
    (96, 192, (1, 2, 3, 4)),
    (224, 320, (1, 2, 4, 5)),
]
AWQ_SHAPES = [
    (32, 32, 32, (1,)),
    (96, 96, 32, (1, 3)),
    (160, 160, 32, (1, 5)),
    (128, 384, 64, (1, 2, 3)),
    (256, 512, 128, (1, 2, 4)),
]


def sliced(array: Array) -> Array:
    """The same values as a view into the middle of a larger array."""
    larger = np.zeros([size + 8 for size in array.shape], array.dtype)
    view = larger[tuple(slice(4, 4 + size) for size in array.shape)]
    view[...] = array
    return view


@pytest.mark.parametrize("source", ["contiguous", "sliced", "transposed"])
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("layout", ["awq-half2", "nvfp4-fp16"])
def test_closed_form(
    kernel: HostKernel, layout: str, interleave: bool, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All shapes through one kernel, in small blocks."""
    monkeypatch.setattr(numpy_sm70, "_BLOCK_BYTES", 8192)
    rng = np.random.default_rng(1)
    shapes = AWQ_SHAPES if layout == "awq-half2" else [(h, i, 16, tps) for h, i, tps in SHAPES]
    for hidden, intermediate, group, sizes in [*shapes, *shapes[::-1]]:
        sides = ((hidden, intermediate), (hidden, intermediate), (intermediate, hidden))
        if layout == "awq-half2":
            parts = [random_awq(rng, k, n, group) for k, n in sides]
        else:
            parts = [random_nvfp4(rng, k, n) for k, n in sides]
        given = parts
        if source != "contiguous":
            change = sliced if source == "sliced" else np.asfortranarray
            given = [p._replace(weight=change(p.weight), scales=change(p.scales)) for p in parts]
            given = [p._replace(zeros=change(p.zeros)) if p.zeros is not None else p for p in given]
        outs = [empty(layout, hidden, intermediate, group, ranks) for ranks in sizes]
        kernel.prepare(*given, layout=layout, interleave=interleave, outs=outs)
        for ranks, out in zip(sizes, outs, strict=True):
            assert_same(out, expected(*parts, interleave, ranks))


@pytest.mark.parametrize(("hidden", "intermediate", "ranks"), [(32, 16, 1), (64, 48, 1), (32, 80, 5), (64, 96, 2)])
@pytest.mark.parametrize("interleave", [False, True])
def test_awq_weights_of_half_tiles(hidden: int, intermediate: int, ranks: int, interleave: bool) -> None:
    """The 4-bit words do not care for the group: I_l = 16 and 48, which no group of 32 allows."""
    rng, kernel = np.random.default_rng(2), NumpyKernel()
    gate, up = random_awq(rng, hidden, intermediate, 32), random_awq(rng, hidden, intermediate, 32)
    local = intermediate // ranks
    out = np.zeros((ranks, hidden, 2 * local // 8), np.uint32)
    kernel._awq_weights((gate, up), interleave, [out])
    for rank in range(ranks):
        cut = slice(rank * local, (rank + 1) * local)
        joined = join(logical(gate)[:, cut], logical(up)[:, cut], interleave)
        np.testing.assert_array_equal(out[rank], pack(joined))


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("layout", ["awq-compact", "awq-int4zero"])
def test_small_awq_scales_hold_the_same(kernel: HostKernel, layout: str, interleave: bool) -> None:
    rng = np.random.default_rng(3)
    for hidden, intermediate, group, sizes in AWQ_SHAPES:
        sides = ((hidden, intermediate), (hidden, intermediate), (intermediate, hidden))
        parts = [random_awq(rng, k, n, group) for k, n in sides]
        outs = [empty(layout, hidden, intermediate, group, ranks) for ranks in sizes]
        kernel.prepare(*parts, layout=layout, interleave=interleave, outs=outs)
        for ranks, out in zip(sizes, outs, strict=True):
            rebuilt = dict(out)
            for name in ("w13_tm_scales", "w2_tm_scales"):
                record = out[name].astype(np.uint16)
                if layout == "awq-compact":
                    scales, zeros = record[..., 0] | record[..., 1] << 8, record[..., 2]
                else:
                    pairs = record[..., 0:4:2] | record[..., 1:4:2] << 8
                    both = np.stack([record[..., 4] & 15, record[..., 4] >> 4], -1)
                    scales, zeros = (x.reshape(*x.shape[:-2], -1) for x in (pairs, both))
                rebuilt[name] = half2(scales, zeros)
            assert_same(rebuilt, expected(*parts, interleave, ranks))


def test_every_scale_and_zero() -> None:
    """All fp16 bits with all zeros: -0.0 for a zero of 0, inf, subnormals, NaN."""
    table, scales = scale_tables.half2_table().reshape(16, -1), np.arange(0x10000, dtype=np.uint16)
    assert ((table & 0xFFFF) == scales).all()
    table = table >> 16
    for zero in range(16):
        high = (torch.from_numpy(scales).view(torch.float16).float() * -float(zero)).half()
        bits = np.where(torch.isnan(high).numpy(), np.uint16(0x7FFF), high.view(torch.uint16).numpy())
        np.testing.assert_array_equal(table[zero], bits)
    assert table[0, 0x3C00] == 0x8000
    assert table[15, 0x7BFF] == 0xFC00
    assert table[3, 1] == 0x8003
    assert table[0, 0x7C00] == table[5, 0x7E01] == table[5, 0xFE01] == 0x7FFF


def test_bf16_to_fp16() -> None:
    bits = np.arange(0x10000, dtype=np.uint16)
    half = torch.from_numpy(bits).view(torch.bfloat16).half()
    wanted = np.where(torch.isnan(half).numpy(), np.uint16(0x7FFF), half.view(torch.uint16).numpy())
    np.testing.assert_array_equal(bf16_to_fp16(bits.reshape(16, -1)), wanted.reshape(16, -1))


def test_refuses_what_it_cannot_do(kernel: HostKernel) -> None:
    rng = np.random.default_rng(4)
    parts = [random_nvfp4(rng, 32, 32, 1.0) for _ in range(3)]
    out = empty("nvfp4-fp16", 32, 32, 16, 1)
    with pytest.raises(ValueError, match="layout 'nvfp4' is none of"):
        kernel.prepare(*parts, layout="nvfp4", interleave=False, outs=[out])
    out["w2_tm_weight"] = np.zeros((1, 64, 4), np.uint32)[:, ::2]
    with pytest.raises(ValueError, match="contiguous"):
        kernel.prepare(*parts, layout="nvfp4-fp16", interleave=False, outs=[out])


# ------------------------------------------------------------ raw NVFP4 scales


def test_e4m3_rne_is_the_cast_of_torch() -> None:
    rng = np.random.default_rng(5)
    saturates = torch.tensor([1e9]).to(torch.float8_e4m3fn).float().item() == 448  # else torch gives NaN
    values = [
        np.arange(0x10000, dtype=np.uint16).view(np.float16).astype(np.float32),
        (np.arange(0x10000, dtype=np.uint32) << 16).view(np.float32),
        (rng.lognormal(0, 4, 200_000) * rng.choice([-1, 1], 200_000)).astype(np.float32),
        np.array([464, np.nextafter(np.float32(464), np.float32(500)), 480, 1e30, -464, -465], np.float32),
    ]
    middles = (scale_tables.e4m3_values()[:126] + scale_tables.e4m3_values()[1:127]) / 2
    values += [
        middles,
        np.nextafter(middles, np.float32(0)),
        np.nextafter(middles, np.float32(999)),
        -middles,
    ]
    for array in values:
        wanted = torch.from_numpy(array.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        got = e4m3_rne(array)
        number = ~np.isnan(array)  # a NaN's sign is of no account
        if not saturates:
            number &= np.abs(array) <= 464
        np.testing.assert_array_equal(got[number], wanted[number])
        assert ((got[np.isnan(array)] & 0x7F) == 0x7F).all()
    np.testing.assert_array_equal(
        scale_tables.e4m3_values(),
        torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy(),
    )


def round_fp16(value: Fraction) -> float:
    """To nearest even, exactly; value not zero."""
    exponent = -24
    while abs(value) / Fraction(2) ** exponent >= 2048:
        exponent += 1
    rounded = round(value / Fraction(2) ** exponent)  # ties to even
    result = rounded * Fraction(2) ** exponent
    return float(result) if abs(result) <= 65504 else float("inf") * (1 if result > 0 else -1)


def fma(a: float, b: float, c: float) -> float:
    """fp16(a * b + c), rounded once."""
    if not np.isfinite([a, b, c]).all() or not Fraction(a) * Fraction(b) + Fraction(c):
        return a * b + c
    return round_fp16(Fraction(a) * Fraction(b) + Fraction(c))


def test_fma_rounds_once() -> None:
    rng = np.random.default_rng(6)
    a, b, c = rng.integers(0, 2**16, (3, 6000), dtype=np.uint16).view(np.float16)
    # products that lie on, or close to, the middle of two fp16 values, with addends that decide
    ones = np.full(3000, 1, np.float16)
    a = np.concatenate([a, (1 + rng.integers(0, 1024, 3000) / 1024).astype(np.float16)])
    b = np.concatenate([b, (1 + rng.integers(0, 2, 3000) / 1024).astype(np.float16) * 1024])
    c = np.concatenate([c, ones * rng.choice([-1, 0, 1], 3000).astype(np.float16) * np.float16(2**-24)])
    a = np.concatenate([a, np.float16(rng.integers(1024, 2048, 2000)), np.float16(rng.integers(1, 999, 2000))])
    b = np.concatenate([b, np.float16(rng.integers(1024, 2048, 2000)) / 64, np.float16([2**-24] * 2000)])
    c = np.concatenate([c, np.float16(rng.choice([-1, 1], 2000)) * 2**-24, np.float16(rng.uniform(-6e4, 6e4, 2000))])
    with np.errstate(all="ignore"):
        got = scale_tables.fma_fp16(a, b, c)
        wanted = [fma(float(x), float(y), float(z)) for x, y, z in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(got, np.array(wanted, np.float16))


def raw(code: int, source: np.float32, bank: np.float32) -> tuple[int, bool]:
    """The stored code, and whether both checks hold, one code at a time."""
    e4m3 = torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    product = (e4m3 * torch.tensor(source)).half()
    stored = (product.float() / torch.tensor(bank)).to(torch.float8_e4m3fn)
    if not bool((stored.float() * torch.tensor(bank)).half() == product):
        return int(stored.view(torch.uint8)), False
    wide = torch.tensor(bank) * 16384
    high = wide.half()
    low = (wide - high.float()).half()
    bits = (int(stored.view(torch.uint8)) * 128 + 0x2000) % 0x10000
    half = np.array([bits], np.uint16).view(np.float16)[0]
    addend = (torch.tensor(float(half)) * low.float()).half()
    with np.errstate(all="ignore"):
        got = np.float16(fma(float(half), float(high), float(addend)))
    return int(stored.view(torch.uint8)), bool(got == (product.float() * 16384).half().item())


GLOBALS = [
    0.0,
    1.0,
    0.0078125,
    0.00048828125,
    3.9e-5,
    0.0123,
    0.1234567,
    1.9,
    4.0,
    -0.5,
    1e-9,
    3e38,
    float("nan"),
]


def test_raw_tables() -> None:
    values = [np.float32(value) for value in GLOBALS]
    pairs = [(value, value) for value in values] + [(values[1], values[2]), (values[5], values[6])]
    tables = scale_tables.RawTables(pairs)
    for row, (source, bank) in enumerate(pairs):
        wanted = [raw(code, source, bank) for code in range(256)]
        np.testing.assert_array_equal(tables.failed[row], [not good for _, good in wanted])
        good = ~tables.failed[row]
        np.testing.assert_array_equal(tables.codes[row][good], np.array([c for c, _ in wanted], np.uint8)[good])


def raw_parts(rng: np.random.Generator, hidden: int, intermediate: int, scales: list[float]) -> list[Projection]:
    """Projections whose codes all survive."""
    parts = []
    for (k, n), scale in zip(((hidden, intermediate),) * 2 + ((intermediate, hidden),), scales, strict=True):
        good = np.flatnonzero(~scale_tables.RawTables([(np.float32(scale),) * 2]).failed[0]).astype(np.uint8)
        part = random_nvfp4(rng, k, n, scale)
        parts.append(part._replace(scales=rng.choice(good, part.scales.shape)))
    return parts


@pytest.mark.parametrize(
    ("scales", "interleave"),
    [((0.0123, 0.0456, 0.1), False), ((0.0123, 0.0123, 0.1), True), ((0.0078125, 0.015625, 0.1), True)],
)
def test_raw_banks(kernel: HostKernel, scales: tuple[float, float, float], interleave: bool) -> None:
    rng = np.random.default_rng(7)
    for hidden, intermediate, sizes in ((96, 192, (1, 2, 3)), (32, 640, (1, 4, 5))):
        parts = raw_parts(rng, hidden, intermediate, list(scales))
        if interleave and scales[0] != scales[1]:  # one step of exponent apart: codes that have room to move
            parts = [p._replace(scales=rng.integers(24, 112, p.scales.shape, dtype=np.uint8)) for p in parts[:2]]
            parts.append(raw_parts(rng, hidden, intermediate, list(scales))[2])
        outs = [empty("nvfp4-raw", hidden, intermediate, 16, ranks) for ranks in sizes]
        kernel.prepare(*parts, layout="nvfp4-raw", interleave=interleave, outs=outs)
        for ranks, out in zip(sizes, outs, strict=True):
            wanted = expected(*parts, interleave, ranks)
            globals13, globals2 = np.float32([scales[:2]] * ranks), np.float32([scales[2:]] * ranks)
            product13, product2 = (wanted.pop(f"{name}_tm_scales") for name in ("w13", "w2"))
            n = np.arange(product13.shape[-1])
            of_column = globals13[0][n >> 5 & 1 if interleave else (n >= len(n) // 2).astype(int)]
            wanted["w13_raw_scale_codes"] = e4m3_rne(product13.view(np.float16).astype(np.float32) / of_column)
            wanted["w2_raw_scale_codes"] = e4m3_rne(product2.view(np.float16).astype(np.float32) / globals2[0])
            wanted["w13_raw_global_scales"], wanted["w2_raw_global_scales"] = globals13, globals2
            assert_same(out, {name: wanted[name] for name in out})


@pytest.mark.parametrize("projection", [0, 1, 2])
@pytest.mark.parametrize("code", [0x00, 0x07, 0x7F, 0x80, 0xB8])
def test_one_bad_code_is_found(kernel: HostKernel, projection: int, code: int) -> None:
    rng = np.random.default_rng(8)
    for interleave in (False, True):
        parts = raw_parts(rng, 64, 64, [0.0123, 0.0123, 0.1])
        parts[projection].scales[-1, -1] = code
        out = empty("nvfp4-raw", 64, 64, 16, 2)
        before = {name: tensor.copy() for name, tensor in out.items()}
        name = ("gate", "up", "down")[projection]
        with pytest.raises(RawScaleError, match=f"{name}: e4m3 code {code:#04x} with global scale") as caught:
            kernel.prepare(*parts, layout="nvfp4-raw", interleave=interleave, outs=[out])
        assert caught.value.projection == name
        assert_same(out, before)


def test_a_gap_in_the_codes_is_no_failure() -> None:
    """A code that fails but does not occur, between two that do."""
    for scale in np.float32(np.random.default_rng(9).lognormal(-4, 1, 500)):
        tables = scale_tables.RawTables([(scale, scale)])
        gaps = np.flatnonzero(tables.failed[0, 9:100]) + 9
        if len(gaps):
            break
    code = int(gaps[0])
    neighbours = [c for c in (8, 110) if not tables.failed[0, c]]
    tables.check("up", 0, np.array([neighbours], np.uint8))
    with pytest.raises(RawScaleError, match=f"up: e4m3 code {code:#04x}"):
        tables.check("up", 0, np.array([[*neighbours, code]], np.uint8))


def test_unlike_globals_interleaved(kernel: HostKernel) -> None:
    rng = np.random.default_rng(10)
    parts = raw_parts(rng, 64, 64, [0.0123, 0.0456, 0.1])
    with pytest.raises(RawScaleError, match=r"gate: .* in an interleaved column"):
        kernel.prepare(*parts, layout="nvfp4-raw", interleave=True, outs=[empty("nvfp4-raw", 64, 64, 16, 2)])
    with pytest.raises(ValueError, match="multiple of 32"):
        kernel.prepare(*parts, layout="nvfp4-raw", interleave=True, outs=[empty("nvfp4-raw", 64, 64, 16, 4)])
