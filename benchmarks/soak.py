"""Kill conversions at random moments, many times, and compare what comes out in the end with an undisturbed run, byte for byte.

    python benchmarks/soak.py FOLDER [--rounds 200] [--seed 0] [--megabytes 300] [--json FILE]

A round makes one prepared folder: whole, in two parts at once and a seal, with a TP size added to a sealed folder, or with
--overwrite over another one; links and hash vary. Its first start is to be killed (SIGKILL), every other one with even odds,
after a time drawn from the length of an undisturbed run; a run that ends before counts as no kill.
FOLDER is made and needs room for three such checkpoints; it is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from synthetic import Synthetic, write_checkpoint

PROGRAM = (sys.executable, "-m", "sm70_convert")
FORMATS = ("awq", "nvfp4")
KINDS = ("whole", "parts", "addition", "overwrite")
TP_SIZES = ((1,), (2,), (4,), (1, 2))
WAYS = (("copy", "blake3"), ("copy", "sha256"), ("hardlink", "blake3"), ("symlink", "blake3"))  # passthrough, hash
PHASES = ("before the journal", "preparing layers", "passing through", "seal", "after the manifest")
EXPERTS, HIDDEN, INTERMEDIATE = 16, 1024, 768


@dataclass
class Figures:
    """What the rounds counted."""

    rounds: int = 0
    kills: int = 0
    layers_resumed: int = 0
    sealed_and_verified: int = 0  # kills of an addition after which the folder as it was sealed still verified
    differences: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)


def digests(folder: Path) -> dict[str, str]:
    """Every file, hidden ones too, with the digest of its bytes."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {p.relative_to(folder).as_posix(): blake3().update_mmap(p).hexdigest() for p in files}


def phase(out: Path, command: str, manifest: bytes | None) -> str:
    """Where a killed run was, by what it left."""
    state = out / "sm70"
    now = read(state / "manifest.json")
    if now is not None and now != manifest:
        return "after the manifest"
    if command == "seal":
        return "seal"
    if not any(state.glob("journal*.jsonl")):
        return "before the journal"
    if now is None and any(p.is_file() for p in out.iterdir()):
        return "passing through"
    return "preparing layers"


def read(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


class Soak:
    """The rounds of one seed, and the undisturbed runs that they are held against."""

    def __init__(self, folder: Path, seed: int, megabytes: int) -> None:
        self.folder, self.random, self.figures = folder, random.Random(seed), Figures()  # noqa: S311 - no secret
        self.layers = -(-megabytes * 1_000_000 // (EXPERTS * 3 * HIDDEN * INTERMEDIATE // 2))
        self.undisturbed: dict[tuple[str, ...], tuple[dict[str, str], float]] = {}
        self.bytes = 0
        for format_ in FORMATS:
            model = self.folder / format_
            shape = (self.layers, EXPERTS, HIDDEN, INTERMEDIATE)
            write_checkpoint(model, Synthetic(format_, *shape, group_size=64, shards=4))
            size = sum(p.stat().st_size for p in model.iterdir())
            assert size >= megabytes * 1_000_000, size
            self.bytes += size

    def convert(
        self, format_: str, out: Path, tp_sizes: tuple[int, ...], way: tuple[str, str], *more: str
    ) -> list[str]:
        sizes = [word for size in tp_sizes for word in ("--tp-size", str(size))]
        links, hash_ = way
        return [str(self.folder / format_), "--out", str(out), *sizes, "--passthrough", links, "--hash", hash_, *more]

    def expected(self, format_: str, tp_sizes: tuple[int, ...], way: tuple[str, str]) -> tuple[dict[str, str], float]:
        """What an undisturbed run makes, and its seconds."""
        command = self.convert(format_, self.folder / "undisturbed", tp_sizes, way)
        if tuple(command) not in self.undisturbed:
            begin = time.monotonic()
            subprocess.run([*PROGRAM, *command, "--quiet"], check=True)
            seconds = time.monotonic() - begin
            self.undisturbed[tuple(command)] = digests(self.folder / "undisturbed"), seconds
            shutil.rmtree(self.folder / "undisturbed")
        return self.undisturbed[tuple(command)]

    def round(self, number: int) -> None:
        """One folder, made against the odds."""
        format_ = FORMATS[number % len(FORMATS)]
        kind = KINDS[number // len(FORMATS) % len(KINDS)]
        jobs = ("--jobs", self.random.choice("12"))
        tp_sizes, way = self.random.choice(TP_SIZES), self.random.choice(WAYS)
        out = self.folder / "out"
        half = self.layers // 2
        if kind == "whole":
            steps = [[self.convert(format_, out, tp_sizes, way, *jobs)]]
        elif kind == "parts":
            parts = (f"0-{half - 1}", f"{half}-{self.layers - 1}")
            steps = [
                [self.convert(format_, out, tp_sizes, way, "--layers", p, *jobs) for p in parts],
                [["seal", str(out)]],
            ]
        elif kind == "addition":
            tp_sizes = (1, 2)
            steps = [[self.convert(format_, out, (size,), way, *jobs)] for size in self.random.sample(tp_sizes, 2)]
        else:
            other = self.convert(format_, out, self.random.choice(TP_SIZES), self.random.choice(WAYS), *jobs)
            steps = [[other], [self.convert(format_, out, tp_sizes, way, "--overwrite", *jobs)]]
        expected, seconds = self.expected(format_, tp_sizes, way)
        each = seconds if kind == "overwrite" else seconds / len(steps)
        must = True
        for step in steps:
            self.carry_out(step, out, each, must=must)
            must = False
        made = digests(out)
        if made != expected:
            self.figures.differences += 1
            names = sorted(n for n in {*made, *expected} if made.get(n) != expected.get(n))
            print(f"round {number} ({kind}, {format_}, TP {tp_sizes}, {way}): other bytes in {names}", file=sys.stderr)
        self.figures.rounds += 1
        self.figures.kinds[kind] += 1
        shutil.rmtree(out)

    def carry_out(self, commands: list[list[str]], out: Path, seconds: float, *, must: bool) -> None:
        """Runs commands, of about so many seconds, at once, and again until all have gone well. must: kill the first start."""
        manifest = read(out / "sm70/manifest.json")
        left = commands
        while left:
            begin = time.monotonic()
            running = [
                subprocess.Popen([*PROGRAM, *c, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                for c in left
            ]
            if must or self.random.random() < 0.5:
                must = False
                delay = self.random.uniform(0.25, max(0.5, 1.1 * seconds))
                for process in running:
                    try:
                        process.wait(max(0.0, begin + delay - time.monotonic()))
                    except subprocess.TimeoutExpired:  # noqa: PERF203 - two at most
                        process.kill()
            ended = [(process.communicate(), process.returncode) for process in running]
            failed = []
            for command, ((stdout, stderr), code) in zip(left, ended, strict=True):
                if code == 0:
                    document = json.loads(stdout)
                    self.figures.layers_resumed += len(document["layers_resumed"]) if command[0] != "seal" else 0
                elif code == -9:
                    failed.append(command)
                    self.figures.kills += 1
                    self.figures.phases[phase(out, command[0], manifest)] += 1
                elif "(it is sealed already)" not in stdout:  # a seal that was killed when all was done
                    raise SystemExit(f"{command}: exit code {code}: {stdout}{stderr}")
            # Once the old manifest is gone, the same command resumes without --overwrite too.
            failed = [[w for w in c if w != "--overwrite" or read(out / "sm70/manifest.json")] for c in failed]
            if failed and manifest is not None and "--overwrite" not in commands[0]:
                subprocess.run([*PROGRAM, "verify", str(out), "--quiet"], check=True, stderr=subprocess.DEVNULL)
                self.figures.sealed_and_verified += 1
            left = failed


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill conversions at random moments and compare what they end in.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--megabytes", type=int, default=300, help="of each checkpoint, at least")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    begin = time.monotonic()
    try:
        soak = Soak(options.folder, options.seed, options.megabytes)
        for number in range(options.rounds):
            soak.round(number)
            if number % 10 == 9:
                print(f"{number + 1} rounds, {soak.figures.kills} kills", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(options.folder)
    figures = soak.figures
    document = {
        "seed": options.seed,
        "checkpoint_bytes": soak.bytes // len(FORMATS),
        "layers": soak.layers,
        "rounds": figures.rounds,
        **{f"rounds_{kind}": figures.kinds[kind] for kind in KINDS},
        "kills": figures.kills,
        **{f"kills_{name.replace(' ', '_')}": figures.phases[name] for name in PHASES},
        "layers_resumed": figures.layers_resumed,
        "sealed_and_verified": figures.sealed_and_verified,
        "differences": figures.differences,
        "seconds": round(time.monotonic() - begin),
    }
    for key, value in document.items():
        print(f"{key:<28}{value:>12}")
    if options.json:
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    sys.exit(1 if figures.differences else 0)


if __name__ == "__main__":
    main()
