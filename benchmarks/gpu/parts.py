"""The parts of the campaign, the most valuable ones first. A part is a few commands: those of
Lockstep where one measures it, otherwise modules of this folder."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

HOW = {
    "plain": {"deterministic": False},
    "deterministic": {"deterministic": True},
    "fused": {"deterministic": False, "fused": "on"},
    "graph": {"deterministic": False, "cuda_graph": "on"},
}
"""Settings of Lockstep's engine by contender. `plain` has kernels that may sum in any order, as the
loops have that it is compared with. Its rate decides what `fused: auto` and `cuda_graph: auto` do.
"""
RESNET = "resnet50"
RESNEXT = "resnext101-32x4d"
RUNTIMES = "onnxruntime,tensorrt,openvino,paddle-inference"
LOADERS = "host,dali,torch-pillow"
SMALL = "-i 2 --compile off --set image_size=32 --set eval_crop=32 --set eval_resize=36"
"""What lets a benchmark end within seconds on a CPU."""


@dataclass(frozen=True)
class Command:
    """A program of a part."""

    line: str
    """What follows `python -m`. {device}, {photos}, {out} and {report} are replaced. The last one
    is the file that the command writes."""
    reader: str = "rows"
    """What reads its results: a name in `readers.READERS`."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields that are added to its rows."""


@dataclass(frozen=True)
class Part:
    """One part of the campaign."""

    name: str
    expected_sec: float
    """Seconds that it is expected to need. It is not begun if fewer are left."""
    commands: tuple[Command, ...]

    @property
    def lines(self) -> list[str]:
        """The command lines."""
        return [command.line for command in self.commands]

    @property
    def limit_sec(self) -> float:
        """Seconds after which it is stopped."""
        return min(3 * self.expected_sec, 500)


def _benchmark(line: str, tiny: bool = False, **fields: Any) -> Command:
    """Return the command of a benchmark; its rows get the fields."""
    size = SMALL if tiny else "-i 40"
    line = f"lockstep benchmark {line} {size} --set device={{device}} -o {{report}}"
    return Command(line, "cells", fields)


def _train(
    model: str, precision: str, batch: int, sec: float, mode: str = "default", tiny: bool = False
) -> Part:
    """Return the part that compares Lockstep's engine with loops that use PyTorch in a mode."""
    ours = {"default": ["plain", "deterministic", "fused"], "reduce-overhead": ["plain", "graph"]}
    contenders = ["plain"] if tiny else ours.get(mode, ["plain"])
    same = f"device={{device}} model={model} precision={precision} batch={batch} mode={mode}"
    commands = []
    for contender in contenders:
        settings = [f"--set {name}={value}" for name, value in HOW[contender].items()]
        if precision == "fp16":
            settings.append("--set loss_scaling=static")
        line = f"train --model {model} --dtype {precision} -b {batch} {' '.join(settings)}"
        fields = {"model": model, "contender": contender, "mode": mode}
        commands.append(_benchmark(line, tiny, **fields))
    commands.append(Command(f"benchmarks.gpu.baselines {same} tiny={int(tiny)}"))
    name = f"train-{model}-{precision}-{batch}" + ("" if mode == "default" else f"-{mode}")
    return Part(name, sec, tuple(commands))


def _profile(name: str, model: str, batch: int, sec: float) -> Part:
    same = f"device={{device}} model={model} precision=bf16 batch={batch}"
    lines = [
        f"steps {same} contender=plain trace={{out}}/trace-{model}.json.gz",
        f"steps {same} contender=graph trace=",
        f"baselines {same} mode=profile",
    ]
    return Part(name, sec, tuple(Command(f"benchmarks.gpu.{line}") for line in lines))


def _conformance(selected: str) -> Part:
    # Warnings are no failures here: they may come from another version of PyTorch, or from an
    # operator that has no deterministic kernel on a GPU.
    line = f"pytest tests/backends -q -p no:cacheprovider -W default -m 'not slow' -k {selected}"
    if find_spec("xdist") is not None:
        line += " -n 8"
    return Part("conformance", 90, (Command(f"{line} --junitxml={{report}}", "tests"),))


def _verify(precision: str, more: str = "") -> Command:
    line = f"lockstep verify --backends torch --precision {precision} --json {more}"
    return Command(line, "json", {"what": "verify", "precision": precision})


def _load(threads: int, loaders: str = "host") -> Command:
    line = f"lockstep benchmark loader {{photos}} --threads {threads} --loaders {loaders}"
    fields = {"what": "loader", "threads": threads}
    return Command(f"{line} --seconds 3 --turns 1 --json", "json", fields)


def _find_batch(recompute: str) -> Command:
    line = f"lockstep find batch --model {RESNET} --precision bf16 --recompute {recompute} --json"
    fields = {"what": "largest batch", "recompute": recompute}
    return Command(f"{line} --start 512 --set device={{device}} --set compile=off", "json", fields)


def _other(name: str, more: str, *before: Command) -> Part:
    line = f"train --model {RESNET} --dtype bf16 -b 128 {more}"
    return Part(name, 90, (*before, _benchmark(line, contender=name)))


def list_parts() -> list[Part]:
    """Return the parts of a campaign on a GPU."""
    runs = "benchmarks.gpu.runs device={device} what="
    inference = f"inference --model {RESNET} -b 1,8,32,128,256 --runtime"
    in_float = _benchmark(f"{inference} native,{RUNTIMES} --dtype fp16,bf16,tf32")
    plain = "--set deterministic=no"
    photos = Command("benchmarks.gpu.photos folder={photos}")
    dali = "--data {photos} --set loader=dali-gpu"
    jpegs = f"train --model {RESNET} --dtype bf16,fp16 -b 256 --data {{photos}} {plain}"
    from_jpegs = _benchmark(jpegs, contender="JPEGs")
    precisions = f"train --dtype bf16,tf32,fp32 -b 128 {plain}"
    return [
        Part("machine", 15, (Command("lockstep doctor", "lines", {"what": "doctor"}),)),
        _train(RESNET, "bf16", 256, 170),
        Part("repeated", 120, (Command(f"{runs}repeated"),)),
        _profile("profile-resnet50", RESNET, 256, 60),
        _conformance("'torch or kernels'"),
        Part("verify", 120, tuple(map(_verify, ("fp32", "tf32", "bf16", "fp16")))),
        Part("killed", 120, (Command(f"{runs}killed"),)),
        _train(RESNET, "fp16", 256, 140),
        Part("precisions", 100, (_benchmark(precisions, contender="precisions"),)),
        _train(RESNET, "bf16", 256, 150, "reduce-overhead"),
        Part("jpegs", 160, (photos, *map(_load, (1, 2, 4, 8)), _load(16, LOADERS), from_jpegs)),
        _train(RESNET, "bf16", 256, 200, "max-autotune"),
        _train(RESNEXT, "bf16", 128, 200),
        _train(RESNEXT, "bf16", 128, 240, "max-autotune"),
        Part("memory", 120, (_find_batch("off"), _find_batch("blocks"))),
        Part("inference", 120, (in_float, _benchmark(f"{inference} {RUNTIMES} --dtype int8"))),
        Part("kernels", 120, (Command("benchmarks.gpu.kernels device={device}"),)),
        Part("ranks", 60, (_benchmark("train --dtype bf16 -b 128 -n 1,2", contender="ranks"),)),
        _profile("profile-resnext101", RESNEXT, 128, 100),
        _train(RESNEXT, "fp16", 128, 200),
        _train(RESNET, "fp16", 256, 200, "max-autotune"),
        _train(RESNET, "bf16", 128, 140),
        _train(RESNEXT, "bf16", 256, 200),
        _other("tensorflow", "--backend tensorflow --compile off,on"),
        _other("paddle", "--backend paddle"),
        _other("mxnet", "--backend mxnet"),
        _other("dali-gpu", dali, photos),
        _train(RESNEXT, "fp16", 128, 240, "max-autotune"),
        _train(RESNET, "fp16", 128, 140),
        _train(RESNEXT, "fp16", 256, 200),
    ]


def list_tiny_parts() -> list[Part]:
    """Return parts that try every module on a CPU, in fp32, which every CPU multiplies."""
    steps = "steps device={device} model=resnet50 precision=fp32 batch=4 contender=plain trace="
    photos = Command("benchmarks.gpu.photos folder={photos} count=20 height=96 width=128")
    jpegs = _benchmark("train --dtype fp32 -b 4 --data {photos}", tiny=True, contender="JPEGs")
    inference = "inference --dtype fp32 -b 1,4 --runtime native,onnxruntime"
    lines = {
        "repeated": "runs device={device} what=repeated tiny=1",
        "killed": "runs device={device} what=killed tiny=1",
        "profile-resnet50": f"{steps} tiny=1",
        "kernels": "kernels device={device} tiny=1",
    }
    return [
        _train(RESNET, "fp32", 4, 120, tiny=True),
        _conformance("'loss_scale_adapts and (first or good)'"),
        Part("verify", 60, (_verify("fp32", more="--steps 3"),)),
        Part("jpegs", 60, (photos, jpegs)),
        Part("inference", 60, (_benchmark(inference, tiny=True),)),
        *[Part(name, 60, (Command(f"benchmarks.gpu.{line}"),)) for name, line in lines.items()],
    ]
