"""How much memory a load takes over what it leaves in use."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class MemoryWatch:
    """Watches from construction on: on a CUDA device what torch allocates there, else the resident memory of the process."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            # Sets the peak back to what is resident now. Where that is forbidden, an earlier peak may show.
            with contextlib.suppress(OSError):
                _CLEAR.write_text("5")

    @property
    def unit(self) -> str:
        """What is watched, for people."""
        return "CUDA" if self.cuda else "RSS"

    def transient(self) -> int:
        """Bytes of the peak so far that are no longer in use."""
        if self.cuda:
            return torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        status = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        peak, now = (int(status[key].split()[0]) * 1024 for key in ("VmHWM", "VmRSS"))
        return max(0, peak - now)
