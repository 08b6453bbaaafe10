"""The C++ path: what numpy_sm70 does, many times faster, where the library was built with the package."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sm70_kernels.scale_tables import raw_code_tables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from sm70_kernels.spec import Projection

    Array = NDArray[Any]
    Outs = Sequence[Mapping[str, NDArray[Any]]]

LIBRARY = Path(__file__).with_name("libsm70_cpu.so")
_ABI = 1
_MAX_SIZES = 32
_LAYOUTS = ("awq-half2", "awq-compact", "awq-int4zero", "nvfp4-fp16", "nvfp4-raw")  # numbered as in sm70_cpu.cpp


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The library of this version, or None."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        if library.sm70_cpu_abi() != _ABI:
            return None
    except (OSError, AttributeError):
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    target = [
        ctypes.c_int,
        integer,
        integer,
        integer,
        pointer,
        pointer,
    ]  # vectors, parts, interleave, sizes, ranks, data
    for name, arguments in (
        ("awq_weights", [pointer, integer, integer]),
        ("nvfp4_weights", [pointer, integer, integer]),
        ("awq_scales", [pointer, pointer, integer, integer, integer]),
        ("nvfp4_scales", [pointer, pointer, integer, integer]),
        ("nvfp4_codes", [pointer, pointer, integer, integer]),
    ):
        function = getattr(library, f"sm70_{name}")
        function.argtypes, function.restype = target + arguments, None
    return library


def available() -> bool:
    """Whether the library was built here, and loads."""
    return _library() is not None


class CppKernel:
    """Prepares experts one by one, as NumpyKernel does, to the same bits. Several threads may share one.

    vectors: whether to use AVX2 and F16C; by default, if this CPU has them. Raises RuntimeError without the library.
    """

    def __init__(self, *, vectors: bool | None = None) -> None:
        library = _library()
        if library is None:
            raise RuntimeError("the C++ kernel is not built")
        self._library = library
        self.vectors = bool(library.sm70_cpu_has_avx2()) if vectors is None else vectors

    def prepare(
        self, gate: Projection, up: Projection, down: Projection, *, layout: str, interleave: bool, outs: Outs
    ) -> None:
        """Fill the bank tensors of one expert, for each TP size of `outs`: see NumpyKernel.prepare.

        Raises RawScaleError, before anything is written, if nvfp4-raw cannot hold the scales exactly, and ValueError
        for a layout that is none and for an array whose shape does not belong to the others.
        """
        if layout not in _LAYOUTS:
            raise ValueError(f"layout {layout!r} is none of {', '.join(_LAYOUTS)}")
        if not 0 < len(outs) <= _MAX_SIZES:
            raise ValueError(f"{len(outs)} TP sizes in one call: 1 to {_MAX_SIZES} are possible")
        tables = []
        if layout == "nvfp4-raw":
            widths = [out["w13_raw_scale_codes"].shape[-1] for out in outs]
            tables = raw_code_tables(gate, up, down, interleave=interleave, widths=widths)
            for out in outs:
                out["w13_raw_global_scales"][:] = gate.global_scale, up.global_scale
                out["w2_raw_global_scales"][:] = down.global_scale
        self._matrix("w13", (gate, up), layout, interleave, outs, tables[:2])
        self._matrix("w2", (down,), layout, False, outs, tables[2:])

    def _matrix(
        self,
        name: str,
        projections: Sequence[Projection],
        layout: str,
        interleave: bool,
        outs: Outs,
        tables: Sequence[Array],
    ) -> None:
        parts, awq = len(projections), layout.startswith("awq")
        weight, scales = projections[0].weight.shape, projections[0].scales.shape
        k, n = (weight[0], weight[1] * 8) if awq else (weight[1] * 2, weight[0])
        groups = scales[0] if awq else scales[1]
        ranks = [len(out[f"{name}_tm_weight"]) for out in outs]
        _check_cut(name, k, n, groups, parts, ranks)
        sizes = (ctypes.c_int64 * len(ranks))(*ranks)

        def run(function: str, tensor: str, nbytes: int, *arguments: Any) -> None:
            data = _pointers([out[f"{name}_{tensor}"] for out in outs], parts * nbytes)
            call = getattr(self._library, f"sm70_{function}")
            call(self.vectors, parts, interleave, len(ranks), sizes, data, *arguments)

        weights = [np.ascontiguousarray(p.weight) for p in projections]
        codes = [np.ascontiguousarray(p.scales) for p in projections]
        weight_data, code_data = _pointers(weights, k * n // 2), _pointers(codes, groups * n * (2 if awq else 1))
        if awq:
            zeros = [np.ascontiguousarray(p.zeros) for p in projections]
            record = {"awq-half2": 8, "awq-compact": 6, "awq-int4zero": 5}[layout]  # bytes of two columns
            run("awq_weights", "tm_weight", k * n // 2, weight_data, k, n)
            zero_data = _pointers(zeros, groups * n // 2)
            size = groups * n // 2 * record
            run("awq_scales", "tm_scales", size, code_data, zero_data, groups, n, _LAYOUTS.index(layout))
            return
        run("nvfp4_weights", "tm_weight", k * n // 2, weight_data, k, n)
        if tables:
            both = [np.resize(table, 512) for table in tables]  # one of 256 codes holds for either half
            run("nvfp4_codes", "raw_scale_codes", groups * n, code_data, _pointers(both, 512), groups, n)
        else:
            factors = (ctypes.c_float * parts)(*(float(np.float32(p.global_scale)) for p in projections))
            run("nvfp4_scales", "tm_scales", groups * n * 2, code_data, factors, groups, n)


def _check_cut(name: str, k: int, n: int, groups: int, parts: int, ranks: Sequence[int]) -> None:
    """The library trusts its arguments: half tiles of 16 columns and units of eight k that no rank splits."""
    columns, rows = (ranks, [1]) if parts == 2 else ([1], ranks)
    if any(n % (16 * t) for t in columns) or parts * n % 32 or any(k % (8 * t) or groups % t for t in rows):
        raise ValueError(
            f"{name}: K={k}, N={n} in {groups} groups cannot be cut for TP sizes {', '.join(map(str, ranks))}"
        )


def _pointers(arrays: Sequence[Array], nbytes: int) -> Any:
    for array in arrays:
        if array.nbytes != nbytes or not array.flags.c_contiguous:
            raise ValueError(f"expected {nbytes} contiguous bytes, got {array.nbytes} of shape {array.shape}")
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
