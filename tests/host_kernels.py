"""The kernels that prepare one expert in host memory, by name: those that can run here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sm70_kernels import cpu
from sm70_kernels.cpu import CppKernel
from sm70_kernels.numpy_sm70 import NumpyKernel
from sm70_kernels.spec import HostKernel

HOST_KERNELS: Mapping[str, Callable[[], HostKernel]] = {
    "numpy": NumpyKernel,
    **({"cpp-plain": lambda: CppKernel(vectors=False)} if cpu.available() else {}),
    **({"cpp-avx2": lambda: CppKernel(vectors=True)} if cpu.available() and CppKernel().vectors else {}),
}
