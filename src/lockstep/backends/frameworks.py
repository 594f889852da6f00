"""What the core knows of a framework without importing it: one row for each backend."""

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lockstep.system import rank_variables


@dataclass(frozen=True)
class Options:
    """The values that a backend supports, for options that not every backend supports in full.

    The defaults are what all support. `Execution` and `Recipe` explain the values.
    """

    distributed: tuple[str, ...] = ("native",)
    layout: tuple[str, ...] = ("auto", "nhwc")
    fused: tuple[str, ...] = ("auto", "off")
    cuda_graph: tuple[str, ...] = ("auto", "off")
    recompute: tuple[str, ...] = ("off",)
    all_reduce_precision: tuple[str, ...] = ("fp32",)
    quantisation: tuple[str, ...] = ("none",)


@dataclass(frozen=True)
class Export:
    """A format that `lockstep export` writes, with a module of a backend's folder."""

    function: str
    """The function that writes a program."""
    module: str = "export"
    distributions: tuple[str, ...] = ()
    """Distributions that write and run it, of which one must be installed. None: those of the
    framework."""
    install: str = ""
    """What to type to install them."""
    fuses_products: bool = False
    """Whether a program may round a product and a sum once, as XLA does: resized pixels of an
    original's geometry can then differ by one level."""
    stores_preprocessing: bool = False
    """Whether `function` takes the preprocessing, as JSON, to store it for readers of the weights.
    """
    phone_file: str | None = None
    """The file of a program for phones. It takes one square; `function` returns the file's content,
    in fp32 or quantised after training. None: a program takes photos."""


@dataclass(frozen=True)
class Framework:
    """A row of `FRAMEWORKS`: what the core knows of a backend without importing the framework."""

    distributions: tuple[str, ...]
    """Packages of which one must be installed."""
    install: str
    """The command that installs the framework."""
    exports: Mapping[str, Export] = field(default_factory=dict)
    """The formats that the backend exports, by name."""
    module: str | None = None
    """The module of the framework, which only the backend's folder imports. None for NumPy."""
    is_separate: bool = False
    """Whether the framework needs a separate environment, without the other frameworks."""
    on_cpu: Options = field(default_factory=Options)
    """The options that the engine supports on CPUs."""
    on_gpu: Options | None = None
    """The options that the engine supports on GPUs; None if it computes only on CPUs."""
    addresses: str | None = None
    """The variable in which a launcher gives a rank the addresses of others; None for one process.
    """
    rank_variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of the framework's own launchers by usual name: RANK, WORLD_SIZE, LOCAL_RANK."""
    reads_tf_config: bool = False
    """Whether the variable TF_CONFIG names a rank, too."""
    slower: Mapping[str, str] = field(default_factory=dict)
    """By emulated precision, how much slower than fp32 it is (docs/explanation/numerics.md)."""
    slower_with_avx_512: Mapping[str, str] = field(default_factory=dict)
    """The same, for precisions that oneDNN emulates faster with AVX-512."""
    always_emulates: tuple[str, ...] = ()
    """Precisions that the backend rounds to but multiplies in float32 on every processor."""
    origins: tuple[str, ...] = ()
    """Origins of weights files that belong to the framework: `lockstep.weights.Weights.origin`."""
    explains: bool = False
    """Whether the backend has a module `grad_cam` with an `Explainer`, for `predict --explain`."""
    nvidia_example: str = "PyTorch"
    """The example of NVIDIA that names the keys of `lockstep benchmark convert --form dlll`."""

    @property
    def quantises(self) -> bool:
        """Whether the engine is a `QuantisingEngine`."""
        return "int8" in self.on_cpu.quantisation

    @property
    def recomputes(self) -> bool:
        """Whether the engine can compute residual blocks again to save memory."""
        return "blocks" in self.on_cpu.recompute

    def options(self, on_gpu: bool) -> Options:
        """Return the options that the engine supports on a GPU or a CPU."""
        return self.on_gpu if on_gpu and self.on_gpu is not None else self.on_cpu

    def version(self) -> str | None:
        """Return the installed version, without importing the framework; None if it is missing."""
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

_FLOATS = ("fp32", "bf16", "fp16")
_TENSORFLOW = Options(
    distributed=("native", "horovod"),
    recompute=("off", "blocks"),
    all_reduce_precision=_FLOATS,
)
_JAX = Options(
    recompute=("off", "blocks"), all_reduce_precision=_FLOATS, quantisation=("none", "int8")
)
_TORCH = Options(
    layout=("auto", "nhwc", "nchw"),
    fused=("auto", "on", "off"),
    recompute=("off", "blocks"),
    all_reduce_precision=_FLOATS,
    quantisation=("none", "int8"),
)

FRAMEWORKS: dict[str, Framework] = {
    "jax": Framework(
        ("jax",),
        "pip install jax==0.10.2",
        module="jax",
        exports={
            "stablehlo": Export(
                "export_stablehlo",
                install="pip install jax==0.10.2 flatbuffers==25.12.19",
                fuses_products=True,
            )
        },
        on_cpu=_JAX,
        on_gpu=_JAX,
        addresses="JAX_COORDINATOR_ADDRESS",
        always_emulates=("bf16", "fp16"),
        origins=("Flax", "torchax"),
        explains=True,
    ),
    "mxnet": Framework(
        ("mxnet",),
        "make mxnet-env in Lockstep's source tree; with its wheel: python3.11 -m venv .venv-mxnet"
        " && .venv-mxnet/bin/pip install 'WHEEL[mxnet]'. It is a separate environment, found next"
        " to this one or by LOCKSTEP_MXNET_PYTHON",
        module="mxnet",
        is_separate=True,
        on_cpu=Options(distributed=("native", "horovod"), layout=("auto", "nchw")),
        on_gpu=Options(distributed=("native", "horovod"), layout=("auto", "nhwc")),
        addresses="DMLC_PS_ROOT_URI",
        rank_variables=_HOROVOD,
        slower={"fp16": "10 times"},
        always_emulates=("fp16",),
        origins=("NVIDIA MXNet", "Gluon"),
        nvidia_example="MXNet",
    ),
    "paddle": Framework(
        ("paddlepaddle", "paddlepaddle-gpu"),
        "pip install paddlepaddle==3.3.1",
        module="paddle",
        exports={"paddle-inference": Export("export")},
        # On a CPU, gloo adds up Paddle's fp16 as if it were integers.
        on_cpu=Options(layout=("auto", "nchw"), all_reduce_precision=("fp32", "bf16")),
        on_gpu=Options(layout=("auto", "nhwc"), all_reduce_precision=_FLOATS),
        addresses="PADDLE_TRAINER_ENDPOINTS",
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
    "reference": Framework(
        ("numpy",), "pip install numpy", on_cpu=Options(quantisation=("none", "int8"))
    ),
    "tensorflow": Framework(
        ("tensorflow", "tensorflow-cpu"),
        "pip install tensorflow==2.21.0",
        module="tensorflow",
        exports={
            "savedmodel": Export("export", stores_preprocessing=True),
            "frozen-graph": Export("export_frozen_graph", stores_preprocessing=True),
            "litert": Export("build_program", "litert", phone_file="model.tflite"),
        },
        on_cpu=_TENSORFLOW,
        on_gpu=_TENSORFLOW,
        addresses="TF_CONFIG",
        rank_variables=_HOROVOD,
        reads_tf_config=True,
        slower={"bf16": "several times"},
        always_emulates=("fp16",),
        origins=("NVIDIA TensorFlow", "TensorFlow", "Keras"),
        nvidia_example="TensorFlow",
    ),
    "torch": Framework(
        ("torch",),
        "pip install torch==2.13.0",
        module="torch",
        exports={
            "torchscript": Export("export_torchscript"),
            "torch-export": Export("export_program"),
            "executorch": Export(
                "build_program",
                "executorch_program",
                ("executorch",),
                "pip install executorch==1.5.1 torchao==0.18.0",
                phone_file="model.pte",
            ),
        },
        on_cpu=_TORCH,
        on_gpu=replace(_TORCH, cuda_graph=("auto", "on", "off")),
        addresses="MASTER_ADDR",
        slower={"bf16": "7 to 16 times", "fp16": "9 times"},
        slower_with_avx_512={"bf16": "5 times"},
        origins=("Lockstep", "NVIDIA PyTorch", "PyTorch", "timm", "torchvision", "transformers"),
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
