"""--device and --kernel: what they come to, what they refuse, and what `env` says of it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from fake_gpu import OPS, V100, native_ops, pretend
from sm70_convert import kernel_choice
from sm70_convert.cli import main
from sm70_convert.convert import host_worker
from sm70_convert.device_layer import DeviceWorker
from sm70_convert.devices import KERNELS, CudaDevice
from sm70_convert.environment import Runtime
from sm70_convert.errors import Sm70Error
from sm70_convert.kernel_choice import Choice, choose, settled, why_not, workers
from sm70_kernels import native, torch_sm70
from sm70_kernels.numpy_sm70 import NumpyKernel

AWQ = Path(__file__).parent / "data" / "autoawq-gemm-g64-qwen3moe"
H200 = CudaDevice("NVIDIA H200", (9, 0))
NO_CPP = "the C++ kernel was not built with this package"
WITHOUT = "use --device cpu without --kernel: the banks are the same, bit for bit"


class CppKernel(NumpyKernel):
    """In place of the C++ one."""


def run(*args: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in args])
    assert result.exit_code == code, (args, result.exit_code, result.output, result.exception)
    return result


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No driver, no runtime, no Triton and no C++ kernel, whatever this machine has."""
    monkeypatch.setattr(kernel_choice, "cuda_devices", list)
    monkeypatch.setattr(kernel_choice, "find_runtime", lambda: None)
    have_triton(monkeypatch, None)
    have_cpp(monkeypatch, built=None)


def have_triton(monkeypatch: pytest.MonkeyPatch, kernels: Any = "there") -> None:
    """triton with its kernels; None: not installed; a string other than "there": kernels that cannot be imported."""
    installed = kernels is not None
    real = importlib.util.find_spec
    monkeypatch.setattr(
        kernel_choice, "find_spec", lambda name: (object() if installed else None) if name == "triton" else real(name)
    )
    module = ModuleType("sm70_kernels.triton_sm70") if kernels == "there" else None
    if module:
        module.prepare_layer = torch_sm70.prepare_layer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sm70_kernels.triton_sm70", module)


def have_cpp(monkeypatch: pytest.MonkeyPatch, *, built: bool | None) -> None:
    """The module of the C++ kernel, with its library or without; None: not even the module."""
    module = None if built is None else SimpleNamespace(available=lambda: built, CppKernel=CppKernel)
    monkeypatch.setitem(sys.modules, "sm70_kernels.cpu", module)


# auto


def test_without_a_driver_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("auto", "auto") == Choice("cpu", "auto", "no CUDA device was found")
    assert settled(choose("auto", "auto")) == Choice("cpu", "numpy", f"no CUDA device was found; {NO_CPP}")
    for built, kernel in ((False, "numpy"), (True, "cpp")):
        have_cpp(monkeypatch, built=built)
        assert settled(choose("auto", "auto")).kernel == kernel
        assert settled(choose("cpu", "auto")).kernel == kernel
    assert settled(choose("auto", "auto")).why == "no CUDA device was found"


def test_a_v100_with_a_runtime_takes_its_ops_and_any_gpu_takes_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    have_triton(monkeypatch)
    pretend(monkeypatch, V100)
    with native_ops():
        assert choose("auto", "auto") == Choice("cuda:0", "native", V100.name)
        assert choose("cuda", "triton") == Choice("cuda:0", "triton", V100.name)
        pretend(monkeypatch, H200, V100)
        assert choose("auto", "auto") == Choice("cuda:0", "triton", H200.name)
        assert choose("cuda:1", "auto") == Choice("cuda:1", "native", V100.name)
    assert choose("cuda:1", "auto") == Choice("cuda:1", "triton", V100.name)
    pretend(monkeypatch, V100, runtime=False)
    with native_ops():
        assert choose("auto", "auto").kernel == "triton"


def test_a_layout_that_the_runtime_cannot_make_goes_to_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, V100)
    with native_ops("awq_sm70_prepare"):
        assert choose("auto", "auto", "awq-half2").kernel == "native"
        missing = "native: the runtime has no awq_sm70_prepare_compact; triton: triton is not installed"
        assert choose("auto", "auto").kernel == "native"  # before there is a plan
        assert choose("auto", "auto", "awq-compact") == Choice("cpu", "auto", missing)
        with pytest.raises(Sm70Error, match=f"--device cuda: {missing}$"):
            choose("cuda", "auto", "awq-compact")
        have_triton(monkeypatch)
        assert choose("auto", "auto", "awq-compact").kernel == "triton"


def test_a_gpu_without_a_kernel_is_left_for_the_cpu_with_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, H200)
    reasons = "native: a runtime's ops run on a V100, not on NVIDIA H200; triton: triton is not installed"
    assert choose("auto", "auto") == Choice("cpu", "auto", reasons)
    pretend(monkeypatch, V100)
    have_triton(monkeypatch, "broken")
    choice = choose("auto", "auto")
    assert choice.why.startswith(
        "native: the runtime has no awq_sm70_prepare; triton: the Triton kernel cannot be imported: "
    )


def test_the_slow_kernel_is_never_taken_unasked_and_runs_on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, V100, runtime=False)
    assert choose("auto", "auto").device == "cpu"
    assert choose("auto", "torch") == Choice("cuda:0", "torch", V100.name)
    assert choose("cpu", "torch") == Choice("cpu", "torch", "as asked")
    monkeypatch.setattr(kernel_choice, "cuda_devices", list)
    assert choose("auto", "torch") == Choice("cpu", "torch", "no CUDA device was found")


def test_a_host_kernel_needs_no_word_about_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, V100)
    assert choose("auto", "numpy") == choose("cpu", "numpy") == Choice("cpu", "numpy", "as asked")


# What torch says of a device


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "cuda_devices", lambda: [V100])
    monkeypatch.setattr(torch.version, "cuda", None)
    reason = f"torch {torch.__version__} was built without CUDA"
    assert choose("auto", "auto") == Choice("cpu", "auto", reason)
    assert why_not("triton") == why_not("native") == reason


def test_a_torch_that_was_not_built_for_the_device_is_found_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "cuda_devices", lambda: [H200, V100])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    tried = []

    def zeros(*_: object, device: str) -> None:
        tried.append(device)
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nCompile with ...")

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(Sm70Error) as caught:
        choose("cuda:1", "auto")
    assert tried == ["cuda:1"]
    assert caught.value.problems[0].message == (
        f"--device cuda:1: torch {torch.__version__} cannot use Tesla V100-SXM2-32GB: "
        "CUDA error: no kernel image is available for execution on the device"
    )


def test_a_torch_that_is_not_there_or_broken_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "cuda_devices", lambda: [V100])
    monkeypatch.setitem(sys.modules, "torch", None)
    assert choose("auto", "auto").why.startswith("torch cannot be imported: ")


def test_the_runtimes_library_is_loaded_once_its_ops_are_wanted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "_C_stable_libtorch.abi3.so").touch()
    library = tmp_path / "_C.abi3.so"
    library.write_bytes(b"no library")
    pretend(monkeypatch, V100)
    runtime = Runtime("1cat", sm70_ops=True, folders=(tmp_path,), distributions={})
    monkeypatch.setattr(kernel_choice, "find_runtime", lambda: runtime)
    reason = why_not("native")
    assert reason is not None
    assert reason.startswith("the runtime's ops cannot be loaded: ")
    assert str(library) in reason
    loaded: list[str] = []
    with native_ops():
        monkeypatch.setattr(native, "load", loaded.append)
        assert why_not("native") is None
        assert loaded == []
    assert why_not("native") == "the runtime has no awq_sm70_prepare"
    assert loaded == [str(library)]


# What cannot be


IMPOSSIBLE = [
    (("cuda", "cpp"), (), 2, "--kernel cpp runs on the CPU, not on cuda", "leave --kernel out, or use --device cpu"),
    (
        ("cuda:1", "numpy"),
        (),
        2,
        "--kernel numpy runs on the CPU, not on cuda:1",
        "leave --kernel out, or use --device cpu",
    ),
    (
        ("cpu", "triton"),
        (),
        2,
        "--kernel triton runs on a GPU, not on the CPU",
        "leave --kernel out, or use --device cuda",
    ),
    (
        ("cpu", "native"),
        (),
        2,
        "--kernel native runs on a GPU, not on the CPU",
        "leave --kernel out, or use --device cuda",
    ),
    (("cuda:x", "auto"), (), 2, "--device 'cuda:x' is not auto, cpu, cuda or cuda:NUMBER", "see sm70-convert --help"),
    (("cuda:", "auto"), (), 2, "--device 'cuda:' is not auto, cpu, cuda or cuda:NUMBER", "see sm70-convert --help"),
    (("cuda:-1", "auto"), (), 2, "--device 'cuda:-1' is not auto, cpu, cuda or cuda:NUMBER", "see sm70-convert --help"),
    (("cuda:²", "auto"), (), 2, "--device 'cuda:²' is not auto, cpu, cuda or cuda:NUMBER", "see sm70-convert --help"),
    (("cpu", "cpp"), (), 7, f"--kernel cpp: {NO_CPP}", "leave --kernel out: the banks are the same, bit for bit"),
    (("cuda", "auto"), (), 7, "--device cuda: no CUDA device was found", WITHOUT),
    (("auto", "native"), (), 7, "--device auto --kernel native: no CUDA device was found", WITHOUT),
    (("cuda", "torch"), (), 7, "--device cuda --kernel torch: no CUDA device was found", WITHOUT),
    (("cuda:2", "auto"), (V100, V100), 7, "--device cuda:2: there is no cuda:2, the last one is cuda:1", WITHOUT),
    (("cuda", "triton"), (V100,), 7, "--device cuda --kernel triton: triton is not installed", WITHOUT),
    (("auto", "native"), (V100,), 7, "--device auto --kernel native: the runtime has no awq_sm70_prepare", WITHOUT),
    (
        ("cuda", "native"),
        (H200,),
        7,
        "--device cuda --kernel native: a runtime's ops run on a V100, not on NVIDIA H200",
        WITHOUT,
    ),
    (
        ("cuda", "auto"),
        (H200,),
        7,
        "--device cuda: native: a runtime's ops run on a V100, not on NVIDIA H200; triton: triton is not installed",
        WITHOUT,
    ),
]


@pytest.mark.parametrize(("asked", "devices", "code", "message", "hint"), IMPOSSIBLE, ids=lambda v: str(v)[:40])
def test_what_cannot_be_is_said_before_a_checkpoint_is_opened(
    asked: tuple[str, str],
    devices: tuple[CudaDevice, ...],
    code: int,
    message: str,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if devices:
        pretend(monkeypatch, *devices)
    args = (tmp_path / "no such model", "--out", tmp_path / "out", "--device", asked[0], "--kernel", asked[1])
    (problem,) = json.loads(run(*args, "--json", code=code).stdout)["error"]["problems"]
    assert problem == {"message": message, "hint": hint}
    assert run(*args, code=code).stderr.splitlines() == [f"error: {message}", f"next: {hint}"]
    assert not (tmp_path / "out").exists()


def test_a_layout_that_the_asked_kernel_cannot_make_is_7_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, V100)
    with native_ops(*(op for op in OPS if op != "awq_sm70_prepare_compact")):
        args = (AWQ, "--out", tmp_path / "out", "--layout", "awq-compact", "--kernel", "native", "--json")
        (problem,) = json.loads(run(*args, code=7).stdout)["error"]["problems"]
    message = "--device auto --kernel native: the runtime has no awq_sm70_prepare_compact"
    assert problem == {"message": message, "hint": WITHOUT}
    assert not (tmp_path / "out").exists()


# Workers


def test_a_device_has_one_worker_and_the_cpu_as_many_as_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    have_cpp(monkeypatch, built=True)
    for kernel, new in (("numpy", NumpyKernel), ("cpp", CppKernel)):
        jobs, worker = workers(Choice("cpu", kernel, ""), 8)
        assert (jobs, worker.func, worker.args) == (8, host_worker, (new,))  # type: ignore[attr-defined]
    have_triton(monkeypatch)
    for kernel, module in (("native", native), ("torch", torch_sm70), ("triton", torch_sm70)):
        jobs, worker = workers(Choice("cuda:1", kernel, ""), 8)
        assert jobs == 1
        assert (worker.func, worker.args) == (DeviceWorker, ("cuda:1", module.prepare_layer))  # type: ignore[attr-defined]


# What is said


def test_auto_says_what_it_took_and_why_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"prepares on cpu with the numpy kernel (no CUDA device was found; {NO_CPP})\n"
    result = run(AWQ, "--out", tmp_path / "out")
    assert result.stderr == line
    assert "\nkernel    numpy on cpu\n" in result.stdout
    assert run(AWQ, "--out", tmp_path / "quiet", "--quiet").stderr == ""
    assert run(AWQ, "--out", tmp_path / "told", "--device", "cpu").stderr == ""
    result = run(AWQ, "--out", tmp_path / "json", "--json")
    document = json.loads(result.stdout)
    assert (document["device"], document["kernel"], result.stderr) == ("cpu", "numpy", "")
    have_cpp(monkeypatch, built=True)
    assert (
        run(AWQ, "--out", tmp_path / "cpp").stderr == "prepares on cpu with the cpp kernel (no CUDA device was found)\n"
    )
    pretend(monkeypatch, V100)
    with native_ops():
        result = run(AWQ, "--out", tmp_path / "gpu")
        assert result.stderr == "prepares on cuda:0 with the native kernel (Tesla V100-SXM2-32GB)\n"
        assert "\nkernel    native on cuda:0\n" in result.stdout
        document = json.loads(run(AWQ, "--out", tmp_path / "gpu json", "--json").stdout)
    assert (document["device"], document["kernel"]) == ("cuda:0", "native")


def test_env_lists_kernels_and_why_some_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def reasons() -> dict[str, str | None]:
        document = json.loads(run("env", "--json").stdout)
        assert [k["name"] for k in document["kernels"]] == list(KERNELS)
        return {k["name"]: k["why_not"] for k in document["kernels"]} | {"default": document["default"]}

    none = "no CUDA device was found"
    assert reasons() == {
        "native": none,
        "triton": none,
        "cpp": NO_CPP,
        "numpy": None,
        "torch": None,
        "default": {"device": "cpu", "kernel": "numpy", "why": f"{none}; {NO_CPP}"},
    }
    lines = run("env").stdout.splitlines()
    assert f"cpp kernel       cannot run: {NO_CPP}" in lines
    assert "numpy kernel     can run" in lines
    assert f"by default       prepares on cpu with the numpy kernel ({none}; {NO_CPP})" in lines
    pretend(monkeypatch, V100, runtime=False)
    have_cpp(monkeypatch, built=True)
    have_triton(monkeypatch)
    assert reasons() == {
        "native": "no V100 runtime is installed in this environment",
        "triton": None,
        "cpp": None,
        "numpy": None,
        "torch": None,
        "default": {"device": "cuda:0", "kernel": "triton", "why": "Tesla V100-SXM2-32GB"},
    }
