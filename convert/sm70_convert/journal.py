"""The journal of an unfinished folder, and the decision: fresh, resume, add, done or refuse."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm70_convert import names
from sm70_convert.bank import (
    HASHES,
    MEND,
    TEMPORARY,
    FileRecord,
    bank_of,
    check_relative,
    layer_bank_paths,
    make_folder,
    measure,
    remove,
    sync_folder,
    write_small,
    writing,
)
from sm70_convert.checkpoint import read_small, reading, walk
from sm70_convert.errors import IntegrityError, OutputError, Problem, Sm70Error
from sm70_convert.lock import locked
from sm70_convert.manifest import (
    IDENTITY_FORM,
    MANIFEST,
    RECORD_FORM,
    SUMS,
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

    def names_bank(self, path: str) -> bool:
        """Whether `path` is a bank that this journal's run makes, recorded or not."""
        bank = bank_of(path)
        return bank is not None and bank[0] in self.plan["tp_sizes"] and bank[1] < bank[0] and bank[2] in self.layers

    def names(self, path: str) -> bool:
        """Whether this journal's run may have written `path`, or was to remove it."""
        return path in self.outputs or self.names_bank(path)


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
        line = memoryview(canonical(record.as_json()) + b"\n")
        with writing(f"sm70/{self.journal.name}"):
            fd = os.open(self.journal, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                while line:
                    line = line[os.write(fd, line) :]
                os.fsync(fd)
            finally:
                os.close(fd)
        self.done[record.layer] = record


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
    except (Sm70Error, ValueError) as exc:
        if isinstance(exc.__cause__, OSError):
            message = f"cannot be read: {exc.__cause__.strerror}"
            raise OutputError(Problem(message, file=f"sm70/{path.name}", hint=MEND)) from exc.__cause__
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
                _start_over(plan, root)
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
        for path in _lock_files(root):
            with suppress(OutputError), locked(path):
                pass
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
                _forget(folder, other, ours=journal)
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
            _write_head(plan, folder.root, folder.todo)
        else:
            _cut_torn_line(journal)
        folder.journal = journal
        yield


def _write_head(plan: Plan, root: Path, tp_sizes: tuple[int, ...], stale: Sequence[str] = ()) -> Path:
    """Begins the journal of this run. Besides banks, --overwrite and the seal may remove what its `outputs` name."""
    sums = [SUMS] if plan.options.hash == "sha256" else []
    head = {
        "plan": journal_plan(plan, tuple(sorted(tp_sizes))),
        "source": str(plan.checkpoint.folder.resolve()),
        "layers": names.format_ranges(plan.selected),
        "outputs": sorted({*output_names(plan), *sums, *stale}),
    }
    write_small(root, journal_name(plan), canonical(head) + b"\n", HASHES[plan.options.hash])
    return root / journal_name(plan)


def _forget(folder: OpenFolder, other: Journal, *, ours: Path) -> None:
    """Removes the journal of an addition to a sealed folder that ended before its first layer: it binds nobody."""
    with nullcontext() if other.path == ours else locked(lock_path(other.path)), writing(f"sm70/{other.path.name}"):
        kept = folder.sealed.files if folder.sealed else {}
        for path in [p for p in _files(folder.root) if other.names_bank(p) and p not in kept]:
            remove(folder.root, path)  # renamed, but not recorded before the end
        remove(folder.root, f"sm70/{other.path.name}")


def _cut_torn_line(journal: Path) -> None:
    """Removes what a crash left of a line, so that the next one starts on a line of its own."""
    with writing(f"sm70/{journal.name}"):
        data = journal.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            os.truncate(journal, whole)


def is_intact(root: Path, record: FileRecord, hash_name: str) -> bool:
    """Whether a journaled bank is there, through no symlink, with the size and the digest that its line says."""
    path = root / record.path
    try:
        return (
            is_real(path)
            and path.lstat().st_size == record.bytes
            and measure(path, record.path, HASHES[hash_name]) == record
        )
    except (OSError, IntegrityError):
        return False


def is_real(path: Path) -> bool:
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
        state = root / "sm70"
        if not entries or (state / "manifest.json").exists() or any(state.glob("journal*.jsonl")):
            return
        if entries == ["sm70"] and all(_OUR_NAMES.fullmatch(p.name) for p in state.iterdir()):
            return
    except OSError as exc:
        raise OutputError(Problem(f"cannot be read as a folder: {exc.strerror}", file=str(root))) from exc
    message = "is not empty, and holds no manifest or journal of this tool"
    if overwrite:
        message += " that would say what --overwrite may remove"
    raise OutputError(Problem(message, file=str(root), hint="give a new or empty folder as --out"))


def _start_over(plan: Plan, root: Path) -> None:
    """Removes what a manifest or journal here names, and our temporary files; nothing else.

    The new journal comes first and names all that goes, so that a run that is stopped in between can be resumed.
    """
    try:
        sealed = read_manifest(root, error=OutputError) if (root / MANIFEST).exists() else None
        journals = read_journals(root)
    except Sm70Error as exc:
        message = f"--overwrite cannot tell which files are ours: {exc}"
        hint = "remove the folder yourself if it may go, or give another --out"
        raise OutputError(Problem(message, file=str(root), hint=hint)) from exc
    if not sealed and not journals:
        return
    for journal in journals:
        with locked(lock_path(journal.path)):
            pass
    named = {*sealed.files, SUMS} if sealed else set()
    written = {b.path for journal in journals for record in journal.records for b in record.banks}
    for path in sorted(named.union(written, *(journal.outputs for journal in journals))):
        if not is_real((root / path).parent):
            message = "lies behind a symlink, so --overwrite does not remove it"
            raise OutputError(Problem(message, file=path, hint="remove the symlink, or give another --out"))
    with writing(str(root)):
        there = sorted(n for n in _files(root) if n != MANIFEST and not is_own_state(n))
    foreign = [n for n in there if n not in named and not any(journal.names(n) for journal in journals)]
    if foreign:
        message = f"holds files that this tool did not write: {', '.join(foreign[:5])}"
        raise OutputError(
            Problem(message, file=str(root), hint="move them away, or give another --out; nothing was removed")
        )
    ours = _write_head(plan, root, plan.tp_sizes, there)
    with writing(str(root)):
        for journal in journals:
            if journal.path != ours:
                remove(root, f"sm70/{journal.path.name}")
        remove(root, MANIFEST)  # from here on the folder is not loadable
        for path in [*there, *temporary_files(root)]:
            remove(root, path)
        for folder in [*root.glob("sm70/tp*/rank*"), *root.glob("sm70/tp*")]:
            if not any(folder.iterdir()):
                folder.rmdir()


def _files(root: Path) -> Iterator[str]:
    """Everything in the folder that is no real folder, as relative paths."""
    for folder, folders, files in walk(root):
        links = [f for f in folders if (Path(folder) / f).is_symlink()]
        for name in (*files, *links):
            yield (Path(folder) / name).relative_to(root).as_posix()


def is_own_state(path: str) -> bool:
    """Whether `path` is a journal, a lock or a temporary file of ours."""
    name = Path(path).name
    in_state = Path(path).parent == Path("sm70")
    return (name.startswith(".") and name.endswith(TEMPORARY)) or (in_state and _OUR_NAMES.fullmatch(name) is not None)


def temporary_files(root: Path) -> Iterator[str]:
    """What killed runs left: our temporary files, in the folders that we write to, as relative paths."""
    for folder, folders, files in walk(root):
        folders.sort()
        for file in files:
            if file.startswith(".") and file.endswith(TEMPORARY):
                yield (Path(folder) / file).relative_to(root).as_posix()


@contextmanager
def sealing(root: Path, own: Sequence[Path]) -> Iterator[None]:
    """Holds the whole folder: no part may still be going, apart from the run that seals."""
    with ExitStack() as held:
        held.enter_context(locked(root / _FOLDER_LOCK, wait=5))
        # Also those that a killed run left without a journal: they go with this.
        locks = {*map(lock_path, (root / "sm70").glob("journal*.jsonl")), *_lock_files(root)}
        for path in sorted(locks - set(map(lock_path, own))):
            held.enter_context(locked(path))
        yield


def _lock_files(root: Path) -> list[Path]:
    return sorted((root / "sm70").glob(".journal*.jsonl.lock"))


def close_journals(root: Path) -> None:
    """After the seal: removes the journals, so that only what the manifest names is left."""
    with writing("sm70"):
        for path in sorted((root / "sm70").glob("journal*.jsonl")):
            remove(root, f"sm70/{path.name}")
        sync_folder(root / "sm70")


def unfinished(folder: Path) -> list[Journal]:
    """The journals in a sealed folder: of an addition that was stopped or is still going. None that are damaged count."""
    with reading("sm70", error=IntegrityError, hint="mend the disk (or the rights), then run the same command again"):
        try:
            return read_journals(folder)
        except OutputError:
            return []
