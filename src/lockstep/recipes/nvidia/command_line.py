"""A command line of NVIDIA's examples, split into environment, launcher, script and options.
Nothing is run."""

import argparse
import re
import shlex
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, NoReturn

from lockstep.recipes.nvidia.table import SYSTEMS, Launcher, Option, Script, Shell, System, systems
from lockstep.system.errors import UserError, nearest

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_INTERPRETER = re.compile(r"python[\d.]*|bash|sh|env|exec|-m|-u")
"""Words in front of a script that only name what runs it."""
_PLACEHOLDER = re.compile(r"<[^<>]+>")
"""What a page prints in place of a value, such as `<path to imagenet>`."""
_HELP = ("-h", "--help")
_MOST_SHELLS = 4
"""At most this many shell scripts that run one another are followed."""


@dataclass(frozen=True)
class Word:
    """An option as it is typed."""

    option: Option
    name: str
    """One of its names."""
    value: str
    """A switch has "true"."""


@dataclass(frozen=True)
class ParsedCommand:
    """The parts of a command line."""

    system: System
    script: Script
    environment: dict[str, str]
    ranks: int | None
    """The number of processes that the launcher starts; None if there is no launcher."""
    values: dict[str, str]
    """The values of options by the first name of the option's row. A switch has "true"."""
    typed: dict[str, str]
    """The names in `values` that the command line itself has, with the names as typed. All others
    come from presets."""
    overridden: tuple[Word, ...]
    """Options that the command line repeats later."""
    launched: tuple[Word, ...]
    """The launcher's options."""
    unknown: tuple[str, ...]
    """Words that neither the script nor its launcher knows."""
    notes: tuple[str, ...]
    wants_help: bool = False
    """Whether the command asks for the script's help."""


@dataclass(frozen=True)
class _Split:
    environment: dict[str, str]
    prefix: tuple[str, ...]
    script: str
    words: tuple[str, ...]
    wants_help: bool


def read_command(
    words: list[str], system: str | None = None, revision: str | None = None
) -> ParsedCommand:
    """Parse a command: its words as the shell splits them, or one text.

    `system` is the name of the example and `revision` the year of its script. By default, they are
    found from the script, the launcher and the options. Raises `UserError` if no script of NVIDIA's
    examples is in it, if an option has no value, or if a value is a placeholder of a page.
    """
    if system is not None and system not in SYSTEMS:
        raise UserError(f"there is no example {system!r}. {nearest(system, SYSTEMS)}")
    try:
        words = _clean_words(shlex.split(words[0]) if len(words) == 1 else words)
    except ValueError as error:
        raise UserError(
            f"the command cannot be split into words: {error}. Close its quotes"
        ) from None
    placeholders = _PLACEHOLDER.findall(" ".join(words))
    if placeholders:
        raise UserError(
            f"a placeholder instead of a value: {', '.join(placeholders)}. Replace it with a value"
        )
    chosen = [row for name, row in systems().items() if system in (None, name)]
    is_shell = False
    for _ in range(_MOST_SHELLS):
        shell = _find_shell(words, chosen)
        if shell is None:
            break
        is_shell = True
        chosen = [shell[0]]
        words = _clean_words(shell[1])
    split = _split(words, chosen)
    best = _find_best_scripts(split, chosen, revision)
    notes = [_describe_choice(best)] if len(best) > 1 and not is_shell else []
    return _parse_command(*best[0], split, notes)


def _find_best_scripts(
    split: _Split, chosen: list[System], revision: str | None
) -> list[tuple[System, Script]]:
    """Return the scripts of this name that fit the options best."""
    scripts = []
    for system in chosen:
        scripts += [(system, row) for row in system.scripts if row.name == split.script]
    matches = [pair for pair in scripts if revision in (None, pair[1].revision)]
    if not matches:
        years = ", ".join(script.revision for _, script in scripts)
        raise UserError(
            f"{split.script} has no revision {revision!r}."
            f" {f'Known: {years}.' if years else 'Leave it out.'}"
        )
    scores = [_mismatch(*pair, split) for pair in matches]
    return [pair for pair, score in zip(matches, scores, strict=True) if score == min(scores)]


def _clean_words(words: list[str]) -> list[str]:
    """Return the words without the backslashes and ends of lines of a copied command."""
    stripped = (word.strip() for word in words)
    return [word for word in stripped if word not in ("", "\\")]


def _find_shell(words: list[str], chosen: list[System]) -> tuple[System, list[str]] | None:
    """Return the example and the command of a shell script that is named; None if there is none."""
    for place, word in enumerate(words):
        for system in chosen:
            for shell in system.shells:
                match = re.fullmatch(shell.pattern, PurePosixPath(word).name)
                if match is not None:
                    command = _expand_shell(shell, match, words[place + 1 :])
                    return system, [*words[:place], *command]
    return None


def _expand_shell(shell: Shell, match: re.Match[str], arguments: list[str]) -> list[str]:
    """Return the command in a shell script, with the arguments put in. Arguments that it does not
    name come last."""
    values = [*arguments[: len(shell.defaults)], *shell.defaults[len(arguments) :]]
    words = shlex.split(match.expand(shell.runs))
    for number, value in enumerate(values, 1):
        words = [word.replace(f"${number}", value) for word in words]
    return words + arguments[len(shell.defaults) :]


_PASSED_ON = "-x"
"""mpirun's option for an environment variable: its name, or an assignment."""


def _split(words: list[str], chosen: list[System]) -> _Split:
    """Split at the first word that names a script. Assignments in front of it are the environment.
    `-h` is left out."""
    names = [script.name for system in chosen for script in system.scripts]
    base_names = [PurePosixPath(word).name for word in words]
    place = next((place for place, name in enumerate(base_names) if name in names), None)
    if place is None:
        scripts = [name for name in base_names if name.endswith((".py", ".sh"))]
        hint = f"Known: {', '.join(dict.fromkeys(names))}."
        if scripts:
            hint = nearest(scripts[0], dict.fromkeys(names))
        raise UserError(
            f"the command names no script of NVIDIA's examples: {shlex.join(words)!r:.200}."
            " Expected a ResNet script, such as: python main.py --arch resnet50 -b 256"
            f" --amp /imagenet. {hint}"
        )
    environment = {}
    others = []
    for before, word in pairwise(["", *words[:place]]):
        match = _ASSIGNMENT.fullmatch(word)
        if match is not None and before != _PASSED_ON:
            environment[match[1]] = match[2]
        else:
            others.append(word)
    options = tuple(word for word in words[place + 1 :] if word not in _HELP)
    return _Split(
        environment=environment,
        prefix=tuple(others),
        script=base_names[place],
        words=options,
        wants_help=place + 1 + len(options) < len(words),
    )


def _find_launcher(system: System, prefix: tuple[str, ...]) -> Launcher | None:
    names = [PurePosixPath(word).name for word in prefix]
    launchers = (row for row in system.launchers if row.program in names)
    return next(launchers, None)


def _mismatch(system: System, script: Script, split: _Split) -> tuple[int, int, int]:
    """Return how badly a command fits a script: unknown and missing options, abbreviated ones,
    the launcher of another example."""
    options = system.options(script)
    _, unknown = _split_known(options, split.words)
    typed = [word.partition("=")[0] for word in split.words]
    missing = 0
    for option in options:
        if option.required and not option.positional:
            missing += set(option.names).isdisjoint(typed)
    names = {name for option in options for name in option.names}.union(unknown)
    abbreviated = sum(name.startswith("--") and name not in names for name in typed)
    is_foreign = _find_launcher(system, split.prefix) is None and any(
        _find_launcher(other, split.prefix) for other in systems().values()
    )
    strange = sum(word.startswith("-") for word in unknown)
    return strange + missing, abbreviated, int(is_foreign)


def _describe_choice(best: list[tuple[System, Script]]) -> str:
    names = []
    options = []
    for system, script in best:
        names.append(system.title)
        if script.revision:
            names[-1] += f" of {script.revision}"
        if system is not best[0][0]:
            options.append(f"--system {system.name}")
        elif script is not best[0][1]:
            options.append(f"--revision {script.revision}")
    return (
        f"{best[0][1].name} is in {' and '.join(names)}; read as {names[0]} (for the other, add"
        f" {' or '.join(options)})"
    )


def _parse_command(
    system: System, script: Script, split: _Split, notes: list[str]
) -> ParsedCommand:
    options = system.options(script)
    known, unknown = _split_known(options, split.words)
    words = _parse_options(script.name, options, known)
    typed = {word.option.names[0]: word for word in words}  # the last one of each counts
    presets = _find_presets(system, script, options, typed)
    ranks, launched, others = _parse_prefix(system, split)
    values: dict[str, str] = {}
    for word in [*_parse_options(script.name, options, presets), *words]:
        values[word.option.names[0]] = word.value
    return ParsedCommand(
        system=system,
        script=script,
        environment=split.environment,
        ranks=ranks,
        values=values,
        typed={name: word.name for name, word in typed.items()},
        overridden=tuple(word for word in words if word is not typed[word.option.names[0]]),
        launched=launched,
        unknown=(*others, *unknown),
        notes=tuple(notes),
        wants_help=split.wants_help,
    )


def _find_presets(
    system: System, script: Script, options: tuple[Option, ...], typed: dict[str, Word]
) -> list[str]:
    """Return the options that presets add, including those of the scripts that this one runs."""
    values: dict[str, str] = {}
    for option in options:
        if option.names[0] in typed:
            values |= dict.fromkeys(option.names, typed[option.names[0]].value)
    words = []
    for row in [*(system.script(name, script.revision) for name in script.also), script]:
        for preset in row.presets:
            if preset.when.items() <= values.items():
                words += shlex.split(preset.adds)
    return words


def _parse_prefix(system: System, split: _Split) -> tuple[int | None, tuple[Word, ...], list[str]]:
    """Return what stands in front of the script: the number of processes, the launcher's options,
    and unknown words.

    Without a launcher the number is None.
    """
    launcher = _find_launcher(system, split.prefix)
    if launcher is None:
        return None, (), _drop_interpreters(split.prefix)
    names = [PurePosixPath(word).name for word in split.prefix]
    place = names.index(launcher.program)
    options = launcher.all_options
    known, unknown = _split_known(options, split.prefix[place + 1 :])
    launched = tuple(_parse_options(launcher.name, options, known))
    others = _drop_interpreters((*split.prefix[:place], *unknown))
    return _count_processes(launcher, launched), launched, others


def _drop_interpreters(words: tuple[str, ...]) -> list[str]:
    return [word for word in words if not _INTERPRETER.fullmatch(PurePosixPath(word).name)]


def _count_processes(launcher: Launcher, launched: tuple[Word, ...]) -> int:
    """Return the number of processes that a launcher starts."""
    values = [word.value for word in launched if word.name in launcher.ranks]
    if not values:
        return 1
    value = values[-1]
    if launcher.lists:
        return len(value.split(","))
    if not value.isdigit() or int(value) < 1:
        raise UserError(
            f"{launcher.name} starts {value!r} processes; expected a number. Write the number of"
            " GPUs"
        )
    return int(value)


def _split_known(
    options: tuple[Option, ...], words: tuple[str, ...]
) -> tuple[list[str], list[str]]:
    """Split words into those of known options and others. The value of an unknown option goes with
    it.

    The last word stays if the script has an argument that is known by its position.
    """
    takes: dict[str, int] = {}
    for option in options:
        if not option.positional:
            takes |= dict.fromkeys(option.names, option.takes)
    has_positional = any(option.positional for option in options)
    known: list[str] = []
    unknown: list[str] = []
    place = 0
    while place < len(words):
        word = words[place]
        name, equals, _ = word.partition("=")
        place += 1
        if not word.startswith("-") or word == "-":
            (known if has_positional else unknown).append(word)
            continue
        full = _find_full_name(name, takes)
        if full is not None:
            has_joined_value = equals or (name != full and not name.startswith("--"))
            count = 0 if has_joined_value else takes[full]
            known += [word, *words[place : place + count]]
            place += count
            continue
        unknown.append(word)
        is_last = has_positional and place == len(words) - 1
        if not equals and not is_last and place < len(words) and _is_value(words[place]):
            unknown.append(words[place])
            place += 1
    return known, unknown


def _find_full_name(name: str, takes: dict[str, int]) -> str | None:
    """Return the option that a word means: itself, the only one that begins so, or a short one with
    its value joined."""
    if name in takes:
        return name
    if name.startswith("--"):
        names = [option for option in takes if option.startswith(name)]
        return names[0] if len(names) == 1 else None
    return name[:2] if takes.get(name[:2]) else None


def _is_value(word: str) -> bool:
    """Return whether a word is no option: negative numbers are values."""
    return (
        not word.startswith("-") or re.fullmatch(r"-\d+(\.\d*)?([eE][-+]?\d+)?", word) is not None
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(
            f"{self.prog}: {message}. Expected a command that NVIDIA's script accepts; correct or"
            " remove it"
        )


class _Note(argparse.Action):
    """Appends an option's name as typed, and its value, to `words`."""

    def __call__(
        self,
        parser: object,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        value = " ".join(values) if self.nargs else "true"
        namespace.words.append((self.dest, option_string, value))


def _parse_options(prog: str, options: tuple[Option, ...], words: list[str]) -> list[Word]:
    """Return the options in these words, in their order. Several values of an option are joined by
    spaces."""
    parser = _Parser(prog=prog, add_help=False)
    rows = {option.names[0]: option for option in options}
    positional = [option for option in options if option.positional]
    for name, option in rows.items():
        if option not in positional:
            parser.add_argument(*option.names, dest=name, action=_Note, nargs=option.takes)
    parsed, rest = parser.parse_known_args(words, argparse.Namespace(words=[]))
    if len(rest) > len(positional):
        parser.error(f"unrecognized arguments: {' '.join(rest[len(positional) :])}")
    result = [Word(rows[name], typed, value) for name, typed, value in parsed.words]
    for option, value in zip(positional, rest, strict=False):
        result.append(Word(option, option.names[0], value))
    return result
