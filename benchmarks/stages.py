"""Where a conversion's CPU time goes: milliseconds of one thread for one expert, by stage.

    python benchmarks/stages.py

A synthetic layer, its shards read once before so that they lie in the page cache, is prepared expert by expert as the tool
does it, into files in memory, so that no disk waits. MB = 10^6 bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sm70_convert import names
from sm70_convert.bank import HASHES
from sm70_convert.checkpoint import open_checkpoint
from sm70_convert.convert import expert_arrays
from sm70_convert.experts import ExpertReader
from sm70_convert.layer_findings import LayerFindings
from sm70_convert.plan import Options, build_plan
from sm70_kernels.host import best_kernel
from synthetic import Synthetic, write_checkpoint

RUNS = [("awq", (4,)), ("awq", (1, 2, 4)), ("nvfp4", (4,)), ("nvfp4", (1, 2, 4))]
STAGES = ("read", "source digest", "scale checks", "kernel", "write", "bank digest")


def profile(model: Path, tp_sizes: tuple[int, ...]) -> dict[str, Any]:
    """The second of two passes over one layer."""
    spent = dict.fromkeys(STAGES, 0.0)
    clock = time.thread_time()

    def lap(stage: str) -> None:
        nonlocal clock
        now = time.thread_time()
        spent[stage] += now - clock
        clock = now

    with open_checkpoint(model) as checkpoint:
        plan = build_plan(checkpoint, Options(tp_sizes=tp_sizes))
        layer, kernel = plan.layers[0], best_kernel()
        reader, outs = ExpertReader(plan, layer), [expert_arrays(plan, size) for size in tp_sizes]
        files = {(i, rank): os.memfd_create("bank") for i, size in enumerate(tp_sizes) for rank in range(size)}
        for _ in range(2):
            found = LayerFindings(plan, layer)
            source_digest, bank_digest = HASHES["blake3"](), HASHES["blake3"]()
            spent = dict.fromkeys(STAGES, 0.0)
            clock = time.thread_time()
            for expert in range(plan.moe.experts):
                projections = reader.read(expert)
                lap("read")
                for _, raw in reader.raw():
                    source_digest.update(raw.data)
                lap("source digest")
                found.check(expert, projections)
                lap("scale checks")
                kernel.prepare(
                    *(projections[p] for p in names.PROJECTIONS),
                    layout=plan.layout.name,
                    interleave=plan.layout.interleave_gate_up,
                    outs=outs,
                )
                lap("kernel")
                for (i, rank), fd in files.items():
                    place = expert * sum(array[rank].nbytes for array in outs[i].values())
                    for array in outs[i].values():
                        data = array[rank].data.cast("B")
                        place += os.pwrite(fd, data, place)
                        lap("write")
                        bank_digest.update(data)
                        lap("bank digest")
        for fd in files.values():
            os.close(fd)
        experts = plan.moe.experts
        return {
            "expert_mb": layer.source_bytes / experts / 1e6,
            "milliseconds": {stage: 1000 * seconds / experts for stage, seconds in spent.items()},
        }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"experts": 64, "hidden": 2048, "intermediate": 768, "group_size": 64}.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=default, metavar="N", help=f"default {default}"
        )
    parser.add_argument("--work", type=Path, help="put the work folder, removed at the end, in here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args(arguments)
    sizes = {name: getattr(options, name) for name in ("experts", "hidden", "intermediate", "group_size")}
    rows = []
    with tempfile.TemporaryDirectory(prefix="stages-", dir=options.work or Path.cwd()) as work:
        for kind in ("awq", "nvfp4"):
            write_checkpoint(Path(work) / kind, Synthetic(kind, layers=1, shards=1, **sizes))
        for kind, tp_sizes in RUNS:
            run = f"{kind.upper()}, TP {' and '.join(map(str, tp_sizes))}".replace("1 and 2 and 4", "1, 2 and 4")
            rows.append({"run": run} | profile(Path(work) / kind, tp_sizes))
    print(f"{'run':20} {'expert MB':>9} " + " ".join(f"{stage:>13}" for stage in STAGES) + f" {'total ms':>9}")
    for row in rows:
        spent = row["milliseconds"]
        cells = " ".join(f"{spent[stage]:13.3f}" for stage in STAGES)
        print(f"{row['run']:20} {row['expert_mb']:9.2f} {cells} {sum(spent.values()):9.3f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
