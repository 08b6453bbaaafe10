"""The journal of an unfinished folder, the locks of its parts, and the decision: fresh, resume, add, done or refuse."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from sm70_convert import names
from sm70_convert.bank import (
    HASHES,
    TEMPORARY,
    FileRecord,
    check_relative,
    layer_bank_paths,
    make_folder,
    measure,
    sync_folder,
    write_small,
    writing,
)
from sm70_convert.checkpoint import read_small
from sm70_convert.errors import IntegrityError, OutputError, Problem, Sm70Error
from sm70_convert.manifest import (
    IDENTITY_FORM,
    MANIFEST,
    RECORD_FORM,
    LayerRecord,
    Manifest,
    difference,
    is_tp_size,
    other_plan,
    plan_identity,
    read_manifest,
)
from sm70_convert.passthrough import output_names
from sm70_convert.plan import Plan
from sm70_convert.strict_json import canonical, has_form, load_object

MAX_LINES = 10_000  # one a layer: a file of line ends alone must not fill the memory
_HEAD_FORM = {
    "plan": {**IDENTITY_FORM, "tp_sizes": [is_tp_size], "mtimes": {str: int}},
    "source": str,
    "layers": str,
    "outputs": [str],
}
_FOLDER_LOCK = "sm70/.folder.lock"
_OUR_NAMES = re.compile(r"journal[0-9_-]*\.jsonl|\.folder\.lock|\.journal[0-9_-]*\.jsonl\.lock|\..+\.sm70-tmp")


@dataclass(frozen=True)
class Journal:
    """One journal as read: the plan it belongs to, where its source was, its layers, and those finished so far."""

    path: Path
    plan: dict[str, Any]
    source: str
    layers: tuple[int, ...]
    outputs: tuple[str, ...]
    records: tuple[LayerRecord, ...]


@dataclass
class OpenFolder:
    """An output folder that this run holds. `todo` are the TP sizes still to make; `done` the layers finished for them."""

    root: Path
    plan: dict[str, Any]
    sealed: Manifest | None
    todo: tuple[int, ...]
    done: dict[int, LayerRecord] = field(default_factory=dict)
    journal: Path | None = None

    def record(self, record: LayerRecord) -> None:
        """Notes a finished layer, durably."""
        assert self.journal is not None  # noqa: S101 - a run with work to do has a journal
        with writing(self.journal.name), open(self.journal, "ab", opener=_no_symlink) as file:
            file.write(canonical(record.as_json()) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.done[record.layer] = record


def _no_symlink(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def journal_name(plan: Plan) -> str:
    """`sm70/journal.jsonl` for a whole run, `sm70/journal-<layers>.jsonl` for a part."""
    if plan.options.layers is None:
        return "sm70/journal.jsonl"
    return f"sm70/journal-{names.format_ranges(plan.selected).replace(',', '_')[:200]}.jsonl"


def lock_path(journal: Path) -> Path:
    """The lock of the run that writes `journal`."""
    return journal.with_name(f".{journal.name}.lock")


def read_journals(root: Path) -> list[Journal]:
    """All journals of an unfinished folder. Raises OutputError for one that is not ours or is damaged."""
    return [_read_journal(path) for path in sorted((root / "sm70").glob("journal*.jsonl"))]


def _read_journal(path: Path) -> Journal:
    """One journal. A last line that is not whole was cut by a crash and does not count."""
    try:
        if path.is_symlink():
            raise ValueError("a journal is appended to, and nothing is written through a symlink")
        lines = read_small(path, path.name).split(b"\n", MAX_LINES)
        head = load_object(lines[0], path.name, error=OutputError)
        if b"\n" in lines[-1] or not has_form(head, _HEAD_FORM):
            raise ValueError("too long, or another form")
        records = [_read_record(line, path.name) for line in lines[1:-1]]
        for bank in (b for record in records for b in record.banks):
            check_relative(bank.path)
        outputs = tuple(check_relative(o) for o in head["outputs"])
        return Journal(
            path,
            head["plan"],
            head["source"],
            names.parse_ranges(head["layers"]),
            outputs,
            tuple(records),
        )
    except (Sm70Error, ValueError):
        raise OutputError(
            Problem(
                "is damaged, or no journal of this tool",
                file=f"sm70/{path.name}",
                hint="start over with another --out",
            )
        ) from None


def _read_record(line: bytes, file: str) -> LayerRecord:
    record = load_object(line, file, error=OutputError)
    if not has_form(record, RECORD_FORM):
        raise ValueError("another form")
    return LayerRecord.from_json(record)


def _refuse_foreign_lock(path: Path) -> None:
    """Some versions of filelock follow a symlink, and all truncate what is there."""
    with suppress(FileNotFoundError):
        info = path.lstat()
        if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
            raise OSError(errno.EEXIST, "it is no lock file of this tool")


@contextmanager
def locked(path: Path, *, wait: float = 0) -> Iterator[None]:
    """Holds a lock that ends with the process. Raises OutputError if another run holds it.

    The lock file goes with the lock, so that a sealed folder holds none; who got a removed one tries again.
    """
    lock = FileLock(path, timeout=wait)
    try:
        _refuse_foreign_lock(path)
        lock.acquire()
        while not path.exists():
            lock.release()
            lock.acquire()
    except Timeout:
        raise OutputError(
            Problem(
                "another run is working on this folder",
                file=f"sm70/{path.name}",
                hint="wait for the other run, or stop it",
            )
        ) from None
    except OSError as exc:
        raise OutputError(Problem(f"cannot be locked: {exc.strerror}", file=f"sm70/{path.name}")) from exc
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()


@contextmanager
def open_folder(plan: Plan, out: Path, *, overwrite: bool) -> Iterator[OpenFolder]:
    """Takes `out` for this run: fresh, resumed, one more TP size for a sealed one, or nothing to do.

    Raises OutputError if it belongs to another plan, to nobody, or to a run that is still going.
    """
    root = Path(os.path.realpath(out))
    refuse_overlap(plan, root)
    _refuse_foreign(root, overwrite=overwrite)
    make_folder(root, root)
    make_folder(root, root / "sm70")
    with ExitStack() as held:
        with locked(root / _FOLDER_LOCK, wait=5):
            if overwrite:
                _remove_ours(root)
            folder = _decide(plan, root)
            if folder.todo:
                held.enter_context(_register(plan, folder))
        yield folder


def _decide(plan: Plan, root: Path) -> OpenFolder:
    identity = plan_identity(plan)
    sealed = read_manifest(root, error=OutputError) if (root / MANIFEST).exists() else None
    if sealed and (field := difference(sealed.identity, identity)):
        raise other_plan(MANIFEST, field)
    if sealed and all(set(j.plan["tp_sizes"]) <= set(sealed.tp_sizes) for j in read_journals(root)):
        close_journals(root)  # a run that was stopped between its seal and this
    todo = tuple(t for t in sorted(plan.tp_sizes) if sealed is None or t not in sealed.tp_sizes)
    return OpenFolder(root, journal_plan(plan, todo), sealed, todo)


def journal_plan(plan: Plan, tp_sizes: tuple[int, ...]) -> dict[str, Any]:
    """What the journals of one run's parts must agree on: the identity, the TP sizes, and that no shard was touched since.

    A hub snapshot is held by its commit instead of times, which differ from cache to cache.
    """
    local = plan.checkpoint.repo is None
    mtimes = {name: shard.mtime_ns for name, shard in sorted(plan.checkpoint.shards.items())} if local else {}
    return {**plan_identity(plan), "tp_sizes": list(tp_sizes), "mtimes": mtimes}


@contextmanager
def _register(plan: Plan, folder: OpenFolder) -> Iterator[None]:
    """Locks this run's part, takes over what earlier runs finished, and opens the journal."""
    journal = folder.root / journal_name(plan)
    with locked(lock_path(journal)):
        for other in read_journals(folder.root):
            if field := difference(other.plan, folder.plan):
                if other.records or folder.sealed is None:
                    raise other_plan(f"sm70/{other.path.name}", field)
                _forget(other, ours=journal)
                continue
            if other.path != journal and set(other.layers) & set(plan.selected):
                with locked(lock_path(other.path)):
                    pass
            for record in other.records:
                whole = {b.path for b in record.banks} == layer_bank_paths(record.layer, folder.todo)
                intact = whole and all(is_intact(folder.root, b, plan.options.hash) for b in record.banks)
                if record.layer in plan.selected and intact:
                    folder.done[record.layer] = record
        if not journal.exists():
            head = {
                "plan": folder.plan,
                "source": str(plan.checkpoint.folder.resolve()),
                "layers": names.format_ranges(plan.selected),
                "outputs": output_names(plan),  # so that --overwrite knows what is ours
            }
            write_small(folder.root, f"sm70/{journal.name}", canonical(head) + b"\n", HASHES[plan.options.hash])
        else:
            _cut_torn_line(journal)
        folder.journal = journal
        yield


def _forget(other: Journal, *, ours: Path) -> None:
    """Removes the journal of an addition to a sealed folder that ended before its first layer: it binds nobody."""
    with nullcontext() if other.path == ours else locked(lock_path(other.path)):
        other.path.unlink()


def _cut_torn_line(journal: Path) -> None:
    """Removes what a crash left of a line, so that the next one starts on a line of its own."""
    data = journal.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        os.truncate(journal, whole)


def is_intact(root: Path, record: FileRecord, hash_name: str) -> bool:
    """Whether a journaled bank is there, through no symlink, with the size and the digest that its line says."""
    path = root / record.path
    try:
        return (
            _is_real(path)
            and path.lstat().st_size == record.bytes
            and measure(path, record.path, HASHES[hash_name]) == record
        )
    except (OSError, IntegrityError):
        return False


def _is_real(path: Path) -> bool:
    """Whether no symlink is in `path`, which is below a folder without any."""
    return os.path.realpath(path) == str(path)


def refuse_overlap(plan: Plan, root: Path) -> None:
    """The output may neither be, nor lie in, nor hold the checkpoint's folder."""
    source = plan.checkpoint.folder.resolve()
    if root == source or source in root.parents or root in source.parents:
        raise OutputError(
            Problem("output and checkpoint overlap", file=str(root), hint=f"give an --out outside {source}")
        )


def _refuse_foreign(root: Path, *, overwrite: bool) -> None:
    """Refuses a folder with contents that no run of this tool left there."""
    try:
        entries = sorted(p.name for p in root.iterdir()) if os.path.lexists(root) else []
    except OSError as exc:
        raise OutputError(Problem(f"cannot be read as a folder: {exc.strerror}", file=str(root))) from exc
    state = root / "sm70"
    if not entries or (state / "manifest.json").exists() or any(state.glob("journal*.jsonl")):
        return
    if entries == ["sm70"] and all(_OUR_NAMES.fullmatch(p.name) for p in state.iterdir()):
        return
    message = "is not empty, and holds no manifest or journal of this tool"
    if overwrite:
        message += " that would say what --overwrite may remove"
    raise OutputError(Problem(message, file=str(root), hint="give a new or empty folder as --out"))


def _remove_ours(root: Path) -> None:
    """Removes what a manifest or journal here names, and our temporary files; nothing else."""
    paths: set[str] = set()
    try:
        if (root / MANIFEST).exists():
            paths.update(read_manifest(root, error=OutputError).files, ("SHA256SUMS",))
        for journal in read_journals(root):
            paths.update(journal.outputs)
            paths.update(b.path for record in journal.records for b in record.banks)
            with locked(lock_path(journal.path)):
                pass
    except Sm70Error as exc:
        raise OutputError(
            Problem(
                f"--overwrite cannot tell which files are ours: {exc}",
                file=str(root),
                hint="remove the folder yourself if it may go, or give another --out",
            )
        ) from exc
    for path in sorted(paths):
        if not _is_real((root / path).parent):
            message = "lies behind a symlink, so --overwrite does not remove it"
            raise OutputError(Problem(message, file=path, hint="remove the symlink, or give another --out"))
    foreign = sorted(n for n in _files(root) if n not in paths and n != MANIFEST and not is_own_state(n))
    if foreign:
        message = f"holds files that this tool did not write: {', '.join(foreign[:5])}"
        raise OutputError(
            Problem(message, file=str(root), hint="move them away, or give another --out; nothing was removed")
        )
    with writing(str(root)):
        # The manifest first: from here on the folder is not loadable.
        for path in (MANIFEST, *sorted(paths)):
            (root / path).unlink(missing_ok=True)
        for leftover in temporary_files(root):
            leftover.unlink(missing_ok=True)
        for journal_path in (root / "sm70").glob("journal*.jsonl"):
            journal_path.unlink()
        for folder in sorted((p for p in root.glob("sm70/tp*/rank*") if not any(p.iterdir())), reverse=True):
            folder.rmdir()
        for folder in (p for p in root.glob("sm70/tp*") if not any(p.iterdir())):
            folder.rmdir()


def _files(root: Path) -> Iterator[str]:
    """Everything in the folder that is no real folder, as relative paths."""
    for folder, folders, files in os.walk(root):
        links = [f for f in folders if (Path(folder) / f).is_symlink()]
        for name in (*files, *links):
            yield (Path(folder) / name).relative_to(root).as_posix()


def is_own_state(path: str) -> bool:
    """Whether `path` is a journal, a lock or a temporary file of ours."""
    name = Path(path).name
    in_state = Path(path).parent == Path("sm70")
    return (name.startswith(".") and name.endswith(TEMPORARY)) or (in_state and _OUR_NAMES.fullmatch(name) is not None)


def temporary_files(root: Path) -> Iterator[Path]:
    """What killed runs left: our temporary files, in the folders that we write to."""
    for folder, folders, files in os.walk(root):
        folders.sort()
        for file in files:
            if file.startswith(".") and file.endswith(TEMPORARY):
                yield Path(folder) / file


@contextmanager
def sealing(root: Path, own: Sequence[Path]) -> Iterator[None]:
    """Holds the whole folder: no part may still be going, apart from the run that seals."""
    with ExitStack() as held:
        held.enter_context(locked(root / _FOLDER_LOCK, wait=5))
        for path in sorted((root / "sm70").glob("journal*.jsonl")):
            if path not in own:
                held.enter_context(locked(lock_path(path)))
        yield


def close_journals(root: Path) -> None:
    """After the seal: removes the journals, so that only what the manifest names is left."""
    with writing("sm70"):
        for path in (root / "sm70").glob("journal*.jsonl"):
            path.unlink()
        sync_folder(root / "sm70")
