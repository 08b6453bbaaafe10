"""Speed of the numpy kernel: GB of source per CPU second, and as a ratio to memcpy, medians of 5; one thread.

A: hidden 2048, intermediate 768; B: hidden 2560, intermediate 160, which no AWQ group but 32 divides. At TP 4 a group
of 128 does not divide A's 192 either. Four experts in turn, so that the source does not come from the cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from sm70_kernels.numpy_sm70 import NumpyKernel
from sm70_kernels.spec import Projection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Array = np.ndarray[Any, Any]
SHAPES = {"A": (2048, 768, (1, 4)), "B": (2560, 160, (1,))}
AWQ, NVFP4 = ("awq-half2", "awq-compact", "awq-int4zero"), ("nvfp4-fp16", "nvfp4-raw")
CASES = [("A", 64, AWQ), ("A", 128, AWQ), ("B", 32, AWQ), ("A", 16, NVFP4), ("B", 16, NVFP4)]
EXPERTS = 4


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


def cpu_seconds(function: Callable[[], object], least: float = 0.1) -> float:
    """Of one call: the median of 5 runs, each of `least` seconds or more."""
    function()
    samples = []
    for _ in range(5):
        calls, start = 0, time.process_time()
        while (spent := time.process_time() - start) < least:
            function()
            calls += 1
        samples.append(spent / calls)
    return statistics.median(samples)


def speed(layer: list[list[Projection]], layout: str, interleave: bool, out: dict[str, Array]) -> float:
    kernel = NumpyKernel()

    def run() -> None:
        for gate, up, down in layer:
            kernel.prepare(gate, up, down, layout=layout, interleave=interleave, outs=[out])

    nbytes = sum(x.nbytes for parts in layer for p in parts for x in p[:3] if x is not None)
    return nbytes / cpu_seconds(run) / 1e9


def measure() -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(0)
    source, target = np.ones(1 << 25, np.uint8), np.ones(1 << 25, np.uint8)
    memcpy = source.nbytes / cpu_seconds(lambda: np.copyto(target, source)) / 1e9
    for shape, group, layouts in CASES:
        hidden, intermediate, sizes = SHAPES[shape]
        layer = experts(rng, hidden, intermediate, group)
        for layout, interleave, ranks in itertools.product(layouts, (False, True), sizes):
            if intermediate // ranks % group:
                continue
            rate = speed(layer, layout, interleave, banks(layout, hidden, intermediate, group, ranks))
            yield {
                "shape": shape,
                "group_size": group,
                "layout": layout,
                "interleave": interleave,
                "tp_size": ranks,
                "gb_per_cpu_second": round(rate, 3),
                "memcpy_gb_per_cpu_second": round(memcpy, 3),
                "of_memcpy": round(rate / memcpy, 4),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    if parser.parse_args().json:
        print(json.dumps(list(measure()), indent=2))
        return
    print(f"{'shape':5} {'g':>3} {'layout':12} {'interleave':10} {'tp':>2} {'GB/s':>5} {'of memcpy':>9}")
    for row in measure():
        print(
            f"{row['shape']:5} {row['group_size']:3} {row['layout']:12} {'on' if row['interleave'] else 'off':10} "
            f"{row['tp_size']:2} {row['gb_per_cpu_second']:5.2f} {row['of_memcpy']:9.3f}"
        )


if __name__ == "__main__":
    main()
