"""Execution: how a run is carried out. The choices that decide its result are in
`lockstep.recipes.recipe`."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from lockstep.recipes import limits
from lockstep.recipes.best_evaluation import Selection
from lockstep.recipes.field_validation import Settings
from lockstep.system.defaults import DEFAULT_BACKEND


def _switch(value: object) -> object:
    """Turn true and false back into "on" and "off", which YAML reads as booleans."""
    return ("off", "on")[value] if isinstance(value, bool) else value


class Execution(Settings):
    """How a run is carried out, which changes results only by rounding.

    Accumulation and ranks also change which images a local batch norm normalises together.

    >>> import lockstep
    >>> lockstep.Execution(backend="jax").replace(device="cpu").device
    'cpu'
    """

    backend: str = DEFAULT_BACKEND
    """The framework that trains. `lockstep doctor` shows which are installed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device that the run computes on. "auto": a GPU if there is one."""
    compile: Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)] = "auto"
    """Whether the framework's compiler is used. "auto": where it makes the run faster. That is on
    GPUs, for Paddle and MXNet on every device, and for PyTorch on processors without AVX-512 if an
    epoch in fp32 is long enough to make up for the time it takes to compile
    (docs/explanation/numerics.md)."""
    fused: Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)] = "auto"
    """Whether PyTorch's engine trains with Lockstep's own fused kernels, which need an NVIDIA GPU
    and Triton (docs/explanation/gpu.md). "auto": off, because no speed-up has been measured. Other
    engines refuse "on"."""
    cuda_graph: Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)] = "auto"
    """Whether PyTorch's engine captures a step on a GPU as a CUDA graph and replays it. It does not
    change numbers. "auto": off, because no speed-up has been measured (docs/explanation/gpu.md).
    "on" is refused on CPUs, with several ranks and by the other engines."""
    layout: Literal["auto", "nhwc", "nchw"] = "auto"
    """Layout of activations in memory. "nhwc": channels are the last axis. "auto": the layout that
    suits engine and device. PyTorch's engine supports both. The others support only the layout that
    suits them and refuse the other one."""
    recompute: Annotated[
        Literal["off", "blocks"], BeforeValidator(lambda value: "off" if value is False else value)
    ] = "off"
    """What is computed again in the backward pass to save memory. "off": nothing; all activations
    are kept. "blocks": residual blocks, of which only the inputs are kept. A step then takes about
    a third more operations and gives the same numbers. PyTorch's, TensorFlow's and JAX's engines
    support it; the others refuse it."""
    reference_dtype: Literal["float64", "float32"] = "float64"
    """The type that the reference engine computes in. Other engines ignore it."""
    deterministic: bool = True
    """Whether a GPU uses only deterministic kernels. If false, a resumed run is equal within
    rounding."""
    distributed: Literal["native", "horovod"] = "native"
    """Library that adds up over ranks. "native": the framework's. "horovod": Horovod, which
    TensorFlow's and MXNet's engines also support."""
    all_reduce_mb: Annotated[int, Field(ge=1), limits.EXCHANGE_MB] = 25
    """MB of gradients that are added up over ranks in one exchange. Horovod and MXNet ignore it:
    they add up all gradients in one exchange."""
    all_reduce_precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The type in which gradients are sent between ranks and added up. "bf16" and "fp16" halve the
    bytes and round every gradient, so weights differ from those of one process by more than fp32's
    rounding; ranks still hold equal weights. With "fp16", gradients below 6e-8 are lost, unless the
    recipe has a loss scale. Some engines have only "fp32"."""
    accumulation_steps: Annotated[int, Field(ge=1), limits.GLOBAL_BATCH] = 1
    """Number of parts in which a rank computes its share of a step, one after the other."""
    keep_global_batch: bool = False
    """Whether a run that resumes on a different number of ranks computes its global batches in the
    same parts as before: on half as many ranks with twice as many accumulation steps. The global
    batches themselves are the same in any case."""
    loader: Literal["host", "dali", "dali-gpu", "synthetic"] = "host"
    """What decodes images. "host": Lockstep's own threads. "dali" and "dali-gpu": NVIDIA's DALI on
    the CPU or the GPU. "synthetic": nothing; the images are noise."""
    loader_threads: Annotated[int, Field(ge=0), limits.THREADS] = 0
    """Number of threads that decode images in a rank. 0: the rank's equal share of the machine's
    cores."""
    loader_batches: Annotated[int, Field(ge=1), limits.BATCHES_AHEAD] = 2
    """Number of batches that are decoded ahead."""
    profile_step: Annotated[int, Field(ge=0), limits.STEPS] | None = None
    """The first step that the framework's profiler traces. Steps count from 0. None: no step is
    traced."""
    profile_steps: Annotated[int, Field(ge=1), limits.TRACED_STEPS] = 1
    """Number of steps that the profiler traces, from `profile_step` on."""
    loggers: tuple[Literal["tensorboard", "mlflow", "wandb", "dlll", "nvidia-report"], ...] = (
        "tensorboard",
    )
    """Where figures are logged in addition to the run's log. "dlll": the lines that NVIDIA's
    examples log. "nvidia-report": the JSON document of NVIDIA's MXNet example."""
    dlll_file: str = ""
    """File of the logger dlll; setting it turns the logger on. Empty: the run's dlll.json."""
    nvidia_report_file: str = ""
    """File of the logger nvidia-report; setting it turns the logger on. Empty: the run's
    nvidia-report.json."""
    log_every_steps: Annotated[int, Field(ge=1), limits.STEPS] = 10
    """Number of steps after which losses are read from the device and logged."""
    save_every_steps: Annotated[int, Field(ge=0), limits.STEPS] = 0
    """Number of steps after which a checkpoint is saved, in addition to the end of every epoch. 0:
    only at the end of every epoch."""
    evaluate_every_epochs: Annotated[int, Field(ge=1), limits.EPOCHS] = 1
    """Number of epochs after which the model is evaluated. The last epoch is always evaluated."""
    metrics: tuple[Selection, ...] = ()
    """Values of an evaluation that are computed in addition to the usual ones and `selection`: mrr,
    and top3 with any number."""
    keep_checkpoints: Annotated[int, Field(ge=1), limits.STEPS] = 2
    """Number of newest checkpoints that are kept. The best one is kept, too."""
    stop_after_epochs: Annotated[int, Field(ge=0), limits.EPOCHS] = 0
    """Number of epochs that one command trains, as `--run-epochs` of NVIDIA's code: it stops at the
    end of this many epochs after the last complete one. The schedule stays that of the whole run.
    0: the command trains to the end."""
    stop_after_steps: Annotated[int, Field(ge=0), limits.STEPS] = 0
    """Number of steps that one command trains, counted from the step where it resumes. 0: the
    command trains to the end."""
    train_only: bool = False
    """Whether the run is never evaluated. Validation images are not read and may be missing."""
    model_prefix: str = ""
    """Prefix of files to which the weights at the end of every epoch are also written, in the
    format of MXNet's Module: PREFIX-symbol.json and PREFIX-0001.params, counted from 1. If it is
    empty, they are not written."""

    checkpoint_store: str = ""
    """Address in an object store to which the run is copied after every save, such as
    s3://BUCKET/RUN (docs/how-to/object-stores.md). A command whose folder has older checkpoints, or
    none, first fetches the copy. If it is empty, there is none."""

    @property
    def loggers_used(self) -> tuple[str, ...]:
        """The loggers that are selected by name or by their file."""
        loggers: list[str] = [*self.loggers]
        if self.dlll_file:
            loggers.append("dlll")
        if self.nvidia_report_file:
            loggers.append("nvidia-report")
        return tuple(dict.fromkeys(loggers))

    @property
    def traced_steps(self) -> range:
        """The steps that the profiler traces."""
        if self.profile_step is None:
            return range(0)
        return range(self.profile_step, self.profile_step + self.profile_steps)
