"""Limits of the system: a disk that fills up for real, files that may not grow, and too little memory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from made import awq

# Without the check beforehand, which would refuse a disk that is too small.
UNCHECKED = (
    "import sm70_convert.estimate as e; e.check_room = lambda *_: None; from sm70_convert.__main__ import main; main()"
)
OUT_OF_MEMORY = (
    "error: out of memory\n"
    "next: use fewer --jobs, or raise the limit (ulimit -v, the container's), then run the same command again\n"
)
NAMESPACE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]


def run(*arguments: object, limit: Callable[[], object] | None = None) -> subprocess.CompletedProcess[str]:
    device = ("--device", "cpu") if "--out" in arguments else ()
    command = [sys.executable, "-m", "sm70_convert", *map(str, (*arguments, *device))]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, preexec_fn=limit)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of 0.4 MB."""
    return awq(layers=2, hidden=256, intermediate=256).write(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run without limits makes of it."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert run(model, "--out", out, "--tp-size", 2).returncode == 0
    return contents(out)


def can_mount(folder: Path) -> bool:
    command = [*NAMESPACE, "mount", "-t", "tmpfs", "-o", "size=1m", "none", folder]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


# Of the bytes that are needed: the disk is full at the journal, in a bank, in what passes through, at the manifest.
@pytest.mark.parametrize("percent", [0.2, 2, 20, 40, 60, 80, 95, 99])
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_full_disk_is_5_and_more_room_lets_it_resume(
    model: Path, whole: dict[str, bytes], tmp_path: Path, percent: float, jobs: int
) -> None:
    if not can_mount(tmp_path):
        pytest.skip("no tmpfs can be mounted here, neither as root nor in a namespace of one's own")
    disk, copied = tmp_path / "disk", tmp_path / "copied"
    disk.mkdir()
    size = int(sum(len(data) for data in whole.values()) * percent / 100)
    script = """
        mount -t tmpfs -o size=$1 none "$2"
        "$PYTHON" -c "$UNCHECKED" "$3" --out "$2/out" --tp-size 2 --device cpu --jobs "$4"; echo $?
        ls "$2/out/sm70/manifest.json" 2>&1
        find "$2" -name '.*sm70-tmp'
        mount -o remount,size=64m "$2"
        "$PYTHON" -c "$UNCHECKED" "$3" --out "$2/out" --tp-size 2 --quiet; echo $?
        cp -r "$2/out" "$5"
    """
    done = subprocess.run(
        [*NAMESPACE, "sh", "-c", script, "sh", str(size), disk, model, str(jobs), copied],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHON": sys.executable, "UNCHECKED": UNCHECKED},
    )
    manifest = disk / "out/sm70/manifest.json"
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("5", "0"), (done.stdout, done.stderr)
    assert len(lines) == 3, lines  # no temporary file
    assert str(manifest) in lines[1]
    assert "No such file" in lines[1]
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert error.endswith(("cannot be written: No space left on device", "cannot be created: No space left on device"))
    assert hint == "next: free some space (or mend the disk), then run the same command again: it resumes"
    assert contents(copied) == whole


@pytest.mark.parametrize("kilobytes", [0, 4, 200])
def test_a_file_that_may_not_grow_is_5_and_resumes(
    model: Path, whole: dict[str, bytes], tmp_path: Path, kilobytes: int
) -> None:
    out = tmp_path / "out"
    size = kilobytes << 10
    done = run(
        model, "--out", out, "--tp-size", 2, limit=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    )
    assert done.returncode == 5
    assert done.stderr.splitlines()[0].endswith("cannot be written: File too large")
    assert len(done.stderr.splitlines()) == 2
    assert not (out / "sm70/manifest.json").exists()
    assert run(model, "--out", out, "--tp-size", 2).returncode == 0
    assert contents(out) == whole


def under(megabytes: int) -> Callable[[], object]:
    """A limit of address space, set in the child."""
    return lambda: resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))


# Python, click, numpy and torch each fail in a way of their own when they get no memory; where is not the same everywhere.
@pytest.mark.parametrize("megabytes", [24, 48, 72, 96, 104, 112, 120, 128, 136, 160, 1000])
def test_too_little_memory_is_5_with_a_next_step_or_enough(
    model: Path, whole: dict[str, bytes], tmp_path: Path, megabytes: int
) -> None:
    out = tmp_path / "out"
    done = run(model, "--out", out, "--tp-size", 2, "--jobs", 2, limit=under(megabytes))
    if done.returncode != 0:
        assert (done.returncode, done.stdout, done.stderr) == (5, "", OUT_OF_MEMORY)
        assert not (out / "sm70/manifest.json").exists()
        assert run(model, "--out", out, "--tp-size", 2).returncode == 0
    assert done.returncode == {24: 5, 1000: 0}.get(megabytes, done.returncode)
    assert contents(out) == whole


@pytest.mark.parametrize("megabytes", [100, 300, 600, 640, 680, 4000])
def test_too_little_memory_for_the_reference_is_5_with_a_next_step_or_enough(
    model: Path, tmp_path: Path, megabytes: int
) -> None:
    out = tmp_path / "out"
    assert run(model, "--out", out).returncode == 0
    done = run("verify", out, "--source", model, limit=under(megabytes))
    if done.returncode != 0:
        assert (done.returncode, done.stdout, done.stderr) == (5, "", OUT_OF_MEMORY)
    assert done.returncode == {100: 5, 4000: 0}.get(megabytes, done.returncode)
