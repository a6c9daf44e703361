"""Compiles the CPU kernels that a wheel brings, one library for each kind of processor; pyproject.toml has the rest.

Without a C++ compiler the wheel has no kernels, and the package compiles them at first use.
"""

import runpy
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = Path("skipdecode", "engine", "kernels")
TARGETS = runpy.run_path(str("src" / KERNELS / "targets.py"))
# The wheel must not depend on the version of the compiler's libraries; OpenMP's comes with torch. macOS has them.
STATIC = ("-static-libstdc++", "-static-libgcc", "-s") if sys.platform == "linux" else ()


class BuildKernels(build_py):
    """Adds the libraries to the built package; an editable install has none."""

    def run(self) -> None:
        super().run()
        compiler = TARGETS["find_compiler"]()
        if self.editable_mode or compiler is None:
            return
        for name, target in TARGETS["TARGETS"].items():
            output = Path(self.build_lib, KERNELS, f"kernels-{name}{TARGETS['LIBRARY_SUFFIX']}")
            command = TARGETS["compile_command"](compiler, (*target.flags, *STATIC), output)
            if subprocess.run(command).returncode:
                sys.stderr.write(f"{compiler} did not compile the kernels for {name}: the wheel goes without\n")


class PlatformWheel(bdist_wheel):
    """Tags the wheel for this platform and any Python 3: the libraries do not use Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class PlatformDistribution(Distribution):
    """A distribution with compiled files."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildKernels, "bdist_wheel": PlatformWheel}, distclass=PlatformDistribution)
