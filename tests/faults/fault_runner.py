"""A process that runs the command line in forks of itself, each with one fault at one I/O call.

    python fault_runner.py [MODULE ...]     requests and replies are JSON lines on stdin and stdout; modules are imported first

A request holds `args`, files for `stdout` and `stderr`, a file `log`, `trace` (log every call) and perhaps a `fault`: the `site`
of the call ("bank.py:154 commit"), the `op` of os that it comes to, `k` (the k-th such call of the run), and a `kind`. Files are
opened by Python's own pure implementation, so that buffered reads and writes come to os.read and os.write too. Nothing is synced:
no power fails here.
"""

# ruff: noqa: E402, PLW0603, PTH100, PTH120 - what is patched must be so before others import it, pathlib too
from __future__ import annotations

import _pyio
import builtins
import errno
import fcntl
import io
import os
import signal
import sys

_open = io.open
io.open = builtins.open = _pyio.open

OPS = (
    "open", "read", "write", "pread", "preadv", "pwrite", "close", "fsync", "rename", "unlink", "link", "symlink", "mkdir",
    "rmdir", "truncate", "scandir", "listdir", "stat", "lstat", "fstat", "statvfs", "access", "posix_fadvise", "readlink",
)  # fmt: skip
OF = {"link": 1, "symlink": 1}  # which argument names the file that is made
REAL = {op: getattr(os, op) for op in OPS} | {"flock": fcntl.flock}

import json
import threading
from typing import Any

package = ""  # the folder of the code whose calls count
active: dict[str, Any] | None = None  # this process is a fork with this request
log = -1
counts: dict[tuple[str, str], int] = {}
seen: set[str] = set()
lock = threading.Lock()


def frames() -> list[str]:
    """Where in the package this call comes from, innermost first: "bank.py:154 commit"."""
    found, frame = [], sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(package):
            file = frame.f_code.co_filename[len(package) + 1 :]
            found.append(f"{file}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return found


def path_of(target: Any) -> str:
    """The path of a file that is given by path or descriptor."""
    if isinstance(target, int):
        try:
            return REAL["readlink"](f"/proc/self/fd/{target}")
        except OSError:
            return ""
    return os.path.abspath(os.fspath(target)) if target is not None else ""


def note(entry: dict[str, Any]) -> None:
    REAL["write"](log, (json.dumps(entry) + "\n").encode())


def wrapped(op: str) -> Any:
    real = REAL[op]

    def call(*args: Any, **options: Any) -> Any:
        if active is None or not (where := frames()):
            return real(*args, **options) if op != "fsync" or active is None else None
        with lock:
            key = where[0], op
            counts[key] = k = counts.get(key, 0) + 1
            seen.update(where)
        fault = active.get("fault")
        if active["trace"]:
            note(
                {
                    "site": where[0],
                    "op": op,
                    "k": k,
                    "frames": where,
                    "path": path_of(args[OF.get(op, 0)]),
                }
            )
        elif fault and fault["site"] == where[0] and fault["op"] == op and fault["k"] == k:
            note({"hit": path_of(args[OF.get(op, 0)])})
            return inject(fault, op, real, args, options)
        return real(*args, **options) if op != "fsync" else None

    return call


def inject(fault: dict[str, Any], op: str, real: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    kind = fault["kind"]
    if kind.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, kind))
    elif op == "access":
        return False
    elif kind.startswith("E"):
        if op == "close":
            real(*args)
        number = getattr(errno, kind)
        raise OSError(number, os.strerror(number), *(a for a in args[:1] if not isinstance(a, int)))
    elif kind == "short":
        return short(op, real, args)
    elif kind in ("shrinks", "changes"):
        path = path_of(args[0])
        data = _open(path, "rb").read()
        with _open(path, "r+b") as file:
            if kind == "shrinks":
                file.truncate(len(data) // 2)
            else:
                file.write(bytes(b ^ 1 for b in data))
        info = REAL["stat"](path)  # a clock may be too coarse to show it
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns + 1_000_000_000))
    return real(*args, **options) if op != "fsync" else None


def short(op: str, real: Any, args: tuple[Any, ...]) -> Any:
    """Half of what was asked for, and never nothing."""
    if op in ("read", "pread"):
        return real(args[0], (args[1] + 1) // 2, *args[2:])
    if op == "preadv":
        (buffer,) = args[1]
        return real(args[0], [buffer[: (len(buffer) + 1) // 2]], *args[2:])
    view = memoryview(args[1]).cast("B")
    return real(args[0], view[: (len(view) + 1) // 2], *args[2:])


for op in OPS:
    setattr(os, op, wrapped(op))
fcntl.flock = wrapped("flock")

import contextlib
import gc
import importlib
import traceback


def child(request: dict[str, Any], main: Any) -> int:
    """Runs the command line as a process of its own would; its exit code."""
    global active, log
    signal.alarm(120)  # a hang
    for target, number in ((request["stdout"], 1), (request["stderr"], 2)):
        if target is not None:
            REAL["close"](number)
            REAL["open"](target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    sys.stdout = _open(1, "w", closefd=False) if request["stdout"] is not None else None
    sys.stderr = _open(2, "w", closefd=False)
    log = REAL["open"](request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    active = request
    try:
        main(request["args"])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:  # noqa: BLE001 - what would be a traceback of the process
        traceback.print_exc()
        code = 1
    else:
        code = 0
    active = None
    note({"seen": sorted(seen)})
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            try:
                stream.flush()
            except OSError:
                code = 120
    return code


def warm(commands: list[list[str]], main: Any) -> None:
    """Runs commands in this process, so that forks find all imported and started."""
    streams = sys.stdout, sys.stderr
    with _open(os.devnull, "w") as null:
        sys.stdout = sys.stderr = null
        for arguments in commands:
            with contextlib.suppress(SystemExit):
                main(arguments)
        sys.stdout, sys.stderr = streams
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1, threading.enumerate()


def serve() -> None:
    global package
    package = os.path.dirname(importlib.import_module("sm70_convert").__file__ or "")
    from sm70_convert.cli import main

    for module in sys.argv[1:]:
        importlib.import_module(module)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for line in sys.stdin:
        if "warm" in (request := json.loads(line)):
            warm(request["warm"], main)
            continue
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = child(request, main)
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
