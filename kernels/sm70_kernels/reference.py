"""The definition of every bank layout, in torch: slow, plain, and independent of the fast kernels.

A projection is unpacked to logical integers [K, N] (K in-features, N out-features) and cut for the rank; gate
and up are joined along N and, if asked, interleaved; the closed form packs the result. Nothing is fused.

Words: G = K / group_size; H hidden size; I intermediate size; T = tp_size; I_l = I / T.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sm70_kernels.spec import RawScaleError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from sm70_kernels.spec import Projection

AWQ_LAYOUTS = ("awq-half2", "awq-compact", "awq-int4zero")
NVFP4_LAYOUTS = ("nvfp4-fp16", "nvfp4-raw")

AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # column 8c+j is nibble AWQ_NIBBLES[j] of word c
TM_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a bank word holds row TM_ROWS[i] of its eight
NVFP4_GROUP = 16
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FP16_NAN = 0x7FFF


# Bits and numbers. Integers are int64 until the very end, since torch's int32 shifts extend the sign.


def _integers(array: NDArray[Any]) -> Tensor:
    """Raw unsigned words of any width as int64."""
    return torch.from_numpy(array.astype("int64"))


def _fp16_bits(values: Tensor) -> Tensor:
    """fp16 -> int64 0..0xffff."""
    return values.view(torch.int16).long() & 0xFFFF


def _fp16_from_bits(bits: Tensor) -> Tensor:
    """int64 0..0xffff -> fp16."""
    return bits.to(torch.int16).view(torch.float16)


def round_to_fp16(values: Tensor) -> Tensor:
    """fp32 -> fp16, to nearest even; overflow gives inf, subnormals stay, and every NaN becomes 0x7fff."""
    bits = _fp16_bits(values.to(torch.float16))
    return _fp16_from_bits(torch.where(values.isnan(), FP16_NAN, bits))


def bf16_to_fp16(scales: Tensor) -> Tensor:
    """bf16 -> fp16, as `round_to_fp16`."""
    return round_to_fp16(scales.to(torch.float32))


def e4m3_values(codes: Tensor) -> Tensor:
    """e4m3 codes (0..255) -> fp32 values; 0x7f and 0xff are NaN."""
    return codes.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)


# Words of one matrix


def unpack_awq(words: Tensor) -> Tensor:
    """AWQ words [R, N/8] -> integers 0..15 [R, N]: column 8c+j is nibble (0,4,1,5,2,6,3,7)[j] of word c."""
    columns = [(words >> (4 * nibble)) & 0xF for nibble in AWQ_NIBBLES]
    return torch.stack(columns, dim=-1).flatten(1)


def unpack_nvfp4(data: Tensor) -> Tensor:
    """NVFP4 bytes [N, K/2] -> e2m1 codes [K, N]: the low nibble is the even k."""
    return torch.stack([data & 0xF, data >> 4], dim=-1).flatten(1).T


def _unit_index(k: int, n: int) -> Tensor:
    """Flat bank word of unit u (rows 8u..8u+7) and column n: ((n//32)*(K//8) + u)*32 + n%32, as [K/8, N]."""
    if k % 8 or n % 32:
        raise ValueError(f"a packed matrix needs K % 8 == 0 and N % 32 == 0, got K={k}, N={n}")
    unit = torch.arange(k // 8)[:, None]
    column = torch.arange(n)[None, :]
    return ((column // 32) * (k // 8) + unit) * 32 + column % 32


def pack_weight(logical: Tensor) -> Tensor:
    """Integers 0..15 [K, N] -> bank words int32, container [K, N/8].

    Flat word ((n//32)*(K//8) + k//8)*32 + n%32; its nibble i (bits 4i..4i+3) holds row
    k = 8*(k//8) + (0,2,4,6,1,3,5,7)[i].
    """
    k, n = logical.shape
    index = _unit_index(k, n)
    words = torch.zeros(k * n // 8, dtype=torch.int64)
    for nibble, row in enumerate(TM_ROWS):
        words[index] |= logical[row::8] << (4 * nibble)
    return words.to(torch.int32).reshape(k, n // 8)


def unpack_weight(words: Tensor) -> Tensor:
    """Bank words int32 [K, N/8] -> integers 0..15 [K, N]; the inverse of `pack_weight`."""
    k, n = words.shape[0], words.shape[1] * 8
    units = words.long().flatten()[_unit_index(k, n)]
    logical = torch.empty(k, n, dtype=torch.int64)
    for nibble, row in enumerate(TM_ROWS):
        logical[row::8] = (units >> (4 * nibble)) & 0xF
    return logical


def interleave_pairs(joined: Tensor) -> Tensor:
    """[..., gate | up] -> new column 2j = gate j, 2j+1 = up j."""
    gate, up = joined.chunk(2, dim=-1)
    return torch.stack([gate, up], dim=-1).flatten(-2)


def split_pairs(interleaved: Tensor) -> Tensor:
    """The inverse of `interleave_pairs`."""
    return torch.cat([interleaved[..., 0::2], interleaved[..., 1::2]], dim=-1)


def meta(layout: str, k: int, n: int) -> tuple[int, int]:
    """(k_ld, q_ld) of one bank matrix [K, N]: 32*K, and N, negative for awq-compact and awq-int4zero."""
    return 32 * k, -n if layout in ("awq-compact", "awq-int4zero") else n


# AWQ scales


def half2_scales(scales: Tensor, zeros: Tensor) -> Tensor:
    """fp16 [G, N], zeros [G, N] -> int32 [G, N].

    Low half: the scale's bits as they are. High half: (-zero) * scale, rounded once to fp16 (fp32 holds the
    product exactly). A zero of 0 is -0.0, hence 0x8000 for a positive scale.
    """
    high = round_to_fp16(-zeros.to(torch.float32) * scales.to(torch.float32))
    return (_fp16_bits(scales) | _fp16_bits(high) << 16).to(torch.int32)


def compact_scales(scales: Tensor, zeros: Tensor) -> Tensor:
    """fp16 [G, N], zeros [G, N] -> uint8 [G, N, 3]: scale low byte, scale high byte, zero."""
    bits = _fp16_bits(scales)
    return torch.stack([bits & 0xFF, bits >> 8, zeros], dim=-1).to(torch.uint8)


def int4zero_scales(scales: Tensor, zeros: Tensor) -> Tensor:
    """fp16 [G, N], zeros [G, N] -> uint8 [G, N/2, 5]: s0 low, s0 high, s1 low, s1 high, z0 | z1 << 4."""
    bits = _fp16_bits(scales)
    even, odd = bits[:, 0::2], bits[:, 1::2]
    both_zeros = zeros[:, 0::2] | zeros[:, 1::2] << 4
    return torch.stack([even & 0xFF, even >> 8, odd & 0xFF, odd >> 8, both_zeros], dim=-1).to(torch.uint8)


def expand_compact(records: Tensor) -> Tensor:
    """awq-compact uint8 [G, N, 3] -> awq-half2 int32 [G, N]."""
    low, high, zeros = records.long().unbind(-1)
    return half2_scales(_fp16_from_bits(low | high << 8), zeros)


def expand_int4zero(records: Tensor) -> Tensor:
    """awq-int4zero uint8 [G, N/2, 5] -> awq-half2 int32 [G, N]."""
    low0, high0, low1, high1, both_zeros = records.long().unbind(-1)
    bits = torch.stack([low0 | high0 << 8, low1 | high1 << 8], dim=-1).flatten(1)
    zeros = torch.stack([both_zeros & 0xF, both_zeros >> 4], dim=-1).flatten(1)
    return half2_scales(_fp16_from_bits(bits), zeros)


# NVFP4 scales


def scale_products(codes: Tensor, global_scale: Tensor) -> Tensor:
    """e4m3 codes and fp32 global(s), broadcast -> fp16 products: one rounding to fp32, then one to fp16."""
    return round_to_fp16(e4m3_values(codes) * global_scale)


def column_globals(global_scales: Tensor, n: int, *, interleave: bool) -> Tensor:
    """The global that a raw bank applies to each of N columns, fp32 [N].

    [1] (w2): the same for all. [2] (w13): plain, gate's for n < N/2, then up's; interleaved, (n >> 5) & 1
    chooses by 32-column tile: the runtime's own rule, although gate and up then alternate by column.
    """
    column = torch.arange(n)
    if len(global_scales) == 1:
        return global_scales[torch.zeros_like(column)]
    return global_scales[(column >> 5) & 1 if interleave else (column >= n // 2).long()]


def raw_codes(products: Tensor, globals_: Tensor) -> Tensor:
    """fp16 products [K/16, N] and each column's global [N] -> uint8 e4m3(fp32(P) / G), to nearest even."""
    return (products.to(torch.float32) / globals_).to(torch.float8_e4m3fn).view(torch.uint8)


def raw_scale_check(codes: Tensor, products: Tensor, globals_: Tensor) -> Tensor:
    """Whether a raw bank's code C gives the product P exactly, bool [K/16, N]; by value, NaN is never equal.

    1. fp16(fp32(e4m3(C)) * G) == P
    2. fp16(fma(r, hi, t)), rounded once, == fp16(P * 16384), where S = fp32(G * 16384), hi = fp16(S),
       lo = fp16(S - fp32(hi)), r = the fp16 with bits C*128 + 0x2000 (mod 2^16), t = fp16(r * lo)
    """
    # Few distinct (G, P, C) exist, so the exact arithmetic runs once for each.
    global_bits = globals_.expand(products.shape).contiguous().view(torch.int32).long() & 0xFFFFFFFF
    cases, position = torch.unique(global_bits << 24 | _fp16_bits(products) << 8 | codes.long(), return_inverse=True)
    code = cases & 0xFF
    product = _fp16_from_bits((cases >> 8) & 0xFFFF).to(torch.float32)
    global_scale = (cases >> 24).to(torch.int32).view(torch.float32)

    kept = scale_products(code, global_scale).to(torch.float32) == product

    scaled = global_scale * 16384
    high = round_to_fp16(scaled).to(torch.float32)
    low = round_to_fp16(scaled - high).to(torch.float32)
    ratio = _fp16_from_bits((code * 128 + 0x2000) & 0xFFFF).to(torch.float32)
    tail = round_to_fp16(ratio * low).to(torch.float32)
    fused = [_fma_fp16(*operands) for operands in zip(ratio.tolist(), high.tolist(), tail.tolist(), strict=True)]
    rebuilt = torch.tensor(fused, dtype=torch.float32) == round_to_fp16(product * 16384).to(torch.float32)

    return (kept & rebuilt)[position]


def _fma_fp16(a: float, b: float, c: float) -> float:
    """fp16(a * b + c), rounded once, for fp16 values."""
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return a * b + c  # inf or NaN: nothing to round
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    step = Fraction(1, 2**24)  # of the subnormals and of the lowest binade
    while abs(exact) >= 2048 * step:
        step *= 2
    rounded = float(round(exact / step) * step)  # Python rounds to nearest even
    return rounded if abs(rounded) <= 65504 else math.copysign(math.inf, rounded)


def expand_raw(codes: Tensor, global_scales: Tensor, *, interleave: bool = False) -> Tensor:
    """nvfp4-raw codes uint8 [K/16, N], fp32 globals [1] or [2] -> nvfp4-fp16 scales fp16 [K/16, N]."""
    return scale_products(codes, column_globals(global_scales, codes.shape[-1], interleave=interleave))


# One rank of one expert


class _Logical(NamedTuple):
    """One projection, unpacked: weight int64 [K, N]; scales fp16 [G, N]; zeros int64 [G, N], AWQ only."""

    weight: Tensor
    scales: Tensor
    zeros: Tensor | None

    def columns(self, part: slice) -> _Logical:
        zeros = None if self.zeros is None else self.zeros[:, part]
        return _Logical(self.weight[:, part], self.scales[:, part], zeros)

    def rows(self, start: int, stop: int) -> _Logical:
        group = self.weight.shape[0] // self.scales.shape[0]
        if start % group or stop % group:
            raise ValueError(f"rows {start}..{stop} of down do not fall on groups of {group}")
        groups = slice(start // group, stop // group)
        zeros = None if self.zeros is None else self.zeros[groups]
        return _Logical(self.weight[start:stop], self.scales[groups], zeros)

    def regrouped(self, group_size: int) -> _Logical:
        """The same matrix with every group split into equal groups of `group_size`."""
        group = self.weight.shape[0] // self.scales.shape[0]
        if group % group_size:
            raise ValueError(f"groups of {group} cannot be split into groups of {group_size}")
        repeats = group // group_size
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(repeats, dim=0)
        return _Logical(self.weight, self.scales.repeat_interleave(repeats, dim=0), zeros)


def _logical(projection: Projection, *, awq: bool) -> _Logical:
    weight, scales = _integers(projection.weight), _integers(projection.scales)
    if awq:
        if projection.zeros is None:
            raise ValueError("an AWQ layout needs a projection with zeros")
        return _Logical(unpack_awq(weight), _fp16_from_bits(scales), unpack_awq(_integers(projection.zeros)))
    return _Logical(unpack_nvfp4(weight), scale_products(scales.T, _global_scale(projection)), None)


def _global_scale(projection: Projection) -> Tensor:
    """weight_scale_2 as fp32 [1]."""
    if projection.global_scale is None:
        raise ValueError("an NVFP4 layout needs a projection with a global scale")
    return torch.tensor([float(projection.global_scale)], dtype=torch.float32)


def _join(gate: _Logical, up: _Logical, *, interleave: bool) -> _Logical:
    def join(left: Tensor, right: Tensor) -> Tensor:
        joined = torch.cat([left, right], dim=-1)
        return interleave_pairs(joined) if interleave else joined

    zeros = None if gate.zeros is None or up.zeros is None else join(gate.zeros, up.zeros)
    return _Logical(join(gate.weight, up.weight), join(gate.scales, up.scales), zeros)


def prepare_rank(
    gate: Projection,
    up: Projection,
    down: Projection,
    *,
    layout: str,
    interleave: bool,
    rank: int,
    tp_size: int,
    group_size: int | None = None,
) -> dict[str, Tensor]:
    """The bank tensors of one expert for one rank.

    gate and up are K=H, N=I, down is K=I, N=H, all uncut. `group_size` splits larger groups to it.

    w13_tm_weight int32 [H, 2*I_l/8], w2_tm_weight int32 [I_l, H/8], and w13_tm_scales, w2_tm_scales, with
    [G, N] = [H/g, 2*I_l] for w13 and [I_l/g, H] for w2 (g = 16 for NVFP4): awq-half2 int32 [G, N];
    awq-compact uint8 [G, N, 3]; awq-int4zero uint8 [G, N/2, 5]; nvfp4-fp16 fp16 [G, N]. nvfp4-raw has instead
    w13_raw_scale_codes and w2_raw_scale_codes uint8 [G, N], w13_raw_global_scales fp32 [2] = (gate, up) and
    w2_raw_global_scales fp32 [1].

    Raises RawScaleError where nvfp4-raw cannot hold a scale exactly.
    """
    if layout not in AWQ_LAYOUTS + NVFP4_LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}")
    awq = layout in AWQ_LAYOUTS
    parts = [_logical(projection, awq=awq) for projection in (gate, up, down)]
    if group_size is not None:
        parts = [part.regrouped(group_size) for part in parts]

    intermediate = parts[2].weight.shape[0]
    if intermediate % tp_size:
        raise ValueError(f"the intermediate size {intermediate} is not divisible by tp_size {tp_size}")
    start, stop = rank * intermediate // tp_size, (rank + 1) * intermediate // tp_size
    owned = slice(start, stop)
    w13 = _join(parts[0].columns(owned), parts[1].columns(owned), interleave=interleave)
    w2 = parts[2].rows(start, stop)

    tensors = {"w13_tm_weight": pack_weight(w13.weight), "w2_tm_weight": pack_weight(w2.weight)}
    if layout == "nvfp4-raw":
        w13_globals = torch.cat([_global_scale(gate), _global_scale(up)])
        w2_globals = _global_scale(down)
        tensors["w13_raw_scale_codes"] = _checked_codes(
            w13.scales, w13_globals, interleave=interleave, projections=("gate", "up")
        )
        tensors["w13_raw_global_scales"] = w13_globals
        tensors["w2_raw_scale_codes"] = _checked_codes(w2.scales, w2_globals, interleave=False, projections=("down",))
        tensors["w2_raw_global_scales"] = w2_globals
    else:
        tensors["w13_tm_scales"] = _bank_scales(w13, layout)
        tensors["w2_tm_scales"] = _bank_scales(w2, layout)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _bank_scales(matrix: _Logical, layout: str) -> Tensor:
    if matrix.zeros is None:
        return matrix.scales
    convert = {"awq-half2": half2_scales, "awq-compact": compact_scales, "awq-int4zero": int4zero_scales}
    return convert[layout](matrix.scales, matrix.zeros)


def _checked_codes(
    products: Tensor, global_scales: Tensor, *, interleave: bool, projections: tuple[str, ...]
) -> Tensor:
    """The codes of a raw bank matrix; the error names the first of its projections that fails the check."""
    n = products.shape[1]
    globals_ = column_globals(global_scales, n, interleave=interleave)
    codes = raw_codes(products, globals_)
    failed = ~raw_scale_check(codes, products, globals_)

    columns = torch.arange(n)
    pairwise = columns % 2 if interleave else (columns >= n // 2).long()
    owner = pairwise if len(projections) == 2 else torch.zeros_like(columns)
    for number, projection in enumerate(projections):
        places = (failed & (owner == number)).nonzero().tolist()
        if places:
            group, column = places[0]
            raise RawScaleError(
                projection,
                f"code 0x{int(codes[group, column]):02x} with global {float(globals_[column]):.9g} does not "
                f"give the scale {float(products[group, column]):.9g} exactly ({len(places)} such scales)",
            )
    return codes


# Back to weights


def dequantise(tensors: Mapping[str, Tensor], *, layout: str, interleave: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Bank tensors of one expert of one rank, as `prepare_rank` gives them -> gate, up, down, fp32 [N, K].

    AWQ: (q - z) * s, with z = round(-hi / lo) from the two halves of awq-half2: exactly the source, as long
    as zero * scale is finite. NVFP4: e2m1 * fp16 scale: the source with its scales rounded to fp16.
    """
    w13 = _dequantise_matrix(tensors, "w13", layout=layout, interleave=interleave)
    if interleave:
        w13 = split_pairs(w13)
    gate, up = w13.T.chunk(2)
    w2 = _dequantise_matrix(tensors, "w2", layout=layout, interleave=False)
    return gate.contiguous(), up.contiguous(), w2.T.contiguous()


def _dequantise_matrix(tensors: Mapping[str, Tensor], matrix: str, *, layout: str, interleave: bool) -> Tensor:
    """One bank matrix -> fp32 [K, N], columns in bank order."""
    logical = unpack_weight(tensors[f"{matrix}_tm_weight"])
    if layout in NVFP4_LAYOUTS:
        if layout == "nvfp4-raw":
            codes, global_scales = (tensors[f"{matrix}_raw_{part}"] for part in ("scale_codes", "global_scales"))
            scales = expand_raw(codes, global_scales, interleave=interleave)
        else:
            scales = tensors[f"{matrix}_tm_scales"]
        return torch.tensor(E2M1_VALUES)[logical] * _by_row(scales.to(torch.float32), logical)

    half2 = tensors[f"{matrix}_tm_scales"]
    if layout == "awq-compact":
        half2 = expand_compact(half2)
    elif layout == "awq-int4zero":
        half2 = expand_int4zero(half2)
    words = half2.long()
    low = _fp16_from_bits(words & 0xFFFF).to(torch.float32)
    high = _fp16_from_bits((words >> 16) & 0xFFFF).to(torch.float32)
    zeros = torch.where(low == 0, 0.0, (-high / low).round())  # with a scale of 0 the zero is lost, and is not needed
    return (logical - _by_row(zeros, logical)) * _by_row(low, logical)


def _by_row(groups: Tensor, logical: Tensor) -> Tensor:
    """[G, N] -> [K, N], each group's row repeated over its rows."""
    return groups.repeat_interleave(logical.shape[0] // groups.shape[0], dim=0)
