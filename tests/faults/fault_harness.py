"""Tries faults: a run that is hit, what it left, and the run after it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fault_scenarios import Command, Killed, Place, Scenario

HERE = Path(__file__).parent
MODULES = ("convert", "describe", "estimate", "hub", "recorded")
WRITES = {"write", "pwrite", "fsync", "rename", "link", "symlink", "mkdir", "truncate"}
READS = {"read", "pread", "preadv", "scandir", "listdir", "readlink", "stat", "lstat", "fstat", "access", "statvfs"}
PARTIAL = {"read", "pread", "preadv", "write", "pwrite"}
# Calls that move no byte and change nothing: an error of theirs is tried, a signal at the calls around them does.
ASKS = {"stat", "lstat", "fstat", "access", "statvfs", "readlink", "posix_fadvise", "close"}
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")
NO_ROOM = ("ENOSPC", "EIO", "EDQUOT")
CODES = {"SIGKILL": -9, "SIGTERM": 143, "SIGINT": 130}
# Faults tried so far, by kind; printed at the end of the session.
TRIED: Counter[str] = Counter()
# Lines of the package at which, or below which, an I/O call was disturbed or passed after another fault.
HIT: set[str] = set()
ALIKE: set[tuple[str, tuple[str, ...]]] = set()


class Call(NamedTuple):
    """One I/O call of an undisturbed run."""

    site: str
    op: str
    k: int
    path: str
    frames: tuple[str, ...]


class Outcome(NamedTuple):
    """How a run ended."""

    code: int
    stdout: str
    stderr: str
    notes: list[dict[str, Any]]


class Runner:
    """The process that forks the runs, and the files that they speak by."""

    def __init__(self, folder: Path, modules: tuple[str, ...] = ()) -> None:
        folder.mkdir()
        self.folder = folder
        arguments = [f"sm70_convert.{m}" for m in MODULES] + list(modules)
        self.process = subprocess.Popen(
            [sys.executable, HERE / "fault_runner.py", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "LANGUAGE": "C"},
        )

    def close(self) -> None:
        self.process.communicate()

    def send(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def run(self, arguments: list[str], fault: dict[str, Any] | None = None, *, trace: bool = False) -> Outcome:
        files = {name: self.folder / name for name in ("stdout", "stderr", "log")}
        request = {"args": arguments, "trace": trace, "fault": fault, **{n: str(p) for n, p in files.items()}}
        self.send(request)
        assert self.process.stdout is not None
        code = int(self.process.stdout.readline())
        notes = [json.loads(line) for line in files["log"].read_text().splitlines()]
        for entry in notes:
            HIT.update(entry.get("seen", ()))
        return Outcome(code, files["stdout"].read_text(), files["stderr"].read_text(), notes)

    def calls(self, arguments: list[str]) -> list[Call]:
        """Every I/O call of a command, which must go well."""
        done = self.run(arguments, trace=True)
        assert done.code == 0, (arguments, done)
        return [Call(n["site"], n["op"], n["k"], n["path"], tuple(n["frames"])) for n in done.notes if "site" in n]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


class Trial:
    """A scenario with its folders: the state before, and what an undisturbed run makes of it."""

    def __init__(self, scenario: Scenario, runner: Runner, root: Path) -> None:
        self.scenario, self.runner, self.root = scenario, runner, root
        self.place = Place(root / "model", root / "out", root / "other")
        self.saved_model, self.start = root / "saved-model", root / "start"
        made = scenario.make()
        others, made.others = made.others, {}
        made.write(self.place.model)
        for name, data in others.items():
            (self.place.model / name).parent.mkdir(exist_ok=True)
            (self.place.model / name).write_bytes(data)
        shutil.copytree(self.place.model, self.saved_model)
        for step in scenario.before:
            self.do(step)
        scenario.prepare(self.place)
        self.existed = self.place.out.exists()
        if self.existed:
            shutil.copytree(self.place.out, self.start, symlinks=True)
        self.before = contents(self.place.out)
        # Calls on our files, but for click's own.
        self.calls = [c for c in runner.calls(self.arguments) if c.path.startswith(f"{root}/") and len(c.frames) > 1]
        self.undisturbed = contents(self.place.out)
        self.finish()
        self.final = contents(self.place.out)
        assert (verified := self.runner.run(self.place.filled(("verify", "OUT")))).code == 0, verified
        self.mended: set[str] = set()  # digests of folders from which the next run came to the same end

    @property
    def arguments(self) -> list[str]:
        return self.place.filled(self.scenario.command)

    def do(self, step: Command | Killed) -> None:
        if not isinstance(step, Killed):
            done = self.runner.run(self.place.filled(step))
            assert done.code == 0, (step, done)
            return
        arguments = self.place.filled(step.command)
        existed = self.place.out.exists()
        if existed:
            shutil.copytree(self.place.out, self.root / "before-kill")
        matching = [c for c in self.runner.calls(arguments) if c.op == step.op and c.path.endswith(step.path)]
        call = matching[step.k - 1]
        shutil.rmtree(self.place.out)
        if existed:
            (self.root / "before-kill").rename(self.place.out)
        fault = {"site": call.site, "op": call.op, "k": call.k, "kind": "SIGKILL"}
        assert self.runner.run(arguments, fault).code == -9

    def reset(self) -> None:
        shutil.rmtree(self.place.out, ignore_errors=True)
        if self.existed:
            shutil.copytree(self.start, self.place.out, symlinks=True)

    def finish(self) -> None:
        """What comes after must go well."""
        for command in self.scenario.after:
            done = self.runner.run(arguments := self.place.filled(command))
            if done.code == 5 and "--overwrite to start over" in done.stderr and "--overwrite" in self.scenario.command:
                done = self.runner.run([*arguments, "--overwrite"])
            elif done.code == 5 and "(it is sealed already)" in done.stderr:
                continue
            assert done.code == 0, (command, done)

    def faults(self) -> Iterator[tuple[Call, str]]:
        """Which fault to try at which call."""
        last = {(c.site, c.op): c.k for c in self.calls}
        turn: Counter[str] = Counter()
        for call in self.calls:
            final = last[call.site, call.op]
            chosen = {1, final}
            if call.k not in chosen and (not self.scenario.full or call.op in ASKS):
                continue
            if call.op in ASKS or (self.is_source(call.path) and call.op != "preadv"):
                # What is asked, and how a checkpoint is opened, is the same in every scenario.
                if (call.op, call.frames) in ALIKE:
                    continue
                ALIKE.add((call.op, call.frames))
            for kinds in self.kinds(call):
                if self.scenario.full:
                    yield from ((call, kind) for kind in kinds)
                else:
                    turn[kinds[0]] += 1
                    yield call, kinds[turn[kinds[0]] % len(kinds)]

    def kinds(self, call: Call) -> Iterator[tuple[str, ...]]:
        """The kinds of fault that can happen at a call, like ones together."""
        writes = call.op in WRITES or (call.op == "open" and ".sm70-tmp" in call.path)
        yield NO_ROOM if writes else ("EIO",)
        if call.op in ASKS:
            return
        if call.op in PARTIAL:
            yield ("short",)
        if call.op == "flock":
            yield ("EAGAIN",)
        yield SIGNALS
        if (
            call.op in ("read", "preadv")
            and call.path.startswith(f"{self.place.model}/")
            and self.scenario.command[0] == "MODEL"
        ):
            yield "shrinks", "changes"

    def is_source(self, path: str) -> bool:
        return f"{path}/".startswith(f"{self.place.model}/")

    def attempt(self, call: Call, kind: str) -> list[str]:
        """Tries one fault; what is wrong with what it did."""
        self.reset()
        fault = {"site": call.site, "op": call.op, "k": call.k, "kind": kind}
        done = self.runner.run(self.arguments, fault)
        TRIED[kind] += 1
        HIT.update(call.frames)
        wrong = list(self.wrong(call, kind, done))
        if kind in ("shrinks", "changes"):
            shutil.rmtree(self.place.model)
            shutil.copytree(self.saved_model, self.place.model)
        wrong += self.wrong_end()
        where = f"{self.scenario.name}: {kind} at {call.site}, {call.op} {call.k} of {call.path}"
        return [f"{where}: {what} [{done.code}: {done.stderr!r}]" for what in wrong]

    def wrong_end(self) -> Iterator[str]:
        """What is wrong with what the next run makes of a folder that a fault left."""
        left = hashlib.sha256(repr(contents(self.place.out)).encode()).hexdigest()
        if left in self.mended:
            return
        try:
            self.finish()
        except AssertionError as exc:
            yield f"what comes after: {exc}"
        now = contents(self.place.out)
        other = sorted(n for n in {*now, *self.final} if now.get(n) != self.final.get(n))
        if other:
            yield f"other bytes in the end: {other}"
        else:
            self.mended.add(left)

    def wrong(self, call: Call, kind: str, done: Outcome) -> Iterator[str]:
        """What is wrong with the code, the message and the folder after a fault."""
        if not any("hit" in entry for entry in done.notes):
            yield "the fault was never reached"
        if "Traceback" in done.stderr or "Exception ignored" in done.stderr:
            yield "a traceback"
        if done.code not in (codes := self.codes(call, kind)):
            yield f"exit code is none of {sorted(codes)}"
        errors = [line for line in done.stderr.splitlines() if not line.startswith(("warning: ", "prepares on "))]
        if done.code > 0 and not (errors and errors[0].startswith("error: ") and errors[-1].startswith("next: ")):
            yield "no message with a next step"
        if kind in NO_ROOM and done.code > 0:
            path = Path(next(entry["hit"] for entry in done.notes if "hit" in entry))
            name = path.name.removeprefix(".").removesuffix(".sm70-tmp")
            if os.strerror(getattr(errno, kind)) not in done.stderr and call.op != "access":
                yield f"the message does not say {kind}"
            if name not in done.stderr and call.op not in ASKS and not path.is_dir():
                yield f"the message does not name {name}"
        yield from self.wrong_folder(done)

    def codes(self, call: Call, kind: str) -> set[int]:
        """The exit codes that a fault may have."""
        functions = {frame.split()[1] for frame in call.frames}
        if kind in CODES:
            return {CODES[kind]}
        if kind == "short":
            return {0}
        if "estimate_seconds" in functions:
            return {0, 3}  # no estimate is given then
        if "_lock_files" in functions or ("locked" in functions and "_decide" in functions):
            return {0, 5}  # a leftover lock, removed by whoever comes next
        if kind == "EAGAIN":  # the folder's lock is waited for
            return {0} if call.path.endswith("/.folder.lock") else {5}
        tolerated = {0} if call.op in ASKS else set()
        if "read_back" in functions:
            return {5} | tolerated
        if self.is_source(call.path):
            return {3} | tolerated
        if self.scenario.command[0] == "verify":
            return {6} | tolerated
        if self.scenario.command[0] == "inspect":
            return {3, 6} | tolerated
        if call.op in READS | ASKS or (call.op == "open" and ".sm70-tmp" not in call.path):
            return {0, 5, 6}  # a bank of an earlier run is made again, or is damage of what is sealed
        return {5}

    def wrong_folder(self, done: Outcome) -> Iterator[str]:
        """A folder is sealed as it was, sealed as it shall be, or not sealed."""
        now = contents(self.place.out)
        manifest = now.get("sm70/manifest.json")
        wanted = self.undisturbed if manifest == self.undisturbed.get("sm70/manifest.json") else self.before
        if done.code == 0:
            wanted = self.undisturbed
        if manifest is None and "--overwrite" in self.scenario.command:
            return
        if manifest != wanted.get("sm70/manifest.json"):
            yield "sealed as it neither was nor shall be" if manifest else "its seal was lost"
        elif manifest is not None:
            listed = json.loads(manifest)
            names = {record["path"] for record in listed["banks"] + listed["passthrough"]}
            damaged = sorted(n for n in names if now.get(n) != wanted.get(n))
            if damaged:
                yield f"sealed with other files: {damaged}"
