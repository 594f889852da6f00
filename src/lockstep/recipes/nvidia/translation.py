"""Translate a command of NVIDIA's examples into the equivalent command of Lockstep.

What the script does without an option is translated too: its defaults, and what its code fixes.
Where NVIDIA's page and code disagree about a value that no option sets, it is the page's, as in the
published recipes.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lockstep.recipes.execution import Execution
from lockstep.recipes.nvidia.command_line import Given, Word, read_command
from lockstep.recipes.nvidia.commands import Command, Wanted
from lockstep.recipes.nvidia.nearest import nearest_recipe
from lockstep.recipes.nvidia.table import Option, equal, filled
from lockstep.recipes.recipe import Recipe, eval_fields
from lockstep.recipes.recipe_files import parse_settings
from lockstep.system.errors import RecipeError

_DEFAULT = "it is the default of NVIDIA's script"
_KEPT = "CUDA_VISIBLE_DEVICES"
"""The environment variable that means the same to Lockstep."""


@dataclass(frozen=True)
class Remark:
    """Something to know about words of the original command."""

    words: str
    reason: str


@dataclass(frozen=True)
class Carried:
    """Words of the original command, and what they became."""

    words: str
    becomes: tuple[str, ...]
    """Fields of the recipe or the execution, such as "momentum=0.875", options, such as "--data D",
    and parts of the command, such as "ranks 8". Empty if Lockstep does the same without an option.
    """


@dataclass(frozen=True)
class Translation:
    """The equivalent of a command."""

    system: str
    """The example, such as "pytorch"."""
    script: str
    environment: dict[str, str]
    """Environment variables that the command keeps."""
    command: tuple[str, ...]
    """The words of the command of Lockstep; empty if there is none. DATA, RUN, SOURCE, IMAGE,
    TARGET and FOLDER stand for what the original command does not name."""
    recipe: str | None
    """The published recipe that is nearest."""
    changes: dict[str, Any]
    """The fields to set on it."""
    carried: tuple[Carried, ...]
    """Options that are in the command, as fields of its recipe or as words. Every option of the
    original command is here, in `not_carried`, in `not_needed` or in `unknown`."""
    not_carried: tuple[Remark, ...]
    not_needed: tuple[Remark, ...]
    """Options for which there is nothing to type."""
    unknown: tuple[str, ...]
    """Words that neither NVIDIA's script nor its launcher knows."""
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
        return (
            self.value is not None
            and self.option.default is not None
            and equal(self.value, self.option.default)
        )


@dataclass(frozen=True)
class _Meant:
    """What one option asks for: the words of its template, with the value put in."""

    words: str
    pairs: tuple[tuple[str, str], ...]
    typed: bool


def translate(
    words: list[str], system: str | None = None, revision: str | None = None
) -> Translation:
    """Return the equivalent of a command line, given as words or as one text. Nothing is run or
    read.

    `system` and `revision` select the example and the year of the script, if the command fits
    several. Raises `UserError` if no script of NVIDIA's examples is in it.
    """
    return translate_command(read_command(words, system, revision))


def translate_command(given: Given) -> Translation:
    """Return the equivalent of a command line that is read."""
    asked = _asked(given)
    not_carried, not_needed = _without_equivalent(given, asked)
    ranks = _ranks(given, asked)
    meant = _meant(given, asked, ranks, not_carried)
    wanted = _wanted(given, ranks, meant, not_carried)
    name, changes = nearest_recipe(wanted.recipe, given.system.name)
    words: list[str] = []
    carried: list[Carried] = []
    if given.script.command is not None:
        command = Command(given, wanted, name, changes)
        words = command.words()
        carried = _carried(command, words, meant, not_carried, not_needed)
    uses_recipe = "--recipe" in words
    kept = {name: text for name, text in given.environment.items() if name == _KEPT}
    return Translation(
        system=given.system.name,
        script=given.script.name,
        environment=kept,
        command=tuple(words),
        recipe=name if uses_recipe else None,
        changes=changes if uses_recipe else {},
        carried=tuple(carried),
        not_carried=tuple(not_carried),
        not_needed=tuple(not_needed),
        unknown=() if given.script.not_here else given.unknown,  # its options are not listed
        notes=(*given.notes, *_notes(given, wanted, words)),
    )


def _carried(
    command: Command,
    words: list[str],
    meant: list[_Meant],
    not_carried: list[Remark],
    not_needed: list[Remark],
) -> list[Carried]:
    """Return the typed options that the command has. Add the others to `not_carried` or
    `not_needed`."""
    refused = {remark.words for remark in not_carried}
    found = []
    for one in meant:
        if not one.typed or one.words in refused or one.words == command.given.script.name:
            continue
        used = [(name, text) for name, text in one.pairs if command.uses(name, text, words)]
        unused = [command.why_unused(name) for name, text in one.pairs if (name, text) not in used]
        lost = [reason for reason, is_lost in unused if is_lost]
        if used or not one.pairs:
            layers = command.wanted.slots.get("layers", "50")
            found.append(
                Carried(one.words, tuple(_shown(name, text, layers) for name, text in used))
            )
        if lost:
            not_carried.append(Remark(one.words, "; ".join(dict.fromkeys(lost))))
        elif unused and not used:
            not_needed.append(Remark(one.words, unused[0][0]))
    return found


def _shown(name: str, text: str, layers: str) -> str:
    """Return what a word of a template became: a field and its value, an option, or a part of the
    command."""
    if name == "@benchmark":
        return "benchmark"
    if name == "@model":
        return f"model={text.replace('#', layers)}"
    return f"{name}={text}" if name[0] not in "-@" else f"{name.removeprefix('@')} {text}".rstrip()


def _notes(given: Given, wanted: Wanted, words: list[str]) -> list[str]:
    notes = _placeholders(words, given)
    backend = wanted.slots.get("backend")
    if words and "train" in words and backend not in (None, given.system.backend):
        notes.append("PyTorch's engine quantises, so the command trains with it")
    variables = dict.fromkeys(word for word in words if "$" in word)
    if variables:
        notes.append(
            f"{', '.join(variables)}: variables of the shell are not replaced; write their values"
        )
    if wanted.nodes > 1 and "launch" in words:
        notes.append(
            "all machines need the same secret: --secret-file FILE (docs/many-machines.md)"
        )
    return notes


def _placeholders(command: list[str], given: Given) -> list[str]:
    """Return a note on the words that stand for what the original command does not name."""
    stand_ins = ("DATA", "RUN", "SOURCE", "IMAGE", "TARGET", "FOLDER")
    found = [word for word in stand_ins if word in command and word not in given.values.values()]
    found += ["HOST"] if any(word.startswith("HOST:") for word in command) else []
    return (
        [f"put your own in place of {' and '.join(found)}, which the command does not name"]
        if found
        else []
    )


def _asked(given: Given) -> list[_Asked]:
    """Return all options of the script that have an effect, and the environment variables that are
    known."""
    found = []
    for option in given.system.options(given.script):
        if _has_effect(given, option):
            name = option.names[0]
            found.append(
                _Asked(
                    option, given.values.get(name), _typed_as(given, option), name in given.typed
                )
            )
    found += [_Asked(word.option, word.value, _as_typed(word), True) for word in given.launched]
    for name, value in given.environment.items():
        known = [each for each in given.system.environment if _matches(each, name)]
        found += [_Asked(each, value, f"{name}={value}", True) for each in known[:1]]
    return found


def _has_effect(given: Given, option: Option) -> bool:
    """Return whether the options are there without which the script ignores this one."""
    if not option.needs:
        return True
    needed = next(
        each for each in given.system.options(given.script) if each.names[0] == option.needs
    )
    return option.needs in given.values and _has_effect(given, needed)


def _typed_as(given: Given, option: Option) -> str:
    name = given.typed.get(option.names[0], option.names[-1])
    value = given.values.get(option.names[0])
    return name if value is None else _as_typed(Word(option, name, value))


def _as_typed(word: Word) -> str:
    if word.option.positional:
        return word.value
    return f"{word.name} {word.value}" if word.option.takes else word.name


def _matches(option: Option, name: str) -> bool:
    return any(
        name == each or (each.endswith("*") and name.startswith(each[:-1])) for each in option.names
    )


def _without_equivalent(given: Given, asked: list[_Asked]) -> tuple[list[Remark], list[Remark]]:
    """Return what the command line has and is not carried, and that for which there is nothing to
    type."""
    idle = [each for each in asked if each.typed and each.template is None]
    not_carried = [
        Remark(each.words, each.option.not_here)
        for each in idle
        if not (each.option.same or each.is_default)
    ]
    known = (*given.system.environment, Option(names=(_KEPT,), same="kept"))
    for name, value in given.environment.items():
        if not any(_matches(each, name) for each in known):
            not_carried.append(
                Remark(
                    f"{name}={value}",
                    "this variable is not known; Lockstep inherits it if it is set",
                )
            )
    if given.script.not_here:
        not_carried.append(Remark(given.script.name, given.script.not_here))
    not_needed = [
        Remark(each.words, each.option.same or _DEFAULT)
        for each in idle
        if each.option.same or each.is_default
    ]
    not_needed += [Remark(_as_typed(word), "it is overridden later") for word in given.overridden]
    for option in given.system.options(given.script):
        if option.names[0] in given.typed and not _has_effect(given, option):
            reason = f"NVIDIA's code ignores it without {option.needs}"
            not_needed.append(Remark(_typed_as(given, option), reason))
    return not_carried, not_needed


def _meant(
    given: Given, asked: list[_Asked], ranks: int, not_carried: list[Remark]
) -> list[_Meant]:
    """Return what each option means; add values that an option does not take to `not_carried`."""
    meant = [
        _Meant(given.script.name, tuple(filled(given.script.arguments, "", ranks)), typed=True)
    ]
    for each in asked:
        if each.template is None:
            continue
        try:
            meant.append(
                _Meant(each.words, tuple(filled(each.template, each.text, ranks)), each.typed)
            )
        except ValueError:
            not_carried.append(
                Remark(each.words, f"{each.text!r} is not a value that this option takes")
            )
    return meant


def _ranks(given: Given, asked: list[_Asked]) -> int:
    """Return the number of processes on all machines: the launcher's, else that of an option of the
    script, else 1."""
    if given.ranks is not None:
        nodes = [
            word.value
            for word in given.launched
            if word.option.to == "@nodes={value}" and word.value.isdigit()
        ]
        return given.ranks * max(int(nodes[-1]) if nodes else 1, 1)
    found = 1
    for each in asked:
        if (each.template or "").startswith("@ranks=") and each.text:
            with suppress(ValueError):  # `_meant` reports it
                found = max(int(filled(str(each.template), each.text, 1)[0][1]), 1)
    return found


def _wanted(given: Given, ranks: int, meant: list[_Meant], not_carried: list[Remark]) -> Wanted:
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
    return _with_slots(Wanted(recipe, execution, options, slots, ranks), not_carried)


def _applied(recipe: Recipe, meant: list[_Meant]) -> tuple[Recipe, dict[str, Any], dict[str, str]]:
    """Return the recipe with the fields that options ask for, the fields of the execution, and
    options of Lockstep.

    How a run is carried out is left to Lockstep unless the command line itself asks for it. Raises
    `RecipeError`.
    """
    fields: dict[str, Any] = {}
    execution: dict[str, Any] = {}
    options: dict[str, str] = {}
    for each in meant:
        ours, how = parse_settings(
            [f"{name}={text}" for name, text in each.pairs if name[0] not in "-@"]
        )
        fields |= eval_fields(ours) | ours
        if each.typed:
            execution |= how
            options |= {name: text for name, text in each.pairs if name.startswith("-")}
    Execution.of(execution)
    return recipe.replace(**fields), execution, options


def _with_slots(wanted: Wanted, not_carried: list[Remark]) -> Wanted:
    """Return the same with the fields that follow from several options."""
    recipe = wanted.recipe
    slots = wanted.slots
    execution = dict(wanted.execution)
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
        parts, rest = divmod(int(slots["step_images"]), recipe.global_batch_images)
        words = f"a step of {slots['step_images']} images"
        if parts < 1:
            not_carried.append(
                Remark(words, f"the GPUs already have {recipe.global_batch_images} in each step")
            )
        elif rest:
            reason = (
                f"it has whole parts of {recipe.global_batch_images}, as in NVIDIA's code: {parts}"
                " of them"
            )
            not_carried.append(Remark(words, reason))
        if parts > 1:
            fields["global_batch_images"] = parts * recipe.global_batch_images
            execution["accumulation_steps"] = parts
    try:
        recipe = recipe.replace(
            **parse_settings([f"{name}={value}" for name, value in fields.items()])[0]
        )
    except RecipeError as error:
        not_carried.append(
            Remark(", ".join(f"{name} {value}" for name, value in fields.items()), str(error))
        )
    return Wanted(recipe, execution, wanted.options, slots, wanted.ranks)
