"""What `pip install .` makes with a C++ compiler and without one, and that either converts."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from sm70_kernels import cpu

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "tiny-qwen3moe-awq"
LIBRARY = "sm70_kernels/cpu/libsm70_cpu.so"


def build(tmp_path: Path, **environment: str) -> Path:
    """A wheel of the sources alone, so that nothing an earlier build left gets in."""
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("not a git repository")
    source = tmp_path / "source"
    for name in filter(None, listed.stdout.decode().split("\0")):
        if name.startswith(("convert/", "kernels/")) or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path / "dist"), "."]
    made = subprocess.run(command, cwd=source, env={**os.environ, **environment}, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """The tool of a new environment that has this wheel, and what it needs from the one of this run."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)  # a wheel is installed by being unpacked
    ours = [p for p in sys.path if p.endswith("site-packages")]
    (site / "needs.pth").write_text("\n".join(ours))
    return folder / "bin" / "python"


def convert(python: Path, out: Path) -> str:
    """Converts and verifies the example; returns which kernels there were. No compiler is on its PATH."""
    script = (
        "import sys; from sm70_kernels import cpu; from sm70_convert.cli import main; print(cpu.__file__, cpu.available());"
        "main(sys.argv[1:], standalone_mode=False)"
    )
    environment = {"PATH": "/nonexistent", "HOME": str(out.parent)}
    for arguments in (
        [str(EXAMPLE), "--out", str(out), "--tp-size", "2"],
        ["verify", str(out), "--source", str(EXAMPLE)],
    ):
        run = subprocess.run(
            [str(python), "-c", script, *arguments], cwd=out.parent, env=environment, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        where, available = run.stdout.split("\n", 1)[0].split()
        assert Path(where).is_relative_to(python.parent.parent)
    return available


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_wheel_with_and_one_without_the_library_convert_alike(tmp_path: Path) -> None:
    made = {}
    for name, environment in (("compiler", {}), ("none", {"CC": "/bin/false", "CXX": "/bin/false"})):
        if name == "compiler" and not cpu.available():
            continue
        wheel = build(tmp_path / name, **environment)
        with zipfile.ZipFile(wheel) as archive:
            assert (LIBRARY in archive.namelist()) == (name == "compiler")
        assert wheel.name.endswith("-py3-none-any.whl") == (name == "none")
        out = tmp_path / name / "out"
        assert convert(install(wheel, tmp_path / name / "venv"), out) == str(name == "compiler")
        made[name] = files(out)
    assert len(made["none"]) > 10
    assert made.get("compiler", made["none"]) == made["none"]


def test_the_conversion_tests_pass_on_numpy_alone(tmp_path: Path) -> None:
    if not cpu.available():
        pytest.skip("they run so anyway: the C++ kernel is not built")
    wheel = build(tmp_path, CC="/bin/false", CXX="/bin/false")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    check = "import sys, sm70_kernels.cpu as c; assert not c.available() and c.__file__.startswith(sys.argv[1])"
    cases = ["tests/test_golden_folders.py", "tests/test_real_checkpoints.py", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, "-c", f"{check}; import pytest; sys.exit(pytest.main({cases!r}))", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert " passed" in run.stdout.rsplit("\n", 2)[-2]
    assert " skipped" not in run.stdout.rsplit("\n", 2)[-2]
