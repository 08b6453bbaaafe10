"""Speed of the kernels that prepare one expert: GB of source per CPU second, one thread.

    python benchmarks/kernels.py --check

Each case is five pairs of a memcpy and the kernel, close in time, since a shared machine's speed drifts; shown are the
medians, and the median of the pairs' ratios. memcpy is np.copyto between two buffers of 32 MB, touched before. Shapes as in
real checkpoints: A is hidden 2048, intermediate 768; B is hidden 2560, intermediate 160, which no AWQ group but 32 divides
(at TP 4 a group of 128 does not divide A's 192 either). Four experts in turn, so that the source does not come from the
cache. naive is how a runtime prepares at load time (naive.py), per expert, without the stacking. GB = 10^9 bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import naive
from sm70_kernels import cpu
from sm70_kernels.cpu import CppKernel
from sm70_kernels.numpy_sm70 import NumpyKernel
from sm70_kernels.spec import Projection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Array = np.ndarray[Any, Any]
SHAPES = {"A": (2048, 768, (1, 4)), "B": (2560, 160, (1,))}
AWQ, NVFP4 = ("awq-half2", "awq-compact", "awq-int4zero"), ("nvfp4-fp16", "nvfp4-raw")
CASES = [("A", 64, AWQ), ("A", 128, AWQ), ("B", 32, AWQ), ("A", 16, NVFP4), ("B", 16, NVFP4)]
EXPERTS, PAIRS = 4, 5
# Of memcpy: what a runtime of today asks for, through the fastest kernel, and NVFP4 words without their scales.
WANTED = {"awq-half2": 0.30, "nvfp4-fp16": 0.25, "nvfp4 weights alone": 0.45}


def experts(rng: np.random.Generator, hidden: int, intermediate: int, group: int) -> list[list[Projection]]:
    """Random experts with scales as they occur."""
    sides = ((hidden, intermediate), (hidden, intermediate), (intermediate, hidden))

    def projection(k: int, n: int) -> Projection:
        if group == 16:
            codes = rng.integers(16, 127, (n, k // 16), dtype=np.uint8)
            nibbles = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
            return Projection(nibbles, codes, None, np.float32(0.01))
        weight, zeros = (rng.integers(0, 2**32, (r, n // 8), dtype=np.uint32) for r in (k, k // group))
        scales = rng.lognormal(-5, 0.5, (k // group, n)).astype(np.float16).view(np.uint16)
        return Projection(weight, scales, zeros, None)

    return [[projection(*side) for side in sides] for _ in range(EXPERTS)]


def banks(layout: str, hidden: int, intermediate: int, group: int, ranks: int) -> dict[str, Array]:
    """Bank tensors of one expert, touched."""
    out: dict[str, Array] = {}
    for name, k, n in (("w13", hidden, 2 * intermediate // ranks), ("w2", intermediate // ranks, hidden)):
        out[f"{name}_tm_weight"] = np.ones((ranks, k, n // 8), np.uint32)
        shape = (ranks, k // group, n)
        if layout == "nvfp4-raw":
            out[f"{name}_raw_scale_codes"] = np.ones(shape, np.uint8)
            out[f"{name}_raw_global_scales"] = np.ones((ranks, 2 if name == "w13" else 1), np.float32)
            continue
        scale_shape, dtype = {
            "awq-half2": (shape, np.uint32),
            "awq-compact": ((*shape, 3), np.uint8),
            "awq-int4zero": ((*shape[:2], n // 2, 5), np.uint8),
            "nvfp4-fp16": (shape, np.uint16),
        }[layout]
        out[f"{name}_tm_scales"] = np.ones(scale_shape, dtype)
    return out


def cpu_seconds(function: Callable[[], object], least: float) -> float:
    """Of one call, over a run of `least` seconds or more."""
    calls, start = 0, time.process_time()
    while (spent := time.process_time() - start) < least:
        function()
        calls += 1
    return spent / calls


class Clock:
    """Measures functions in pairs with a memcpy."""

    def __init__(self, least: float) -> None:
        self.least = least
        self.source, self.target = np.ones(1 << 25, np.uint8), np.ones(1 << 25, np.uint8)

    def measure(self, function: Callable[[], object], nbytes: int) -> dict[str, float]:
        function()
        rates, copies = [], []
        for _ in range(PAIRS):
            copies.append(
                self.source.nbytes / cpu_seconds(lambda: np.copyto(self.target, self.source), self.least) / 1e9
            )
            rates.append(nbytes / cpu_seconds(function, self.least) / 1e9)
        return {
            "gb_per_cpu_second": round(statistics.median(rates), 3),
            "memcpy_gb_per_cpu_second": round(statistics.median(copies), 3),
            "of_memcpy": round(statistics.median(r / c for r, c in zip(rates, copies, strict=True)), 4),
        }


def size(projections: list[Projection]) -> int:
    return sum(x.nbytes for p in projections for x in p[:3] if x is not None)


def naive_expert(projections: list[Projection], interleave: bool) -> None:
    def parts(p: Projection) -> dict[str, Any]:
        if p.zeros is None:
            return {"weight": p.weight, "weight_scale": p.scales, "weight_scale_2": p.global_scale}
        return {"qweight": p.weight, "scales": p.scales.view(np.float16), "qzeros": p.zeros}

    gate, up, down = (naive.unpack(parts(p)) for p in projections)
    w13 = naive.Matrix(*(naive._join(a, b, interleave) for a, b in zip(gate, up, strict=True)))
    for matrix in (w13, down):
        naive.pack(matrix.codes)
        np.ascontiguousarray(matrix.scales)


def weights_alone(layer: list[list[Projection]], out: dict[str, Array]) -> Callable[[], object]:
    """The library's NVFP4 words of w13 and w2, TP 1, not interleaved."""
    library = cpu._library()
    assert library is not None
    one = (ctypes.c_int64 * 1)(1)
    calls = []
    for expert in layer:
        for name, parts in (("w13", expert[:2]), ("w2", expert[2:])):
            n, half = parts[0].weight.shape
            data = cpu._pointers([out[f"{name}_tm_weight"]], out[f"{name}_tm_weight"].nbytes)
            source = cpu._pointers([p.weight for p in parts], n * half)
            calls.append((CppKernel().vectors, len(parts), 0, 1, one, data, source, 2 * half, n))
    return lambda: [library.sm70_nvfp4_weights(*call) for call in calls if out]  # which keeps `out` in memory


def kernels() -> dict[str, NumpyKernel | CppKernel]:
    made: dict[str, NumpyKernel | CppKernel] = {"numpy": NumpyKernel()}
    if cpu.available():
        made["cpp, plain"] = CppKernel(vectors=False)
        if CppKernel().vectors:
            made["cpp"] = CppKernel()
    return made


def measure(least: float) -> Iterator[dict[str, Any]]:
    """One row a case; `least` seconds for each of its ten samples."""
    rng, clock = np.random.default_rng(0), Clock(least)
    for shape, group, layouts in CASES:
        hidden, intermediate, sizes = SHAPES[shape]
        layer = experts(rng, hidden, intermediate, group)
        about = {"shape": shape, "group_size": group}
        nbytes = sum(size(expert) for expert in layer)

        def all_naive(layer: list[list[Projection]] = layer, group: int = group) -> None:
            for expert in layer:
                naive_expert(expert, group != 16)

        row = {"kernel": "naive", "layout": layouts[0], "interleave": group != 16, "tp_size": 1}
        yield about | row | clock.measure(all_naive, nbytes)
        for layout, interleave, ranks in itertools.product(layouts, (False, True), sizes):
            if intermediate // ranks % group:
                continue
            out = banks(layout, hidden, intermediate, group, ranks)
            for name, kernel in kernels().items():

                def run(
                    kernel: Any = kernel,
                    out: Any = out,
                    layer: Any = layer,
                    layout: str = layout,
                    pairs: bool = interleave,
                ) -> None:
                    for gate, up, down in layer:
                        kernel.prepare(gate, up, down, layout=layout, interleave=pairs, outs=[out])

                row = {"kernel": name, "layout": layout, "interleave": interleave, "tp_size": ranks}
                yield about | row | clock.measure(run, nbytes)
        if group == 16 and cpu.available():
            words = weights_alone(layer, banks("nvfp4-fp16", hidden, intermediate, group, 1))
            alone = sum(p.weight.nbytes for expert in layer for p in expert)
            row = {"kernel": "cpp", "layout": "nvfp4 weights alone", "interleave": False, "tp_size": 1}
            yield about | row | clock.measure(words, alone)


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """What a check finds wrong, one line a row."""
    return [
        f"FAILED {row['shape']} g{row['group_size']} {row['layout']} tp {row['tp_size']} interleave {row['interleave']}: "
        f"{row['of_memcpy']} of memcpy, at least {WANTED[row['layout']]} wanted"
        for row in rows
        if row["kernel"] == "cpp" and row["of_memcpy"] < WANTED.get(row["layout"], 0)
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.1, metavar="S", help="of each sample (default 0.1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--check", action="store_true", help="exit 1 if a figure is worse than wanted")
    options = parser.parse_args(arguments)
    rows = []
    print(f"{'shape':5} {'g':>3} {'layout':19} {'interleave':10} tp {'kernel':10} {'GB/s':>6} of memcpy of naive")
    for row in measure(options.seconds):
        if row["kernel"] == "naive":
            slow = row["gb_per_cpu_second"]
        row["of_naive"] = round(row["gb_per_cpu_second"] / slow, 1)
        rows.append(row)
        print(
            f"{row['shape']:5} {row['group_size']:3} {row['layout']:19} {'on' if row['interleave'] else 'off':10} "
            f"{row['tp_size']:2} {row['kernel']:10} {row['gb_per_cpu_second']:6.2f} {row['of_memcpy']:9.3f} "
            f"{row['of_naive']:8.1f}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    failed = failures(rows) if options.check else []
    print(*failed, sep="\n", end="\n" if failed else "")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
