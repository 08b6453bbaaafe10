"""Stand-ins for the natives of a V100 runtime on a CPU: what conversion after loading calls, computed by the reference kernels.

The current platform is made the CPU's. `CALLS` counts what was called with real data, `POINTERS` keeps what pointer tables were
built over.
"""

from __future__ import annotations

import sys
from collections import Counter
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from sm70_kernels import reference

CALLS: Counter[str] = Counter()
POINTERS: list[tuple[int, int]] = []
_SEEN: dict[tuple[Any, ...], list[Tensor]] = {}

# Ops that a runtime only looks for, or calls without need here.
_PRESENT = {
    "_C": (
        "awq_sm70_int4_zero_supported",
        "awq_moe_single_token_sm70_out",
        "awq_moe_indexed_dense_w13_sm70_out",
        "awq_moe_chunked_w2_sm70_out",
        "awq_moe_gemm_sm70_out",
        "nvfp4_moe_dense_stage_sm70_out",
        "nvfp4_moe_indexed_dense_stage_sm70_out",
        "nvfp4_moe_indexed_fused_swiglu_sm70_out",
        "nvfp4_moe_qpn_m1_sm70_out",
        "nvfp4_moe_qpn_batch_sm70_out",
        "nvfp4_moe_qpn_mtp5_sm70_out",
        "nvfp4_moe_qpn_raw_scale_sm70_out",
        "nvfp4_moe_qpn_raw_w13_swiglu_batch_sm70_out",
        "nvfp4_moe_qpn_raw_w2_reduce_sm70_out",
        "nvfp4_grouped_w13_sm70_out",
        "nvfp4_grouped_w2_sm70_out",
        "nvfp4_grouped_w2_batch_reduce_sm70_out",
        "nvfp4_raw_grouped_decode_sm70_out",
        "nvfp4_qwen38_w2_direct_reduce_out",
        "nvfp4_qwen38_w13_fused_swiglu_out",
    ),
    "_moe_C": ("moe_permute_with_scratch", "moe_permute_metadata_with_scratch"),
}
_LIBRARIES: list[torch.library.Library] = []


def install() -> None:
    """Must run before the runtime's modules are imported."""
    if find_spec("cuda") is None:
        sys.modules |= {name: MagicMock() for name in ("cuda", "cuda.bindings", "cuda.bindings.driver")}
    import vllm.platforms as platforms
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = CpuPlatform()
    torch.accelerator.empty_cache = lambda: None
    torch.accelerator.current_device_index = lambda: 0
    native, moe = torch.library.Library("_C", "FRAGMENT"), torch.library.Library("_moe_C", "FRAGMENT")
    _LIBRARIES.extend((native, moe))
    for library, names in ((native, _PRESENT["_C"]), (moe, _PRESENT["_moe_C"])):
        for name in names:
            library.define(f"{name}() -> ()")
    awq = "(Tensor qweight, Tensor scales, Tensor qzeros, int group_size, bool interleave_gated_silu) -> Tensor[]"
    nvfp4 = "(Tensor qweight, Tensor scales, int group_size, bool interleave_gated_silu) -> Tensor[]"
    pointers = "(Tensor tm_weights, Tensor tm_scales, int k_ld, int q_ld, int num_experts) -> Tensor[]"
    expand = "(Tensor out, Tensor codes, Tensor globals, bool interleaved_w13, bool fast_decode_rounding) -> ()"
    _define(native, "awq_sm70_prepare", awq, lambda *a: _awq("awq-half2", *a))
    _define(native, "awq_sm70_prepare_compact", awq, lambda *a: _awq("awq-compact", *a))
    _define(native, "nvfp4_sm70_prepare", nvfp4, _nvfp4)
    _define(native, "awq_moe_build_strided_ptrs", pointers, _pointers)
    _define(native, "nvfp4_expand_raw_scales_sm70_out", expand, _expand)
    _define(moe, "moe_permute_sort_workspace_size", "(int slots, int experts) -> int", lambda *_: 64)


def place(rank: int, size: int) -> None:
    """Makes this process one of `size` ranks, for what asks the runtime's own tensor-parallel group."""
    import vllm.distributed.parallel_state as state

    state._TP = SimpleNamespace(rank_in_group=rank, world_size=size)


def _define(library: torch.library.Library, name: str, schema: str, function: Any) -> None:
    def counted(*args: Any) -> Any:
        CALLS[name] += 1
        return function(*args)

    library.define(name + schema)
    library.impl(name, counted, "CompositeExplicitAutograd" if "int slots" in schema else "CPU")


def _logical(words: Tensor) -> Tensor:
    return reference.unpack_awq(words.long() & 0xFFFFFFFF)


def _once(key: tuple[Any, ...], tensors: tuple[Tensor, ...], make: Any) -> list[Tensor]:
    """The outputs of equal inputs again, for layers of hundreds of equal experts."""
    key += tuple(hash(t.contiguous().view(torch.uint8).numpy().tobytes()) for t in tensors)
    if key not in _SEEN:
        _SEEN[key] = make()
    return [t.clone() for t in _SEEN[key]]


def _awq(layout: str, weight: Tensor, scales: Tensor, zeros: Tensor, group_size: int, interleave: bool) -> list[Tensor]:
    def make() -> list[Tensor]:
        parts = [_logical(weight), scales, _logical(zeros)]
        assert parts[0].shape[0] == group_size * scales.shape[0]
        if interleave:
            parts = [reference.interleave_pairs(p) for p in parts]
        form = reference.half2_scales if layout == "awq-half2" else reference.compact_scales
        meta = torch.tensor(reference.meta(layout, *parts[0].shape))
        return [reference.pack_weight(parts[0]), form(parts[1], parts[2]), meta]

    return _once((layout, interleave), (weight, scales, zeros), make)


def _nvfp4(weight: Tensor, scales: Tensor, group_size: int, interleave: bool) -> list[Tensor]:
    def make() -> list[Tensor]:
        codes, products = weight.long(), scales
        assert codes.shape[0] == group_size * products.shape[0]
        if interleave:
            codes, products = reference.interleave_pairs(codes), reference.interleave_pairs(products)
        meta = torch.tensor(reference.meta("nvfp4-fp16", *codes.shape))
        return [reference.pack_weight(codes), products.contiguous(), meta]

    return _once(("nvfp4", interleave), (weight, scales), make)


def _pointers(weights: Tensor, scales: Tensor, k_ld: int, q_ld: int, experts: int) -> list[Tensor]:
    """Tables as bytes: where each expert lies, counted from its storage, and the leading dimension."""
    POINTERS.append((weights.untyped_storage().data_ptr(), scales.untyped_storage().data_ptr()))

    def table(tensor: Tensor, leading: int) -> Tensor:
        first, stride = tensor.storage_offset(), tensor.stride(0)
        rows = [[first + e * stride, leading] for e in range(experts)]
        return torch.tensor(rows, dtype=torch.int64).view(torch.uint8).flatten()

    return [table(weights, k_ld), table(scales, q_ld)]


def _expand(out: Tensor, codes: Tensor, globals_: Tensor, interleaved: bool, fast: bool) -> None:
    column = torch.arange(codes.shape[-1])
    if globals_.shape[1] == 1:
        scale = globals_[:, :1]
    else:
        second = (column >> 5) & 1 if interleaved else (column >= len(column) // 2).long()
        scale = globals_[:, second]
    out.copy_(codes.view(torch.float8_e4m3fn).float() * scale[:, None, :])
    if fast:
        out.mul_(16384.0)
