"""The tables of docs/reference/nvidia-*.md, from the data that `lockstep from-nvidia` uses."""

import re
import shlex

from lockstep.recipes.nvidia.equivalents import (
    describe_equivalent,
    describe_names,
    describe_script,
)
from lockstep.recipes.nvidia.table import System, systems
from lockstep.recipes.nvidia.translation import translate

LEGEND = """V is the value of the option, n the number of GPUs. FIELD=VALUE stands for
`--set FIELD=VALUE`: look fields up under [recipe](recipe-fields.md) and
[execution](execution-fields.md)."""

LAUNCH = "./launch.py --model resnext101-32x4d --precision AMP --platform DGXA100 --mode"
TENSORFLOW = "python main.py --iter_unit batch --data_dir DATA --batch_size 256 --amp --xla"
PADDLE = "--benchmark --benchmark-steps 100 --benchmark-warmup-steps 300 --batch-size 256 --amp"
BENCHMARKS = {
    ("MXNet of 2019", "mxnet", "2019", "mxnet-18.12"): (
        "python benchmark.py -n 1,4,8 -b 208 --dtype float16 -o benchmark_report_fp16.json"
        " --data-root DATA -i 100 -e 12 -w 4 --num-examples 25600",
        "python benchmark.py -n 1,4,8 -b 96 --dtype float32 -o benchmark_report_fp32.json"
        " --data-root DATA -i 100 -e 12 -w 4 --num-examples 12800",
        "python benchmark.py -n 1 -b 1,2,4,8,16,32,64,96,128,192,208 --dtype float16"
        " -o benchmark_report_fp16.json --data-root DATA -i 200 -e 12 -w 4 --only-inference",
    ),
    ("MXNet of 2022", "mxnet", "2022", "mxnet-22.10"): (
        "python benchmark.py -n 1,4,8 -b 512 --dtype float16 -o benchmark_report_fp16.json"
        " -i 500 -e 3 -w 1 --num-examples 32000 --mode train",
        "python benchmark.py -n 1 -b 1,2,4,8,16,32,64,128,192,256 --dtype float16"
        " -o benchmark_report_fp16.json -i 500 -e 3 -w 1 --mode val",
        "python benchmark.py -n 1 -b 512 --data-backend synthetic --mode train",
    ),
    ("PyTorch", "pytorch", "", "pytorch"): (
        f"python {LAUNCH} benchmark_training DATA",
        f"python ./multiproc.py --nproc_per_node 8 {LAUNCH} benchmark_training DATA",
        f"python {LAUNCH} benchmark_training_short DATA",
        f"python {LAUNCH} benchmark_inference DATA",
    ),
    ("TensorFlow", "tensorflow", "", "tensorflow"): (
        f"{TENSORFLOW} --mode=training_benchmark --warmup_steps 200 --num_iter 500",
        f"{TENSORFLOW} --mode=inference_benchmark --warmup_steps 50 --num_iter 400",
        "bash training_perf.sh",
        "bash inference_benchmark.sh",
    ),
    ("PaddlePaddle", "paddle", "", "paddlepaddle"): (
        "python -m paddle.distributed.launch --gpus=0,1,2,3,4,5,6,7 train.py"
        f" --run-scope train_only {PADDLE}",
        f"python train.py --run-scope eval_only {PADDLE}",
    ),
}
"""The benchmark commands in NVIDIA's documents: by title, example, year of the scripts, and name of
NVIDIA's figure in `other_definitions`."""


def describe_system(name: str) -> str:
    """Return the tables of an example: its launchers and variables, then each of its scripts."""
    system = systems()[name]
    lines = [LEGEND, "", "## Launchers and environment", "", "| NVIDIA's | Lockstep |", "|---|---|"]
    lines += list_launchers(system)
    lines += [
        f"| `{shell.shown}` | that of `{show_command(shell.runs)}` |" for shell in system.shells
    ]
    lines += [
        f"| {describe_names(option)} | {describe_equivalent(option)} |"
        for option in system.environment
    ]
    return "\n".join([*lines, "", *(describe_script(system, script) for script in system.scripts)])


def list_launchers(system: System) -> list[str]:
    """Return rows of a table: the number of processes, then the options of the launchers that
    have them."""
    rows = []
    programs: dict[str, list[str]] = {}
    for launcher in system.launchers:
        number = " or ".join(f"`{name}`" for name in launcher.ranks)
        what = "has n entries" if launcher.lists else "is n"
        rows.append(
            f"| `{launcher.name}`, where {number} {what} | `lockstep launch -n <n> -- ...` |"
        )
        for option in launcher.options:
            row = f"{describe_names(option)} | {describe_equivalent(option)} |"
            programs.setdefault(row, []).append(f"`{launcher.program}`")
    return rows + [f"| {', '.join(names)}: {row}" for row, names in programs.items()]


def show_command(runs: str) -> str:
    """Return a command without the marks of its pattern: a group is shown as three dots."""
    return re.sub(r"\\\d", "...", runs)


def describe_benchmarks() -> str:
    """Return a table for each document of NVIDIA: its benchmark commands and shell scripts, with
    their equivalents."""
    parts = []
    for (title, name, revision, figure), commands in BENCHMARKS.items():
        lines = [f"## {title}", "", f"NVIDIA's figure is `{figure}` in `other_definitions`.", ""]
        lines += ["| NVIDIA's | Lockstep |", "|---|---|"]
        lines += [describe_translation(command, name, revision) for command in commands]
        for shell in systems()[name].shells:
            row = describe_translation(shell.shown, name, revision)
            if "| `lockstep benchmark" in row and revision != "2022":  # the scripts are of 2019
                lines.append(row)
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def describe_translation(command: str, name: str, revision: str) -> str:
    """Return a row of a table with a command, its equivalent, and the reasons for what is not
    translated."""
    translation = translate(command.split(), name, revision or None)
    lost = translation.not_carried
    if not translation.command:
        return f"| `{command}` | {'; '.join(remark.reason for remark in lost)} |"
    equivalent = f"`lockstep {shlex.join(translation.command)}`"
    remarks = [f"; not translated: `{remark.words}`: {remark.reason}" for remark in lost]
    return f"| `{command}` | {''.join([equivalent, *remarks])} |"
