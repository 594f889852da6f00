"""Execution: how a run is carried out. What decides its result is in `lockstep.recipes.recipe`."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from lockstep.recipes import limits
from lockstep.recipes.settings import Settings
from lockstep.system.defaults import DEFAULT_BACKEND


def _switch(value: object) -> object:
    """YAML reads the words on and off as true and false."""
    return ("off", "on")[value] if isinstance(value, bool) else value


class Execution(Settings):
    """How a run is carried out. Backend, device and compiler change rounding, nothing more; accumulation, and the number of
    ranks, also change which images a local batch norm normalises together."""

    backend: str = DEFAULT_BACKEND
    """The framework; see `lockstep doctor`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto": a GPU if there is one."""
    compile: Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)] = "auto"
    """Whether the framework's compiler is used. "auto": where it pays: on GPUs, for Paddle and MXNet everywhere, and for
    PyTorch on processors without AVX-512 if an epoch in fp32 is long enough to repay compiling (docs/numerics.md)."""
    layout: Literal["auto", "nhwc", "nchw"] = "auto"
    """Whether channels are the last axis of activations in memory. "auto": as suits engine and device. PyTorch's engine has
    both; the others have what suits them and refuse the other."""
    reference_dtype: Literal["float64", "float32"] = "float64"
    """What the reference engine computes in; other engines take no notice."""
    deterministic: bool = True
    """On a GPU: only kernels that give the same bits every time. Without it a resumed run is equal within rounding."""
    distributed: Literal["native", "horovod"] = "native"
    """What adds up over ranks: the framework's own way, or Horovod, which the engines of TensorFlow and MXNet have."""
    all_reduce_mb: Annotated[int, Field(ge=1), limits.EXCHANGE_MB] = 25
    """MB of gradients that are added up over ranks in one exchange. Horovod and MXNet, which add up all in one, take no
    notice."""
    accumulation_steps: Annotated[int, Field(ge=1), limits.GLOBAL_BATCH] = 1
    """Parts a rank's share of a step is computed in, one after the other."""
    loader: Literal["host", "dali", "dali-gpu", "synthetic"] = "host"
    """What decodes images: Lockstep's own threads, NVIDIA's DALI on the CPU or the GPU, or nothing ("synthetic": noise)."""
    loader_threads: Annotated[int, Field(ge=0), limits.THREADS] = 0
    """Threads that decode images; 0: one for each core that the ranks on a machine leave to each other."""
    loader_batches: Annotated[int, Field(ge=1), limits.BATCHES_AHEAD] = 2
    """Batches decoded ahead."""
    profile_step: Annotated[int, Field(ge=0), limits.STEPS] | None = None
    """The first step that the framework's profiler traces; steps count from 0. None: none is."""
    profile_steps: Annotated[int, Field(ge=1), limits.TRACED_STEPS] = 1
    """How many are traced from there on."""
    loggers: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = ("tensorboard",)
    """Where figures go besides the run's own log."""
    log_every_steps: Annotated[int, Field(ge=1), limits.STEPS] = 10
    """Steps after which losses are read from the device and logged."""
    save_every_steps: Annotated[int, Field(ge=0), limits.STEPS] = 0
    """Besides the end of every epoch; 0: only there."""
    evaluate_every_epochs: Annotated[int, Field(ge=1), limits.EPOCHS] = 1
    """The last epoch is always evaluated."""
    keep_checkpoints: Annotated[int, Field(ge=1), limits.STEPS] = 2
    """The newest so many are kept, and the best."""
    model_prefix: str = ""
    """Where the weights at the end of every epoch are written as MXNet's Module has them besides: PREFIX-symbol.json and
    PREFIX-0001.params, counted from 1. Nowhere if it is empty."""

    @property
    def traced_steps(self) -> range:
        """The steps that are traced."""
        return range(0) if self.profile_step is None else range(self.profile_step, self.profile_step + self.profile_steps)
