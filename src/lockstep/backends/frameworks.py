"""What the core knows of a framework without importing it: one row for each backend."""

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.system import rank_variables


@dataclass(frozen=True)
class Framework:
    """One backend, as far as it can be told without its framework."""

    distributions: tuple[str, ...]
    """Distributions of which one must be installed."""
    install: str
    """What to type to install it."""
    exports: Mapping[str, str] = field(default_factory=dict)
    """Formats that `lockstep export` writes, each with the function of the backend's module
    `export` that writes it."""
    rank_variables: Mapping[str, str] = field(default_factory=dict)
    """The environment variables of the framework's own launchers, by the usual names: RANK,
    WORLD_SIZE, LOCAL_RANK."""
    reads_tf_config: bool = False
    """Whether TF_CONFIG names a rank as well."""
    slower: Mapping[str, str] = field(default_factory=dict)
    """By precision: how much slower than fp32 it is where the processor emulates it; measured in
    docs/numerics.md."""
    slower_with_avx_512: Mapping[str, str] = field(default_factory=dict)
    """The same where oneDNN has AVX-512 to emulate with, for precisions in which that differs."""
    always_emulates: tuple[str, ...] = ()
    """Precisions that it rounds to and multiplies in float32, whatever the processor has."""
    origins: tuple[str, ...] = ()
    """Origins of the weights files that are the framework's own; see
    `lockstep.weights.Weights.origin`."""
    quantises: bool = False
    """Whether its engine is a `QuantisingEngine`."""
    recomputes: bool = False
    """Whether its engine supports every value of the execution's `recompute`."""
    explains: bool = False
    """Whether its module `explaining` has an `Explainer`, for `lockstep predict --explain`."""
    nvidia_example: str = "PyTorch"
    """Which of NVIDIA's examples names the keys of `lockstep benchmark convert --form dlll`."""

    def version(self) -> str | None:
        """Return the installed version, without importing it; None if it is missing."""
        for name in self.distributions:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None


_HOROVOD = {
    "RANK": "HOROVOD_RANK",
    "WORLD_SIZE": "HOROVOD_SIZE",
    "LOCAL_RANK": "HOROVOD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "HOROVOD_LOCAL_SIZE",
}

FRAMEWORKS: dict[str, Framework] = {
    "mxnet": Framework(
        ("mxnet",),
        "make mxnet-env in Lockstep's source tree; with its wheel: python3.11 -m venv .venv-mxnet"
        " && .venv-mxnet/bin/pip install 'WHEEL[mxnet]'. It is a separate environment, found next"
        " to this one or by LOCKSTEP_MXNET_PYTHON",
        rank_variables=_HOROVOD,
        slower={"fp16": "10 times"},
        always_emulates=("fp16",),
        origins=("NVIDIA MXNet", "Gluon"),
        nvidia_example="MXNet",
    ),
    "paddle": Framework(
        ("paddlepaddle", "paddlepaddle-gpu"),
        "pip install paddlepaddle==3.3.1",
        exports={"paddle-inference": "export"},
        rank_variables={
            "RANK": "PADDLE_TRAINER_ID",
            "WORLD_SIZE": "PADDLE_TRAINERS_NUM",
            "LOCAL_RANK": "PADDLE_LOCAL_RANK",
            "LOCAL_WORLD_SIZE": "PADDLE_LOCAL_SIZE",
        },
        slower={"bf16": "6 to 12 times", "fp16": "2 to 3 times"},
        always_emulates=("fp16",),
        origins=("NVIDIA Paddle", "PaddleClas", "paddle.vision"),
        nvidia_example="PaddlePaddle",
    ),
    "reference": Framework(("numpy",), "pip install numpy", quantises=True),
    "tensorflow": Framework(
        ("tensorflow", "tensorflow-cpu"),
        "pip install tensorflow==2.21.0",
        exports={"savedmodel": "export", "frozen-graph": "export_frozen_graph"},
        rank_variables=_HOROVOD,
        reads_tf_config=True,
        slower={"bf16": "several times"},
        always_emulates=("fp16",),
        origins=("NVIDIA TensorFlow", "TensorFlow", "Keras"),
        recomputes=True,
        nvidia_example="TensorFlow",
    ),
    "torch": Framework(
        ("torch",),
        "pip install torch==2.13.0",
        exports={"torchscript": "export_torchscript", "torch-export": "export_program"},
        slower={"bf16": "7 to 16 times", "fp16": "9 times"},
        slower_with_avx_512={"bf16": "5 times"},
        origins=("Lockstep", "NVIDIA PyTorch", "PyTorch", "timm", "torchvision"),
        quantises=True,
        recomputes=True,
        explains=True,
    ),
}
"""The frameworks by name. `lockstep doctor` imports them in this order: Paddle cannot be imported
after TensorFlow.

The install commands name the versions that are tested together (`constraints.txt`). They do not
name Lockstep itself, so they are right wherever Lockstep was installed from.
"""


def name_rank(backend: str) -> None:
    """Set RANK, WORLD_SIZE and LOCAL_RANK where a launcher of a backend's framework names this rank
    in other variables."""
    framework = FRAMEWORKS.get(backend)
    if framework is not None:
        rank_variables.name_rank(
            framework.rank_variables, reads_tf_config=framework.reads_tf_config
        )
