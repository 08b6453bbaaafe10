"""The GPU path: all experts of a layer at once, by Triton kernels made for sm_70; any CUDA device runs them.

A program takes 16 or 32 columns of one expert (of gate and of up, if they interleave) and a block of rows: units of
eight k for weights, groups for scales. w13 is cut by columns, w2 by rows, for T ranks. COLS is 32 where that divides a
rank's columns, else 16 (half a tile, which no rank ever splits).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from sm70_kernels.scale_tables import raw_code_tables
from sm70_kernels.spec import Projection, RawScaleError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sm70_kernels.spec import LayerProjection

LAYOUTS = ("awq-half2", "awq-compact", "awq-int4zero", "nvfp4-fp16", "nvfp4-raw")
UNITS, GROUPS = 32, 16  # rows of a block: of weights, of scales


@triton.jit
def _exchange(low, high, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """Exchange the masked fields of high with those SHIFT bits up in low."""
    differ = ((low >> SHIFT) ^ high) & MASK
    return low ^ (differ << SHIFT), high ^ differ


@triton.jit
def _awq_columns(rows, stride, inside, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Bank words [ROWS, COLS] of AWQ words: rows [..., COLS/8] points at the first of eight, `stride` words apart.

    The bits of k in its eight rows are k2 k1 k0, those of a column in its word j2 j1 j0: the nibbles of a word are ordered
    by j0 j2 j1 and wanted by k0 k2 k1, which takes three exchanges of a k bit with a j bit.
    """
    a0 = tl.load(rows, mask=inside, other=0).to(tl.uint32, bitcast=True)
    a1 = tl.load(rows + stride, mask=inside, other=0).to(tl.uint32, bitcast=True)
    a2 = tl.load(rows + 2 * stride, mask=inside, other=0).to(tl.uint32, bitcast=True)
    a3 = tl.load(rows + 3 * stride, mask=inside, other=0).to(tl.uint32, bitcast=True)
    a4 = tl.load(rows + 4 * stride, mask=inside, other=0).to(tl.uint32, bitcast=True)
    a5 = tl.load(rows + 5 * stride, mask=inside, other=0).to(tl.uint32, bitcast=True)
    a6 = tl.load(rows + 6 * stride, mask=inside, other=0).to(tl.uint32, bitcast=True)
    a7 = tl.load(rows + 7 * stride, mask=inside, other=0).to(tl.uint32, bitcast=True)
    a0, a4 = _exchange(a0, a4, 8, 0x00FF00FF)
    a1, a5 = _exchange(a1, a5, 8, 0x00FF00FF)
    a2, a6 = _exchange(a2, a6, 8, 0x00FF00FF)
    a3, a7 = _exchange(a3, a7, 8, 0x00FF00FF)
    a0, a2 = _exchange(a0, a2, 4, 0x0F0F0F0F)
    a1, a3 = _exchange(a1, a3, 4, 0x0F0F0F0F)
    a4, a6 = _exchange(a4, a6, 4, 0x0F0F0F0F)
    a5, a7 = _exchange(a5, a7, 4, 0x0F0F0F0F)
    a0, a1 = _exchange(a0, a1, 16, 0x0000FFFF)
    a2, a3 = _exchange(a2, a3, 16, 0x0000FFFF)
    a4, a5 = _exchange(a4, a5, 16, 0x0000FFFF)
    a6, a7 = _exchange(a6, a7, 16, 0x0000FFFF)
    # Joined by j2, then j1, then j0, so that j0 varies fastest.
    even = tl.join(tl.join(a0, a4), tl.join(a2, a6))
    odd = tl.join(tl.join(a1, a5), tl.join(a3, a7))
    return tl.reshape(tl.join(even, odd), (ROWS, COLS))


@triton.jit
def _nvfp4_columns(rows, inside):
    """Bank words [ROWS, COLS] of NVFP4 words [COLS, ROWS] of eight k: nibble i holds k = (0,2,4,6,1,3,5,7)[i]."""
    word = tl.load(rows, mask=inside, other=0).to(tl.uint32, bitcast=True)
    differ = ((word >> 4) ^ word) & 0x00F000F0  # to 0 2 1 3 4 6 5 7
    word = word ^ differ ^ (differ << 4)
    differ = ((word >> 8) ^ word) & 0x0000FF00  # to 0 2 4 6 1 3 5 7
    return tl.trans(word ^ differ ^ (differ << 8))


@triton.jit
def _rank_of(column, row, columns, rows, T, PARTS: tl.constexpr):
    """(rank, column, row) in the rank: of w13 the columns are cut, of w2 the rows."""
    if PARTS == 2:
        own = columns // T
        return column // own + row * 0, column % own, row
    own = rows // T
    return row // own, column, row % own


@triton.jit
def _store_words(out, words, column, unit, inside, part, n, units, T, E, expert, PARTS: tl.constexpr,
                 INTERLEAVE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Bank words [ROWS, COLS] (two for one if INTERLEAVE) of columns from `column` of a part, to [T, E, K*N/8]."""
    rank, inside_rank, row = _rank_of(column, unit, n, units, T, PARTS)
    of_rank = units if PARTS == 2 else units // T
    width = 2 * (n // T) if PARTS == 2 else n
    if INTERLEAVE:
        first = 2 * inside_rank
    else:
        first = inside_rank + (part * (n // T) if PARTS == 2 else 0)
    WIDE: tl.constexpr = COLS * 2 if INTERLEAVE else COLS
    TILES: tl.constexpr = 2 if WIDE == 64 else 1
    base = (rank * E + expert).to(tl.int64) * of_rank * width  # [ROWS]
    row_place = tl.multiple_of(base + row * 32 + (first // 32) * of_rank * 32 + first % 32, 16)
    tile = tl.arange(0, TILES) * of_rank * 32
    place = row_place[:, None, None] + tile[None, :, None] + tl.arange(0, WIDE // TILES)[None, None, :]
    values = tl.reshape(words, (ROWS, TILES, WIDE // TILES)).to(tl.int32, bitcast=True)
    tl.store(out + place, values, mask=inside[:, None, None])


@triton.jit
def awq_weights(gate, up, out, row_vectors, units, T, E, PARTS: tl.constexpr, INTERLEAVE: tl.constexpr,
                ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """gate, up (or down twice): int32 [E, 8 * units, row_vectors * COLS/8]; out: int32 [T, E, ...]."""
    VECTOR: tl.constexpr = COLS // 8
    expert = tl.program_id(2) if INTERLEAVE else tl.program_id(2) // PARTS
    part = 0 if INTERLEAVE else tl.program_id(2) % PARTS
    stride = row_vectors * VECTOR
    unit = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = unit < units
    start = expert.to(tl.int64) * units * 8 * stride + tl.program_id(1) * VECTOR
    at = start + (unit[:, None] * 8) * stride + tl.arange(0, VECTOR)[None, :]
    if INTERLEAVE:
        # Both by one load, so that a thread has 16 bytes of one of them and registers for that alone.
        of_up = tl.arange(0, 2)[None, :, None] == 1
        rows = tl.where(of_up, up + at[:, None, :], gate + at[:, None, :])
        both = _awq_columns(rows, stride, inside[:, None, None], ROWS, 2 * COLS)
        words = tl.permute(tl.reshape(both, (ROWS, 2, COLS)), (0, 2, 1))
    else:
        source = gate if part == 0 else up
        words = _awq_columns(source + at, stride, inside[:, None], ROWS, COLS)
    column = tl.program_id(1) * COLS
    _store_words(out, words, column, unit, inside, part, stride * 8, units, T, E, expert, PARTS, INTERLEAVE, ROWS, COLS)


@triton.jit
def nvfp4_weights(gate, up, out, n, row_vectors, T, E, PARTS: tl.constexpr, INTERLEAVE: tl.constexpr,
                  VECTOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """gate, up (or down twice): int32 [E, n, row_vectors * VECTOR], words of eight k; out: int32 [T, E, ...]."""
    expert = tl.program_id(2) if INTERLEAVE else tl.program_id(2) // PARTS
    part = 0 if INTERLEAVE else tl.program_id(2) % PARTS
    units = row_vectors * VECTOR
    unit = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = unit < units
    column = tl.program_id(1) * COLS
    at = (expert.to(tl.int64) * n + column) * units + tl.arange(0, COLS)[:, None] * units + unit[None, :]
    if INTERLEAVE:
        words = tl.join(_nvfp4_columns(gate + at, inside[None, :]), _nvfp4_columns(up + at, inside[None, :]))
    else:
        source = gate if part == 0 else up
        words = _nvfp4_columns(source + at, inside[None, :])
    _store_words(out, words, column, unit, inside, part, n, units, T, E, expert, PARTS, INTERLEAVE, ROWS, COLS)


@triton.jit
def _record_place(column, group, part, n, groups, T, E, expert, PARTS: tl.constexpr, INTERLEAVE: tl.constexpr,
                  COLS: tl.constexpr):  # fmt: skip
    """Where the records [ROWS, COLS] (two for one if INTERLEAVE) of some columns lie in [T, E, G, N]."""
    rank, inside_rank, row = _rank_of(column, group, n, groups, T, PARTS)
    of_rank = groups if PARTS == 2 else groups // T
    width = 2 * (n // T) if PARTS == 2 else n
    if INTERLEAVE:
        first = 2 * inside_rank
    else:
        first = inside_rank + (part * (n // T) if PARTS == 2 else 0)
    WIDE: tl.constexpr = COLS * 2 if INTERLEAVE else COLS
    line = tl.multiple_of(((rank * E + expert).to(tl.int64) * of_rank + row) * width + first, 16)
    return line[:, None] + tl.arange(0, WIDE)[None, :]


@triton.jit
def minus_zero_times(zero, scale):
    """fp32 (-zero) * scale, exact; a zero of 0 counts as -0.0, which `-zero` would not be: it compiles to 0 - zero."""
    positive = zero.to(tl.float32)
    negative = (positive.to(tl.int32, bitcast=True) | -0x80000000).to(tl.float32, bitcast=True)
    return negative * scale


@triton.jit
def _half_bits(values):
    """fp16 bits of fp32 values, rounded to nearest even; every NaN 0x7fff."""
    bits = values.to(tl.float16).to(tl.int16, bitcast=True)
    return tl.where(values != values, 0x7FFF, bits.to(tl.int32) & 0xFFFF)


@triton.jit
def _awq_keys(scales, zeros, at, zero_at, shift, inside):
    """int32 zero << 16 | scale bits."""
    bits = tl.load(scales + at, mask=inside, other=0).to(tl.int32) & 0xFFFF
    zero = (tl.load(zeros + zero_at, mask=inside, other=0) >> shift) & 15
    return zero << 16 | bits


@triton.jit
def awq_scales(gate, up, gate_zeros, up_zeros, out, n, groups, T, E, PARTS: tl.constexpr, INTERLEAVE: tl.constexpr,
               LAYOUT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """gate, up (or down twice): fp16 as int16 [E, groups, n]; zeros int32 [E, groups, n/8]; LAYOUT: index in LAYOUTS.

    out: int32 [T, E, G, N] of awq-half2, else bytes.
    """
    expert = tl.program_id(2) if INTERLEAVE else tl.program_id(2) // PARTS
    part = 0 if INTERLEAVE else tl.program_id(2) % PARTS
    group = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (group < groups)[:, None]
    start = tl.program_id(1) * COLS
    column = start + tl.arange(0, COLS)
    line = expert.to(tl.int64) * groups + group
    at = line[:, None] * n + column[None, :]
    zero_at = line[:, None] * (n // 8) + (column // 8)[None, :]
    j = column % 8
    shift = (4 * ((j >> 1) | ((j & 1) << 2)))[None, :]
    WIDE: tl.constexpr = COLS * 2 if INTERLEAVE else COLS
    if INTERLEAVE:
        left = _awq_keys(gate, gate_zeros, at, zero_at, shift, inside)
        right = _awq_keys(up, up_zeros, at, zero_at, shift, inside)
        keys = tl.reshape(tl.join(left, right), (ROWS, WIDE))
    else:
        keys = _awq_keys(gate if part == 0 else up, gate_zeros if part == 0 else up_zeros, at, zero_at, shift, inside)
    place = _record_place(start, group, part, n, groups, T, E, expert, PARTS, INTERLEAVE, COLS)
    if LAYOUT == 0:
        scale = (keys & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        record = (_half_bits(minus_zero_times(keys >> 16, scale)) << 16) | (keys & 0xFFFF)
        tl.store(out + place, record, mask=inside)
    elif LAYOUT == 1:
        tl.store(out + place * 3, keys.to(tl.uint8), mask=inside)
        tl.store(out + place * 3 + 1, (keys >> 8).to(tl.uint8), mask=inside)
        tl.store(out + place * 3 + 2, (keys >> 16).to(tl.uint8), mask=inside)
    else:
        low, high = tl.split(tl.reshape(keys, (ROWS, WIDE // 2, 2)))
        first, _second = tl.split(tl.reshape(place, (ROWS, WIDE // 2, 2)))
        at_pair = out + (first // 2) * 5
        tl.store(at_pair, low.to(tl.uint8), mask=inside)
        tl.store(at_pair + 1, (low >> 8).to(tl.uint8), mask=inside)
        tl.store(at_pair + 2, high.to(tl.uint8), mask=inside)
        tl.store(at_pair + 3, (high >> 8).to(tl.uint8), mask=inside)
        tl.store(at_pair + 4, ((low >> 16) | ((high >> 16) << 4)).to(tl.uint8), mask=inside)


@triton.jit
def _nvfp4_records(codes, at, factor, table, upper, inside, RAW: tl.constexpr):
    """[ROWS, COLS] records of codes [COLS, ROWS]: fp16 bits of value * factor, rounded twice, or the stored codes."""
    code = tl.trans(tl.load(codes + at, mask=inside, other=0).to(tl.int32))
    if RAW:
        records = tl.load(table + upper[None, :] * 256 + code)
    else:
        # An fp16 with the code's exponent and mantissa is its value over 2^8, subnormals included.
        half = (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
        bits = _half_bits((half.to(tl.float32) * 256.0) * factor)
        records = tl.where((code & 0x7F) == 0x7F, 0x7FFF, bits).to(tl.int16)
    return records


@triton.jit
def nvfp4_scales(gate, up, gate_factors, up_factors, tables, out, n, groups, T, E, PARTS: tl.constexpr,
                 INTERLEAVE: tl.constexpr, RAW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """gate, up (or down twice): uint8 [E, n, groups]; factors fp32 [E]; out: fp16 as int16, or uint8, [T, E, G, N].

    tables (if RAW): uint8 [E, PARTS, 2, 256], stored code by source code, for the lower and upper 16 of each 32 columns.
    """
    expert = tl.program_id(2) if INTERLEAVE else tl.program_id(2) // PARTS
    part = 0 if INTERLEAVE else tl.program_id(2) % PARTS
    group = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = group < groups
    start = tl.program_id(1) * COLS
    column = start + tl.arange(0, COLS)
    at = (expert.to(tl.int64) * n + column)[:, None] * groups + group[None, :]
    upper = (column >> 4) & 1
    table = tables + expert * (PARTS * 512)
    WIDE: tl.constexpr = COLS * 2 if INTERLEAVE else COLS
    if INTERLEAVE:
        left = _nvfp4_records(gate, at, tl.load(gate_factors + expert), table, upper, inside[None, :], RAW)
        right = _nvfp4_records(up, at, tl.load(up_factors + expert), table + 512, upper, inside[None, :], RAW)
        records = tl.reshape(tl.join(left, right), (ROWS, WIDE))
    else:
        codes = gate if part == 0 else up
        factor = tl.load((gate_factors if part == 0 else up_factors) + expert)
        records = _nvfp4_records(codes, at, factor, table + part * 512, upper, inside[None, :], RAW)
    place = _record_place(start, group, part, n, groups, T, E, expert, PARTS, INTERLEAVE, COLS)
    tl.store(out + place, records, mask=inside[:, None])


def prepare_layer(
    gate: LayerProjection,
    up: LayerProjection,
    down: LayerProjection,
    *,
    layout: str,
    interleave: bool,
    outs: Sequence[Mapping[str, torch.Tensor]],
) -> None:
    """Fill the bank tensors of one layer, for each TP size T of `outs`, on the device that holds them all.

    The mappings are those of NumpyKernel.prepare, with the number of experts E after T and signed dtypes:
    `w13_tm_weight` int32 [T, E, H, 2*I_l/8], `*_tm_scales` int32 (awq-half2), float16 (nvfp4-fp16) or uint8,
    `*_raw_scale_codes` uint8, `w13_raw_global_scales` float32 [T, E, 2].

    Raises RawScaleError with its expert, before anything is written, if nvfp4-raw cannot hold the scales exactly.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is none of {', '.join(LAYOUTS)}")
    tables: dict[str, torch.Tensor | None] = {"w13": None, "w2": None}
    if layout == "nvfp4-raw":
        tables = _raw_tables(gate, up, down, interleave, [out["w13_raw_scale_codes"].shape[-1] for out in outs])
        assert gate.global_scale is not None  # noqa: S101 - for the type
        assert up.global_scale is not None  # noqa: S101
        assert down.global_scale is not None  # noqa: S101
        for out in outs:
            out["w13_raw_global_scales"].copy_(torch.stack([gate.global_scale, up.global_scale], dim=1))
            out["w2_raw_global_scales"].copy_(down.global_scale[:, None])
    for out in outs:
        for matrix, sources, pairs in (("w13", (gate, up), interleave), ("w2", (down, down), False)):
            weights, scales = launches(
                matrix, *sources, layout=layout, interleave=pairs, out=out, tables=tables[matrix]
            )
            for kernel, grid, arguments in (weights, scales):
                kernel[grid](**arguments)


def launches(
    matrix: str,
    first: LayerProjection,
    second: LayerProjection,
    *,
    layout: str,
    interleave: bool,
    out: Mapping[str, torch.Tensor],
    tables: torch.Tensor | None,
) -> list[tuple[Any, tuple[int, int, int], dict[str, Any]]]:
    """(kernel, grid, arguments) for the weights and for the scales of one matrix and TP size."""
    awq, parts = layout.startswith("awq"), 2 if matrix == "w13" else 1
    words = out[f"{matrix}_tm_weight"]
    ranks, experts = words.shape[:2]
    if awq:
        k, n, groups = first.weight.shape[1], first.weight.shape[2] * 8, first.scales.shape[1]
    else:
        k, n, groups = first.weight.shape[2] * 2, first.weight.shape[1], first.scales.shape[2]
    columns = 32 if (n // ranks if parts == 2 else n) % 32 == 0 else 16
    programs = experts if interleave else experts * parts
    common = {"T": ranks, "E": experts, "PARTS": parts, "INTERLEAVE": interleave, "COLS": columns}
    units = UNITS // 2 if awq and interleave else UNITS
    weights: dict[str, Any] = {"out": words, "ROWS": units, **common}
    if awq:
        weights |= {"gate": first.weight, "up": second.weight, "row_vectors": n // columns, "units": k // 8}
        weights |= {"num_warps": 1}  # so that a thread has 16 bytes of each of the eight rows
    else:
        vector = 4 if k % 32 == 0 else 2  # 16 or 8 bytes
        weights |= {"gate": first.weight.view(torch.int32), "up": second.weight.view(torch.int32), "n": n}
        weights |= {"row_vectors": k // 8 // vector, "VECTOR": vector, "num_warps": 2}
    scales: dict[str, Any] = {"n": n, "groups": groups, "ROWS": GROUPS, **common}
    if awq:
        target = out[f"{matrix}_tm_scales"]
        scales |= {"gate": first.scales.view(torch.int16), "up": second.scales.view(torch.int16), "out": target}
        scales |= {"gate_zeros": first.zeros, "up_zeros": second.zeros, "LAYOUT": LAYOUTS.index(layout)}
    else:
        raw = layout == "nvfp4-raw"
        target = out[f"{matrix}_raw_scale_codes"] if raw else out[f"{matrix}_tm_scales"].view(torch.int16)
        scales |= {"gate": first.scales, "up": second.scales, "out": target, "RAW": raw}
        scales |= {"gate_factors": first.global_scale, "up_factors": second.global_scale}
        scales |= {"tables": first.scales if tables is None else tables}
    return [
        (awq_weights if awq else nvfp4_weights, (triton.cdiv(k // 8, units), n // columns, programs), weights),
        (awq_scales if awq else nvfp4_scales, (triton.cdiv(groups, GROUPS), n // columns, programs), scales),
    ]


def _raw_tables(
    gate: LayerProjection, up: LayerProjection, down: LayerProjection, interleave: bool, widths: Sequence[int]
) -> dict[str, torch.Tensor | None]:
    """uint8 [E, parts, 2, 256] for w13 and w2. The codes in use are looked at on the host: they decide what fails."""

    def experts(of: LayerProjection) -> list[Projection]:
        assert of.global_scale is not None  # noqa: S101 - for the type
        factors = of.global_scale.cpu().numpy()
        empty = np.empty((0, 0), np.uint8)
        return [
            Projection(empty, codes.cpu().numpy(), None, factor)
            for codes, factor in zip(of.scales, factors, strict=True)
        ]

    tables = []
    for expert, parts in enumerate(zip(*(experts(p) for p in (gate, up, down)), strict=True)):
        try:
            made = raw_code_tables(*parts, interleave=interleave, widths=widths)
        except RawScaleError as exc:
            exc.expert = expert
            raise
        tables.append(np.stack([np.resize(table, (2, 256)) for table in made]))
    stacked = torch.from_numpy(np.stack(tables)).to(gate.weight.device)
    return {"w13": stacked[:, :2].contiguous(), "w2": stacked[:, 2:].contiguous()}
