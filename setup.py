"""The parts that are compiled; all else about the package is in pyproject.toml."""

import sysconfig

from setuptools import Extension, setup

# One build for all Python from 3.11 on, but for those without the global lock.
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            module,
            [f"src/{module.replace('.', '/')}.c"],
            extra_compile_args=["-O3"],
            py_limited_api=STABLE,
            optional=True,  # libraries stand in for it
        )
        for module in ("lockstep.data._jpeg", "lockstep.data.formats._scan")
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {},
)
