"""The one thing pyproject.toml cannot say: a shared library of plain C functions, built where there is a compiler."""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCE = Path("kernels/sm70_kernels/cpu")
LIBRARY = "sm70_kernels.cpu.libsm70_cpu"


class BuildLibrary(build_ext):
    """It is loaded with ctypes, so it has no module name, and serves every Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return "/".join(fullname.split(".")) + ".so"


class Wheel(bdist_wheel):
    """Tagged by what is in it: for this platform with the library, for any without."""

    def get_tag(self) -> tuple[str, str, str]:
        built = Path(self.get_finalized_command("build_ext").get_ext_fullpath(LIBRARY)).exists()
        return "py3", "none", super().get_tag()[2] if built else "any"


setup(
    ext_modules=[
        Extension(
            LIBRARY,
            [str(SOURCE / "sm70_cpu.cpp")],
            depends=[str(p) for p in sorted(SOURCE.glob("*.h"))],
            # It uses nothing of the C++ library but headers.
            extra_compile_args=["-std=c++17", "-O3", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-g0"],
            extra_link_args=["-Wl,--as-needed"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel},
)
