"""The Triton kernels, interpreted on a CPU, against the reference: run by tests/test_triton.py, as TRITON_INTERPRET=1 pytest."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import gpu_kernels
from expert_banks import allocate, bits, prepare, random_awq, random_nvfp4, raw
from sm70_kernels import reference, triton_sm70
from sm70_kernels.spec import LayerProjection, Projection, RawScaleError
from test_golden import FILES, load, source_expert

# Products of inf and NaN are meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

AWQ, NVFP4 = ("awq-half2", "awq-compact", "awq-int4zero"), ("nvfp4-fp16", "nvfp4-raw")
SIGNED = {np.dtype(np.uint32): np.int32, np.dtype(np.uint16): np.int16}


def tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(array.view(SIGNED.get(array.dtype, array.dtype)).copy())


def stack(projections: list[Projection]) -> LayerProjection:
    weight, scales = (tensor(np.stack([getattr(p, name) for p in projections])) for name in ("weight", "scales"))
    if projections[0].zeros is None:
        return LayerProjection(weight, scales, None, torch.tensor([float(p.global_scale) for p in projections]))
    return LayerProjection(weight, scales.view(torch.float16), tensor(np.stack([p.zeros for p in projections])), None)


def prepare_layer(
    experts: list[list[Projection]], layout: str, interleave: bool, tp_sizes: list[int]
) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Bank arrays [T, E, ...] as raw bits, one mapping per TP size."""
    outs = []
    for tp_size in tp_sizes:
        one = allocate(*experts[0], layout=layout, tp_size=tp_size)
        out = {name: tensor(np.stack([array] * len(experts), axis=1)) for name, array in one.items()}
        if layout == "nvfp4-fp16":
            out = {name: t.view(torch.float16) if name.endswith("scales") else t for name, t in out.items()}
        outs.append(out)
    gate, up, down = (stack([expert[i] for expert in experts]) for i in range(3))
    triton_sm70.prepare_layer(gate, up, down, layout=layout, interleave=interleave, outs=outs)
    return [{name: raw(t) for name, t in out.items()} for out in outs]


def assert_like_the_reference(experts: list[list[Projection]], layout: str, interleave: bool, sizes: list[int]) -> None:
    got = prepare_layer(experts, layout, interleave, sizes)
    for e, expert in enumerate(experts):
        wanted = prepare("reference", *expert, layout=layout, interleave=interleave, tp_sizes=sizes)
        for out, bank in zip(got, wanted, strict=True):
            assert out.keys() == bank.keys()
            for name, array in bank.items():
                np.testing.assert_array_equal(bits(out[name][:, e]), bits(array), err_msg=f"{name} of expert {e}")


def expert(rng: np.random.Generator, layout: str, hidden: int, intermediate: int, group: int) -> list[Projection]:
    sides = ((hidden, intermediate), (hidden, intermediate), (intermediate, hidden))
    if layout in AWQ:
        return [random_awq(rng, k, n, group) for k, n in sides]
    codes = (24, 0x70) if layout == "nvfp4-raw" else (0, 0x7F)  # those that raw storage keeps
    globals_ = (0.0078125, 0.0078125, 0.03125) if layout == "nvfp4-raw" else tuple(rng.lognormal(-6, 2, 3))
    return [random_nvfp4(rng, k, n, g, codes) for (k, n), g in zip(sides, globals_, strict=True)]


# hidden, intermediate, group, experts, TP sizes: ranks of 16, 48 and 80 columns end inside a tile
SHAPES = [
    *((layout, 32, 32, 32, 1, [1]) for layout in AWQ),
    *((layout, 160, 96, 32, 3, [1, 3]) for layout in AWQ),
    *((layout, 128, 384, 64, 1, [1, 2, 3]) for layout in AWQ),
    *((layout, 256, 512, 128, 2, [1, 2, 4]) for layout in AWQ),
    ("nvfp4-fp16", 32, 16, 16, 1, [1]),
    ("nvfp4-fp16", 96, 48, 16, 3, [1, 3]),
    ("nvfp4-fp16", 224, 80, 16, 1, [1, 5]),
    ("nvfp4-fp16", 160, 320, 16, 2, [1, 2, 4]),
    ("nvfp4-raw", 96, 64, 16, 3, [1, 2]),
    ("nvfp4-raw", 224, 80, 16, 2, [1, 5]),
    ("nvfp4-raw", 160, 320, 16, 2, [1, 2, 5]),
]


@pytest.mark.parametrize("interleave", [False, True], ids=["joined", "interleaved"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}-h{s[1]}-i{s[2]}-e{s[4]}")
def test_shape(shape: tuple[str, int, int, int, int, list[int]], interleave: bool) -> None:
    layout, hidden, intermediate, group, count, sizes = shape
    rng = np.random.default_rng(hidden + intermediate)
    experts = [expert(rng, layout, hidden, intermediate, group) for _ in range(count)]
    assert_like_the_reference(experts, layout, interleave, sizes)


def test_every_fp16_scale_and_zero() -> None:
    """Subnormals, inf and NaN, both signs, each with all zeros: expert z has the zero z everywhere."""
    scales = torch.arange(0x10000).to(torch.int16).view(torch.float16).reshape(1, 64, 1024).repeat(16, 1, 1)
    zeros = (0x11111111 * torch.arange(16)).to(torch.int32).reshape(16, 1, 1).repeat(1, 64, 128)
    down = LayerProjection(torch.empty(16, 2048, 128, dtype=torch.int32), scales, zeros, None)
    out = {"w2_tm_weight": down.weight[None], "w2_tm_scales": torch.empty(1, 16, 64, 1024, dtype=torch.int32)}
    _, (kernel, grid, arguments) = triton_sm70.launches(
        "w2", down, down, layout="awq-half2", interleave=False, out=out, tables=None
    )
    kernel[grid](**arguments)
    for zero in range(16):
        wanted = reference.half2_scales(scales[zero], torch.full((64, 1024), zero))
        assert torch.equal(out["w2_tm_scales"][0, zero], wanted)


def test_every_code_with_many_globals() -> None:
    """Signed zeros, subnormals, overflow and NaN codes."""
    rng = np.random.default_rng(2)
    codes = np.arange(256, dtype=np.uint8)
    experts = []
    for value in (0.0, -0.0, 1.0, 1e-40, 3.9e-5, 2**-14, 146.0, 147.0, -3.0, 1e30, 2e38, np.inf, np.nan):
        parts = expert(rng, "nvfp4-fp16", 128, 128, 16)
        experts.append(
            [p._replace(scales=np.resize(codes, p.scales.shape), global_scale=np.float32(value)) for p in parts]
        )
    assert_like_the_reference(experts, "nvfp4-fp16", False, [1, 2])


def test_a_zero_of_zero_gives_minus_zero() -> None:
    """The trap: `-zero` compiles to `0 - zero`, which is +0.0."""

    @triton.jit
    def products(out, scale, trap: tl.constexpr):  # type: ignore[no-untyped-def]
        zero = tl.arange(0, 16)
        negative = (0.0 - zero.to(tl.float32)) * scale
        tl.store(out + zero, negative if trap else triton_sm70.minus_zero_times(zero, scale))

    out = torch.empty(16)
    products[(1,)](out, 2.0, False)
    assert out.tolist() == [-2.0 * z for z in range(16)]
    assert bool(torch.signbit(out[0]))
    products[(1,)](out, 2.0, True)
    assert not bool(torch.signbit(out[0]))  # so the test can tell


@pytest.mark.parametrize("interleave", [False, True], ids=["joined", "interleaved"])
def test_unlike_globals_raw(interleave: bool) -> None:
    """Globals one binade apart: interleaved, the table differs for the upper half of each 32 columns."""
    rng = np.random.default_rng(3)
    parts = [
        random_nvfp4(rng, k, n, g, (24, 112)) for k, n, g in ((64, 128, 2**-7), (64, 128, 2**-6), (128, 64, 2**-5))
    ]
    assert_like_the_reference([parts], "nvfp4-raw", interleave, [1, 2])


def test_a_scale_that_raw_storage_cannot_hold_names_its_expert() -> None:
    rng = np.random.default_rng(4)
    experts = [expert(rng, "nvfp4-raw", 64, 64, 16) for _ in range(3)]
    experts[2][1].scales[5, 3] = 0x07
    with pytest.raises(RawScaleError, match="up: e4m3 code 0x07 with global scale") as caught:
        prepare_layer(experts, "nvfp4-raw", False, [1])
    assert (caught.value.projection, caught.value.expert) == ("up", 2)


def untouched(elements: int, dtype: Any) -> np.ndarray[Any, Any]:
    """Zeros that take no memory until they are touched, with as much room before them: a wrapped offset stays inside."""
    nbytes, no_reserve = elements * np.dtype(dtype).itemsize, 0x4000
    memory = mmap.mmap(-1, 2 * nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return np.frombuffer(memory, dtype, elements, nbytes)


@pytest.mark.parametrize("number", [0, 1], ids=["weights", "scales"])
@pytest.mark.parametrize("layout", ["awq-half2", "nvfp4-fp16"])
def test_an_expert_beyond_2_to_31_elements(layout: str, number: int) -> None:
    """The first block of two experts of 2^31 elements each, alike: it comes out alike, and at its place."""
    rows, columns, rng = 2**26, 32, np.random.default_rng(6)
    awq = layout == "awq-half2"

    def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(2, *shape, dtype=dtype, device="meta")

    words, scales = meta(8 * rows, columns // 8, dtype=torch.int32), meta(rows, columns, dtype=torch.float16)
    bytes_, codes = meta(columns, 4 * rows, dtype=torch.uint8), meta(columns, rows, dtype=torch.uint8)
    zeros = meta(rows, columns // 8, dtype=torch.int32)
    down = LayerProjection(words, scales, zeros, None) if awq else LayerProjection(bytes_, codes, None, torch.ones(2))
    out = {"w2_tm_weight": words[None], "w2_tm_scales": (words.view(2, rows, columns) if awq else scales)[None]}
    launches = triton_sm70.launches("w2", down, down, layout=layout, interleave=False, out=out, tables=None)

    kernel, _, arguments = launches[number]
    far: dict[str, np.ndarray[Any, Any]] = {}
    for name, given in arguments.items():
        if isinstance(given, torch.Tensor) and given.is_meta:
            dtype = {1: np.uint8, 2: np.int16, 4: np.int32}[given.itemsize]
            far[name] = untouched(given.numel(), dtype)
            if name != "out":
                lines = far[name].reshape(2, -1) if awq else far[name].reshape(2, columns, -1)
                lines[..., :1024] = rng.integers(1, np.iinfo(dtype).max, (*lines.shape[1:-1], 1024), dtype=dtype)
    # torch sees the beginning alone, since the interpreter copies what it sees.
    arguments |= {name: torch.from_numpy(array[:1024]) for name, array in far.items()}
    kernel[(1, 1, 2)](**arguments)
    first, second = far["out"].reshape(2, -1)[:, : (1024, 512)[number]]
    assert (first != 0).all()
    np.testing.assert_array_equal(first, second)


def test_an_unknown_layout() -> None:
    rng = np.random.default_rng(5)
    gate, up, down = (stack([p]) for p in expert(rng, "nvfp4-fp16", 32, 32, 16))
    with pytest.raises(ValueError, match="layout 'nvfp4' is none of awq-half2, awq-compact"):
        triton_sm70.prepare_layer(gate, up, down, layout="nvfp4", interleave=False, outs=[])


@pytest.mark.parametrize("path", [p for p in FILES if ".tp" in p.name], ids=lambda p: p.name)
def test_recorded_layer(path: Path) -> None:
    recording, source = load(path), load(path.with_name(f"{path.name.split('.')[0]}.hf.safetensors"))
    metadata = recording.metadata
    awq = metadata["kind"].startswith("awq")
    experts = [source_expert(source, e, awq=awq) for e in range(int(metadata["experts"]))]
    layout, tp_size = "awq-half2" if awq else "nvfp4-fp16", int(metadata["tp"])
    (out,) = prepare_layer(experts, layout, metadata["interleave"] == "1", [tp_size])
    assert {f"rank{rank}.{name}" for rank in range(tp_size) for name in out} == set(recording.outputs)
    for rank in range(tp_size):
        for name, array in out.items():
            np.testing.assert_array_equal(array[rank], recording.tensors[f"rank{rank}.{name}"])


def test_the_gpu_benchmark_compares_every_layout() -> None:
    compared, wrong = gpu_kernels.check(torch.device("cpu"))
    # 2 shapes x 2 x (1 + 2) ranks x 2 experts, of 4 tensors, 6 for nvfp4-raw
    assert (compared, wrong) == (2 * 2 * 3 * 2 * (4 * 4 + 6), [])
