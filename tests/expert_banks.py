"""One expert through either kernel, as raw bits: what the kernel tests compare."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from host_kernels import HOST_KERNELS
from sm70_kernels import reference
from sm70_kernels.spec import Projection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

KERNELS = ("reference", *HOST_KERNELS)
KERNEL_OF = {name: make() for name, make in HOST_KERNELS.items()}  # one for all, so that scratch of another shape shows
RAW_DTYPES = {torch.int32: np.uint32, torch.float16: np.uint16, torch.float8_e4m3fn: np.uint8}


def raw(tensor: torch.Tensor) -> NDArray[Any]:
    """The tensor's bits: int32 as uint32, fp16 as uint16, e4m3 as uint8; anything else as it is."""
    dtype = RAW_DTYPES.get(tensor.dtype)
    if tensor.dtype == torch.float8_e4m3fn:
        tensor = tensor.view(torch.uint8)
    array = tensor.contiguous().numpy()
    return array if dtype is None else array.view(dtype)


def bits(array: NDArray[Any]) -> NDArray[Any]:
    """fp32 as uint32, so that NaN equals itself and -0.0 is not 0.0."""
    return array.view(np.uint32) if array.dtype == np.float32 else array


def allocate(
    gate: Projection, up: Projection, down: Projection, *, layout: str, tp_size: int
) -> dict[str, NDArray[Any]]:
    """Bank arrays [T, ...] of one expert, filled with a pattern so that an unwritten word shows."""
    awq = layout.startswith("awq")
    shapes: dict[str, tuple[tuple[int, ...], type]] = {}
    for matrix, part in (("w13", gate), ("w2", down)):
        if awq:
            k, n, groups = part.weight.shape[0], part.weight.shape[1] * 8, part.scales.shape[0]
        else:
            k, n, groups = part.weight.shape[1] * 2, part.weight.shape[0], part.scales.shape[1]
        if matrix == "w13":
            n = 2 * n // tp_size
        else:
            k, groups = k // tp_size, groups // tp_size
        shapes[f"{matrix}_tm_weight"] = (k, n // 8), np.uint32
        if layout == "nvfp4-raw":
            shapes[f"{matrix}_raw_scale_codes"] = (groups, n), np.uint8
            shapes[f"{matrix}_raw_global_scales"] = (2 if matrix == "w13" else 1,), np.float32
        else:
            shapes[f"{matrix}_tm_scales"] = {
                "awq-half2": ((groups, n), np.uint32),
                "awq-compact": ((groups, n, 3), np.uint8),
                "awq-int4zero": ((groups, n // 2, 5), np.uint8),
                "nvfp4-fp16": ((groups, n), np.uint16),
            }[layout]
    banks = {name: np.empty((tp_size, *shape), dtype) for name, (shape, dtype) in shapes.items()}
    for array in banks.values():
        array.view(np.uint8).fill(0xA5)
    return banks


def prepare(
    kernel: str,
    gate: Projection,
    up: Projection,
    down: Projection,
    *,
    layout: str,
    interleave: bool,
    tp_sizes: Sequence[int],
) -> list[Mapping[str, NDArray[Any]]]:
    """Bank arrays [T, ...] as raw bits, one mapping per TP size."""
    if kernel in KERNEL_OF:
        outs = [allocate(gate, up, down, layout=layout, tp_size=tp_size) for tp_size in tp_sizes]
        KERNEL_OF[kernel].prepare(gate, up, down, layout=layout, interleave=interleave, outs=outs)
        return list(outs)
    banks = []
    for tp_size in tp_sizes:
        ranks = [
            reference.prepare_rank(gate, up, down, layout=layout, interleave=interleave, rank=rank, tp_size=tp_size)
            for rank in range(tp_size)
        ]
        banks.append({name: np.stack([raw(tensors[name]) for tensors in ranks]) for name in ranks[0]})
    return list(banks)


def random_awq(rng: np.random.Generator, k: int, n: int, group_size: int) -> Projection:
    """Random words, with scales that reach fp16 subnormals but whose products stay finite."""
    scales = rng.choice([-1, 1], (k // group_size, n)) * 2.0 ** rng.uniform(-24, 11, (k // group_size, n))
    return Projection(
        rng.integers(0, 2**32, (k, n // 8), dtype=np.uint32),
        scales.astype(np.float16).view(np.uint16),
        rng.integers(0, 2**32, (k // group_size, n // 8), dtype=np.uint32),
        None,
    )


def random_nvfp4(
    rng: np.random.Generator, k: int, n: int, global_scale: float, codes: tuple[int, int] = (8, 0x7F)
) -> Projection:
    """Random bytes, with scale codes from a half-open range (the default: the positive normal ones)."""
    return Projection(
        rng.integers(0, 256, (n, k // 2), dtype=np.uint8),
        rng.integers(*codes, (n, k // 16), dtype=np.uint8),
        None,
        np.float32(global_scale),
    )
