"""The file locks that keep two runs from one folder, or from one part of it. They end with the process that holds them."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sm70_convert.bank import MEND
from sm70_convert.errors import OutputError, Problem

_POLL_SECONDS = 0.05


@contextmanager
def locked(path: Path, *, wait: float = 0) -> Iterator[None]:
    """Holds the lock of `path`, a file in sm70/, for up to `wait` seconds trying. Raises OutputError if another run holds it.

    The file goes with the lock, so that a sealed folder holds none; one that a killed run left is nobody's lock.
    """
    try:
        fd = _acquire(path, time.monotonic() + wait)
    except OSError as exc:
        foreign = exc.errno == errno.ELOOP  # a link
        why, hint = ("it is no lock file of this tool", "remove it") if foreign else (exc.strerror, MEND)
        raise OutputError(Problem(f"cannot be locked: {why}", file=f"sm70/{path.name}", hint=hint)) from exc
    try:
        yield
    finally:
        try:
            path.unlink(missing_ok=True)  # while it is held, so that it is still the one that was locked
        except OSError as exc:
            message = f"cannot be removed: {exc.strerror}"
            raise OutputError(Problem(message, file=f"sm70/{path.name}", hint=MEND)) from exc
        finally:
            os.close(fd)


def _acquire(path: Path, deadline: float) -> int:
    """A descriptor of the locked file."""
    while True:
        held = False
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
                raise OSError(errno.ELOOP, "a link")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The run that held it may have removed it meanwhile, and another file may be there now.
            held = path.exists() and os.path.samestat(os.fstat(fd), path.stat())
            if held:
                return fd
        except BlockingIOError:
            if time.monotonic() >= deadline:
                hint = "wait for the other run, or stop it"
                message = "another run is working on this folder"
                raise OutputError(Problem(message, file=f"sm70/{path.name}", hint=hint)) from None
            time.sleep(_POLL_SECONDS)
        finally:
            if not held:
                os.close(fd)
