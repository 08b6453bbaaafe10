"""What becomes of scales, by code or bits: tables that every fast kernel shares, exact by construction."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from sm70_kernels.spec import Projection, RawScaleError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Array = NDArray[Any]

_FP16_NAN = 0x7FFF


def fp16_bits(values: Array) -> NDArray[np.uint16]:
    """fp16 bits of values rounded once, with the NaN a GPU makes."""
    bits: NDArray[np.uint16] = values.astype(np.float16).view(np.uint16)
    bits[np.isnan(values)] = _FP16_NAN
    return bits


@lru_cache(maxsize=1)
def _bf16_table() -> NDArray[np.uint16]:
    with np.errstate(all="ignore"):
        return fp16_bits((np.arange(0x10000, dtype=np.uint32) << 16).view(np.float32))


def bf16_to_fp16(bits: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """bf16 bits to fp16 bits, rounded to nearest even; overflow gives inf and NaN gives 0x7fff."""
    return np.take(_bf16_table(), bits)


@lru_cache(maxsize=1)
def half2_table() -> NDArray[np.uint32]:
    """uint32 [16 * 65536], by `zero << 16 | scale bits`: fp16 of (-zero) * scale << 16 | scale bits.

    The fp32 product of a 4-bit integer and an fp16 is exact, so it is rounded once; a zero of 0 counts as -0.0.
    """
    table = np.empty((16, 0x10000), np.uint32)
    bits = np.arange(0x10000, dtype=np.uint32)
    with np.errstate(all="ignore"):
        scale = bits.astype(np.uint16).view(np.float16).astype(np.float32)
        for zero, row in enumerate(table):
            np.left_shift(fp16_bits(np.float32(-float(zero)) * scale), 16, out=row, dtype=np.uint32)
            np.bitwise_or(row, bits, out=row)
    return table.reshape(-1)


@lru_cache(maxsize=1)
def e4m3_values() -> NDArray[np.float32]:
    """fp32 [256], the value of each e4m3 code; 0x7f and 0xff are NaN."""
    code = np.arange(256, dtype=np.uint16)
    # An fp16 with the same exponent and mantissa fields is the value over 2^8, subnormals included.
    half = ((code & 0x80) << 8 | (code & 0x7F) << 7).view(np.float16)
    values: NDArray[np.float32] = half.astype(np.float32) * np.float32(256)
    values[[0x7F, 0xFF]] = np.nan
    return values


def e4m3_rne(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """e4m3 codes of fp32 values, to nearest even; what is larger than 448 becomes 448, NaN stays NaN."""
    positive = e4m3_values()[:0x7F]
    middles = (positive[:-1] + positive[1:]) / 2  # exact in fp32
    below, upto = (np.searchsorted(middles, np.abs(values), side) for side in ("left", "right"))
    code = below + (below & (upto - below))  # on a middle the two differ by one: take the even code
    code[np.isnan(values)] = 0x7F
    codes: NDArray[np.uint8] = (code | np.signbit(values) * 0x80).astype(np.uint8)
    return codes


def nvfp4_scale_table(global_scale: np.float32 | None) -> NDArray[np.uint16]:
    """uint16 [256]: by e4m3 code, the fp16 bits of its product, rounded to fp32, then to fp16; NaN is 0x7fff."""
    with np.errstate(all="ignore"):
        return fp16_bits(e4m3_values() * np.asarray(global_scale, np.float32))


def fma_fp16(a: Array, b: Array, c: Array) -> NDArray[np.float16]:
    """fp16 of a * b + c with one rounding, for fp16 arguments.

    The product is exact in fp64. The sum may not be; rounded to odd, by its exact error, it rounds on to fp16 as
    the exact sum would.
    """
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    rest = total - product
    error = (product - (total - rest)) + (addend - rest)
    even = (total.view(np.uint64) & np.uint64(1)) == 0
    inexact = even & (error != 0) & np.isfinite(error)
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    rounded: NDArray[np.float16] = np.where(inexact, odd, total).astype(np.float16)
    return rounded


class RawTables:
    """What raw storage makes of each e4m3 code, for pairs of globals (the source's, the bank column's).

    codes uint8 [pairs, 256]: C = e4m3_rne(fp32(P) / G), P the fp16 scale, G the bank column's global. The runtime
    reads C in two ways, to give P and P * 16384 by value; failed bool [pairs, 256] is where one does not.
    """

    def __init__(self, pairs: Sequence[tuple[np.float32 | None, np.float32 | None]]) -> None:
        self.pairs = pairs
        source, bank = (np.array(column, np.float32)[:, None] for column in zip(*pairs, strict=True))
        with np.errstate(all="ignore"):
            half = fp16_bits(e4m3_values() * source).view(np.float16)
            single = half.astype(np.float32)
            self.codes = e4m3_rne(single / bank)
            read = (e4m3_values()[self.codes] * bank).astype(np.float16)
            shifted = bank * np.float32(16384)
            high = shifted.astype(np.float16)
            low = (shifted - high.astype(np.float32)).astype(np.float16)
            raw = (self.codes.astype(np.uint16) * np.uint16(128) + np.uint16(0x2000)).view(np.float16)
            expanded = fma_fp16(raw, high, raw * low)  # an fp16 product of numpy is rounded once
            self.checks = ((read, half), (expanded, (single * np.float32(16384)).astype(np.float16)))
        self.failed = (read != half) | (expanded != self.checks[1][1])

    def check(self, projection: str, row: int, codes: Array) -> None:
        """Raise RawScaleError if one of the codes, all of the pair `row`, does not survive."""
        if not self.failed[row, codes.min() : int(codes.max()) + 1].any():  # often none in the whole range
            return
        bad = self.failed[row] & (np.bincount(codes.reshape(-1), minlength=256) > 0)
        if not bad.any():
            return
        code = int(bad.argmax())
        number, (got, want) = next(
            (n, (got[row, code], want[row, code]))
            for n, (got, want) in enumerate(self.checks, 1)
            if got[row, code] != want[row, code]
        )
        source, bank = self.pairs[row]
        where = f"e4m3 code {code:#04x} with global scale {source!s}"
        if source != bank:
            where += f" in an interleaved column that the runtime reads with {bank!s}"
        raise RawScaleError(projection, f"{where} fails check {number}: {got!s} instead of {want!s}")


def raw_code_tables(
    gate: Projection, up: Projection, down: Projection, *, interleave: bool, widths: Sequence[int]
) -> list[Array]:
    """uint8 [256] each: what nvfp4-raw stores, by source code, for gate, up and down; every code in use is checked.

    [512] where it differs for the upper half of each 32 columns. widths: the columns of a rank's w13, 2 * I_l, for each
    TP size. Raises RawScaleError.
    """
    pairs = [(p.global_scale, p.global_scale) for p in (gate, up, down)]
    mixed = interleave and gate.global_scale != up.global_scale
    if mixed:
        # The runtime reads an interleaved bank with gate's global in even tiles of 32 columns and up's in odd
        # ones: the upper 16 of each 32 columns of gate meet up's global, the lower 16 of up meet gate's.
        if any(width % 64 for width in widths):
            raise ValueError("interleaved nvfp4-raw needs a rank's intermediate size to be a multiple of 32")
        pairs += [(gate.global_scale, up.global_scale), (up.global_scale, gate.global_scale)]
    tables = RawTables(pairs)
    if not mixed:
        for row, (name, projection) in enumerate((("gate", gate), ("up", up), ("down", down))):
            tables.check(name, row, projection.scales)
        return list(tables.codes[:3])
    for name, projection, rows in (("gate", gate, (0, 3)), ("up", up, (4, 1))):
        halves = projection.scales.reshape(-1, 2, 16, projection.scales.shape[1])
        for half, row in enumerate(rows):
            tables.check(name, row, halves[:, half])
    tables.check("down", 2, down.scales)
    return [tables.codes[[0, 3]].reshape(-1), tables.codes[[4, 1]].reshape(-1), tables.codes[2]]
