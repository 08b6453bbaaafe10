"""Regular files alone are read: a FIFO, a device or a folder in their place is refused, and never waited for."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from sm70_convert.errors import CheckpointError, Problem, Sm70Error

UNREADABLE = "mend the disk (or the rights), or fetch the checkpoint again"


def open_regular(
    path: Path, shown: str, *, error: type[Sm70Error] = CheckpointError, missing: str | None = None
) -> int:
    """A descriptor for reading `path`; a symlink that ends at a regular file is followed. Raises `error` for anything else.

    missing: the next step where there is no such file.
    """
    try:
        # O_NONBLOCK: a FIFO must not hang the run before it is refused.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        regular = False
        try:
            regular = stat.S_ISREG(os.fstat(fd).st_mode)
        finally:
            if not regular:
                os.close(fd)
    except FileNotFoundError:
        raise error(Problem("is missing", file=shown, hint=missing)) from None
    except OSError as exc:
        hint = UNREADABLE if error is CheckpointError else None
        raise error(Problem(f"cannot be opened: {exc.strerror}", file=shown, hint=hint)) from exc
    if not regular:
        raise error(Problem("is not a regular file", file=shown))
    return fd


def forget(fd: int, offset: int = 0, count: int = 0) -> None:
    """Tells the page cache that `count` bytes (0: all that follow) are not needed again: it is for what others need."""
    with suppress(OSError):  # a hint that some file systems do not take
        os.posix_fadvise(fd, offset, count, os.POSIX_FADV_DONTNEED)
