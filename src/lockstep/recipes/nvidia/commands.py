"""The words of the Lockstep command, and which options of NVIDIA's command it does not use."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from lockstep.recipes.nvidia.command_line import ParsedCommand
from lockstep.recipes.published import NVIDIA_RECIPES, RECIPES
from lockstep.recipes.recipe import Recipe, difference, eval_fields
from lockstep.recipes.schedule import peak_lr, warmup_epochs
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
_ON_RANKS = {"train", "evaluate"}
_MACHINES = {"@node_rank", "@meeting", "@meeting_host", "@meeting_port"}
_LAUNCH = {"@ranks", "@nodes", "@restarts", *_MACHINES}
_MEASURES = {"@steps", "@warmup_steps", "@epoch_steps", "@all_epochs", "@warmup_epochs"}
_LOADER = ("device", "loader", "loader_threads", "loader_batches")
_WORK = ("image_size", "logits", "stem_channels", "mixup_alpha", "nesterov", "ema_decay")
"""Fields of a recipe that decide how much a step computes."""
_LOGS = ("dlll_file", "nvidia_report_file")
_PREPROCESSING = {"mean", "std", "interpolation", "eval_resize", "eval_crop", "eval_antialias"}
_PREPROCESSING |= {"eval_side_rounding", "eval_offset_rounding", "eval_sampling", "image_size"}
"""The preprocessing of an evaluation, and the size that it follows."""
_BUILT = {"@layers", "@model", "@iterations", "@unit"}
_ALWAYS = {"@command", "@benchmark"}
_OF_WEIGHTS = {*_ALWAYS, "@epoch"}
_USED_SLOTS = {
    **dict.fromkeys(("evaluate", "predict", "convert", "export"), _OF_WEIGHTS),
    "train": {*_ALWAYS, *_BUILT, "@epoch", "@step_images", "@backend"},
    "benchmark": {*_ALWAYS, *_BUILT, *_MEASURES, "@ranks"},
    PACK: _ALWAYS,
}
"""Slots that a kind of command always uses. Slots that are texts are used if the text is a word of
the command."""
_ENGINE = {"precision", "layout", "compile", "device"}
_USED_FIELDS = {
    "evaluate": {*_ENGINE, *_LOADER, *_PREPROCESSING, "global_batch_images"},
    "predict": {*_ENGINE, *_PREPROCESSING},
    "benchmark": {*_ENGINE, *_LOADER, *_WORK, "global_batch_images", "model"},
}
"""Fields of the recipe and of the execution that a kind of command uses; others use none. Training
uses all."""
_REASONS = (
    (_ON_RANKS, _MACHINES, "the processes of one machine find each other", False),
    ({"train"}, {"--weights"}, "the checkpoint that is resumed has the weights", True),
    ({"evaluate"}, _LOGS, "`lockstep evaluate --json` prints the result", True),
    (
        *({"benchmark"}, _LOGS),
        "`lockstep benchmark convert REPORT --form dlll -o LOG` writes it from the report of"
        " `-o REPORT`",
        True,
    ),
    (_NAMES, _LOGS, "{} writes no log", True),
    (
        *({"evaluate", "predict"}, {"model", "logits", "@model", "@layers"}),
        *("the model comes with the weights", False),
    ),
    ({"evaluate"}, {"@unit"}, "all images are evaluated", True),
    ({"benchmark"}, {"@nodes"}, "a benchmark runs on one machine", True),
    ({"benchmark"}, {"quantisation", "sparsity"}, "a benchmark neither prunes nor quantises", True),
    ({"benchmark"}, Recipe.model_fields, "the speed does not depend on it", False),
)
"""Why kinds of commands do not use some names of templates, and whether anything is lost. The first
matching row counts."""


@dataclass(frozen=True)
class Request:
    """What all options together ask for."""

    recipe: Recipe
    execution: dict[str, Any]
    options: dict[str, str]
    slots: dict[str, str]
    ranks: int
    """Number of processes on all machines."""
    typed: frozenset[str] = frozenset()
    """The fields of the recipe that the command line itself sets."""

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return int(self.slots.get("nodes", 1))


@dataclass(frozen=True)
class Command:
    """The Lockstep command for a request."""

    parsed: ParsedCommand
    request: Request
    recipe: str
    changes: dict[str, Any]

    @property
    def kind(self) -> str:
        """The command's name, such as "train"."""
        if "benchmark" in self.request.slots:
            return "benchmark"
        return str(self.request.slots.get("command") or self.parsed.script.command)

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
        """Return whether the command with these words has the name and value of a template."""
        used = _USED_SLOTS[self.kind]
        if name in used:
            return True
        if name in _LAUNCH:
            return self.kind in _ON_RANKS and (name not in _MACHINES or self.request.nodes > 1)
        if name.startswith("@"):
            return name != "@unit" and text in words
        if not name.startswith("-"):
            return self.kind == "train" or name in _USED_FIELDS.get(self.kind, ())
        if name == "--model-prefix" and "@epoch" in used:
            return any(word.startswith(text) for word in words)
        if name == "--out" and text in (".", "./"):
            return self.kind == "train"
        if name == "--compile":
            return not {"--compile", "compile=on"}.isdisjoint(words)
        return (text or name) in words

    def why_unused(self, name: str) -> tuple[str, bool]:
        """Return why the command does not use a name of a template, and whether anything is
        lost."""
        for kinds, names, reason, is_lost in _REASONS:
            if self.kind in kinds and name in names:
                return reason.format(_NAMES[self.kind]), is_lost
        return f"{_NAMES[self.kind]} does not use it", False

    def _train(self) -> list[str]:
        options = dict(self.request.options)
        slots = self.request.slots
        if "epoch" in slots:
            options["--resume-from"] = self._name_epoch()
        if "--resume-from" in options:
            options.pop("--weights", None)
        out = options.pop("--out", None) or slots.get("model_dir") or "RUN"
        if out in (".", "./"):
            out = "RUN"
        data = options.pop("--data", "DATA")
        words = ["train", *self._backend(slots.get("backend")), "--recipe", self.recipe]
        words += ["--data", data, "--out", out, *_write_options(options)]
        words += [*_write_sets(self.changes), *_write_sets(self.request.execution)]
        return self._launch(words)

    def _evaluate(self) -> list[str]:
        data = self.request.options.get("--data", "DATA")
        words = ["evaluate", self._source(), "--data", data, *self._backend()]
        words += ["--batch", self._batch(), *self._precision(), *self._preprocessing()]
        return self._launch([*words, *self._how("layout", *_LOADER)])

    def _predict(self) -> list[str]:
        image = self.request.slots.get("image", "IMAGE")
        words = ["predict", self._source(), image, *self._backend()]
        words += [*self._precision(), *self._preprocessing()]
        return [*words, *self._how("layout", "device")]

    def _convert(self) -> list[str]:
        target = self.request.slots.get("target", "TARGET")
        return ["convert", self._source(), target, *_write_options(self.request.options)]

    def _export(self) -> list[str]:
        folder = self.request.slots.get("target", "FOLDER")
        return ["export", self._source(), folder, "--to", self.request.options["--to"]]

    def _pack(self) -> list[str]:
        folder = self.request.slots.get("target", "FOLDER")
        return [*PACK.split(), self._source(), folder, *_write_options(self.request.options)]

    def _benchmark(self) -> list[str]:
        slots = self.request.slots
        options = self.request.options
        execution = self.request.execution
        recipe = self.request.recipe
        kind = str(slots.get("command") or self.parsed.script.command)
        synthetic = execution.get("loader") == "synthetic"
        # Without a folder, TensorFlow's script measures noise. The others have a default folder.
        data = "synthetic" if self.parsed.system.backend == "tensorflow" else "DATA"
        data = "synthetic" if synthetic else options.get("--data", data)
        words = ["benchmark", {"evaluate": "inference", "all": "all"}.get(kind, "train")]
        words += [*self._backend(), "--model", str(recipe.model), "--recipe", self.recipe]
        words += ["-n", slots.get("benchmark_ranks", str(self.request.ranks // self.request.nodes))]
        words += ["-b", slots.get("benchmark_batches", self._batch())]
        words += ["--dtype", recipe.precision, "--data", data, *_iterations(slots)]
        if "--compile" in options:
            words += ["--compile", "on"]
        if "layout" in execution:
            words += ["--layout", execution["layout"]]
        if "--num-examples" in options:
            words += ["--num-examples", options["--num-examples"]]
        if "report" in slots:
            words += ["-o", slots["report"]]
        work = {name: value for name, value in self.changes.items() if name in _WORK}
        loader = [name for name in _LOADER if name != "loader" or not synthetic]
        return [*words, *_write_sets(work), *self._how(*loader)]

    def _batch(self) -> str:
        """Return the images of one process in one accumulation part."""
        parts = self.request.ranks * self.request.execution.get("accumulation_steps", 1)
        return str(max(self.request.recipe.global_batch_images // parts, 1))

    def _precision(self) -> list[str]:
        return ["--set", f"precision={self.request.recipe.precision}"]

    def _preprocessing(self) -> list[str]:
        """Return the preprocessing that the command line names. The rest comes with the
        weights."""
        fields = self.request.recipe.fields()
        typed = self.request.typed & _PREPROCESSING
        return _write_sets({name: fields[name] for name in fields if name in typed})

    def _how(self, *names: str) -> list[str]:
        """Return the settings of an execution that matter without training."""
        execution = self.request.execution
        settings = {name: value for name, value in execution.items() if name in names}
        if "--compile" in self.request.options and self.kind != "benchmark":
            settings["compile"] = "on"
        return _write_sets(settings)

    def _backend(self, instead: str | None = None) -> list[str]:
        backend = instead or self.parsed.system.backend
        return [] if backend == DEFAULT_BACKEND else ["--backend", backend]

    def _launch(self, words: list[str]) -> list[str]:
        slots = self.request.slots
        nodes = self.request.nodes
        restarts = ["--restarts", slots["restarts"]] if "restarts" in slots else []
        if self.request.ranks == 1 and not restarts:
            return words
        machines = []
        if nodes > 1:
            host = slots.get("meeting_host", "HOST")
            meeting = slots.get("meeting") or f"{host}:{slots.get('meeting_port', 29500)}"
            machines = ["--nodes", str(nodes), "--node-rank", slots.get("node_rank", "0")]
            machines += ["--rendezvous", meeting]
        ranks = str(self.request.ranks // nodes)
        return ["launch", *machines, *restarts, "-n", ranks, "--", *words]

    def _name_epoch(self) -> str:
        prefix = self.request.options.get("--model-prefix", "model")
        epoch = self.request.slots["epoch"]
        number = f"{int(epoch):04d}" if epoch.isdigit() else epoch
        return f"{prefix}-{number}.params"

    def _source(self) -> str:
        options = self.request.options
        slots = self.request.slots
        if "epoch" in slots:
            return self._name_epoch()
        return (
            slots.get("source")
            or options.get("--resume-from")
            or options.get("--weights")
            or slots.get("model_dir")
            or options.get("--out")
            or "SOURCE"
        )


def _iterations(slots: dict[str, str]) -> list[str]:
    """Return -i, -e and -w. Steps become epochs of the longest length that divides both parts, so
    that the same steps are measured as by NVIDIA's code."""
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


def _write_options(options: dict[str, str]) -> list[str]:
    words = []
    for name, text in options.items():
        words += [name, text] if text else [name]
    return words


def _write_sets(fields: dict[str, Any]) -> list[str]:
    """Return `--set FIELD=VALUE` for each field; lists as YAML without spaces."""
    words = []
    for name, value in fields.items():
        words += ["--set", f"{name}={_text(value)}"]
    return words


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return value if isinstance(value, str) else json.dumps(value, allow_nan=False)


_LR = ("lr", "lr_scaling", "lr_batch_images")
_IDLE: dict[str, Callable[[Recipe], bool]] = {
    "lr_step_epochs": lambda recipe: recipe.lr_decay != "step",
    "lr_step_factor": lambda recipe: recipe.lr_decay != "step",
    "lr_decay_from": lambda recipe: recipe.lr_decay == "step" or warmup_epochs(recipe) == 0,
    "lr_end": lambda recipe: recipe.lr_decay == "step",
    "warmup_from_batch_images": lambda recipe: recipe.warmup_epochs == 0,
    "warmup_start_lr": lambda recipe: warmup_epochs(recipe) == 0,
    "warmup_counts_from": lambda recipe: warmup_epochs(recipe) == 0,
    "mixup_coefficient": lambda recipe: recipe.mixup_alpha == 0,
    "mixup_pairing": lambda recipe: recipe.mixup_alpha == 0,
    "weight_decay_roles": lambda recipe: recipe.weight_decay == 0,
    "sparsity_excluded": lambda recipe: recipe.sparsity == "none",
    "loss_scaling": lambda recipe: recipe.precision != "fp16",
    "loss_scale": lambda recipe: recipe.precision != "fp16" or recipe.loss_scaling == "none",
    **dict.fromkeys(
        (
            "loss_scale_growth",
            "loss_scale_growth_steps",
            "loss_scale_backoff",
            "loss_scale_backoff_steps",
        ),
        lambda recipe: recipe.precision != "fp16" or recipe.loss_scaling != "dynamic",
    ),
}
"""Fields that change nothing in some recipes, with the test for such a recipe."""


def find_changes(base: Recipe, wanted: Recipe) -> dict[str, Any]:
    """Return the fewest fields to set on `base` so that it computes the same as `wanted`, as plain
    values.

    Fields that change nothing in `wanted` are left out. `seed` is compared like all others.
    """
    unneeded = {name for name, is_idle in _IDLE.items() if is_idle(wanted)}
    scale = wanted.global_batch_images / base.lr_batch_images if base.lr_scaling == "linear" else 1
    if math.isclose(base.lr * scale, peak_lr(wanted), rel_tol=1e-9):
        unneeded.update(_LR)
    elif wanted.lr_scaling == "none":
        unneeded.add("lr_batch_images")
    if wanted.global_batch_images >= max(
        base.warmup_from_batch_images, wanted.warmup_from_batch_images
    ):
        unneeded.add("warmup_from_batch_images")
    sizes = eval_fields({"image_size": wanted.image_size})
    if base.image_size != wanted.image_size and sizes.items() <= wanted.fields().items():
        unneeded.update(sizes)
    differences = difference(base, wanted)
    return {name: new for name, (_, new) in differences.items() if name not in unneeded}


def nearest_recipe(wanted: Recipe, framework: str) -> tuple[str, dict[str, Any]]:
    """Return the name of the example's recipe with the fewest fields to set, and these fields.

    `framework` is part of the names of the example's recipes, such as "paddle". Those of the wanted
    model come first. A quantised recipe is never changed into one that is not.
    """

    def keep_if_any(is_wanted: Callable[[str, Recipe], bool]) -> dict[str, Recipe]:
        return {name: base for name, base in bases.items() if is_wanted(name, base)} or bases

    bases = _list_published()
    bases = keep_if_any(lambda _, base: base.quantisation in ("none", wanted.quantisation))
    bases = keep_if_any(lambda name, _: f"-{framework}-" in name)
    bases = keep_if_any(lambda _, base: base.model == wanted.model)
    changes = {name: find_changes(base, wanted) for name, base in bases.items()}
    best = min(changes, key=lambda name: len(changes[name]))
    return best, changes[best]


@cache
def _list_published() -> dict[str, Recipe]:
    return {name: RECIPES[name]() for name in NVIDIA_RECIPES}
