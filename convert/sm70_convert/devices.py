"""Which CUDA devices are there, asked of the driver itself, so that no torch is loaded to hear that there is none.

And which kernels there are for them and for the CPU, by name.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

# `auto` takes the first that can run. `torch` runs on both, but is slow everywhere and only taken if asked for.
GPU_KERNELS = ("native", "triton")
HOST_KERNELS = ("cpp", "numpy")
KERNELS = (*GPU_KERNELS, *HOST_KERNELS, "torch")


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """One device: its name and compute capability, (7, 0) for a V100."""

    name: str
    capability: tuple[int, int]


def cuda_devices() -> list[CudaDevice]:
    """The devices that libcuda sees; empty without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    found = []
    for ordinal in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(128)
        major, minor = ctypes.c_int(), ctypes.c_int()
        if driver.cuDeviceGet(ctypes.byref(device), ordinal) != 0:
            continue
        driver.cuDeviceGetName(name, 128, device)
        driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # COMPUTE_CAPABILITY_MAJOR
        driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)  # COMPUTE_CAPABILITY_MINOR
        found.append(CudaDevice(name.value.decode("utf-8", "replace"), (major.value, minor.value)))
    return found
