"""Translate a command of NVIDIA's examples into the equivalent Lockstep command.

The script's defaults and the values that its code fixes are translated too. Where NVIDIA's page and
code disagree about a value that no option sets, the page's value is used, as in the published
recipes.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from lockstep.recipes.execution import Execution
from lockstep.recipes.nvidia.command_line import ParsedCommand, Word, read_command
from lockstep.recipes.nvidia.commands import Command, Request, nearest_recipe
from lockstep.recipes.nvidia.table import Option, fill_template, is_equal
from lockstep.recipes.recipe import Recipe, eval_fields
from lockstep.recipes.recipe_files import parse_settings
from lockstep.system.errors import RecipeError

_DEFAULT = "it is the default of NVIDIA's script"
_KEPT = "CUDA_VISIBLE_DEVICES"
"""The environment variable that Lockstep reads in the same way."""


@dataclass(frozen=True)
class Remark:
    """A remark on words of NVIDIA's command."""

    words: str
    reason: str


@dataclass(frozen=True)
class Carried:
    """Words of NVIDIA's command, and what they became."""

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
    """The words of the Lockstep command; empty if there is none. DATA, RUN, SOURCE, IMAGE, TARGET
    and FOLDER stand for what NVIDIA's command does not name."""
    recipe: str | None
    """The published recipe that is nearest."""
    changes: dict[str, Any]
    """The fields to set on it."""
    carried: tuple[Carried, ...]
    """Options that are in the command, as fields of its recipe or as words. Every option of
    NVIDIA's command is here, in `not_carried`, in `not_needed` or in `unknown`."""
    not_carried: tuple[Remark, ...]
    not_needed: tuple[Remark, ...]
    """Options that Lockstep does not need."""
    unknown: tuple[str, ...]
    """Words that neither NVIDIA's script nor its launcher knows."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Use:
    """One option, as the command line, a preset or its default has it."""

    option: Option
    value: str | None
    """None: it is left out. A switch has "true"."""
    words: str
    """As it would be typed."""
    typed: bool
    """Whether it is on the command line, rather than in a preset or a default."""

    @property
    def text(self) -> str:
        """The value for a template."""
        return self.value or self.option.default or ""

    @property
    def template(self) -> str | None:
        """The template for the value, or for the absence. None: there is none."""
        if self.option.takes == 0:
            return self.option.absent if self.value is None else self.option.to
        value = self.option.default if self.value is None else self.value
        return "" if value is None else self.option.template(value)

    @property
    def reason_to_drop(self) -> str:
        """Why it is not needed, if it has no template; "" if it is not translated."""
        if self.option.same:
            return self.option.same
        default = self.option.default
        if self.value is None or default is None or not is_equal(self.value, default):
            return ""
        return _DEFAULT


@dataclass(frozen=True)
class _Effect:
    """What one option asks for: the words of its template, with the value put in."""

    words: str
    pairs: tuple[tuple[str, str], ...]
    typed: bool


def translate(
    words: list[str], system: str | None = None, revision: str | None = None
) -> Translation:
    """Return the equivalent of a command line, given as words or as one text. Nothing is executed,
    and no file is read.

    `system` and `revision` select the example and the year of the script, if the command fits
    several. Raises `UserError` if no script of NVIDIA's examples is in it.
    """
    return translate_command(read_command(words, system, revision))


def translate_command(parsed: ParsedCommand) -> Translation:
    """Return the equivalent of a parsed command line."""
    uses = _list_uses(parsed)
    not_carried, not_needed = _find_without_equivalent(parsed, uses)
    ranks = _count_ranks(parsed, uses)
    effects = _find_effects(parsed, uses, ranks, not_carried)
    request = _build_request(parsed, ranks, effects, not_carried)
    name, changes = nearest_recipe(request.recipe, parsed.system.name)
    words: list[str] = []
    carried: list[Carried] = []
    if parsed.script.command is not None:
        command = Command(parsed, request, name, changes)
        words = command.words()
        carried = _list_carried(command, words, effects, not_carried, not_needed)
    uses_recipe = "--recipe" in words
    return Translation(
        system=parsed.system.name,
        script=parsed.script.name,
        environment={name: text for name, text in parsed.environment.items() if name == _KEPT},
        command=tuple(words),
        recipe=name if uses_recipe else None,
        changes=changes if uses_recipe else {},
        carried=tuple(carried),
        not_carried=tuple(not_carried),
        not_needed=tuple(not_needed),
        unknown=() if parsed.script.not_here else parsed.unknown,  # its options are not listed
        notes=(*parsed.notes, *_write_notes(parsed, request, words)),
    )


def _list_carried(
    command: Command,
    words: list[str],
    effects: list[_Effect],
    not_carried: list[Remark],
    not_needed: list[Remark],
) -> list[Carried]:
    """Return the typed options that the command has. Add the others to `not_carried` or
    `not_needed`."""
    refused = {remark.words for remark in not_carried}
    layers = command.request.slots.get("layers", "50")
    carried = []
    for effect in effects:
        if not effect.typed or effect.words in {*refused, command.parsed.script.name}:
            continue
        becomes = []
        losses: list[str] = []
        reasons: list[str] = []
        for name, text in effect.pairs:
            if command.uses(name, text, words):
                becomes.append(_describe_pair(name, text, layers))
                continue
            reason, is_lost = command.why_unused(name)
            (losses if is_lost else reasons).append(reason)
        if becomes or not effect.pairs:
            carried.append(Carried(effect.words, tuple(becomes)))
        if losses:
            not_carried.append(Remark(effect.words, "; ".join(dict.fromkeys(losses))))
        elif reasons and not becomes:
            not_needed.append(Remark(effect.words, reasons[0]))
    return carried


def _describe_pair(name: str, text: str, layers: str) -> str:
    """Return what a word of a template became: a field and its value, an option, or a part of the
    command."""
    if name == "@benchmark":
        return "benchmark"
    if name == "@model":
        return f"model={text.replace('#', layers)}"
    if name[0] in "-@":
        return f"{name.removeprefix('@')} {text}".rstrip()
    return f"{name}={text}"


def _write_notes(parsed: ParsedCommand, request: Request, words: list[str]) -> list[str]:
    notes = []
    stand_ins = _find_stand_ins(words, parsed)
    if stand_ins:
        notes.append(f"replace {' and '.join(stand_ins)}, which the command does not name")
    backend = request.slots.get("backend")
    if words and "train" in words and backend not in (None, parsed.system.backend):
        notes.append("only the PyTorch backend quantises: the command uses it")
    variables = dict.fromkeys(word for word in words if "$" in word)
    if variables:
        notes.append(
            f"{', '.join(variables)}: shell variables are not expanded; write their values"
        )
    if request.nodes > 1 and "launch" in words:
        notes.append(
            "all machines need the same secret: --secret-file FILE (docs/how-to/many-machines.md)"
        )
    return notes


def _find_stand_ins(command: list[str], parsed: ParsedCommand) -> list[str]:
    """Return the words that stand for what NVIDIA's command does not name."""
    candidates = ("DATA", "RUN", "SOURCE", "IMAGE", "TARGET", "FOLDER")
    typed = parsed.values.values()
    stand_ins = [word for word in candidates if word in command and word not in typed]
    if any(word.startswith("HOST:") for word in command):
        stand_ins.append("HOST")
    return stand_ins


def _list_uses(parsed: ParsedCommand) -> list[_Use]:
    """Return all options of the script that have an effect, and the environment variables that are
    known."""
    uses = []
    for option in parsed.system.options(parsed.script):
        if _has_effect(parsed, option):
            name = option.names[0]
            words = _write_option(parsed, option)
            uses.append(_Use(option, parsed.values.get(name), words, name in parsed.typed))
    uses += [_Use(word.option, word.value, _write_word(word), True) for word in parsed.launched]
    for name, value in parsed.environment.items():
        variable = _find_variable(parsed, name)
        if variable is not None:
            uses.append(_Use(variable, value, f"{name}={value}", True))
    return uses


def _has_effect(parsed: ParsedCommand, option: Option) -> bool:
    """Return whether the options are set without which the script ignores this one."""
    if not option.needs:
        return True
    options = parsed.system.options(parsed.script)
    needed = next(other for other in options if other.names[0] == option.needs)
    return option.needs in parsed.values and _has_effect(parsed, needed)


def _write_option(parsed: ParsedCommand, option: Option) -> str:
    name = parsed.typed.get(option.names[0], option.names[-1])
    value = parsed.values.get(option.names[0])
    return name if value is None else _write_word(Word(option, name, value))


def _write_word(word: Word) -> str:
    if word.option.positional:
        return word.value
    return f"{word.name} {word.value}" if word.option.takes else word.name


def _find_variable(parsed: ParsedCommand, name: str) -> Option | None:
    """Return the row of an environment variable; None if the example does not read it."""
    for option in parsed.system.environment:
        for pattern in option.names:
            if name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])):
                return option
    return None


def _find_without_equivalent(
    parsed: ParsedCommand, uses: list[_Use]
) -> tuple[list[Remark], list[Remark]]:
    """Return the words of the command line that are not translated, and those that are not
    needed."""
    not_carried = []
    not_needed = []
    for use in uses:
        if not use.typed or use.template is not None:
            continue
        if use.reason_to_drop:
            not_needed.append(Remark(use.words, use.reason_to_drop))
        else:
            not_carried.append(Remark(use.words, use.option.not_here))
    for name, value in parsed.environment.items():
        if name != _KEPT and _find_variable(parsed, name) is None:
            reason = "unknown variable; Lockstep inherits it if it is set"
            not_carried.append(Remark(f"{name}={value}", reason))
    if parsed.script.not_here:
        not_carried.append(Remark(parsed.script.name, parsed.script.not_here))
    for word in parsed.overridden:
        later = parsed.typed.get(word.option.names[0], word.name)
        reason = "it is overridden later" if later == word.name else f"{later} sets it too"
        not_needed.append(Remark(_write_word(word), reason))
    for option in parsed.system.options(parsed.script):
        if option.names[0] in parsed.typed and not _has_effect(parsed, option):
            reason = f"NVIDIA's code ignores it without {option.needs}"
            not_needed.append(Remark(_write_option(parsed, option), reason))
    return not_carried, not_needed


def _find_effects(
    parsed: ParsedCommand, uses: list[_Use], ranks: int, not_carried: list[Remark]
) -> list[_Effect]:
    """Return what each option means; add values that an option does not take to `not_carried`."""
    always = fill_template(parsed.script.arguments, "", ranks)
    effects = [_Effect(parsed.script.name, tuple(always), typed=True)]
    for use in uses:
        if use.template is None:
            continue
        try:
            pairs = fill_template(use.template, use.text, ranks)
        except ValueError:
            reason = f"{use.text!r} is not a value that this option takes"
            not_carried.append(Remark(use.words, reason))
        else:
            effects.append(_Effect(use.words, tuple(pairs), use.typed))
    return effects


def _count_ranks(parsed: ParsedCommand, uses: list[_Use]) -> int:
    """Return the number of processes on all machines: the launcher's, else that of an option of the
    script, else 1."""
    if parsed.ranks is not None:
        nodes = 1
        for word in parsed.launched:
            if word.option.to == "@nodes={value}" and word.value.isdigit():
                nodes = int(word.value)
        return parsed.ranks * max(nodes, 1)
    ranks = 1
    for use in uses:
        if (use.template or "").startswith("@ranks=") and use.text:
            with suppress(ValueError):  # `_find_effects` reports it
                ranks = max(int(fill_template(str(use.template), use.text, 1)[0][1]), 1)
    return ranks


def _build_request(
    parsed: ParsedCommand, ranks: int, effects: list[_Effect], not_carried: list[Remark]
) -> Request:
    start = parsed.system.start(parsed.script)
    try:
        recipe, execution, options = _apply_effects(start, effects)
    except RecipeError:  # find the options that are wrong, and leave them out
        fitting: list[_Effect] = []
        for effect in effects:
            try:
                _apply_effects(start, [*fitting, effect])
                fitting.append(effect)
            except RecipeError as error:
                not_carried.append(Remark(effect.words, " ".join(str(error).split())))
        recipe, execution, options = _apply_effects(start, fitting)
    slots: dict[str, str] = {}
    for effect in effects:
        slots |= {name[1:]: text for name, text in effect.pairs if name.startswith("@")}
    typed = frozenset(name for effect in effects if effect.typed for name, _ in effect.pairs)
    return _apply_slots(Request(recipe, execution, options, slots, ranks, typed), not_carried)


def _apply_effects(
    recipe: Recipe, effects: list[_Effect]
) -> tuple[Recipe, dict[str, Any], dict[str, str]]:
    """Return the recipe with the fields that options ask for, the fields of the execution, and
    options of Lockstep.

    How a run is carried out is left to Lockstep unless the command line itself asks for it. Raises
    `RecipeError`.
    """
    fields: dict[str, Any] = {}
    execution: dict[str, Any] = {}
    options: dict[str, str] = {}
    for effect in effects:
        settings = [f"{name}={text}" for name, text in effect.pairs if name[0] not in "-@"]
        ours, how = parse_settings(settings)
        fields |= eval_fields(ours) | ours
        if effect.typed:
            execution |= how
            options |= {name: text for name, text in effect.pairs if name.startswith("-")}
    Execution.of(execution)
    return recipe.replace(**fields), execution, options


def _apply_slots(request: Request, not_carried: list[Remark]) -> Request:
    """Return the same with the fields that follow from several options."""
    recipe = request.recipe
    slots = request.slots
    execution = dict(request.execution)
    fields: dict[str, Any] = {}
    if "model" in slots:
        fields["model"] = slots["model"].replace("#", slots.get("layers", "50"))
    if "iterations" in slots and "benchmark" not in slots:
        fields["epochs"] = slots["iterations"]
        if (
            "unit" in slots
        ):  # NVIDIA's code then decays over 90 epochs, whatever the number of steps
            fields["epochs"] = "90"
            steps = execution.pop("stop_after_epochs", None) or slots["iterations"]
            execution["stop_after_steps"] = min(int(steps), int(slots["iterations"]))
    if "step_images" in slots:
        part = recipe.global_batch_images
        parts, rest = divmod(int(slots["step_images"]), part)
        words = f"a step of {slots['step_images']} images"
        if parts < 1:
            not_carried.append(Remark(words, f"the GPUs already have {part} in each step"))
        elif rest:
            reason = (
                f"NVIDIA's code rounds a step down to whole parts of {part} images:"
                f" {parts * part} images"
            )
            not_carried.append(Remark(words, reason))
        if parts > 1:
            fields["global_batch_images"] = parts * part
            execution["accumulation_steps"] = parts
    try:
        settings = [f"{name}={value}" for name, value in fields.items()]
        recipe = recipe.replace(**parse_settings(settings)[0])
    except RecipeError as error:
        words = ", ".join(f"{name} {value}" for name, value in fields.items())
        not_carried.append(Remark(words, str(error)))
    return replace(request, recipe=recipe, execution=execution)
