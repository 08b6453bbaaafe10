"""Which kernel prepares experts in host memory, where nobody asks for a certain one."""

from __future__ import annotations

from sm70_kernels import cpu
from sm70_kernels.cpu import CppKernel
from sm70_kernels.numpy_sm70 import NumpyKernel
from sm70_kernels.spec import HostKernel


def best_kernel() -> HostKernel:
    """The C++ kernel where it was built, else numpy's. One instance per thread."""
    return CppKernel() if cpu.available() else NumpyKernel()
