"""Translate a command of NVIDIA's examples into the equivalent command of Lockstep.

What the script does without an option is translated too: its defaults, and what its code fixes. Where NVIDIA's page and code
disagree about a value that no option sets, it is the page's, as in the published recipes.
"""

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lockstep.recipes.execution import Execution
from lockstep.recipes.nvidia.command_line import Given, read_command
from lockstep.recipes.nvidia.nearest import nearest_recipe
from lockstep.recipes.nvidia.table import Option, equal, filled
from lockstep.recipes.recipe import Recipe, eval_fields
from lockstep.recipes.recipe_files import parse_settings
from lockstep.system.defaults import DEFAULT_BACKEND
from lockstep.system.errors import RecipeError

_KEPT = "CUDA_VISIBLE_DEVICES"
"""The environment variable that means the same to Lockstep."""


@dataclass(frozen=True)
class Remark:
    """Something to know about words of the original command."""

    words: str
    reason: str


@dataclass(frozen=True)
class Translation:
    """The equivalent of a command."""

    system: str
    """The example, such as "pytorch"."""
    script: str
    environment: dict[str, str]
    """Environment variables that the command keeps."""
    command: tuple[str, ...]
    """The words of the command of Lockstep; empty if there is none. DATA, RUN, SOURCE, IMAGE, TARGET and FOLDER stand for
    what the original command does not name."""
    recipe: str | None
    """The published recipe that is nearest."""
    changes: dict[str, Any]
    """The fields to set on it."""
    not_carried: tuple[Remark, ...]
    not_needed: tuple[Remark, ...]
    """Options for which there is nothing to type."""
    unknown: tuple[str, ...]
    """Words that NVIDIA's script does not know."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Asked:
    """One option, as the command line, a preset or its default has it."""

    option: Option
    value: str | None
    """None: it is left out. A switch has "true"."""
    words: str
    """As it would be typed."""
    typed: bool
    """Whether the command line has it, rather than a preset or a default."""

    @property
    def text(self) -> str:
        """The value that a template gets."""
        return self.value or self.option.default or ""

    @property
    def template(self) -> str | None:
        """What carries the value, or the absence. None: nothing does."""
        if self.option.takes == 0:
            return self.option.to if self.value is not None else self.option.absent
        value = self.option.default if self.value is None else self.value
        return "" if value is None else self.option.template(value)

    @property
    def is_default(self) -> bool:
        """Whether the value is the one that the script uses anyway."""
        return self.value is not None and self.option.default is not None and equal(self.value, self.option.default)


@dataclass(frozen=True)
class _Meant:
    """What one option asks for: the words of its template, with the value put in."""

    words: str
    pairs: tuple[tuple[str, str], ...]
    typed: bool


@dataclass(frozen=True)
class _Wanted:
    """What all options together ask for."""

    recipe: Recipe
    execution: dict[str, Any]
    options: dict[str, str]
    slots: dict[str, str]
    ranks: int


def translate(words: list[str], system: str | None = None, revision: str | None = None) -> Translation:
    """Return the equivalent of a command line, given as words or as one text. Nothing is run or read.

    `system` and `revision` select the example and the year of the script, if the command fits several. Raises `UserError` if
    no script of NVIDIA's examples is in it.
    """
    given = read_command(words, system, revision)
    asked = _asked(given)
    not_carried, not_needed = _without_equivalent(given, asked)
    ranks = _ranks(given, asked)
    meant = _meant(given, asked, ranks, not_carried)
    wanted = _wanted(given, ranks, meant, not_carried)
    name, changes = nearest_recipe(wanted.recipe, given.system.name)
    command: list[str] = []
    if given.script.command is not None:
        shape = _Command(given, wanted, name, changes)
        command, dropped = shape.words()
        not_carried += dropped
    uses_recipe = "--recipe" in command
    kept = {name: text for name, text in given.environment.items() if name == _KEPT}
    return Translation(
        system=given.system.name,
        script=given.script.name,
        environment=kept,
        command=tuple(command),
        recipe=name if uses_recipe else None,
        changes=changes if uses_recipe else {},
        not_carried=tuple(not_carried),
        not_needed=tuple(not_needed),
        unknown=() if given.script.not_here else given.unknown,  # its options are not listed
        notes=(*given.notes, *_placeholders(command, given)),
    )


def _placeholders(command: list[str], given: Given) -> list[str]:
    """Return a note on the words that stand for what the original command does not name."""
    stand_ins = ("DATA", "RUN", "SOURCE", "IMAGE", "TARGET", "FOLDER")
    found = [word for word in stand_ins if word in command and word not in given.values.values()]
    return [f"put your own in place of {' and '.join(found)}, which the command does not name"] if found else []


def _asked(given: Given) -> list[_Asked]:
    """Return all options of the script that have an effect, and the environment variables that are known."""
    found = []
    for option in given.system.options(given.script):
        if _has_effect(given, option):
            name = option.names[0]
            found.append(_Asked(option, given.values.get(name), _typed_as(given, option), name in given.typed))
    for name, value in given.environment.items():
        known = [each for each in given.system.environment if _matches(each, name)]
        found += [_Asked(each, value, f"{name}={value}", True) for each in known[:1]]
    return found


def _has_effect(given: Given, option: Option) -> bool:
    """Return whether the options are there without which the script ignores this one."""
    if not option.needs:
        return True
    needed = next(each for each in given.system.options(given.script) if each.names[0] == option.needs)
    return option.needs in given.values and _has_effect(given, needed)


def _typed_as(given: Given, option: Option) -> str:
    value = given.values.get(option.names[0])
    return f"{option.names[-1]} {value}" if option.takes and value is not None else option.names[-1]


def _matches(option: Option, name: str) -> bool:
    return any(name == each or (each.endswith("*") and name.startswith(each[:-1])) for each in option.names)


def _without_equivalent(given: Given, asked: list[_Asked]) -> tuple[list[Remark], list[Remark]]:
    """Return what the command line has and is not carried, and that for which there is nothing to type."""
    idle = [each for each in asked if each.typed and each.template is None and not each.is_default]
    not_carried = [Remark(each.words, each.option.not_here) for each in idle if not each.option.same]
    known = (*given.system.environment, Option(names=(_KEPT,), same="kept"))
    for name, value in given.environment.items():
        if not any(_matches(each, name) for each in known):
            not_carried.append(Remark(f"{name}={value}", "this variable is not known; Lockstep inherits it if it is set"))
    if given.script.not_here:
        not_carried.append(Remark(given.script.name, given.script.not_here))
    not_needed = [Remark(each.words, each.option.same) for each in idle if each.option.same]
    for option in given.system.options(given.script):
        if option.names[0] in given.typed and not _has_effect(given, option):
            reason = f"NVIDIA's code ignores it without {option.needs}"
            not_needed.append(Remark(_typed_as(given, option), reason))
    return not_carried, not_needed


def _meant(given: Given, asked: list[_Asked], ranks: int, not_carried: list[Remark]) -> list[_Meant]:
    """Return what each option means; add values that an option does not take to `not_carried`."""
    meant = [_Meant(given.script.name, tuple(filled(given.script.arguments, "", ranks)), typed=True)]
    for each in asked:
        try:
            meant.append(_Meant(each.words, tuple(filled(each.template or "", each.text, ranks)), each.typed))
        except ValueError:
            not_carried.append(Remark(each.words, f"{each.text!r} is not a value that this option takes"))
    return meant


def _ranks(given: Given, asked: list[_Asked]) -> int:
    """Return the number of processes: the launcher's, else that of an option of the script, else 1."""
    if given.ranks is not None:
        return given.ranks
    found = 1
    for each in asked:
        if (each.template or "").startswith("@ranks=") and each.text:
            with suppress(ValueError):  # `_meant` reports it
                found = max(int(filled(str(each.template), each.text, 1)[0][1]), 1)
    return found


def _wanted(given: Given, ranks: int, meant: list[_Meant], not_carried: list[Remark]) -> _Wanted:
    recipe = given.system.start(given.script)
    try:
        recipe, execution, options = _applied(recipe, meant)
    except RecipeError:  # find the options that are wrong, and leave them out
        fitting: list[_Meant] = []
        for each in meant:
            try:
                _applied(recipe, [*fitting, each])
                fitting.append(each)
            except RecipeError as error:
                not_carried.append(Remark(each.words, " ".join(str(error).split())))
        recipe, execution, options = _applied(recipe, fitting)
    slots = {name[1:]: text for each in meant for name, text in each.pairs if name.startswith("@")}
    return _with_slots(_Wanted(recipe, execution, options, slots, ranks), not_carried)


def _applied(recipe: Recipe, meant: list[_Meant]) -> tuple[Recipe, dict[str, Any], dict[str, str]]:
    """Return the recipe with the fields that options ask for, the fields of the execution, and options of Lockstep.

    How a run is carried out is left to Lockstep unless the command line itself asks for it. Raises `RecipeError`.
    """
    fields: dict[str, Any] = {}
    execution: dict[str, Any] = {}
    options: dict[str, str] = {}
    for each in meant:
        ours, how = parse_settings([f"{name}={text}" for name, text in each.pairs if name[0] not in "-@"])
        fields |= eval_fields(ours) | ours
        if each.typed:
            execution |= how
            options |= {name: text for name, text in each.pairs if name.startswith("-")}
    Execution.of(execution)
    return recipe.replace(**fields), execution, options


def _with_slots(wanted: _Wanted, not_carried: list[Remark]) -> _Wanted:
    """Return the same with the fields that follow from several options."""
    recipe, slots, execution = wanted.recipe, wanted.slots, dict(wanted.execution)
    fields: dict[str, Any] = {}
    if "model" in slots:
        fields["model"] = slots["model"].replace("#", slots.get("layers", "50"))
    if "iterations" in slots and "benchmark" not in slots:
        fields["epochs"] = slots["iterations"]
        if "unit" in slots:  # the original then decays over 90 epochs, however many steps it takes
            fields["epochs"] = "90"
            steps = execution.pop("stop_after_epochs", None) or slots["iterations"]
            execution["stop_after_steps"] = min(int(steps), int(slots["iterations"]))
    if "step_images" in slots:
        parts = int(slots["step_images"]) // recipe.global_batch_images
        if parts < 1:
            words = f"a step of {slots['step_images']} images"
            not_carried.append(Remark(words, f"the GPUs already have {recipe.global_batch_images} in each step"))
        if parts > 1:
            fields["global_batch_images"] = parts * recipe.global_batch_images
            execution["accumulation_steps"] = parts
    try:
        recipe = recipe.replace(**parse_settings([f"{name}={value}" for name, value in fields.items()])[0])
    except RecipeError as error:
        not_carried.append(Remark(", ".join(f"{name} {value}" for name, value in fields.items()), str(error)))
    return _Wanted(recipe, execution, wanted.options, slots, wanted.ranks)


@dataclass(frozen=True)
class _Command:
    """The command of Lockstep for what is wanted."""

    given: Given
    wanted: _Wanted
    recipe: str
    changes: dict[str, Any]

    def words(self) -> tuple[list[str], list[Remark]]:
        """Return the words of the command, and what this command cannot carry."""
        slots = self.wanted.slots
        kind = slots.get("command") or self.given.script.command
        if "benchmark" in slots:
            return self._benchmark(str(kind)), []
        make = {
            "train": self._train,
            "evaluate": self._evaluate,
            "predict": self._predict,
            "convert": self._convert,
            "export": self._export,
        }
        return make[str(kind)]()

    def _train(self) -> tuple[list[str], list[Remark]]:
        options, slots = dict(self.wanted.options), self.wanted.slots
        dropped: list[Remark] = []
        if "epoch" in slots:
            options["--resume-from"] = self._of_epoch()
        if "--weights" in options and "--resume-from" in options:
            dropped.append(Remark(f"--weights {options.pop('--weights')}", "the checkpoint that is resumed has the weights"))
        out = options.pop("--out", None) or slots.get("model_dir") or "RUN"
        words = ["train", *self._backend(slots.get("backend")), "--recipe", self.recipe]
        words += ["--data", options.pop("--data", "DATA"), "--out", "RUN" if out in (".", "./") else out]
        words += [word for name, text in options.items() for word in ([name, text] if text else [name])]
        return self._launched([*words, *_sets(self.changes), *_sets(self.wanted.execution)]), dropped

    def _evaluate(self) -> tuple[list[str], list[Remark]]:
        recipe = self.wanted.recipe
        batch = recipe.global_batch_images // self.wanted.ranks // self.wanted.execution.get("accumulation_steps", 1)
        words = ["evaluate", self._source(), "--data", self.wanted.options.get("--data", "DATA"), *self._backend()]
        words += ["--batch", str(max(batch, 1)), "--set", f"precision={recipe.precision}"]
        part = f"--iter_unit batch --num_iter {self.wanted.slots.get('iterations')}"
        dropped = [Remark(part, "all images are evaluated")] if "unit" in self.wanted.slots else []
        return self._launched([*words, *self._how()]), dropped

    def _predict(self) -> tuple[list[str], list[Remark]]:
        image = self.wanted.slots.get("image", "IMAGE")
        words = ["predict", self._source(), image, *self._backend()]
        return [*words, "--set", f"precision={self.wanted.recipe.precision}", *self._how()], []

    def _convert(self) -> tuple[list[str], list[Remark]]:
        options = [word for name, text in self.wanted.options.items() for word in ([name, text] if text else [name])]
        return ["convert", self._source(), self.wanted.slots.get("target", "TARGET"), *options], []

    def _export(self) -> tuple[list[str], list[Remark]]:
        folder = self.wanted.slots.get("target", "FOLDER")
        return ["export", self._source(), folder, "--to", self.wanted.options["--to"]], []

    def _benchmark(self, kind: str) -> list[str]:
        slots, options, recipe = self.wanted.slots, self.wanted.options, self.wanted.recipe
        batch = recipe.global_batch_images // self.wanted.ranks // self.wanted.execution.get("accumulation_steps", 1)
        # Without a folder, TensorFlow's script measures noise. The others have a default folder.
        real = "synthetic" if self.given.system.backend == "tensorflow" else "DATA"
        synthetic = self.wanted.execution.get("loader") == "synthetic"
        words = ["benchmark", {"evaluate": "inference", "all": "all"}.get(kind, "train"), *self._backend()]
        words += ["--model", str(recipe.model), "--recipe", self.recipe]
        words += ["-n", slots.get("benchmark_ranks", str(self.wanted.ranks))]
        words += ["-b", slots.get("benchmark_batches", str(max(batch, 1))), "--dtype", recipe.precision]
        words += ["--data", "synthetic" if synthetic else options.get("--data", real), *_iterations(slots)]
        words += ["--compile", "on"] if "--xla" in options else []
        words += ["--num-examples", options["--num-examples"]] if "--num-examples" in options else []
        words += ["-o", slots["report"]] if "report" in slots else []
        sizes = {name: value for name, value in self.changes.items() if name == "image_size"}
        loader = {name: value for name, value in self.wanted.execution.items() if name == "loader" and not synthetic}
        return [*words, *_sets(sizes), *_sets(loader)]

    def _how(self) -> list[str]:
        """Return the settings of an execution that matter without training."""
        kept = ("device", "loader", "loader_threads", "layout")
        return _sets({name: value for name, value in self.wanted.execution.items() if name in kept})

    def _backend(self, instead: str | None = None) -> list[str]:
        backend = instead or self.given.system.backend
        return [] if backend == DEFAULT_BACKEND else ["--backend", backend]

    def _launched(self, words: list[str]) -> list[str]:
        ranks = self.wanted.ranks
        return ["launch", "-n", str(ranks), "--", *words] if ranks > 1 else words

    def _of_epoch(self) -> str:
        prefix, epoch = self.wanted.options.get("--model-prefix", "model"), self.wanted.slots["epoch"]
        return f"{prefix}-{int(epoch):04d}.params" if epoch.isdigit() else f"{prefix}-{epoch}.params"

    def _source(self) -> str:
        options, slots = self.wanted.options, self.wanted.slots
        if "epoch" in slots:
            return self._of_epoch()
        found = (slots.get("source"), options.get("--resume-from"), options.get("--weights"), slots.get("model_dir"))
        return next((each for each in (*found, options.get("--out")) if each), "SOURCE")


def _iterations(slots: dict[str, str]) -> list[str]:
    """Return -i, -e and -w. Steps become epochs of the longest length that divides both parts, so that none is measured
    that the original leaves out."""
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


def _sets(fields: dict[str, Any]) -> list[str]:
    """Return `--set FIELD=VALUE` for each field; lists as YAML without spaces."""
    return [word for name, value in fields.items() for word in ("--set", f"{name}={_text(value)}")]


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return value if isinstance(value, str) else json.dumps(value, allow_nan=False)
