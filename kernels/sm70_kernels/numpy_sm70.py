"""The numpy path: one expert's gate, up and down to SM70 bank tensors, with nothing to build.

w13 (gate and up) and w2 (down) take three steps, in pieces that stay in cache:

1. words: source weights become 32-bit words of eight k of one column, in target order (nibble i holds
   k = 8*(k//8) + (0,2,4,6,1,3,5,7)[i]). AWQ: an 8x8 nibble transpose; NVFP4: a shuffle inside each word.
2. place: for each TP size, the words go to index `((n//32)*(K//8) + k//8)*32 + n%32` of their rank's tensor.
3. scales: made once for the uncut projections, in bank order `[group][n]`, then cut for each rank.

Floating point occurs in tables only, by code or bits; the bulk is integer moves. Little-endian only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from sm70_kernels.scale_tables import half2_table, nvfp4_scale_table, raw_code_tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import DTypeLike, NDArray

    from sm70_kernels.spec import Projection

    Array = NDArray[Any]
    Outs = Sequence[Mapping[str, NDArray[Any]]]

_BLOCK_BYTES = 768 * 1024  # a piece of work: about a core's cache; smaller pieces make threads wait for each other
_LAYOUTS = ("awq-half2", "awq-compact", "awq-int4zero", "nvfp4-fp16", "nvfp4-raw")


def _exchange(low: Array, high: Array, shift: int, mask: int, temp: Array, outs: tuple[Array, Array]) -> None:
    """Exchange the masked fields of high with those `shift` bits up in low."""
    np.right_shift(low, shift, out=temp)
    np.bitwise_xor(temp, high, out=temp)
    np.bitwise_and(temp, mask, out=temp)
    np.bitwise_xor(high, temp, out=outs[1])
    np.left_shift(temp, shift, out=temp)
    np.bitwise_xor(low, temp, out=outs[0])


def _exchange_inside(words: Array, shift: int, mask: int, temp: Array, out: Array) -> None:
    """Exchange, inside each word, the masked fields with those `shift` bits up."""
    np.right_shift(words, shift, out=temp)
    np.bitwise_xor(temp, words, out=temp)
    np.bitwise_and(temp, mask, out=temp)
    np.multiply(temp, (1 << shift) + 1, out=temp)  # to both places: they do not overlap
    np.bitwise_xor(words, temp, out=out)


def _rows(array: Array) -> Array:
    """The array, or a copy if its rows are not contiguous: it could not be viewed as another type."""
    return array if array.strides[-1] == array.itemsize else np.ascontiguousarray(array)


def _flat(out: Array, dtype: DTypeLike) -> Array:
    if not out.flags.c_contiguous:
        raise ValueError("bank tensors must be C-contiguous")
    return out.reshape(-1).view(dtype)


class NumpyKernel:
    """Prepares experts one by one. It owns scratch, reused from call to call: one instance per thread."""

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[np.uint8]] = {}

    def prepare(
        self, gate: Projection, up: Projection, down: Projection, *, layout: str, interleave: bool, outs: Outs
    ) -> None:
        """Fill the bank tensors of one expert, for each TP size T of `outs`.

        gate and up have K = H and N = I, down has K = I and N = H; I_l = I / T. A mapping holds C-contiguous arrays:
        `w13_tm_weight` uint32 [T, H, 2*I_l/8], `w2_tm_weight` uint32 [T, I_l, H/8] and, with [G, N] = [H/g, 2*I_l]
        for w13 and [I_l/g, H] for w2, `*_tm_scales`:

        - awq-half2 uint32 [T, G, N]: the scale's fp16 bits, and fp16 of (-zero) * scale above them;
        - awq-compact uint8 [T, G, N, 3]: scale low byte, scale high byte, zero;
        - awq-int4zero uint8 [T, G, N/2, 5]: two scales, then zero | zero << 4;
        - nvfp4-fp16 uint16 [T, G, N]: the fp16 bits of scale * global;
        - nvfp4-raw: not `*_tm_scales`, but `*_raw_scale_codes` uint8 [T, G, N] and `w13_raw_global_scales` float32
          [T, 2], `w2_raw_global_scales` float32 [T, 1].

        A rank's w13 holds its gate columns, then its up columns; if `interleave`, gate j at 2j and up j at 2j+1.
        Raises RawScaleError, before anything is written, if nvfp4-raw cannot hold the scales exactly.
        """
        if layout not in _LAYOUTS:
            raise ValueError(f"layout {layout!r} is none of {', '.join(_LAYOUTS)}")
        name, tables = "tm_scales", []
        if layout == "nvfp4-raw":
            widths = [out["w13_raw_scale_codes"].shape[-1] for out in outs]
            name, tables = "raw_scale_codes", raw_code_tables(gate, up, down, interleave=interleave, widths=widths)
            for out in outs:
                out["w13_raw_global_scales"][:] = gate.global_scale, up.global_scale
                out["w2_raw_global_scales"][:] = down.global_scale
        elif layout == "nvfp4-fp16":
            tables = [nvfp4_scale_table(p.global_scale) for p in (gate, up, down)]
        matrices = (("w13", (gate, up), interleave, tables[:2]), ("w2", (down,), False, tables[2:]))
        for matrix, projections, pairwise, scale_tables in matrices:
            weights = [out[f"{matrix}_tm_weight"] for out in outs]
            if layout.startswith("awq"):
                self._awq_weights(projections, pairwise, weights)
                scales = self._awq_scales(projections, pairwise, layout)
            else:
                self._nvfp4_weights(projections, pairwise, weights)
                scales = self._nvfp4_scales(projections, pairwise, scale_tables)
            _cut_scales(scales, [out[f"{matrix}_{name}"] for out in outs])

    def _scratch(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[name] = np.empty(size, np.uint8)
        return buffer[:size].view(dtype).reshape(shape)

    def _awq_weights(self, projections: Sequence[Projection], interleave: bool, outs: Sequence[Array]) -> None:
        """In blocks of rows k//8, of all columns."""
        parts, (k, columns) = len(projections), projections[0].weight.shape
        for start, stop in _ranges(k // 8, 32 * columns * parts):
            rows = stop - start
            raw = self._scratch("raw", (rows, 2, 2, 2, columns), np.uint32)
            planes = self._scratch("planes", (2, 2, 2, parts, rows, columns), np.uint32)
            temp = self._scratch("temp", (2, 2, parts, rows, columns), np.uint32)
            if interleave:
                words = self._scratch("words", (rows, columns, 2, 2, 2, parts), np.uint32)
                target = words.transpose(2, 3, 4, 5, 0, 1)
            else:
                words = self._scratch("words", (parts, rows, columns, 2, 2, 2), np.uint32)
                target = words.transpose(3, 4, 5, 0, 1, 2)
            for part, projection in enumerate(projections):
                # first as it lies: fetching every eighth row from memory is slow
                np.copyto(raw.reshape(-1, columns), projection.weight[start * 8 : stop * 8])
                np.copyto(planes[:, :, :, part], raw.transpose(1, 2, 3, 0, 4))
            # Name the bits of k in its eight rows k2 k1 k0, those of a column in its word j2 j1 j0. The nibbles of a
            # word are ordered by j0 j2 j1 and wanted by k0 k2 k1: three exchanges of a k bit with a j bit.
            _exchange(planes[0], planes[1], 8, 0x00FF00FF, temp, (planes[0], planes[1]))
            low, high = planes[:, 0], planes[:, 1]
            _exchange(low, high, 4, 0x0F0F0F0F, temp, (low, high))
            _exchange(planes[:, :, 0], planes[:, :, 1], 16, 0xFFFF, temp, (target[:, :, 0], target[:, :, 1]))
            if interleave:
                _place_tiles(outs, words.reshape(rows, -1).view("V128"), start)
            else:
                for part in range(parts):
                    _place_halves(outs, words.reshape(parts, rows, -1)[part].view("V64"), start, part, parts)

    def _nvfp4_weights(self, projections: Sequence[Projection], interleave: bool, outs: Sequence[Array]) -> None:
        """Projection by projection; the transpose from `[N, K/8]` is made by the copy to its place."""
        columns, rows = projections[0].weight.shape[0], projections[0].weight.shape[1] // 4
        words = self._scratch("words", (columns, rows), np.uint32)
        for part, projection in enumerate(projections):
            source = _rows(projection.weight).view(np.uint32)
            for start, stop in _ranges(columns, 4 * rows):
                temp = self._scratch("temp", (stop - start, rows), np.uint32)
                _exchange_inside(source[start:stop], 4, 0x00F000F0, temp, words[start:stop])  # to 0 2 1 3 4 6 5 7
                _exchange_inside(words[start:stop], 8, 0x0000FF00, temp, words[start:stop])  # to 0 2 4 6 1 3 5 7
            halves = words.reshape(-1, 16, rows).transpose(2, 0, 1)
            if interleave:
                _place_tiles(outs, halves, 0, part)
            else:
                _place_halves(outs, halves, 0, part, len(projections))

    # Both kinds of scales: of the uncut projections, [projections, G, N, ...], or [1, G, 2*N, ...] if interleaved.

    def _awq_scales(self, projections: Sequence[Projection], interleave: bool, layout: str) -> Array:
        groups, columns = projections[0].scales.shape
        shape = (1, groups, 2 * columns) if interleave else (len(projections), groups, columns)
        keys = self._scratch("keys", shape, np.uint32)  # zero << 16 | scale bits
        for part, projection in enumerate(projections):
            target = _columns_of(keys, part, interleave)
            np.copyto(target, projection.scales)
            zero_bytes = keys.view(np.uint8).reshape(*shape, 4)[..., 2]
            zero_bytes = _columns_of(zero_bytes, part, interleave).reshape(groups, columns // 8, 2, 2, 2)
            zeros = np.asarray(projection.zeros, np.uint32)
            nibbles = self._scratch("temp", (2, groups, columns // 8), np.uint32)
            np.bitwise_and(zeros, 0x0F0F0F0F, out=nibbles[0])
            np.right_shift(zeros, 4, out=nibbles[1])
            np.bitwise_and(nibbles[1], 0x0F0F0F0F, out=nibbles[1])
            bytes_of = nibbles.view(np.uint8).reshape(2, groups, columns // 8, 2, 2)
            for j2, j1, j0 in np.ndindex(2, 2, 2):  # nibble j0 j2 j1 of a word
                np.copyto(zero_bytes[..., j2, j1, j0], bytes_of[j1, ..., j0, j2])
        if layout == "awq-half2":
            index, records = self._scratch("index", shape, np.intp), self._scratch("records", shape, np.uint32)
            np.copyto(index, keys)
            return np.take(half2_table(), index, out=records, mode="clip")
        key_bytes = keys.view(np.uint8).reshape(*shape[:2], -1, 8)  # of two neighbours
        kept = (0, 1, 2, 4, 5, 6) if layout == "awq-compact" else (0, 1, 4, 5, 2)
        records = self._scratch("records", (*key_bytes.shape[:3], len(kept)), np.uint8)
        for byte, key_byte in enumerate(kept):
            np.copyto(records[..., byte], key_bytes[..., key_byte])
        if layout == "awq-int4zero":
            np.left_shift(key_bytes[..., 6], 4, out=key_bytes[..., 6])
            np.bitwise_or(records[..., 4], key_bytes[..., 6], out=records[..., 4])
        return records

    def _nvfp4_scales(self, projections: Sequence[Projection], interleave: bool, tables: Sequence[Array]) -> Array:
        """A table is [256], by code, or [512] if it differs for the upper half of each 32 columns."""
        columns, groups = projections[0].scales.shape
        dtype, parts = tables[0].dtype, len(projections)
        scales = self._scratch("records", (groups, columns, 2) if interleave else (parts, groups, columns), dtype)
        for part, (projection, table) in enumerate(zip(projections, tables, strict=True)):
            codes = self._scratch("raw", (columns, groups), np.uint8)
            np.copyto(codes, projection.scales)
            for start, stop in _ranges(groups, 8 * columns):
                index = self._scratch("index", (stop - start, columns), np.intp)
                np.copyto(index, codes[:, start:stop].T)
                if table.size == 512:
                    index.reshape(-1, 2, 16)[:, 1] += 256
                if interleave:
                    values = self._scratch("temp", index.shape, dtype)
                    np.copyto(scales[start:stop, :, part], np.take(table, index, out=values, mode="clip"))
                else:
                    np.take(table, index, out=scales[part, start:stop], mode="clip")
        return scales.reshape(1, groups, -1) if interleave else scales


def _ranges(count: int, bytes_each: int) -> Iterator[tuple[int, int]]:
    """Equal ranges of not much more than _BLOCK_BYTES."""
    pieces = min(count, max(1, round(count * bytes_each / _BLOCK_BYTES)))
    for piece in range(pieces):
        yield piece * count // pieces, (piece + 1) * count // pieces


def _columns_of(joined: Array, part: int, interleave: bool) -> Array:
    """Where a projection's columns lie among the joined: every second one or a block of its own."""
    return joined[0, :, part::2] if interleave else joined[part]


def _cut_scales(scales: Array, outs: Sequence[Array]) -> None:
    """Give each rank its columns of w13 (its groups of w2: those already lie in rank order)."""
    parts, groups = scales.shape[:2]
    for out in outs:
        ranks = out.shape[0] if out.shape[1] == groups else 1
        target = _flat(out, scales.dtype).reshape(ranks, groups, parts, -1)
        np.copyto(target, scales.reshape(parts, groups, ranks, -1).transpose(2, 1, 0, 3))


def _place_tiles(outs: Sequence[Array], block: Array, start: int, part: int | None = None) -> None:
    """Rows k//8 from `start` of an interleaved w13: [rows, I/16] whole tiles or, of one part, [rows, I/16, 16].

    The tiles of all ranks follow one another, so they do not depend on the TP size.
    """
    for out in outs:
        tiles = _flat(out, block.dtype).reshape(block.shape[1], out.shape[1] // 8, *block.shape[2:], -1)
        np.copyto(tiles[:, start : start + len(block), ..., part or 0], block.swapaxes(0, 1))


def _place_halves(outs: Sequence[Array], block: Array, start: int, part: int, parts: int) -> None:
    """Rows k//8 from `start` of gate and up side by side (2 parts, ranks own columns) or of down (ranks own rows).

    block is [rows, N/16, ...], in half tiles: where I_l is no multiple of 32, gate ends and up begins inside a tile.
    """
    for out in outs:
        ranks, rows_of_rank = out.shape[0], out.shape[1] // 8
        halves = block.shape[1] if parts == 1 else block.shape[1] // ranks  # of one rank and part
        target = _flat(out, block.dtype).reshape(ranks, -1, rows_of_rank, 2, *block.shape[2:])
        for odd in (0, 1):
            first = part * halves + odd
            tiles = target[:, first // 2 : first // 2 + (halves - odd + 1) // 2, :, first % 2]
            if parts == 2:
                source = block.reshape(len(block), ranks, halves, *block.shape[2:])[:, :, odd::2]
                np.copyto(tiles[:, :, start : start + len(block)], np.moveaxis(source, 0, 2))
                continue
            source = block[:, odd::2].swapaxes(0, 1)
            for rank in range(start // rows_of_rank, (start + len(block) - 1) // rows_of_rank + 1):
                low = max(start, rank * rows_of_rank)
                high = min(start + len(block), (rank + 1) * rows_of_rank)
                rows = slice(low - rank * rows_of_rank, high - rank * rows_of_rank)
                np.copyto(tiles[rank, :, rows], source[:, low - start : high - start])
