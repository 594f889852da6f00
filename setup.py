"""The one part that is compiled; all else about the package is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "lockstep.data._jpeg",
            ["src/lockstep/data/_jpeg.c"],
            extra_compile_args=["-O3"],
            py_limited_api=True,
            optional=True,  # libjpeg-turbo stands in for it
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
