"""The words of the command of Lockstep, and which options of NVIDIA's command it has no use for."""

import json
import math
from dataclasses import dataclass
from typing import Any

from lockstep.recipes.nvidia.command_line import Given
from lockstep.recipes.recipe import Recipe
from lockstep.system.defaults import DEFAULT_BACKEND

PACK = "data pack"
_NAMES = {
    "train": "training",
    "evaluate": "an evaluation",
    "predict": "a prediction",
    "convert": "a conversion",
    "export": "an export",
    "benchmark": "a benchmark",
    PACK: "packing",
}
_LAUNCHED = {"train", "evaluate"}
_LAUNCH = {
    "@ranks",
    "@nodes",
    "@node_rank",
    "@meeting",
    "@meeting_host",
    "@meeting_port",
    "@restarts",
}
_MACHINES = {"@node_rank", "@meeting", "@meeting_host", "@meeting_port"}
_MEASURES = {"@steps", "@warmup_steps", "@epoch_steps", "@all_epochs", "@warmup_epochs"}
_LOADER = ("device", "loader", "loader_threads", "loader_batches")
_WORK = ("image_size", "logits", "stem_channels", "mixup_alpha", "nesterov", "ema_decay")
"""Fields of a recipe that decide how much a step computes."""
_LOGS = ("dlll_file", "nvidia_report_file")
_OF_WEIGHTS = {"mean", "std", "interpolation", "eval_resize", "eval_crop", "eval_antialias"}
_OF_WEIGHTS |= {"eval_side_rounding", "eval_offset_rounding", "eval_sampling"}
"""The preprocessing of an evaluation."""
_USED_SLOTS = {
    "train": {"@step_images", "@epoch", "@layers", "@model", "@iterations", "@unit", "@backend"},
    "evaluate": {"@epoch"},
    "predict": {"@epoch"},
    "convert": {"@epoch"},
    "export": {"@epoch"},
    "benchmark": {"@ranks", "@layers", "@model", "@iterations", "@unit", *_MEASURES},
    PACK: set[str](),
}
"""Slots that a kind of command always uses. Slots that are texts are used if the text is a word of
the command."""
_USED_FIELDS = {
    "evaluate": {"precision", "global_batch_images", "layout", "compile", *_LOADER},
    "predict": {"precision", "layout", "compile", "device"},
    "convert": set[str](),
    "export": set[str](),
    "benchmark": {
        "precision",
        "global_batch_images",
        "model",
        "layout",
        "compile",
        *_LOADER,
        *_WORK,
    },
    PACK: set[str](),
}
"""Fields of the recipe and of the execution that a kind of command uses. Training uses all."""


@dataclass(frozen=True)
class Wanted:
    """What all options together ask for."""

    recipe: Recipe
    execution: dict[str, Any]
    options: dict[str, str]
    slots: dict[str, str]
    ranks: int
    """Number of processes on all machines."""

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return int(self.slots.get("nodes", 1))


@dataclass(frozen=True)
class Command:
    """The command of Lockstep for what is wanted."""

    given: Given
    wanted: Wanted
    recipe: str
    changes: dict[str, Any]

    @property
    def kind(self) -> str:
        """The command's name, such as "train"."""
        if "benchmark" in self.wanted.slots:
            return "benchmark"
        return str(self.wanted.slots.get("command") or self.given.script.command)

    def words(self) -> list[str]:
        """Return the words of the command."""
        make = {
            "train": self._train,
            "evaluate": self._evaluate,
            "predict": self._predict,
            "convert": self._convert,
            "export": self._export,
            "benchmark": self._benchmark,
            PACK: self._pack,
        }
        return make[self.kind]()

    def uses(self, name: str, text: str, words: list[str]) -> bool:
        """Return whether the command, which has these words, has the name and value of a template."""
        if name in ("@command", "@benchmark"):
            return True
        if name in _LAUNCH:
            used = self.kind in _LAUNCHED and (name not in _MACHINES or self.wanted.nodes > 1)
            return used or name in _USED_SLOTS[self.kind]
        if name.startswith("@"):
            return name in _USED_SLOTS[self.kind] or (name != "@unit" and text in words)
        if name == "--out" and text in (".", "./"):
            return self.kind == "train"
        if name == "--xla":
            return not {"--xla", "--compile", "compile=on"}.isdisjoint(words)
        if name.startswith("-"):
            return (text or name) in words
        return self.kind == "train" or name in _USED_FIELDS[self.kind]

    def why_unused(self, name: str) -> tuple[str, bool]:
        """Return why the command has no use for something that a template names, and whether
        anything is lost by it."""
        kind = self.kind
        if name in _MACHINES and kind in _LAUNCHED:
            return "the processes of one machine meet by themselves", False
        if kind == "train" and name == "--weights":
            return "the checkpoint that is resumed has the weights", True
        if name in _LOGS:
            return _instead_of_log(kind), True
        if kind in ("evaluate", "predict") and name in ("model", "logits", "@model", "@layers"):
            return "the model is that of the weights", False
        if kind in ("evaluate", "predict") and name in _OF_WEIGHTS:
            return "the preprocessing comes with the weights", True
        if kind == "evaluate" and name == "@unit":
            return "all images are evaluated", True
        if kind == "benchmark" and name == "@nodes":
            return "a benchmark runs on one machine", True
        if kind == "benchmark" and name in ("quantisation", "sparsity"):
            return "dense fp steps are measured", True
        if kind == "benchmark" and name in Recipe.model_fields:
            return "the speed does not depend on it", False
        return f"{_NAMES[kind]} does not use it", False

    def _train(self) -> list[str]:
        options = dict(self.wanted.options)
        slots = self.wanted.slots
        if "epoch" in slots:
            options["--resume-from"] = self._of_epoch()
        if "--resume-from" in options:
            options.pop("--weights", None)
        out = options.pop("--out", None) or slots.get("model_dir") or "RUN"
        words = ["train", *self._backend(slots.get("backend")), "--recipe", self.recipe]
        words += [
            "--data",
            options.pop("--data", "DATA"),
            "--out",
            "RUN" if out in (".", "./") else out,
        ]
        words += _options(options)
        return self._launched([*words, *_sets(self.changes), *_sets(self.wanted.execution)])

    def _evaluate(self) -> list[str]:
        recipe = self.wanted.recipe
        batch = (
            recipe.global_batch_images
            // self.wanted.ranks
            // self.wanted.execution.get("accumulation_steps", 1)
        )
        words = [
            "evaluate",
            self._source(),
            "--data",
            self.wanted.options.get("--data", "DATA"),
            *self._backend(),
        ]
        words += ["--batch", str(max(batch, 1)), "--set", f"precision={recipe.precision}"]
        return self._launched([*words, *self._how("layout", *_LOADER)])

    def _predict(self) -> list[str]:
        image = self.wanted.slots.get("image", "IMAGE")
        words = ["predict", self._source(), image, *self._backend()]
        return [
            *words,
            "--set",
            f"precision={self.wanted.recipe.precision}",
            *self._how("layout", "device"),
        ]

    def _convert(self) -> list[str]:
        target = self.wanted.slots.get("target", "TARGET")
        return ["convert", self._source(), target, *_options(self.wanted.options)]

    def _export(self) -> list[str]:
        folder = self.wanted.slots.get("target", "FOLDER")
        return ["export", self._source(), folder, "--to", self.wanted.options["--to"]]

    def _pack(self) -> list[str]:
        slots = self.wanted.slots
        return [
            "data",
            "pack",
            self._source(),
            slots.get("target", "FOLDER"),
            *_options(self.wanted.options),
        ]

    def _benchmark(self) -> list[str]:
        slots = self.wanted.slots
        options = self.wanted.options
        recipe = self.wanted.recipe
        kind = str(slots.get("command") or self.given.script.command)
        batch = (
            recipe.global_batch_images
            // self.wanted.ranks
            // self.wanted.execution.get("accumulation_steps", 1)
        )
        # Without a folder, TensorFlow's script measures noise. The others have a default folder.
        real = "synthetic" if self.given.system.backend == "tensorflow" else "DATA"
        synthetic = self.wanted.execution.get("loader") == "synthetic"
        words = [
            "benchmark",
            {"evaluate": "inference", "all": "all"}.get(kind, "train"),
            *self._backend(),
        ]
        words += ["--model", str(recipe.model), "--recipe", self.recipe]
        words += ["-n", slots.get("benchmark_ranks", str(self.wanted.ranks // self.wanted.nodes))]
        words += [
            "-b",
            slots.get("benchmark_batches", str(max(batch, 1))),
            "--dtype",
            recipe.precision,
        ]
        words += [
            "--data",
            "synthetic" if synthetic else options.get("--data", real),
            *_iterations(slots),
        ]
        words += ["--compile", "on"] if "--xla" in options else []
        words += (
            ["--layout", self.wanted.execution["layout"]]
            if "layout" in self.wanted.execution
            else []
        )
        words += (
            ["--num-examples", options["--num-examples"]] if "--num-examples" in options else []
        )
        words += ["-o", slots["report"]] if "report" in slots else []
        kept = [name for name in _LOADER if name != "loader" or not synthetic]
        return [
            *words,
            *_sets({name: value for name, value in self.changes.items() if name in _WORK}),
            *self._how(*kept),
        ]

    def _how(self, *names: str) -> list[str]:
        """Return the settings of an execution that matter without training."""
        execution = self.wanted.execution
        compiled = (
            {"compile": "on"} if "--xla" in self.wanted.options and self.kind != "benchmark" else {}
        )
        return _sets({name: value for name, value in execution.items() if name in names} | compiled)

    def _backend(self, instead: str | None = None) -> list[str]:
        backend = instead or self.given.system.backend
        return [] if backend == DEFAULT_BACKEND else ["--backend", backend]

    def _launched(self, words: list[str]) -> list[str]:
        slots = self.wanted.slots
        nodes = self.wanted.nodes
        machines = []
        if nodes > 1:
            meeting = (
                slots.get("meeting")
                or f"{slots.get('meeting_host', 'HOST')}:{slots.get('meeting_port', 29500)}"
            )
            machines = [
                "--nodes",
                str(nodes),
                "--node-rank",
                slots.get("node_rank", "0"),
                "--rendezvous",
                meeting,
            ]
        restarts = ["--restarts", slots["restarts"]] if "restarts" in slots else []
        if self.wanted.ranks == 1 and not restarts:
            return words
        return ["launch", *machines, *restarts, "-n", str(self.wanted.ranks // nodes), "--", *words]

    def _of_epoch(self) -> str:
        prefix = self.wanted.options.get("--model-prefix", "model")
        epoch = self.wanted.slots["epoch"]
        return (
            f"{prefix}-{int(epoch):04d}.params" if epoch.isdigit() else f"{prefix}-{epoch}.params"
        )

    def _source(self) -> str:
        options = self.wanted.options
        slots = self.wanted.slots
        if "epoch" in slots:
            return self._of_epoch()
        found = (
            slots.get("source"),
            options.get("--resume-from"),
            options.get("--weights"),
            slots.get("model_dir"),
        )
        return next((each for each in (*found, options.get("--out")) if each), "SOURCE")


def _instead_of_log(kind: str) -> str:
    if kind == "evaluate":
        return "`lockstep evaluate --json` prints the result"
    if kind == "benchmark":
        return (
            "`lockstep benchmark convert REPORT --form dlll -o LOG` writes it from the report of"
            " `-o REPORT`"
        )
    return f"{_NAMES[kind]} writes no log"


def _iterations(slots: dict[str, str]) -> list[str]:
    """Return -i, -e and -w. Steps become epochs of the longest length that divides both parts, so
    that none is measured that the original leaves out."""
    warmup = int(slots.get("warmup_steps", 0))
    if "epoch_steps" in slots:
        left_out = int(slots.get("warmup_epochs", 0))
        epochs = max(int(slots.get("all_epochs", 1)) - left_out, 1)
        return ["-i", slots["epoch_steps"], "-e", str(epochs), "-w", str(left_out)]
    steps = int(slots["steps"]) if "steps" in slots else int(slots.get("iterations", 0)) - warmup
    if steps < 1:
        return []
    length = math.gcd(steps, warmup)
    return ["-i", str(length), "-e", str(steps // length), "-w", str(warmup // length)]


def _options(options: dict[str, str]) -> list[str]:
    return [word for name, text in options.items() for word in ([name, text] if text else [name])]


def _sets(fields: dict[str, Any]) -> list[str]:
    """Return `--set FIELD=VALUE` for each field; lists as YAML without spaces."""
    return [word for name, value in fields.items() for word in ("--set", f"{name}={_text(value)}")]


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return value if isinstance(value, str) else json.dumps(value, allow_nan=False)
