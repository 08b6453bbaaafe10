"""A V100 and its runtime on a machine with neither: prepare ops computed by the reference, and devices that are the CPU."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sm70_convert.devices import CudaDevice
from sm70_convert.environment import Runtime
from sm70_kernels import reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest
    from torch import Tensor

V100 = CudaDevice("Tesla V100-SXM2-32GB", (7, 0))
AWQ_OP = "(Tensor a, Tensor b, Tensor c, int group_size, bool interleave_gated_silu) -> Tensor[]"
NVFP4_OP = "(Tensor a, Tensor b, int group_size, bool interleave_gated_silu) -> Tensor[]"
EXPAND_OP = "(Tensor(a!) out, Tensor codes, Tensor globals, bool interleaved_w13, bool fast_decode_rounding) -> ()"
OPS = {
    "awq_sm70_prepare": AWQ_OP,
    "awq_sm70_prepare_compact": AWQ_OP,
    "nvfp4_sm70_prepare": NVFP4_OP,
    "nvfp4_expand_raw_scales_sm70_out": EXPAND_OP,
}


@dataclass
class Call:
    """One call of an op: (dtype, shape) of each tensor, whether all were contiguous, and what followed them."""

    op: str
    tensors: list[tuple[torch.dtype, tuple[int, ...]]]
    contiguous: bool
    rest: tuple[Any, ...]


@contextmanager
def native_ops(*names: str, spoil: Any = lambda _, made: made) -> Iterator[list[Call]]:
    """Registers ops of these names (all, if none is given) as a runtime's library does; gives the calls as they come.

    spoil(op, made): what an op gives in place of what it should.
    """
    calls: list[Call] = []
    library = torch.library.Library("_C", "FRAGMENT")

    def called(op: str, *args: Any) -> Any:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        forms = [(t.dtype, tuple(t.shape)) for t in tensors]
        calls.append(Call(op, forms, all(t.is_contiguous() for t in tensors), args[len(tensors) :]))
        if op == "nvfp4_expand_raw_scales_sm70_out":
            return _expand(*args)
        return spoil(op, _nvfp4(*args) if op.startswith("nvfp4") else _awq(op, *args))

    try:
        for op in names or OPS:
            library.define(op + OPS[op])
            library.impl(op, lambda *args, op=op: called(op, *args), "CPU")
        yield calls
    finally:
        library._destroy()


def _awq(op: str, weight: Tensor, scales: Tensor, zeros: Tensor, group_size: int, interleave: bool) -> list[Tensor]:
    parts = [reference.unpack_awq(weight.long() & 0xFFFFFFFF), scales, reference.unpack_awq(zeros.long() & 0xFFFFFFFF)]
    assert len(parts[0]) == group_size * len(scales)
    if interleave:
        parts = [reference.interleave_pairs(p) for p in parts]
    compact = op.endswith("compact")
    form = reference.compact_scales if compact else reference.half2_scales
    leading = reference.meta("awq-compact" if compact else "awq-half2", *parts[0].shape)
    return [reference.pack_weight(parts[0]), form(parts[1], parts[2]), torch.tensor(leading)]


def _nvfp4(codes: Tensor, scales: Tensor, group_size: int, interleave: bool) -> list[Tensor]:
    assert len(codes) == group_size * len(scales)
    weight, scales = codes.long(), scales.clone()
    if interleave:
        weight, scales = reference.interleave_pairs(weight), reference.interleave_pairs(scales)
    return [reference.pack_weight(weight), scales, torch.tensor(reference.meta("nvfp4-fp16", *weight.shape))]


def _expand(out: Tensor, codes: Tensor, factors: Tensor, interleaved: bool, fast: bool) -> None:
    for expert, (one, factor) in enumerate(zip(codes, factors, strict=True)):
        out[expert] = reference.expand_raw(one, factor, interleave=interleaved)
        columns = reference.column_globals(factor, one.shape[-1], interleave=interleaved)
        kept = reference.raw_scale_check(one, out[expert], columns)
        # Where the runtime's decode arithmetic would give another value than prefill's, any other value does.
        if fast:
            out[expert] = torch.where(kept, out[expert] * 16384.0, -1.0)


def pretend(monkeypatch: pytest.MonkeyPatch, *devices: CudaDevice, runtime: bool = True) -> None:
    """CUDA devices that torch can use, and a V100 runtime whose ops are registered already; layers are prepared on the CPU."""
    import sm70_convert.device_layer as device_layer
    import sm70_convert.kernel_choice as kernel_choice

    worker = device_layer.DeviceWorker
    found = Runtime("revolta", sm70_ops=True, folders=(), distributions={})
    monkeypatch.setattr(kernel_choice, "cuda_devices", lambda: list(devices))
    monkeypatch.setattr(kernel_choice, "_torch_cannot_use", lambda *_: None)
    monkeypatch.setattr(kernel_choice, "find_runtime", lambda: found if runtime else None)
    monkeypatch.setattr(device_layer, "DeviceWorker", lambda _device, kernel: worker("cpu", kernel))
