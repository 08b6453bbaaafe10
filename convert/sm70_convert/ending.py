"""How a command ends: what is reported of an exception, and signals that stop it once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from sm70_convert.console import Console
from sm70_convert.errors import (
    OUT_OF_MEMORY,
    RESUMES,
    Interrupted,
    OutputError,
    Problem,
    Sm70Error,
    Terminated,
    is_out_of_memory,
)


def fail(console: Console, error: Sm70Error, debug: bool) -> None:
    """Prints an error and exits with its code."""
    if debug:
        console.traceback()
    console.error(error)
    sys.exit(error.exit_code)


def as_error(exc: BaseException) -> Sm70Error:
    """What is reported of an exception that no command is to see."""
    if isinstance(exc, KeyboardInterrupt):
        return Terminated("terminated") if isinstance(exc, _Terminate) else Interrupted("interrupted")
    if is_out_of_memory(exc):
        return OutputError(OUT_OF_MEMORY)
    if isinstance(exc, Sm70Error):
        return exc
    if isinstance(exc, OSError):
        file = str(exc.filename) if exc.filename else None
        return OutputError(
            Problem(f"{exc.strerror or exc}", file=file, hint=f"mend the disk (or the rights), then {RESUMES}")
        )
    return Sm70Error(f"unexpected {type(exc).__name__}: {exc}" if str(exc) else f"unexpected {type(exc).__name__}")


def without_overwrite(error: Sm70Error) -> Sm70Error:
    """The same error where the next step is to go on, which --overwrite would not do."""
    hints = [
        (p, (p.hint or "").replace(RESUMES, RESUMES.replace(":", " without --overwrite:"))) for p in error.problems
    ]
    return type(error)(*(replace(p, hint=hint) for p, hint in hints), total=error.total)


class _Terminate(KeyboardInterrupt):
    """SIGTERM on its way up. No Exception, so that nothing takes it for an error of its own."""


@contextmanager
def stoppable(console: Console) -> Iterator[None]:
    """Ctrl-C and SIGTERM stop the command once; more of them do not disturb its cleaning up."""
    handled = [s for s in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(s) is not signal.SIG_IGN]
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        if stopping:
            return
        stopping = True
        reason = _Terminate() if number == signal.SIGTERM else KeyboardInterrupt()
        if _is_importing(frame):
            # Half of a module's code turns it into another error or loses it. Nothing is open yet: end here.
            error = as_error(reason)
            console.error(error)
            sys.stdout.flush()
            os._exit(error.exit_code)
        raise reason

    def lost(args: sys.UnraisableHookArgs) -> None:
        """Where no exception can be raised (__del__): the next signal counts."""
        nonlocal stopping
        if isinstance(args.exc_value, KeyboardInterrupt):
            stopping = False
        else:
            unraisable(args)

    unraisable, sys.unraisablehook = sys.unraisablehook, lost
    before = {s: signal.signal(s, stop) for s in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = unraisable


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
