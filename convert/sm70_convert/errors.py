"""Every error this tool reports: its exit code, its problems, and the next step for each."""

from __future__ import annotations

import errno
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

SHOWN_PROBLEMS = 10
RESUMES = "run the same command again: it resumes"


def printable(text: str) -> str:
    """`text` with control and other unprintable characters escaped, so that a name from a file cannot steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shortened(text))


MAX_LINE = 10_000  # a tensor's name may have 4096 characters


def shortened(text: str) -> str:
    """`text`, cut where it is too long for a line: a value of a hostile config.json may have megabytes."""
    return text if len(text) <= MAX_LINE else f"{text[:MAX_LINE]}... ({len(text)} characters)"


def first_line(exc: BaseException) -> str:
    """What a foreign exception says in its first line, or its type if it says nothing."""
    return str(exc).strip().partition("\n")[0] or type(exc).__name__


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: a sentence, where it was found, and what to do next."""

    message: str
    tensor: str | None = None
    file: str | None = None
    layer: int | None = None
    rank: int | None = None
    expected: str | None = None
    actual: str | None = None
    hint: str | None = None

    def __str__(self) -> str:
        where = [self.tensor] if self.tensor else []
        if self.file:
            where.append(f"({self.file})" if self.tensor else self.file)
        if self.layer is not None and not self.tensor:
            where.append(f"layer {self.layer}")
        if self.rank is not None:
            where.append(f"rank {self.rank}")
        text = f"{' '.join(where)}: {self.message}" if where else self.message
        if self.expected is not None:
            text += f": expected {self.expected}, found {self.actual}"
        return printable(text)


class Sm70Error(Exception):
    """A failure with an exit code. `problems` are all that were found; `total` counts also those not kept.

    next_step: what to do about a problem that brings no hint of its own.
    """

    exit_code: ClassVar[int] = 1
    kind: ClassVar[str] = "bug"
    next_step: ClassVar[str] = "run again with --debug and report what it prints"

    def __init__(self, *problems: Problem | str, total: int | None = None) -> None:
        given = (p if isinstance(p, Problem) else Problem(p) for p in problems)
        self.problems = tuple(p if p.hint else replace(p, hint=self.next_step) for p in given)
        self.total = len(self.problems) if total is None else total
        super().__init__("; ".join(str(p) for p in self.problems))

    def lines(self) -> list[str]:
        """What is printed: up to ten problems, a count of the rest, and each different next step once."""
        shown = self.problems[:SHOWN_PROBLEMS]
        lines = [f"error: {p}" for p in shown]
        if self.total > len(shown):
            lines.append(f"... and {self.total - len(shown)} more problems like these")
        hints = dict.fromkeys(p.hint for p in shown if p.hint)
        return lines + [f"next: {printable(hint)}" for hint in hints]

    def as_json(self) -> dict[str, Any]:
        """The same for `--json`, with every problem that was kept."""
        problems = [
            {k: shortened(v) if isinstance(v, str) else v for k, v in asdict(p).items() if v is not None}
            for p in self.problems
        ]
        return {"kind": self.kind, "exit_code": self.exit_code, "total": self.total, "problems": problems}


OUT_OF_MEMORY = Problem(
    "out of memory",
    hint="use fewer --jobs, or raise the limit (ulimit -v, the container's), then run the same command again",
)
# How the loader, threads and torch say that there is no memory.
_NO_MEMORY = (
    "cannot allocate memory",
    "can't allocate memory",
    "not enough memory",
    "failed to map segment",
    "cannot apply additional memory protection",
    "can't start new thread",
    "bad_alloc",
    "without setting an exception",
    "without exception set",
)


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether memory, or a thread, was what the system refused; libraries say so in many ways."""
    text = str(exc).lower()
    return (
        isinstance(exc, MemoryError)
        or (isinstance(exc, OSError) and exc.errno == errno.ENOMEM)
        or (
            isinstance(exc, ImportError | OSError | RuntimeError | SystemError)
            and any(sign in text for sign in _NO_MEMORY)
        )
        or (exc.__cause__ is not None and is_out_of_memory(exc.__cause__))
    )


class UsageError(Sm70Error):
    """The options do not fit together."""

    exit_code = 2
    kind = "usage"
    next_step = "see sm70-convert --help"


class CheckpointError(Sm70Error):
    """The checkpoint is wrong or incomplete."""

    exit_code = 3
    kind = "checkpoint"
    next_step = "fetch or export the checkpoint again"


class UnsupportedError(Sm70Error):
    """The checkpoint is valid, but not something that can be prepared."""

    exit_code = 4
    kind = "unsupported"
    next_step = "see which checkpoints can be prepared: sm70-convert plan MODEL, and the README"


class OutputError(Sm70Error):
    """The output folder exists, does not match, or has no room."""

    exit_code = 5
    kind = "output"
    next_step = "give another --out"


class IntegrityError(Sm70Error):
    """Bytes are not what the manifest, the source or a recording says."""

    exit_code = 6
    kind = "integrity"
    next_step = "restore the folder from a good copy, or convert again with --overwrite"


class DeviceError(Sm70Error):
    """The device asked for is not there or cannot be used."""

    exit_code = 7
    kind = "device"
    next_step = "use --device cpu"


class Interrupted(Sm70Error):  # noqa: N818 - stopped on purpose
    """Stopped by Ctrl-C; the same command resumes."""

    exit_code = 130
    kind = "interrupted"
    next_step = RESUMES


class Terminated(Sm70Error):  # noqa: N818 - stopped on purpose
    """Stopped by SIGTERM; the same command resumes."""

    exit_code = 143
    kind = "terminated"
    next_step = RESUMES


class Problems:
    """Collects problems of a planning pass, so that all are reported at once.

    Only the first of each kind are kept (a checkpoint of 200,000 wrong tensors must not fill the memory); all are counted.
    """

    KEPT = 100

    def __init__(self) -> None:
        self._kept: dict[type[Sm70Error], list[Problem]] = {}
        self._total = 0

    def add(self, kind: type[Sm70Error], problem: Problem) -> None:
        """Notes one problem that alone would raise `kind`."""
        self._total += 1
        kept = self._kept.setdefault(kind, [])
        if len(kept) < self.KEPT:
            kept.append(problem)

    def __bool__(self) -> bool:
        return self._total > 0

    def raise_if_any(self) -> None:
        """Raises one error with all problems; its kind is the one with the lowest exit code (the root cause)."""
        if self._kept:
            kind = min(self._kept, key=lambda k: k.exit_code)
            ordered = [p for k in sorted(self._kept, key=lambda k: k.exit_code) for p in self._kept[k]]
            raise kind(*ordered, total=self._total)
