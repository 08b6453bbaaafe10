"""Stopped runs: what resumes, what is refused, what stays sealed, and how signals end a run."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from made import Made, awq, bf16, tensor
from sm70_convert.bank import BankWriter
from sm70_convert.cli import main
from sm70_convert.errors import OutputError
from sm70_convert.experts import ExpertReader
from sm70_convert.journal import OpenFolder
from sm70_convert.lock import locked

INTERRUPTED = "error: interrupted\nnext: run the same command again: it resumes\n"
UNFINISHED = "warning: a run on this folder was stopped or is still going: what it has made so far is not verified\n"
VISUAL = "visual.safetensors"  # passes through whole


def run(*arguments: object, code: int = 0) -> Result:
    device = ("--device", "cpu") if "--out" in arguments else ()
    result = CliRunner().invoke(main, [str(a) for a in (*arguments, *device)])
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    return result


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def checkpoint(**shape: int) -> Made:
    made = awq(**{"layers": 2, "shards": 2, **shape})
    made.add("model.visual.weight", tensor("BF16", (8, 8), bf16([0.5])), VISUAL)
    return made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return checkpoint().write(tmp_path / "model")


def stopped(
    monkeypatch: pytest.MonkeyPatch, *arguments: object, at: int = 2, before: Callable[[], object] = lambda: None
) -> Result:
    """A run that is interrupted when its at-th layer is to be recorded: its banks are there, the journal says nothing of them."""
    record, calls = OpenFolder.record, 0

    def interrupted(self: OpenFolder, layer: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            before()
            raise KeyboardInterrupt
        record(self, layer)

    with monkeypatch.context() as patch:
        patch.setattr(OpenFolder, "record", interrupted)
        return run(*arguments, "--jobs", 1, code=130)


# What was sealed


def test_an_addition_that_is_stopped_leaves_what_was_sealed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run(model, "--out", out)
    before = contents(out)
    stopped(monkeypatch, model, "--out", out, "--tp-size", 2)
    now = contents(out)
    assert before.items() < now.items()
    assert any(name.startswith("sm70/tp2/") for name in now)
    assert run("verify", out).stderr == UNFINISHED
    assert run("verify", out, "--source", model).stderr == UNFINISHED
    run(model, "--out", out, "--tp-size", 2)
    assert run("verify", out).stderr == ""


def test_a_stray_bank_of_no_addition_is_still_found(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run(model, "--out", out)
    stopped(monkeypatch, model, "--out", out, "--tp-size", 2)
    stray = out / "sm70/tp4/rank0/layer-00000.safetensors"
    stray.parent.mkdir(parents=True)
    stray.touch()
    assert "error: sm70/tp4/rank0/layer-00000.safetensors: is not named" in run("verify", out, code=6).stderr


def test_an_addition_that_never_began_binds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoint(intermediate=128).write(tmp_path / "model")
    out = tmp_path / "out"
    run(model, "--out", out)
    stopped(monkeypatch, model, "--out", out, "--tp-size", 2, at=1)
    assert any((out / "sm70/tp2").rglob("*.safetensors"))
    run(model, "--out", out, "--tp-size", 4)
    run("verify", out)
    assert not any((out / "sm70").rglob("tp2/*/*"))


def test_an_addition_that_has_a_layer_binds_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoint(intermediate=128).write(tmp_path / "model")
    out = tmp_path / "out"
    run(model, "--out", out)
    stopped(monkeypatch, model, "--out", out, "--tp-size", 2)
    refused = run(model, "--out", out, "--tp-size", 4, code=5)
    assert "sm70/journal.jsonl: belongs to another plan: tp_sizes differs: expected [2], found [4]" in refused.stderr


# Sources that are not the same


def test_other_weights_behind_the_same_headers_are_not_called_complete(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(model, "--out", out)
    other = checkpoint()
    for name in [n for n in other.tensors if n.endswith("gate_proj.qzeros") and ".layers.1." in n]:
        other.change(name, data=b"\5")
    other.write(tmp_path / "other")
    refused = run(tmp_path / "other", "--out", out, code=5)
    assert refused.stderr.startswith(
        "error: model.layers.1.mlp.experts.{expert}.gate_proj.qzeros: differs from what this folder was made of: expected "
    )
    for path in model.iterdir():
        os.utime(path, ns=(1, 1))  # the very weights, copied
    assert "only a sample was compared" in run(model, "--out", out).stderr


@pytest.mark.parametrize("layers", [(), ("--layers", "0-1")])
def test_a_source_that_changes_before_a_layer_is_recorded_is_3(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: tuple[str, ...]
) -> None:
    read = ExpertReader.read

    def then_touched(self: ExpertReader, expert: int) -> Any:
        os.utime(model / VISUAL, ns=(1, 1))
        return read(self, expert)

    monkeypatch.setattr(ExpertReader, "read", then_touched)
    result = run(model, "--out", tmp_path / "out", *layers, code=3)
    assert result.stderr.startswith(f"error: {VISUAL}: changed while it was converted: expected ")
    journal = next((tmp_path / "out/sm70").glob("journal*.jsonl"))
    assert journal.read_bytes().count(b"\n") == 1  # its head alone


def test_a_shard_that_is_replaced_by_an_equal_one_is_3(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replaced() -> None:
        shutil.copy2(model / VISUAL, tmp_path / "copy")
        (tmp_path / "copy").replace(model / VISUAL)

    monkeypatch.setattr("sm70_convert.seal.dropped_records", lambda _: pytest.fail("was sealed"))
    read = ExpertReader.read
    monkeypatch.setattr(ExpertReader, "read", lambda self, expert: (replaced(), read(self, expert))[1])
    result = run(model, "--out", tmp_path / "out", "--jobs", 1, code=3)
    assert result.stderr == (
        f"error: {VISUAL}: was replaced while it was converted\n"
        "next: let the checkpoint rest, then start over with --overwrite\n"
    )


@pytest.mark.parametrize("mode", ["hardlink", "symlink"])
def test_a_link_that_a_killed_run_left_is_not_written_through(model: Path, tmp_path: Path, mode: str) -> None:
    out, before = tmp_path / "out", contents(model)
    run(model, "--out", out, "--layers", "0-1")
    left = out / f".{VISUAL}.sm70-tmp"
    if mode == "hardlink":
        left.hardlink_to(model / VISUAL)
    else:
        left.symlink_to(model / VISUAL)
    run("seal", out)
    assert contents(model) == before
    assert (out / VISUAL).stat().st_nlink == 1
    run("verify", out)


def test_a_folder_of_the_source_that_cannot_be_listed_is_3(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "assets").mkdir()
    (model / "assets/notes.txt").touch()
    scandir = os.scandir

    def failing(path: Any) -> Any:
        if str(path).endswith("/assets"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    result = run(model, "--out", tmp_path / "out", code=3)
    assert result.stderr.splitlines()[0] == f"error: {model}: cannot be read: Permission denied"


# Starting over


def test_starting_over_that_is_stopped_resumes_without_the_option(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run(model, "--out", out, "--hash", "sha256")
    stopped_run = stopped(monkeypatch, model, "--out", out, "--tp-size", 2, "--overwrite")
    assert stopped_run.stderr == (
        "error: interrupted\nnext: run the same command again without --overwrite: it resumes\n"
    )
    run(model, "--out", out, "--tp-size", 2)
    run(model, "--out", tmp_path / "clean", "--tp-size", 2)
    assert contents(out) == contents(tmp_path / "clean")


def test_overwrite_takes_a_bank_that_was_never_recorded_for_ours(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    stopped(monkeypatch, model, "--out", out, "--tp-size", 2, at=1)
    run(model, "--out", out, "--overwrite")
    run("verify", out)


# Locks


def test_a_lock_file_that_nobody_holds_stops_nobody_and_is_not_sealed(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out/sm70").mkdir(parents=True)
    for name in (".folder.lock", ".journal.jsonl.lock", ".journal-0.jsonl.lock"):
        (tmp_path / "out/sm70" / name).touch()
    run(model, "--out", tmp_path / "out")
    assert [p.name for p in (tmp_path / "out/sm70").iterdir() if p.is_file()] == ["manifest.json"]


def test_a_lock_that_goes_while_it_is_taken_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that held it removes it at its end, and a third one may have made another since."""
    path, flock, inodes = tmp_path / "lock", fcntl.flock, []

    def removed(fd: int, how: int) -> None:
        inodes.append(os.fstat(fd).st_ino)
        if len(inodes) == 1:
            path.rename(tmp_path / "old")  # its inode must stay in use to tell the two apart
        if len(inodes) == 2:
            path.rename(tmp_path / "older")
            path.touch()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", removed)
    with locked(path):
        assert len(inodes) == 3
        assert path.stat().st_ino == inodes[2]
        with pytest.raises(OutputError, match="another run is working on this folder"), locked(path):
            pass
        assert path.exists()
    assert not path.exists()


# Signals


def test_more_signals_do_not_disturb_the_cleaning_up(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    discard = BankWriter.discard

    def disturbed(self: BankWriter) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        discard(self)

    monkeypatch.setattr(BankWriter, "discard", disturbed)
    monkeypatch.setattr(BankWriter, "commit", lambda _: os.kill(os.getpid(), signal.SIGINT))
    assert run(model, "--out", tmp_path / "out", "--jobs", 2, code=130).stderr == INTERRUPTED
    assert list((tmp_path / "out").rglob(".*")) == []


def test_a_signal_is_not_taken_for_a_damaged_journal(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(model, "--out", tmp_path / "out", "--layers", 0)

    def terminated(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("sm70_convert.journal.LayerRecord.from_json", terminated)
    result = run("seal", tmp_path / "out", code=143)
    assert result.stderr == "error: terminated\nnext: run the same command again: it resumes\n"


def test_a_signal_that_comes_where_nothing_can_be_raised_says_nothing_and_the_next_one_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Deaf:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    def described(_: Path) -> None:
        Deaf()
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("sm70_convert.describe.describe_path", described)
    assert run("inspect", ".", code=130).stderr == INTERRUPTED


def test_a_signal_that_is_ignored_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shell starts commands in the background, or nohup does."""
    monkeypatch.setattr(
        "sm70_convert.describe.describe_path", lambda _: (os.kill(os.getpid(), signal.SIGINT), ({}, []))[1]
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run("inspect", ".")
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


IMPATIENT = "import os, signal\nfor _ in range(5):\n    os.kill(os.getpid(), signal.{0})\nassert False\n"


def with_module(folder: Path, name: str, text: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own, where `import name` runs `text`."""
    folder.mkdir()
    (folder / f"{name}.py").write_text(text)
    path = os.pathsep.join([str(folder), *sys.path])
    command = [sys.executable, "-m", "sm70_convert", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, timeout=60)


@pytest.mark.parametrize(("number", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_signals_while_modules_are_loading_are_no_traceback(
    model: Path, tmp_path: Path, number: str, code: int, word: str
) -> None:
    run(model, "--out", tmp_path / "out")
    arguments = ("verify", tmp_path / "out", "--source", model)
    done = with_module(tmp_path / "site", "torch", IMPATIENT.format(number), *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == f"error: {word}\nnext: run the same command again: it resumes\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_before_the_command_line_is_loaded_just_end_it(tmp_path: Path, number: signal.Signals) -> None:
    done = with_module(tmp_path / "site", "click", IMPATIENT.format(number.name), "--version")
    assert (done.returncode, done.stdout, done.stderr) == (-number, "", "")


# Memory


@pytest.mark.parametrize(
    "exc",
    [
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        OSError("libtorch_cpu.so: failed to map segment from shared object"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("can't start new thread"),
        SystemError("<built-in function f> returned NULL without setting an exception"),
    ],
    ids=repr,
)
def test_every_way_of_saying_that_memory_is_out_is_5(exc: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(_: Path) -> None:
        raise exc

    monkeypatch.setattr("sm70_convert.describe.describe_path", raises)
    assert run("inspect", ".", code=5).stderr.startswith("error: out of memory\nnext: use fewer --jobs")


def test_memory_that_is_out_while_a_file_is_read_is_not_the_file(model: Path, tmp_path: Path) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", no_memory)
        assert "error: out of memory" in run(model, "--out", tmp_path / "out", code=5).stderr


# Durability


def test_a_folder_is_synced_where_it_was_made(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bank is there after a power failure only if every folder above it is."""
    events: list[tuple[str, str]] = []
    fsync, mkdir = os.fsync, os.mkdir

    def synced(fd: int) -> None:
        events.append(("sync", str(Path(f"/proc/self/fd/{fd}").readlink())))
        fsync(fd)

    def made(path: Any, *args: Any, **options: Any) -> None:
        mkdir(path, *args, **options)
        events.append(("make", str(path)))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "mkdir", made)
    run(model, "--out", tmp_path / "a/out", "--tp-size", 2, "--jobs", 1)
    folders = [path for what, path in events if what == "make"]
    assert [Path(f).relative_to(tmp_path).as_posix() for f in folders] == [
        "a", "a/out", "a/out/sm70", "a/out/sm70/tp2", "a/out/sm70/tp2/rank0", "a/out/sm70/tp2/rank1",
    ]  # fmt: skip
    for folder in folders:
        after = events[events.index(("make", folder)) + 1]
        assert after == ("sync", str(Path(folder).parent))
