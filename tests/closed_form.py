"""Where every source bit stands in the banks, and what becomes of a scale: the closed form as address arithmetic.

Independent of every kernel: one formula from a source byte to a logical (k, n), one from there to a bank's byte. Addresses are
of arrays [T, ...] of all ranks of a TP size, in bytes. All formulas take numbers or arrays of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sm70_convert.formats import source_format

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm70_kernels.spec import Projection

Array = np.ndarray[Any, Any]
PROJECTIONS = ("gate", "up", "down")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_AWQ_NIBBLE = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # column 8c + j is this nibble of word c
_BANK_NIBBLE = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])  # by k % 8: nibble i holds k = (0,2,4,6,1,3,5,7)[i]
_RAW = {"I32": np.uint32, "F32": np.float32, "F16": np.uint16, "BF16": np.uint16, "U8": np.uint8, "F8_E4M3": np.uint8}


def fp16_bits(value: Any) -> Any:
    """fp16 bits of fp32 values, rounded once; every NaN is 0x7fff."""
    with np.errstate(over="ignore"):
        half = np.asarray(value, np.float32).astype(np.float16)
    return np.where(np.isnan(half), np.uint16(0x7FFF), half.view(np.uint16))


def fp16(bits: Any) -> Any:
    return np.asarray(bits, np.uint16).view(np.float16).astype(np.float32)


def e4m3(code: Any) -> Any:
    """The value of e4m3 codes, by the definition of the format."""
    code = np.asarray(code, np.int64)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    value = np.where(code & 0x7F == 0x7F, np.nan, value)
    return np.where(code & 0x80, -value, value).astype(np.float32)


def e4m3_nearest(values: Any) -> Any:
    """The positive e4m3 code nearest to each value, the even one of two."""
    codes = np.r_[0:0x7F:2, 1:0x7F:2]  # of equals argmin takes the first
    distance = np.abs(np.asarray(values, np.float64)[..., None] - e4m3(codes).astype(np.float64))
    return codes[np.argmin(distance, axis=-1)]


class Kind(NamedTuple):
    """A source format: its dtype of scales tells the two AWQs apart."""

    format: str
    scales: str


AWQ, AWQ_BF16, NVFP4 = Kind("awq", "F16"), Kind("awq", "BF16"), Kind("nvfp4", "F8_E4M3")


@dataclass(frozen=True)
class Source:
    """One expert as bytes, by (projection, part). group: in-features that share a scale."""

    kind: Kind
    hidden: int
    intermediate: int
    group: int
    tensors: Mapping[tuple[str, str], Array]

    def sizes(self, projection: str) -> tuple[int, int]:
        """K and N."""
        return (self.intermediate, self.hidden) if projection == "down" else (self.hidden, self.intermediate)

    def grid(self, projection: str, part: str) -> tuple[Array, Array]:
        """Every (k, n) that a part has a value for: each k, or the first of each group."""
        k, n = self.sizes(projection)
        step = 1 if part in ("qweight", "weight") else self.group
        rows, columns = np.meshgrid(np.arange(0, k, step), np.arange(n), indexing="ij")
        return rows, columns

    def place(self, projection: str, part: str, k: Array, n: Array) -> tuple[Array, Array]:
        """The byte, and the shift in it, that a value starts at."""
        in_, out = self.sizes(projection)
        row = k if part in ("qweight", "weight") else k // self.group
        if part in ("qweight", "qzeros"):
            nibble = _AWQ_NIBBLE[n % 8]
            return 4 * (row * (out // 8) + n // 8) + nibble // 2, 4 * (nibble % 2)
        if part == "scales":
            return 2 * (row * out + n), 0 * n
        if part == "weight":
            return n * (in_ // 2) + row // 2, 4 * (row % 2)
        if part == "weight_scale":
            return n * (in_ // self.group) + row, 0 * n
        return 0 * n, 0 * n  # weight_scale_2 is of every column and group

    def touched(self, projection: str, part: str, byte: int) -> list[tuple[int, int]]:
        """The (k, n) of all values that a byte is part of."""
        k, n = self.grid(projection, part)
        width = {"scales": 2, "weight_scale_2": 4}.get(part, 1)
        first, _ = self.place(projection, part, k, n)
        hit = (first <= byte) & (byte < first + width)
        return list(zip(k[hit].tolist(), n[hit].tolist(), strict=True))

    def nibbles(self, projection: str, part: str, k: Any, n: Any) -> Any:
        byte, shift = self.place(projection, part, k, n)
        return self.tensors[projection, part][byte] >> shift & 15

    def scale(self, projection: str, k: Any, n: Any) -> Any:
        """fp16 bits of the scale of (k, n), global included."""
        if self.kind.format == "awq":
            byte, _ = self.place(projection, "scales", k, n)
            words = self.tensors[projection, "scales"].view(np.uint16)[byte // 2]
            if self.kind.scales == "F16":
                return words
            return fp16_bits((np.asarray(words, np.uint32) << np.uint32(16)).view(np.float32))
        byte, _ = self.place(projection, "weight_scale", k, n)
        with np.errstate(over="ignore", invalid="ignore"):
            return fp16_bits(e4m3(self.tensors[projection, "weight_scale"][byte]) * self.global_scale(projection))

    def global_scale(self, projection: str) -> np.float32:
        return np.float32(self.tensors[projection, "weight_scale_2"].view(np.float32)[0])

    def dequantised(self, projection: str) -> Array:
        """fp32 [K, N], with scales rounded to fp16: AWQ (q - z) * s, NVFP4 e2m1 * s."""
        k, n = self.grid(projection, "weight")
        scale = fp16(self.scale(projection, k, n))
        if self.kind.format == "nvfp4":
            return np.asarray(E2M1[self.nibbles(projection, "weight", k, n)] * scale)
        q, z = (self.nibbles(projection, part, k, n).astype(np.float32) for part in ("qweight", "qzeros"))
        return np.asarray((q - z) * scale)

    def projections(self, group: int | None = None) -> list[Projection]:
        """gate, up and down as the tool hands them to a kernel; with every AWQ group split to `group`."""
        result = []
        for projection in PROJECTIONS:
            k, n = self.sizes(projection)
            arrays, dtypes = {}, {}
            for part, (dtype, shape) in parts(self.kind, k, n, self.group).items():
                arrays[part], dtypes[part] = self.tensors[projection, part].view(_RAW[dtype]).reshape(shape), dtype
            made = source_format(self.kind.format).projection(arrays, dtypes)
            if group is not None:
                times = self.group // group
                made = made._replace(scales=np.repeat(made.scales, times, 0), zeros=np.repeat(made.zeros, times, 0))
            result.append(made)
        return result

    def changed(self, projection: str, part: str, byte: int, value: int) -> Source:
        """A copy with one other byte."""
        data = self.tensors[projection, part].copy()
        data[byte] = value
        return Source(self.kind, self.hidden, self.intermediate, self.group, {**self.tensors, (projection, part): data})


def parts(kind: Kind, k: int, n: int, group: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor of a projection."""
    if kind.format == "awq":
        packed = {"qweight": ("I32", (k, n // 8)), "qzeros": ("I32", (k // group, n // 8))}
        return {**packed, "scales": (kind.scales, (k // group, n))}
    scales = {"weight_scale": ("F8_E4M3", (n, k // group)), "weight_scale_2": ("F32", (1,))}
    return {"weight": ("U8", (n, k // 2)), **scales}


def random_source(
    rng: np.random.Generator, kind: Kind, hidden: int, intermediate: int, group: int, *, doubled: bool = False
) -> Source:
    """Random words; scales whose products are ordinary positive fp16 numbers.

    doubled: up's global scale is twice gate's, a difference that an interleaved raw bank can hold; else all are random.
    """
    tensors: dict[tuple[str, str], Array] = {}
    # Of few bits, so that every product is exact in fp16, and the raw layout can hold it.
    factors = dict(zip(PROJECTIONS, rng.integers(17, 64, 3).tolist(), strict=True))
    if doubled:
        factors["gate"], factors["up"] = factors["gate"] // 2, factors["gate"] // 2 * 2
    for projection in PROJECTIONS:
        k, n = (intermediate, hidden) if projection == "down" else (hidden, intermediate)
        for part, (dtype, shape) in parts(kind, k, n, group).items():
            count = int(np.prod(shape))
            if part == "scales":
                values = rng.uniform(0.001, 0.02, count).astype(np.float32)
                words = values.astype(np.float16).view(np.uint16) if dtype == "F16" else values.view(np.uint32) >> 16
                data = words.astype(np.uint16).view(np.uint8)
            elif part == "weight_scale":
                data = rng.integers(0x30, 0x76, count, np.uint8)
            elif part == "weight_scale_2":
                data = np.array([factors[projection] * 2.0**-17], np.float32).view(np.uint8)
            else:
                data = rng.integers(0, 256, count * (1 if dtype == "U8" else 4), np.uint8)
            tensors[projection, part] = data
    return Source(kind, hidden, intermediate, group, tensors)


@dataclass(frozen=True)
class Form:
    """The banks of one TP size. group: in-features that share a scale in the bank."""

    layout: str
    interleave: bool
    hidden: int
    intermediate: int
    group: int
    tp_size: int

    @property
    def local(self) -> int:
        return self.intermediate // self.tp_size

    def matrix(self, projection: str) -> tuple[str, int, int]:
        """Its name, and K and N of one rank."""
        return ("w2", self.local, self.hidden) if projection == "down" else ("w13", self.hidden, 2 * self.local)

    def cell(self, projection: str, k: Any, n: Any) -> tuple[Any, Any, Any]:
        """The rank that a logical (k, n) goes to, and its row and column there."""
        if projection == "down":
            return k // self.local, k % self.local, n
        up, j = int(projection == "up"), n % self.local
        return n // self.local, k, 2 * j + up if self.interleave else j + up * self.local

    def weight(self, projection: str, k: Any, n: Any) -> tuple[str, Any, Any]:
        """The tensor, the byte and the shift of a weight's nibble."""
        name, rows, columns = self.matrix(projection)
        rank, row, column = self.cell(projection, k, n)
        word = (column // 32 * (rows // 8) + row // 8) * 32 + column % 32
        nibble = _BANK_NIBBLE[row % 8]
        return f"{name}_tm_weight", rank * (rows * columns // 2) + 4 * word + nibble // 2, 4 * (nibble % 2)

    def entry(self, projection: str, k: Any, n: Any) -> tuple[str, Any]:
        """The tensor, and the number in [T, G, N] of the scale of (k, n)."""
        name, rows, columns = self.matrix(projection)
        rank, row, column = self.cell(projection, k, n)
        number = (rank * (rows // self.group) + row // self.group) * columns + column
        return f"{name}_raw_scale_codes" if self.layout == "nvfp4-raw" else f"{name}_tm_scales", number

    def global_scale(self, source: Source, projection: str, n: Any) -> Any:
        """The global that the runtime applies to a column of a raw bank: interleaved, it goes by tiles of 32."""
        if projection == "down":
            return source.global_scale("down") + 0 * np.asarray(n, np.float32)
        _, _, column = self.cell(projection, 0, n)
        up = column // 32 % 2 if self.interleave else column // self.local
        return np.where(up, source.global_scale("up"), source.global_scale("gate"))

    def put_scale(self, banks: dict[str, Array], source: Source, projection: str, k: int, n: int) -> None:
        """Writes what becomes of the source scale that starts at (k, n): once for each of the bank's groups in it."""
        for row in range(k, k + source.group, self.group):
            tensor, number = self.entry(projection, row, n)
            data, bits = banks[tensor], source.scale(projection, k, n)
            if self.layout == "nvfp4-fp16":
                data[2 * number : 2 * number + 2] = [bits & 255, bits >> 8]
                continue
            if self.layout == "nvfp4-raw":
                data[number] = e4m3_nearest(fp16(bits) / self.global_scale(source, projection, n))
                continue
            zero = int(source.nibbles(projection, "qzeros", k, n))
            pair = [int(bits) & 255, int(bits) >> 8]
            if self.layout == "awq-half2":
                with np.errstate(over="ignore", invalid="ignore"):
                    high = int(fp16_bits(np.float32(-float(zero)) * fp16(bits)))
                data[4 * number : 4 * number + 4] = [*pair, high & 255, high >> 8]
            elif self.layout == "awq-compact":
                data[3 * number : 3 * number + 3] = [*pair, zero]
            else:
                start, odd = number // 2 * 5, number % 2
                data[start + 2 * odd : start + 2 * odd + 2] = pair
                data[start + 4] = data[start + 4] & (0x0F if odd else 0xF0) | zero << 4 * odd

    def after(
        self, banks: Mapping[str, Array], source: Source, projection: str, part: str, byte: int
    ) -> dict[str, Array]:
        """The bytes of all banks, where `byte` of `source` has changed since `banks` were made: nothing else is touched."""
        made = {tensor: data.copy() for tensor, data in banks.items()}
        for k, n in source.touched(projection, part, byte):
            if part in ("qweight", "weight"):
                tensor, place, shift = self.weight(projection, k, n)
                value = int(source.nibbles(projection, part, k, n))
                made[tensor][place] = made[tensor][place] & (0xF0 >> shift) | value << shift
            else:
                self.put_scale(made, source, projection, k, n)
        if part == "weight_scale_2" and self.layout == "nvfp4-raw":
            wanted = [source.global_scale(p) for p in (("down",) if projection == "down" else ("gate", "up"))]
            tensor = f"{self.matrix(projection)[0]}_raw_global_scales"
            made[tensor] = np.tile(np.array(wanted, np.float32), self.tp_size).view(np.uint8)
            other = {"gate": "up", "up": "gate"}.get(projection)
            if other and self.interleave:  # whose columns share the tiles that this global is for
                for k, n in source.touched(other, "weight_scale_2", 0):
                    self.put_scale(made, source, other, k, n)
        return made

    def dequantised(self, banks: Mapping[str, Array], source: Source, projection: str) -> Array:
        """fp32 [K, N] joined from the banks of all ranks. `source` says the shape alone."""
        k, n = source.grid(projection, "weight")
        tensor, place, shift = self.weight(projection, k, n)
        q = banks[tensor][place] >> shift & 15
        tensor, number = self.entry(projection, k, n)
        data = banks[tensor]
        if self.layout == "nvfp4-fp16":
            return np.asarray(E2M1[q] * fp16(data.view(np.uint16)[number]))
        if self.layout == "nvfp4-raw":
            globals_ = banks[tensor.replace("scale_codes", "global_scales")].view(np.float32)
            _, _, column = self.cell(projection, k, n)
            up = 0 * column if projection == "down" else column // 32 % 2 if self.interleave else column // self.local
            return np.asarray(E2M1[q] * fp16(fp16_bits(e4m3(data[number]) * globals_[up])))
        if self.layout == "awq-half2":
            scale, high = fp16(data.view(np.uint16)[2 * number]), fp16(data.view(np.uint16)[2 * number + 1])
            zero = np.round(-high / scale)
        elif self.layout == "awq-compact":
            scale, zero = fp16(data[3 * number] | data[3 * number + 1].astype(np.uint16) << 8), data[3 * number + 2]
        else:
            start, odd = number // 2 * 5, number % 2
            scale = fp16(data[start + 2 * odd] | data[start + 2 * odd + 1].astype(np.uint16) << 8)
            zero = data[start + 4] >> 4 * odd & 15
        return np.asarray((q.astype(np.float32) - zero.astype(np.float32)) * scale)
