"""The one part that is compiled; all else about the package is in pyproject.toml."""

import sysconfig

from setuptools import Extension, setup

# One build for all Python from 3.11 on, but for those without the global lock.
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            "lockstep.data._jpeg",
            ["src/lockstep/data/_jpeg.c"],
            extra_compile_args=["-O3"],
            py_limited_api=STABLE,
            optional=True,  # libjpeg-turbo stands in for it
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {},
)
