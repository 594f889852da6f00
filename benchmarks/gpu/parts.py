"""The parts of the campaign, the most valuable ones first. A part is a few commands of Lockstep, or
of modules of this folder."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Reader = Callable[[str, Path], list[Row]]
"""What reads a command's results, from what it printed and the file that it wrote."""
RESNET = "resnet50"
RESNEXT = "resnext101-32x4d"
REPEATED = "fp32,tf32,bf16,fp16,fp16-dynamic,bf16-fused"
RUNTIMES = "onnxruntime,tensorrt,openvino,paddle-inference"


def read_rows(printed: str, report: Path) -> list[Row]:
    """Return the JSON objects that a module printed, one a line. A line that a kill cut off is left
    out, and a row over some rounds if there is one over more."""
    rows: dict[str, Row] = {}
    for line in re.findall(r'^{"what":.*\n', printed, re.MULTILINE):
        row = json.loads(line)
        key = f"{row['what']} {row['contender']}" if "rounds" in row else line
        rows[key] = row
    return list(rows.values())


def read_lines(printed: str, report: Path) -> list[Row]:
    """Return one row with all lines."""
    return [{"lines": printed.splitlines()}] if printed else []


def read_json(printed: str, report: Path) -> list[Row]:
    """Return the JSON object that a command of Lockstep printed."""
    return [json.loads(printed)] if printed else []


def read_cells(printed: str, report: Path) -> list[Row]:
    """Return the cells of a report of `lockstep benchmark`."""
    if not report.is_file():
        return []
    cells = json.loads(report.read_text(encoding="utf-8"))["cells"]
    return [cell | {"precision": cell["dtype"]} for cell in cells]


@dataclass(frozen=True)
class Command:
    """A program of a part."""

    line: str
    """What follows `python -m`. {device}, {photos}, {out} and {report} are replaced. The last one
    is the file that the command writes."""
    reader: Reader = read_rows
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


def _measure(name: str, sec: float, *lines: str) -> Part:
    """Return a part of modules of this folder."""
    commands = [Command(f"benchmarks.gpu.{line} device={{device}}") for line in lines]
    return Part(name, sec, tuple(commands))


def _benchmark(line: str, size: str = "-i 40", **fields: Any) -> Command:
    """Return the command of a benchmark; its rows get the fields."""
    line = f"lockstep benchmark {line} {size} --set device={{device}} -o {{report}}"
    return Command(line, read_cells, fields)


def _train(model: str, precision: str, batch: int, sec: float, mode: str = "default") -> Part:
    """Return the part that compares Lockstep's engine with loops that use PyTorch in a mode."""
    name = f"train-{model}-{precision}-{batch}-{mode}"
    line = f"training what=rates model={model} precision={precision} batch={batch} mode={mode}"
    return _measure(name, sec, line)


def _profile(name: str, model: str, batch: int, sec: float) -> Part:
    line = f"training what=profile model={model} precision=bf16 batch={batch}"
    trace = f"{{out}}/trace-{model}"
    kinds = ("plain", "graph", "compile")
    return _measure(name, sec, *[f"{line} kind={k} trace={trace}-{k}.json.gz" for k in kinds])


def _conformance(selected: str) -> Part:
    # Warnings are no failures here: they may come from another version of PyTorch, or from an
    # operator that has no deterministic kernel on a GPU.
    line = "pytest tests/backends -q --tb=short -p no:cacheprovider -W default -m 'not slow'"
    line += f" -k {selected}"
    return Part("conformance", 150, (Command(line, read_lines, {"what": "conformance"}),))


def _verify(precision: str, more: str = "") -> Command:
    line = f"lockstep verify --backends torch --precision {precision} --json {more}"
    return Command(line, read_json, {"what": "verify", "precision": precision})


def _load(threads: int, loaders: str = "host") -> Command:
    line = f"benchmarks.loaders --data {{photos}} --threads {threads} --loaders {loaders}"
    fields = {"what": "loader", "threads": threads}
    return Command(f"{line} --seconds 3 --turns 1", read_json, fields)


def _find_batch(recompute: str) -> Command:
    line = f"lockstep find batch --model {RESNET} --precision bf16 --recompute {recompute} --json"
    line += " --start 512 --set device={device} --set compile=off"
    return Command(line, read_json, {"what": "largest batch", "recompute": recompute})


def _other(name: str, more: str, *before: Command) -> Part:
    line = f"train --model {RESNET} --dtype bf16 -b 128 {more}"
    return Part(name, 90, (*before, _benchmark(line, contender=name)))


def list_parts() -> list[Part]:
    """Return the parts of a campaign on a GPU."""
    inference = f"inference --model {RESNET} -b 1,8,32,128,256 --runtime"
    in_float = _benchmark(f"{inference} native,{RUNTIMES} --dtype fp16,bf16,tf32")
    plain = "--set deterministic=no"
    photos = Command("benchmarks.gpu.photos folder={photos}")
    loaders = _load(16, "host,dali,torch-pillow")
    dali = "--data {photos} --set loader=dali-gpu"
    jpegs = f"train --model {RESNET} --dtype bf16,fp16 -b 256 --data {{photos}} {plain}"
    from_jpegs = _benchmark(jpegs, contender="JPEGs")
    precisions = f"train --dtype bf16,tf32,fp32 -b 128 {plain}"
    return [
        Part("machine", 15, (Command("lockstep doctor", read_lines, {"what": "doctor"}),)),
        _train(RESNET, "bf16", 256, 240),
        _measure("repeated", 120, f"runs what=repeated precisions={REPEATED}"),
        _profile("profile-resnet50", RESNET, 256, 60),
        _conformance("'torch or kernels'"),
        Part("verify", 120, tuple(map(_verify, ("fp32", "tf32", "bf16", "fp16")))),
        _measure("killed", 150, "runs what=killed precisions=bf16,fp16-dynamic"),
        _measure("fine-tuned", 120, "runs what=fine-tuned precisions=bf16"),
        _train(RESNET, "bf16", 256, 240, "engines"),
        _train(RESNET, "fp16", 256, 140),
        Part("precisions", 100, (_benchmark(precisions, contender="precisions"),)),
        _train(RESNET, "bf16", 256, 150, "reduce-overhead"),
        Part("jpegs", 160, (photos, *map(_load, (1, 2, 4, 8)), loaders, from_jpegs)),
        _train(RESNET, "bf16", 256, 200, "max-autotune"),
        _train(RESNEXT, "bf16", 128, 300),
        _train(RESNEXT, "bf16", 128, 300, "engines"),
        _train(RESNEXT, "bf16", 128, 240, "max-autotune"),
        Part("memory", 120, (_find_batch("off"), _find_batch("blocks"))),
        Part("inference", 120, (in_float, _benchmark(f"{inference} {RUNTIMES} --dtype int8"))),
        _measure("kernels", 120, "kernels"),
        Part("ranks", 60, (_benchmark("train --dtype bf16 -b 128 -n 1,2", contender="ranks"),)),
        _profile("profile-resnext101", RESNEXT, 128, 100),
        _train(RESNEXT, "fp16", 128, 200),
        _train(RESNET, "fp16", 256, 200, "max-autotune"),
        _train(RESNET, "bf16", 128, 140),
        _train(RESNEXT, "bf16", 256, 200),
        _other("tensorflow", "--backend tensorflow --compile off,on"),
        _other("paddle", "--backend paddle"),
        _other("mxnet", "--backend mxnet"),
        _other("jax", "--backend jax"),
        _other("dali-gpu", dali, photos),
        _train(RESNEXT, "fp16", 128, 240, "max-autotune"),
        _train(RESNET, "fp16", 128, 140),
        _train(RESNEXT, "fp16", 256, 200),
    ]


def list_tiny_parts() -> list[Part]:
    """Return parts that try every module within seconds on a CPU, in fp32, which every CPU
    multiplies."""
    size = "-i 2 --compile off --set image_size=32 --set eval_crop=32 --set eval_resize=36"
    photos = Command("benchmarks.gpu.photos folder={photos} count=20 height=96 width=128")
    jpegs = _benchmark("train --dtype fp32 -b 4 --data {photos}", size, contender="JPEGs")
    inference = "inference --dtype fp32 -b 1,4 --runtime native,onnxruntime"
    profile = f"training what=profile model={RESNET} precision=fp32 batch=4 kind=plain tiny=1"
    return [
        _train(RESNET, "fp32", 4, 120, "tiny"),
        _conformance("'loss_scale_adapts and (first or good)'"),
        Part("verify", 60, (_verify("fp32", more="--steps 3"),)),
        Part("jpegs", 60, (photos, jpegs)),
        Part("inference", 60, (_benchmark(inference, size),)),
        _measure("repeated", 60, "runs what=repeated precisions=fp32"),
        _measure("killed", 60, "runs what=killed precisions=fp32"),
        _measure("fine-tuned", 120, "runs what=fine-tuned precisions=fp32"),
        _measure("profile-resnet50", 60, f"{profile} trace={{out}}/trace.json.gz"),
        _measure("kernels", 60, "kernels tiny=1"),
    ]
