"""The runtime's own kernels: the ops by which a V100 runtime prepares a layer when it loads one (torch.ops._C).

An op takes one matrix of one expert and rank, cut and joined: w13 or w2 as [K, N]. It gives the bank's weight, its scales and
[k_ld, q_ld]. What the runtime does around its ops in Python is done here likewise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sm70_kernels import reference
from sm70_kernels.spec import LayerProjection, RawScaleError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

_EXPAND = "nvfp4_expand_raw_scales_sm70_out"
# By layout: the op that prepares, then others that are needed.
_OPS = {
    "awq-half2": ("awq_sm70_prepare",),
    "awq-compact": ("awq_sm70_prepare_compact",),
    "awq-int4zero": ("awq_sm70_prepare_compact",),
    "nvfp4-fp16": ("nvfp4_sm70_prepare",),
    "nvfp4-raw": ("nvfp4_sm70_prepare", _EXPAND),
}


def load(library: str) -> None:
    """Loads the runtime's extension (vllm/_C.*.so) and so registers its ops, without importing vllm. Raises OSError."""
    torch.ops.load_library(library)  # type: ignore[no-untyped-call]


def missing_ops(layout: str) -> tuple[str, ...]:
    """The ops for `layout` that no library loaded so far has registered."""
    return tuple(op for op in _OPS[layout] if not hasattr(torch.ops._C, op))


def prepare_layer(
    gate: LayerProjection,
    up: LayerProjection,
    down: LayerProjection,
    *,
    layout: str,
    interleave: bool,
    outs: Sequence[Mapping[str, Tensor]],
) -> None:
    """Fill the bank tensors of all experts of a layer, as torch_sm70.prepare_layer does; all tensors must be on a V100.

    Raises RawScaleError, with `expert`, where the runtime itself would not take the raw scales, and RuntimeError where an op is
    missing or gives another form than the banks have.
    """
    if missing := missing_ops(layout):
        raise RuntimeError(f"the runtime has no {', '.join(missing)}")
    for out in outs:
        tp_size = len(out["w13_tm_weight"])
        for rank in range(tp_size):
            bank = {name: tensor[rank] for name, tensor in out.items()}
            _prepare_matrix(bank, "w13", (gate, up), layout, interleave, rank, tp_size)
            _prepare_matrix(bank, "w2", (down,), layout, False, rank, tp_size)


def _prepare_matrix(
    bank: Mapping[str, Tensor],
    matrix: str,
    parts: Sequence[LayerProjection],
    layout: str,
    interleave: bool,
    rank: int,
    tp_size: int,
) -> None:
    """One matrix of one rank, all experts."""
    prepare = getattr(torch.ops._C, _OPS[layout][0])
    inputs_of = _awq_inputs if layout.startswith("awq") else _nvfp4_inputs
    products = []
    for expert in range(len(parts[0].weight)):
        inputs = inputs_of(parts, expert, rank, tp_size)
        k, n = inputs[0].shape[0], inputs[1].shape[1]
        weight, scales, leading = prepare(*inputs, k // len(inputs[1]), interleave)
        if expert == 0 and tuple(leading.tolist()) != reference.meta(layout, k, n):
            raise RuntimeError(
                f"{_OPS[layout][0]} gives [k_ld, q_ld] = {leading.tolist()} for {matrix}, "
                f"where a bank has {list(reference.meta(layout, k, n))}"
            )
        _put(bank[f"{matrix}_tm_weight"][expert], weight, layout)
        if layout == "nvfp4-raw":
            products.append(scales)
            continue
        if layout == "awq-int4zero":
            scales = _join_zeros(scales)
        _put(bank[f"{matrix}_tm_scales"][expert], scales, layout)
    if products:
        factors = torch.stack([p.global_scale for p in parts if p.global_scale is not None], dim=1)
        bank[f"{matrix}_raw_global_scales"].copy_(factors)
        bank[f"{matrix}_raw_scale_codes"].copy_(_raw_codes(torch.stack(products), factors, interleave))


def _put(target: Tensor, made: Tensor, layout: str) -> None:
    """A copy that neither casts nor broadcasts."""
    if (made.shape, made.dtype) != (target.shape, target.dtype):
        form = f"{made.dtype} {list(made.shape)}"
        raise RuntimeError(f"{_OPS[layout][0]} gives {form}, where a bank has {target.dtype} {list(target.shape)}")
    target.copy_(made)


def _awq_inputs(parts: Sequence[LayerProjection], expert: int, rank: int, tp_size: int) -> tuple[Tensor, ...]:
    """qweight int32 [K, N/8], scales fp16 [G, N], qzeros int32 [G, N/8]: a rank has columns of gate and up, rows of down."""
    dim = 1 if len(parts) == 2 else 0

    def cut(*tensors: Tensor | None) -> Tensor:
        return torch.cat([t[expert].chunk(tp_size, dim)[rank] for t in tensors if t is not None], dim=1)

    return cut(*(p.weight for p in parts)), cut(*(p.scales for p in parts)), cut(*(p.zeros for p in parts))


def _nvfp4_inputs(parts: Sequence[LayerProjection], expert: int, rank: int, tp_size: int) -> tuple[Tensor, ...]:
    """e2m1 codes uint8 [K, N], scales fp16 [G, N]. The source lies as [N, K/2] and [N, G], so the cut is the other way round."""
    dim = 0 if len(parts) == 2 else 1

    def cut(tensor: Tensor) -> Tensor:
        return tensor[expert].chunk(tp_size, dim)[rank]

    codes = torch.cat([cut(p.weight) for p in parts])
    products = [
        reference.scale_products(cut(p.scales), p.global_scale[expert]) for p in parts if p.global_scale is not None
    ]
    return reference.unpack_nvfp4(codes).contiguous(), torch.cat(products).T.contiguous()


def _join_zeros(compact: Tensor) -> Tensor:
    """awq-compact uint8 [G, N, 3] -> awq-int4zero uint8 [G, N/2, 5]; the runtime does this in Python too."""
    even, odd = compact[:, 0::2], compact[:, 1::2]
    return torch.cat([even[..., :2], odd[..., :2], even[..., 2:] | odd[..., 2:] << 4], dim=-1)


def _raw_codes(products: Tensor, factors: Tensor, interleave: bool) -> Tensor:
    """fp16 products [E, G, N] and globals [E, 1 or 2] -> e4m3 codes, once the runtime's expansion gives the products back.

    It is asked as the runtime asks: for the scales of its prefill, and for those of its decode, which are 16384 times as large.
    """
    n = products.shape[-1]
    columns = torch.stack([reference.column_globals(f, n, interleave=interleave) for f in factors])[:, None, :]
    codes = reference.raw_codes(products, columns)
    expanded = torch.empty_like(products)
    for decode in (False, True):
        getattr(torch.ops._C, _EXPAND)(expanded, codes, factors, interleave, decode)
        failed = expanded != (products * 16384.0 if decode else products)
        if failed.any():
            expert, group, column = (int(i) for i in failed.nonzero()[0])
            pairwise = column % 2 if interleave else int(column >= n // 2)
            error = RawScaleError(
                ("gate", "up")[pairwise] if factors.shape[1] == 2 else "down",
                f"code 0x{int(codes[expert, group, column]):02x} with global {float(columns[expert, 0, column]):.9g} does not "
                f"give the scale {float(products[expert, group, column]):.9g} exactly in the runtime's "
                f"{'decode' if decode else 'prefill'} ({int(failed[expert].sum())} such scales)",
            )
            error.expert = expert
            raise error
    return codes
