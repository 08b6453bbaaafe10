"""The C++ kernel as it is built: under sanitizers, by other compilers, for other processors, and not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from expert_banks import allocate, random_awq, random_nvfp4
from sm70_kernels import cpu
from sm70_kernels.cpu import CppKernel
from sm70_kernels.spec import Projection

TESTS = Path(__file__).parent
KERNELS = TESTS.parent / "kernels"
SOURCE = KERNELS / "sm70_kernels" / "cpu" / "sm70_cpu.cpp"
FLAGS = [
    "-std=c++17",
    "-fno-exceptions",
    "-fno-rtti",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Wextra",
    "-Wconversion",
    "-Wno-sign-conversion",
    "-Werror",
]
compiler = os.environ.get("CXX", "c++").split()
needs_compiler = pytest.mark.skipif(shutil.which(compiler[0]) is None, reason="no C++ compiler")


def works() -> bool:
    return subprocess.run([*compiler, "--version"], capture_output=True).returncode == 0


@needs_compiler
def test_the_library_is_here_where_a_compiler_is() -> None:
    """So that no run of this suite passes over the kernel unnoticed."""
    assert cpu.available() == works()


@needs_compiler
def test_every_file_passes_under_the_sanitizers(tmp_path: Path) -> None:
    """Golden files and odd shapes, with every access and every operation checked."""
    if not works():
        pytest.skip("the C++ compiler does not work")
    # A package of its own, so that nothing has to be told where another library lies.
    package = tmp_path / "sm70_kernels"
    shutil.copytree(KERNELS / "sm70_kernels", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g"]
    library = package / "cpu" / "libsm70_cpu.so"
    subprocess.run([*compiler, *FLAGS, *sanitize, str(SOURCE), "-o", str(library)], check=True)
    runtime = subprocess.run([*compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",
        "PYTHONPATH": str(tmp_path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONMALLOC": "malloc",
    }
    cases = ["tests/test_golden.py", "tests/test_numpy_kernel.py", "-k", "cpp", "-q", "-p", "no:cacheprovider"]
    where = f"import sys, sm70_kernels.cpu as c; assert c.available() and c.__file__.startswith({str(tmp_path)!r})"
    run = subprocess.run(
        [sys.executable, "-c", f"{where}; import pytest; sys.exit(pytest.main({cases!r}))"],
        cwd=TESTS.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    # 37 recordings and the count of them, and the cases of the kernel's own tests, once per instruction set.
    sets = 2 if CppKernel().vectors else 1
    assert run.stdout.rstrip().rsplit("\n", 1)[-1].startswith(f"{77 * sets} passed"), run.stdout[-500:]


def checksums(command: list[str], program: Path, *, runner: list[str]) -> str:
    flags = [flag for flag in FLAGS if flag not in ("-fPIC", "-shared")]
    subprocess.run(
        [*command, *flags, "-O3", "-static", str(TESTS / "cpp" / "checksums.cpp"), "-o", str(program)], check=True
    )
    return subprocess.run([*runner, str(program)], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("command", "runner"),
    [(["clang++"], []), (["aarch64-linux-gnu-g++"], ["qemu-aarch64-static"])],
    ids=["clang", "aarch64"],
)
def test_another_compiler_or_processor_gives_the_same_bytes(
    command: list[str], runner: list[str], tmp_path: Path
) -> None:
    """The plain loops; AVX2 is held against them by the kernel's own tests."""
    for program in [*command, *runner]:
        if shutil.which(program) is None or not works():
            pytest.skip(f"{program} is not installed")
    here = checksums(compiler, tmp_path / "here", runner=[])
    assert len(here.splitlines()) == 4 * 3 * 6 * 2
    assert len(set(here.splitlines())) > 70  # (with one rank both sizes are alike)
    assert checksums(command, tmp_path / "there", runner=runner) == here


@pytest.mark.skipif(not cpu.available(), reason="the C++ kernel is not built")
class TestArguments:
    """Nothing that could lead the library outside an array gets to it."""

    @pytest.fixture
    def parts(self) -> list[Projection]:
        rng = np.random.default_rng(0)
        return [random_awq(rng, 64, 128, 32), random_awq(rng, 64, 128, 32), random_awq(rng, 128, 64, 32)]

    def test_too_many_sizes(self, parts: list[Projection]) -> None:
        out = allocate(*parts, layout="awq-half2", tp_size=1)
        with pytest.raises(ValueError, match="33 TP sizes in one call: 1 to 32 are possible"):
            CppKernel().prepare(*parts, layout="awq-half2", interleave=False, outs=[out] * 33)
        with pytest.raises(ValueError, match="0 TP sizes in one call"):
            CppKernel().prepare(*parts, layout="awq-half2", interleave=False, outs=[])

    @pytest.mark.parametrize("name", ["w13_tm_weight", "w13_tm_scales", "w2_tm_weight", "w2_tm_scales"])
    def test_an_output_of_another_size(self, parts: list[Projection], name: str) -> None:
        out = allocate(*parts, layout="awq-half2", tp_size=2)
        out[name] = out[name][..., :-1].copy()
        with pytest.raises(ValueError, match=r"expected \d+ contiguous bytes, got \d+ of shape"):
            CppKernel().prepare(*parts, layout="awq-half2", interleave=False, outs=[out])

    @pytest.mark.parametrize("projection", [0, 1, 2])
    @pytest.mark.parametrize("part", ["weight", "scales", "zeros"])
    def test_a_source_of_another_size(self, parts: list[Projection], projection: int, part: str) -> None:
        out = allocate(*parts, layout="awq-half2", tp_size=2)
        parts[projection] = parts[projection]._replace(**{part: getattr(parts[projection], part)[:-1]})
        with pytest.raises(ValueError, match=r"cannot be cut|contiguous bytes, got"):
            CppKernel().prepare(*parts, layout="awq-half2", interleave=False, outs=[out])

    def test_a_cut_inside_half_a_tile(self) -> None:
        rng = np.random.default_rng(0)
        parts = [random_nvfp4(rng, 32, 32, 1.0) for _ in range(3)]
        out = allocate(*parts, layout="nvfp4-fp16", tp_size=4)
        with pytest.raises(ValueError, match="w13: K=32, N=32 in 2 groups cannot be cut for TP sizes 4"):
            CppKernel().prepare(*parts, layout="nvfp4-fp16", interleave=False, outs=[out])


@pytest.mark.parametrize("content", ["nothing", "no library", "another version"])
def test_a_library_that_does_not_fit_is_none(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libsm70_cpu.so"
    if content == "no library":
        library.write_bytes(b"x")
    elif content == "another version":
        if not works():
            pytest.skip("the C++ compiler does not work")
        (tmp_path / "old.cpp").write_text('extern "C" int sm70_cpu_abi() { return 0; }')
        subprocess.run([*compiler, "-shared", "-fPIC", str(tmp_path / "old.cpp"), "-o", str(library)], check=True)
    monkeypatch.setattr(cpu, "LIBRARY", library)
    cpu._library.cache_clear()
    try:
        assert not cpu.available()
        with pytest.raises(RuntimeError, match="the C\\+\\+ kernel is not built"):
            CppKernel()
    finally:
        cpu._library.cache_clear()
