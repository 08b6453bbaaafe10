"""Opening a file that somebody else made: a FIFO, a device or a folder in its place is refused, and never waited for."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from sm70_convert.errors import CheckpointError, Problem, Sm70Error


def open_regular(
    path: Path, shown: str, *, error: type[Sm70Error] = CheckpointError, missing: str | None = None
) -> int:
    """A descriptor for reading `path`; a symlink that ends at a regular file is followed. Raises `error` for anything else.

    missing: the next step where there is no such file.
    """
    try:
        # O_NONBLOCK: a FIFO must not hang the run before it is refused.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as exc:
        raise error(Problem("is missing", file=shown, hint=missing)) from exc
    except OSError as exc:
        raise error(Problem(f"cannot be opened: {exc.strerror}", file=shown)) from exc
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise error(Problem("is not a regular file", file=shown))
    return fd
