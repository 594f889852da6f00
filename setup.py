"""Build the compiled parts, and describe the package by README with links that work anywhere.
Everything else about the package is in pyproject.toml."""

import os
import re
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

# One build works for every Python from 3.11 on, except for those without the global interpreter
# lock.
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")

# The compiled parts use x86-64 instructions, by the names that GCC and Clang give them on Linux.
# Without them, libraries give the same results.
COMPILED = sysconfig.get_platform() == "linux-x86_64" and not os.environ.get("LOCKSTEP_WITHOUT_C")


ON_THE_WEB = "https://github.com/lockstep-vision/lockstep/blob/main/"
PICTURES_ON_THE_WEB = "https://raw.githubusercontent.com/lockstep-vision/lockstep/main/"


def read_description() -> str:
    """Return README. Its links are relative, so that they work in a clone without a network; a
    package index needs whole addresses."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    picture = re.compile(r"(!\[[^\]]*\]\()(?![a-z]+:)")
    link = re.compile(r"((?<!!)\[[^\]!]+\]\()(?![a-z]+:|#)")
    text = picture.sub(rf"\g<1>{PICTURES_ON_THE_WEB}", text)
    return link.sub(rf"\g<1>{ON_THE_WEB}", text)


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
    long_description=read_description(),
    long_description_content_type="text/markdown",
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
