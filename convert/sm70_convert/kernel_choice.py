"""What --device and --kernel come to: which kernels can run here, why the others cannot, and which one is taken.

Neither torch nor numpy is imported before there is something to ask them: a CUDA device, or a kernel that needs them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sm70_convert.devices import GPU_KERNELS, HOST_KERNELS, KERNELS, cuda_devices
from sm70_convert.environment import find_runtime
from sm70_convert.errors import DeviceError, Problem, UsageError, first_line
from sm70_convert.layout import LAYOUT_NAMES

if TYPE_CHECKING:
    from sm70_convert.convert import PrepareLayer

_LAYER_KERNELS = {"native": "native", "triton": "triton_sm70", "torch": "torch_sm70"}
_V100 = (7, 0)
_SAME = "the banks are the same, bit for bit"


@dataclass(frozen=True, slots=True)
class Choice:
    """A device (`cpu`, `cuda:0`), a kernel, and the reason in a few words. kernel `auto`: one of the host's, not yet settled."""

    device: str
    kernel: str
    why: str

    def __str__(self) -> str:
        return f"prepares on {self.device} with the {self.kernel} kernel ({self.why})"


class _CannotRun(Exception):  # noqa: N818 - a reason, from which some devices are left for another
    """Why no kernel can run on a GPU."""


def choose(device: str, kernel: str, layout: str | None = None) -> Choice:
    """The device and the kernel, for any layout if none is given.

    Raises UsageError for a device and a kernel that never go together, DeviceError for what cannot run here.
    """
    index = _index(device)
    if kernel in HOST_KERNELS and index is not None:
        hint = "leave --kernel out, or use --device cpu"
        raise UsageError(Problem(f"--kernel {kernel} runs on the CPU, not on {device}", hint=hint))
    if kernel in GPU_KERNELS and device == "cpu":
        hint = "leave --kernel out, or use --device cuda"
        raise UsageError(Problem(f"--kernel {kernel} runs on a GPU, not on the CPU", hint=hint))
    if device == "cpu" or kernel in HOST_KERNELS:
        return _on_host(kernel, "as asked")
    try:
        return _on_gpu(index or 0, kernel, layout)
    except _CannotRun as exc:
        if device == "auto" and kernel not in GPU_KERNELS:
            return _on_host(kernel, str(exc))
        asked = f"--device {device}" if kernel == "auto" else f"--device {device} --kernel {kernel}"
        raise DeviceError(Problem(f"{asked}: {exc}", hint=f"use --device cpu without --kernel: {_SAME}")) from exc


def settled(choice: Choice) -> Choice:
    """The same with a host kernel in place of `auto`. Imports numpy."""
    if choice.kernel != "auto":
        return choice
    reason = why_not("cpp")
    return replace(choice, kernel="numpy", why=f"{choice.why}; {reason}") if reason else replace(choice, kernel="cpp")


def workers(choice: Choice, jobs: int) -> tuple[int, Callable[[], PrepareLayer]]:
    """How many workers a run has, and what makes one. A device prepares one layer at a time."""
    from sm70_convert.convert import host_worker
    from sm70_convert.device_layer import DeviceWorker

    if choice.kernel in _LAYER_KERNELS:
        module = importlib.import_module(f"sm70_kernels.{_LAYER_KERNELS[choice.kernel]}")
        return 1, partial(DeviceWorker, choice.device, module.prepare_layer)
    if choice.kernel == "cpp":
        return jobs, partial(host_worker, _cpp().CppKernel)
    from sm70_kernels.numpy_sm70 import NumpyKernel

    return jobs, partial(host_worker, NumpyKernel)


def why_not(kernel: str, index: int = 0, layout: str | None = None) -> str | None:
    """Why `kernel` cannot run here (native and triton: on cuda:`index`), in a few words, or None if it can."""
    if kernel in GPU_KERNELS:
        return _why_not_cuda(index) or (_why_not_native(index, layout) if kernel == "native" else _why_not_triton())
    if kernel == "cpp" and not _cpp():
        return "the C++ kernel was not built with this package"
    if kernel == "torch" and not find_spec("torch"):
        return "torch is not installed"
    return None


def describe_kernels() -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """For env: which kernels can run and which one `auto` takes, as a document and as rows."""
    reasons = {kernel: why_not(kernel) for kernel in KERNELS}
    choice = settled(choose("auto", "auto"))
    document = {
        "kernels": [{"name": kernel, "why_not": reason} for kernel, reason in reasons.items()],
        "default": {"device": choice.device, "kernel": choice.kernel, "why": choice.why},
    }
    rows = [(f"{kernel} kernel", f"cannot run: {r}" if r else "can run") for kernel, r in reasons.items()]
    return document, [*rows, ("by default", str(choice))]


def _index(device: str) -> int | None:
    """The number of the CUDA device asked for."""
    if device in ("auto", "cpu"):
        return None
    kind, colon, index = device.partition(":")
    if kind != "cuda" or (colon and not (index.isascii() and index.isdigit())):
        raise UsageError(Problem(f"--device {device!r} is not auto, cpu, cuda or cuda:NUMBER"))
    return int(index or 0)


def _on_host(kernel: str, why: str) -> Choice:
    if kernel != "auto" and (reason := why_not(kernel)):
        raise DeviceError(Problem(f"--kernel {kernel}: {reason}", hint=f"leave --kernel out: {_SAME}"))
    return Choice("cpu", kernel, why)


def _on_gpu(index: int, kernel: str, layout: str | None) -> Choice:
    if reason := _why_not_cuda(index):
        raise _CannotRun(reason)
    reasons = []
    for candidate in GPU_KERNELS if kernel == "auto" else (kernel,):
        if reason := why_not(candidate, index, layout):
            reasons.append(f"{candidate}: {reason}" if kernel == "auto" else reason)
        else:
            return Choice(f"cuda:{index}", candidate, cuda_devices()[index].name)
    raise _CannotRun("; ".join(reasons))


def _why_not_cuda(index: int) -> str | None:
    devices = cuda_devices()
    if not devices:
        return "no CUDA device was found"
    if index >= len(devices):
        return f"there is no cuda:{index}, the last one is cuda:{len(devices) - 1}"
    return _torch_cannot_use(index, devices[index].name)


def _torch_cannot_use(index: int, name: str) -> str | None:
    try:
        import torch
    except (ImportError, OSError) as exc:
        return f"torch cannot be imported: {first_line(exc)}"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    try:
        # Also finds a torch that was not built for this device.
        torch.zeros(1, device=f"cuda:{index}").add_(1).item()
    except RuntimeError as exc:
        return f"torch {torch.__version__} cannot use {name}: {first_line(exc)}"
    return None


def _why_not_native(index: int, layout: str | None) -> str | None:
    device = cuda_devices()[index]
    if device.capability != _V100:
        return f"a runtime's ops run on a V100, not on {device.name}"
    runtime = find_runtime()
    if runtime is None or not runtime.sm70_ops:
        return "no V100 runtime is installed in this environment"
    from sm70_kernels import native

    def missing() -> tuple[str, ...]:
        return min((native.missing_ops(name) for name in ((layout,) if layout else LAYOUT_NAMES)), key=len)

    if missing() and (library := runtime.extension):
        try:
            native.load(str(library))
        except OSError as exc:
            return f"the runtime's ops cannot be loaded: {exc}"
    return f"the runtime has no {', '.join(missing())}" if missing() else None


def _why_not_triton() -> str | None:
    if not find_spec("triton"):
        return "triton is not installed"
    try:
        importlib.import_module("sm70_kernels.triton_sm70")
    except ImportError as exc:
        return f"the Triton kernel cannot be imported: {exc}"
    return None


def _cpp() -> Any:
    """The C++ kernel's module, where its library was built."""
    try:
        module = importlib.import_module("sm70_kernels.cpu")
    except ImportError:
        return None
    return module if module.available() else None
