"""The Triton kernels compiled for sm_70 without a GPU: run by tests/test_triton.py in an environment with triton 3.6.0.

Each as prepare_layer launches it: same constants, and what the launcher would know of each argument (a pointer of torch
is a multiple of 16 bytes; an integer may be 1 or a multiple of 16).
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sm70_kernels import triton_sm70
from sm70_kernels.spec import LayerProjection

NVIDIA = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTERS = {torch.int32: "*i32", torch.int16: "*i16", torch.uint8: "*u8", torch.float32: "*fp32"}

# name, format, group, experts, hidden, intermediate, TP size. "half": ranks that end inside a tile.
SHAPES = [
    ("A", "awq-half2", 128, 128, 2048, 768, 1),
    ("A-tp2", "awq-half2", 128, 128, 2048, 768, 2),
    ("Qwen3.8", "awq-compact", 32, 512, 2560, 640, 4),
    ("Qwen3.8", "awq-int4zero", 32, 512, 2560, 640, 4),
    ("Qwen3.8", "awq-half2", 32, 512, 2560, 640, 4),
    ("A", "nvfp4-fp16", 16, 128, 2048, 768, 4),
    ("Qwen3.8", "nvfp4-fp16", 16, 512, 2560, 640, 4),
    ("Qwen3.8", "nvfp4-raw", 16, 512, 2560, 640, 4),
    ("half", "nvfp4-fp16", 16, 128, 2048, 192, 4),
]
CASES = [
    (*shape, matrix, interleave)
    for shape in SHAPES
    for matrix, interleave in (("w13", False), ("w13", True), ("w2", False))
]


class Compiled(NamedTuple):
    registers: int
    local_bytes: int
    loads: set[str]  # of global memory, by SASS name
    stores: set[str]


def layer(layout: str, group: int, experts: int, k: int, n: int) -> LayerProjection:
    def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    if layout.startswith("awq"):
        weight, zeros = (meta(experts, rows, n // 8, dtype=torch.int32) for rows in (k, k // group))
        return LayerProjection(weight, meta(experts, k // group, n, dtype=torch.float16), zeros, None)
    weight, scales = (meta(experts, n, k // d, dtype=torch.uint8) for d in (2, 16))
    return LayerProjection(weight, scales, None, meta(experts, dtype=torch.float32))


def bank(layout: str, group: int, experts: int, matrix: str, k: int, n: int, ranks: int) -> dict[str, torch.Tensor]:
    k, n = (k, 2 * n // ranks) if matrix == "w13" else (k // ranks, n)
    shape, dtype = {
        "awq-half2": ((n,), torch.int32),
        "awq-compact": ((n, 3), torch.uint8),
        "awq-int4zero": ((n // 2, 5), torch.uint8),
        "nvfp4-fp16": ((n,), torch.float16),
        "nvfp4-raw": ((n,), torch.uint8),
    }[layout]
    scales = torch.empty((ranks, experts, k // group, *shape), dtype=dtype, device="meta")
    name = "raw_scale_codes" if layout == "nvfp4-raw" else "tm_scales"
    words = torch.empty((ranks, experts, k, n // 8), dtype=torch.int32, device="meta")
    return {f"{matrix}_tm_weight": words, f"{matrix}_{name}": scales}


def compile_for_sm70(kernel: Any, arguments: dict[str, Any], tmp_path: Path) -> Compiled:
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or value == 1:
            signature[parameter.name] = "constexpr"
            constants[(i,)] = value
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    options = {"num_warps": arguments.get("num_warps", 4)}
    source = ASTSource(kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 70, 32), options=options)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(made.asm["cubin"])

    def tool(name: str, *options: str) -> str:
        command = [str(NVIDIA / name), *options, str(cubin)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    usage = tool("cuobjdump", "--dump-resource-usage")
    sass = tool("nvdisasm")
    (registers,) = re.findall(r"REG:(\d+)", usage)
    stack, local = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("STACK", "LOCAL"))  # type: ignore[index]
    spills = re.findall(r"\b(?:LDL|STL)\b", sass)
    return Compiled(
        int(registers),
        stack + local + len(spills),
        set(re.findall(r"\bLDG\.E[.A-Z0-9]*", sass)),
        set(re.findall(r"\bSTG\.E[.A-Z0-9]*", sass)),
    )


def width(name: str) -> int:
    """Bits of a global access by its SASS name."""
    found = re.search(r"\.(128|64|U8|S8|U16|S16)\b", name)
    return int(found[1].lstrip("US")) if found else 32


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}-{c[7]}{'-interleaved' if c[8] else ''}")
def test_repack(case: tuple[Any, ...], tmp_path: Path, record_property: Any) -> None:
    name, layout, group, experts, hidden, intermediate, ranks, matrix, interleave = case
    k, n = (hidden, intermediate) if matrix == "w13" else (intermediate, hidden)
    source = layer(layout, group, experts, k, n)
    out = bank(layout, group, experts, matrix, k, n, ranks)
    tables = torch.empty(experts, 2, 2, 256, dtype=torch.uint8, device="meta") if layout == "nvfp4-raw" else None
    weights, scales = triton_sm70.launches(
        matrix, source, source, layout=layout, interleave=interleave, out=out, tables=tables
    )
    for what, (kernel, _, arguments) in (("weights", weights), ("scales", scales)):
        got = compile_for_sm70(kernel, arguments, tmp_path)
        assert got.local_bytes == 0, "spills"
        if what == "scales":
            assert got.registers <= 128
            continue
        assert got.registers <= 64
        narrow = 64 if name == "half" and matrix == "w13" else 128
        assert {width(load) for load in got.loads} == {narrow if layout.startswith("awq") else 128}
        assert {width(store) for store in got.stores} == {128}


@triton.jit
def negated(out, scale):  # type: ignore[no-untyped-def]
    zero = tl.arange(0, 16)
    tl.store(out + zero, -zero.to(tl.float32) * scale)


@triton.jit
def ours(out, scale):  # type: ignore[no-untyped-def]
    zero = tl.arange(0, 16)
    tl.store(out + zero, triton_sm70.minus_zero_times(zero, scale))


@pytest.mark.parametrize(("kernel", "subtracts"), [(negated, True), (ours, False)], ids=["minus", "ours"])
def test_the_sign_of_a_zero_is_set_and_not_subtracted(kernel: Any, subtracts: bool) -> None:
    """The trap: a minus compiles to `0 - x`, which makes +0.0 of a zero point of 0. (Interpreted, it would be right.)"""
    source = ASTSource(kernel, {"out": "*fp32", "scale": "fp32"}, {}, {})
    ptx = triton.compile(source, target=GPUTarget("cuda", 70, 32)).asm["ptx"]
    assert bool(re.search(r"\bsub(\.rn)?\.f32\b", ptx)) == subtracts
    # PTX's neg flips the sign bit, as or and xor would set it.
    assert subtracts or re.search(r"\bneg\.f32\b|\b(or|xor)\.b32\b.*-2147483648", ptx)
