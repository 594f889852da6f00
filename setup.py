"""Build the compiled parts. Everything else about the package is in pyproject.toml."""

import os
import sysconfig

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

# One build works for every Python from 3.11 on, except for those without the global interpreter
# lock.
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")

# The compiled parts use x86-64 instructions, by the names that GCC and Clang give them on Linux.
# Without them, libraries give the same results.
COMPILED = sysconfig.get_platform() == "linux-x86_64" and not os.environ.get("LOCKSTEP_WITHOUT_C")


class Wheel(bdist_wheel):
    """Make a wheel for all machines (py3-none-any) if no compiled part could be built."""

    def run(self) -> None:
        """Compile before the wheel gets its name."""
        self.run_command("build_ext")
        built = self.get_finalized_command("build_ext").get_outputs()
        if not any(map(os.path.exists, built)):
            self.distribution.ext_modules, self.py_limited_api, self.root_is_pure = [], False, True
        super().run()


setup(
    ext_modules=[
        Extension(
            module,
            [f"src/{module.replace('.', '/')}.c"],
            extra_compile_args=["-O3"],
            py_limited_api=STABLE,
            optional=True,  # without it, libraries do its work
        )
        for module in ("lockstep.data.decoding._jpeg",)
        if COMPILED
    ],
    cmdclass={"bdist_wheel": Wheel},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if COMPILED and STABLE else {},
)
