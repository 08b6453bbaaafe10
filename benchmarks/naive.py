"""The way a runtime prepares banks at load time, for comparison: unpack to 8 and 16 bits, permute, pack, stack.

    python benchmarks/naive.py MODEL OUT --tp-size 4 --layers 1

Gives the right bytes (AWQ: `awq-half2`, gate and up interleaved; NVFP4: `nvfp4-fp16`, plain), but slowly, one
or two bytes a weight, and with a whole layer in memory. Word `((n//32)*(K//8) + k//8)*32 + n%32` of a packed matrix
holds column n, and its nibble i is `k = 8*(k//8) + (0,2,4,6,1,3,5,7)[i]`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Parts = Mapping[str, NDArray[Any]]

NAME = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.(\w+)")
DTYPES = {"F32": np.float32, "I32": np.uint32, "F16": np.float16, "F8_E4M3": np.uint8, "U8": np.uint8}
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
TILE_ROWS = [0, 2, 4, 6, 1, 3, 5, 7]


class Matrix(NamedTuple):
    """One unpacked projection: 4-bit codes uint8 [K, N] and what stands in `tm_scales`, [G, N]."""

    codes: NDArray[np.uint8]
    scales: NDArray[Any]


def naive_convert(model: Path, out: Path, tp_size: int, layers: int | None = None) -> None:
    """Writes `out/tp{T}/rank{r}/layer-{L}.safetensors` for the first `layers` MoE layers (None: all)."""
    sources = _expert_tensors(model)
    for layer in sorted(sources)[:layers]:
        banks: list[dict[str, list[NDArray[Any]]]] = [defaultdict(list) for _ in range(tp_size)]
        for _, projections in sorted(sources[layer].items()):
            read = {name: {part: _read(*where) for part, where in parts.items()} for name, parts in projections.items()}
            gate, up, down = (unpack(read[name]) for name in ("gate", "up", "down"))
            interleave = "qweight" in read["gate"]
            for rank, bank in enumerate(banks):
                columns = zip(_columns(gate, rank, tp_size), _columns(up, rank, tp_size), strict=True)
                w13 = Matrix(*(_join(a, b, interleave) for a, b in columns))
                w2 = Matrix(*(np.array_split(array, tp_size, axis=0)[rank] for array in down))
                for name, matrix in (("w13", w13), ("w2", w2)):
                    bank[f"{name}_tm_weight"].append(pack(matrix.codes).view(np.int32))
                    bank[f"{name}_tm_scales"].append(matrix.scales)
        for rank, bank in enumerate(banks):
            folder = out / f"tp{tp_size}" / f"rank{rank}"
            folder.mkdir(parents=True, exist_ok=True)
            # np.stack keeps a transposed order, and save_file then writes the bytes in that order.
            stacked = {name: np.ascontiguousarray(np.stack(arrays)) for name, arrays in bank.items()}
            save_file(stacked, folder / f"layer-{layer:05d}.safetensors")


def unpack(parts: Parts) -> Matrix:
    """One projection as stored -> codes [K, N] and bank scales [G, N] (AWQ int32, NVFP4 float16)."""
    if "qweight" in parts:
        zeros = -_unpack_awq(parts["qzeros"]).astype(np.float16)
        low = parts["scales"].view(np.uint16).astype(np.uint32)
        high = _fp16_bits(zeros.astype(np.float32) * parts["scales"].astype(np.float32)).astype(np.uint32)
        return Matrix(_unpack_awq(parts["qweight"]), (high << 16 | low).view(np.int32))
    weight = parts["weight"]
    codes = np.empty((weight.shape[0], 2 * weight.shape[1]), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = weight & 15, weight >> 4
    scales = _e4m3_values()[parts["weight_scale"]] * parts["weight_scale_2"]
    return Matrix(codes.T, _fp16_bits(scales).view(np.float16).T)


def pack(codes: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Codes [K, N] -> tile order, uint32 [K, N/8]: widened to 16 bits, permuted, packed, each a pass of its own."""
    k, n = codes.shape
    wide = codes.astype(np.uint16).reshape(k // 8, 8, n // 32, 32)
    tiles = np.ascontiguousarray(wide.transpose(2, 0, 3, 1)[..., TILE_ROWS])
    words = np.zeros(tiles.shape[:-1], np.uint32)
    for nibble in range(8):
        words |= tiles[..., nibble].astype(np.uint32) << np.uint32(4 * nibble)
    return words.reshape(k, n // 8)


def _unpack_awq(words: NDArray[np.uint32]) -> NDArray[np.uint8]:
    codes = np.empty((words.shape[0], 8 * words.shape[1]), np.uint8)
    for column, nibble in enumerate(AWQ_NIBBLES):
        codes[:, column::8] = words >> np.uint32(4 * nibble) & np.uint32(15)
    return codes


def _columns(matrix: Matrix, rank: int, tp_size: int) -> list[NDArray[Any]]:
    return [np.array_split(array, tp_size, axis=1)[rank] for array in matrix]


def _join(gate: NDArray[Any], up: NDArray[Any], interleave: bool) -> NDArray[Any]:
    if interleave:
        return np.stack([gate, up], axis=-1).reshape(gate.shape[0], -1)
    return np.concatenate([gate, up], axis=1)


def _fp16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    with np.errstate(over="ignore"):
        bits = values.astype(np.float16).view(np.uint16)
    bits[np.isnan(values)] = 0x7FFF
    return bits


def _e4m3_values() -> NDArray[np.float32]:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    value[code & 127 == 127] = np.nan
    return (np.where(code > 127, -1.0, 1.0) * value).astype(np.float32)


Where = tuple[Path, int, str, tuple[int, ...]]


def _expert_tensors(model: Path) -> dict[int, dict[int, dict[str, dict[str, Where]]]]:
    """layer -> expert -> projection -> part -> where it lies; `input_scale` left out."""
    found: Any = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        for name, entry in header.items():
            match = NAME.fullmatch(name)
            if match and match[4] != "input_scale":
                where = (path, 8 + size + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))
                found[int(match[1])][int(match[2])][match[3]][match[4]] = where
    return found  # type: ignore[no-any-return]


def _read(path: Path, offset: int, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    count = int(np.prod(shape))
    return np.fromfile(path, dtype=DTYPES[dtype], count=count, offset=offset).reshape(shape)


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert as a runtime does at load time.")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tp-size", type=int, default=1, metavar="N")
    parser.add_argument("--layers", type=int, metavar="N", help="only the first N MoE layers")
    options = parser.parse_args()
    naive_convert(options.model, options.out, options.tp_size, options.layers)


if __name__ == "__main__":
    main()
