"""A command line of NVIDIA's examples, split into environment, launcher, script and options.
Nothing is run."""

import argparse
import re
import shlex
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NoReturn

from lockstep.recipes.nvidia.table import SYSTEMS, Launcher, Option, Script, Shell, System, systems
from lockstep.system.errors import UserError, nearest

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_INTERPRETER = re.compile(r"python[\d.]*|bash|sh|env|exec|-m|-u")
"""Words in front of a script that only say what runs it."""
_PLACEHOLDER = re.compile(r"<[^<>]+>")
"""What a page prints in place of a value, such as `<path to imagenet>`."""
_HELP = ("-h", "--help")
_MOST_SHELLS = 4
"""A shell script runs a command that is no shell script; this many are followed."""


@dataclass(frozen=True)
class Word:
    """An option as it is typed."""

    option: Option
    name: str
    """One of its names."""
    value: str
    """A switch has "true"."""


@dataclass(frozen=True)
class Given:
    """What a command line says."""

    system: System
    script: Script
    environment: dict[str, str]
    ranks: int | None
    """The number of processes that the launcher starts; None if there is no launcher."""
    values: dict[str, str]
    """The values of options by the first name of the option's row. A switch has "true"."""
    typed: dict[str, str]
    """The names in `values` that the command line itself has, with the names as typed. Others are
    of presets."""
    overridden: tuple[Word, ...]
    """Options that the command line has again later."""
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


def read_command(words: list[str], system: str | None = None, revision: str | None = None) -> Given:
    """Return what a command says: its words as the shell splits them, or one text.

    `system` is the name of the example and `revision` the year of its script. By default, they are
    found from the script, the launcher and the options. Raises `UserError` if no script of NVIDIA's
    examples is in it, if an option has no value, or if a value is a placeholder of a page.
    """
    if system is not None and system not in SYSTEMS:
        raise UserError(f"there is no example {system!r}. {nearest(system, SYSTEMS)}")
    try:
        words = _words(shlex.split(words[0]) if len(words) == 1 else words)
    except ValueError as error:
        raise UserError(
            f"the command cannot be split into words: {error}. Close its quotes"
        ) from None
    placeholders = _PLACEHOLDER.findall(" ".join(words))
    if placeholders:
        raise UserError(
            f"a placeholder instead of a value: {', '.join(placeholders)}. Write your own value in"
            " its place"
        )
    chosen = [each for name, each in systems().items() if system in (None, name)]
    shell = _shell(words, chosen)
    is_shell = shell is not None
    for _ in range(_MOST_SHELLS):
        if shell is None:
            break
        words = _words(shell[1])
        chosen = [shell[0]]
        shell = _shell(words, chosen)
    split = _split(words, chosen)
    candidates = [
        (_mismatch(each, script, split), (each, script))
        for each in chosen
        for script in each.scripts
        if script.name == split.script and (revision is None or script.revision == revision)
    ]
    if not candidates:
        years = ", ".join(
            each.revision for one in chosen for each in one.scripts if each.name == split.script
        )
        raise UserError(
            f"{split.script} has no revision {revision!r}."
            f" {f'Known: {years}.' if years else 'Leave it out.'}"
        )
    least = min(score for score, _ in candidates)
    best = [found for score, found in candidates if score == least]
    found, script = best[0]
    notes = [_ambiguous(best)] if len(best) > 1 and not is_shell else []
    return _given(found, script, split, notes)


def _words(words: list[str]) -> list[str]:
    """Return the words without the backslashes and ends of lines that a copied command may contain."""
    return [word for word in (word.strip() for word in words) if word and word != "\\"]


def _shell(words: list[str], chosen: list[System]) -> tuple[System, list[str]] | None:
    """Return the example and the command of a shell script that is named; None if there is none."""
    for place, word in enumerate(words):
        for system in chosen:
            for shell in system.shells:
                found = re.fullmatch(shell.pattern, PurePosixPath(word).name)
                if found is not None:
                    return system, [*words[:place], *_commands(shell, found, words[place + 1 :])]
    return None


def _commands(shell: Shell, found: re.Match[str], arguments: list[str]) -> list[str]:
    """Return the command in a shell script, with the arguments put in. Arguments that it does not
    name come last."""
    values = [*arguments[: len(shell.defaults)], *shell.defaults[len(arguments) :]]
    words = shlex.split(found.expand(shell.runs))
    for number, value in enumerate(values, 1):
        words = [word.replace(f"${number}", value) for word in words]
    return words + arguments[len(shell.defaults) :]


def _split(words: list[str], chosen: list[System]) -> _Split:
    """Split at the first word that names a script. Assignments in front of it are the environment.
    `-h` is left out."""
    names = [script.name for system in chosen for script in system.scripts]
    place = next(
        (place for place, word in enumerate(words) if PurePosixPath(word).name in names), None
    )
    if place is None:
        scripts = [PurePosixPath(word).name for word in words if word.endswith((".py", ".sh"))]
        hint = (
            nearest(scripts[0], dict.fromkeys(names))
            if scripts
            else f"Known: {', '.join(dict.fromkeys(names))}."
        )
        raise UserError(
            f"the command names no script of NVIDIA's examples: {shlex.join(words)!r:.200}."
            " Expected a script of its ResNets, such as: python main.py --arch resnet50 -b 256"
            f" --amp /imagenet. {hint}"
        )
    prefix = words[:place]
    found = {match[1]: match[2] for word in prefix if (match := _ASSIGNMENT.fullmatch(word))}
    others = tuple(word for word in prefix if not _ASSIGNMENT.fullmatch(word))
    following = words[place + 1 :]
    options = tuple(word for word in following if word not in _HELP)
    return _Split(
        found, others, PurePosixPath(words[place]).name, options, len(options) < len(following)
    )


def _launchers(system: System, prefix: tuple[str, ...]) -> list[Launcher]:
    names = [PurePosixPath(word).name for word in prefix]
    return [each for each in system.launchers if each.name.split()[-1] in names]


def _mismatch(system: System, script: Script, split: _Split) -> tuple[int, int, int]:
    """Return how badly a command fits a script: unknown and missing options, abbreviated ones,
    another's launcher."""
    options = system.options(script)
    _, unknown = _sorted_out(options, split.words)
    given = [word.partition("=")[0] for word in split.words]
    missing = sum(
        option.required and not option.positional and not set(option.names) & set(given)
        for option in options
    )
    names = {name for option in options for name in option.names}
    abbreviated = sum(
        name.startswith("--") and name not in names and name not in unknown for name in given
    )
    foreign = any(
        _launchers(other, split.prefix) for other in systems().values()
    ) and not _launchers(system, split.prefix)
    strange = sum(word.startswith("-") for word in unknown)
    return strange + missing, abbreviated, int(foreign)


def _ambiguous(best: list[tuple[System, Script]]) -> str:
    names = [
        f"{system.title}{f' of {script.revision}' if script.revision else ''}"
        for system, script in best
    ]
    options = [
        f"--system {system.name}" if system is not best[0][0] else f"--revision {script.revision}"
        for system, script in best[1:]
    ]
    return (
        f"{best[0][1].name} is in {' and '.join(names)}; taken for {names[0]}"
        f" ({' or '.join(options)} takes the other)"
    )


def _given(system: System, script: Script, split: _Split, notes: list[str]) -> Given:
    options = system.options(script)
    known, unknown = _sorted_out(options, split.words)
    words = _parsed(script.name, options, known)
    typed = {word.option.names[0]: word for word in words}  # the last one of each counts
    presets = _presets(system, script, options, {name: word.value for name, word in typed.items()})
    ranks, launched, others = _launched(system, split)
    return Given(
        system=system,
        script=script,
        environment=split.environment,
        ranks=ranks,
        values={
            word.option.names[0]: word.value
            for word in [*_parsed(script.name, options, presets), *words]
        },
        typed={name: word.name for name, word in typed.items()},
        overridden=tuple(word for word in words if word is not typed[word.option.names[0]]),
        launched=launched,
        unknown=(*others, *unknown),
        notes=tuple(notes),
        wants_help=split.wants_help,
    )


def _presets(
    system: System, script: Script, options: tuple[Option, ...], typed: dict[str, str]
) -> list[str]:
    """Return the options that presets add, those of the scripts that it runs included."""
    row = {name: option.names[0] for option in options for name in option.names}
    found = [
        preset for name in script.also for preset in system.script(name, script.revision).presets
    ]
    return [
        word
        for preset in (*found, *script.presets)
        if all(typed.get(row[name]) == value for name, value in preset.when.items())
        for word in shlex.split(preset.adds)
    ]


def _launched(system: System, split: _Split) -> tuple[int | None, tuple[Word, ...], list[str]]:
    """Return what stands in front of the script: the number of processes, the launcher's options,
    and unknown words.

    Without a launcher the number is None.
    """
    found = _launchers(system, split.prefix)
    if not found:
        return None, (), _without_interpreters(split.prefix)
    launcher = found[0]
    names = [PurePosixPath(word).name for word in split.prefix]
    place = names.index(launcher.name.split()[-1])
    options = launcher.all_options
    known, unknown = _sorted_out(options, split.prefix[place + 1 :])
    launched = tuple(_parsed(launcher.name, options, known))
    others = _without_interpreters((*split.prefix[:place], *unknown))
    return _ranks(launcher, launched), launched, others


def _without_interpreters(words: tuple[str, ...]) -> list[str]:
    return [word for word in words if not _INTERPRETER.fullmatch(PurePosixPath(word).name)]


def _ranks(launcher: Launcher, launched: tuple[Word, ...]) -> int:
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


def _sorted_out(options: tuple[Option, ...], words: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Split words into those of known options and others. The value of an unknown option goes with
    it.

    The last word stays if the script has an argument that is known by its position.
    """
    takes: dict[str, int] = {
        name: option.takes for option in options for name in option.names if not option.positional
    }
    positional = any(option.positional for option in options)
    known: list[str] = []
    unknown: list[str] = []
    place = 0
    while place < len(words):
        word = words[place]
        name, equals, _ = word.partition("=")
        place += 1
        if not word.startswith("-") or word == "-":
            (known if positional else unknown).append(word)
            continue
        full = _full_name(name, takes)
        follows = place < len(words) and (
            not words[place].startswith("-") or _is_number(words[place])
        )
        if full is None:
            unknown.append(word)
            if follows and not equals and not (positional and place == len(words) - 1):
                unknown.append(words[place])
                place += 1
            continue
        known.append(word)
        joined = equals or (len(name) > 2 and not name.startswith("--") and name not in takes)
        count = 0 if joined else takes[full]
        known.extend(words[place : place + count])
        place += count
    return known, unknown


def _full_name(name: str, takes: dict[str, int]) -> str | None:
    """Return the option that a word means: itself, the only one that begins so, or a short one with
    its value joined."""
    if name in takes:
        return name
    if name.startswith("--"):
        found = [each for each in takes if each.startswith(name)]
        return found[0] if len(found) == 1 else None
    return name[:2] if takes.get(name[:2]) else None


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-\d+(\.\d*)?([eE][-+]?\d+)?", word) is not None


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


def _parsed(prog: str, options: tuple[Option, ...], words: list[str]) -> list[Word]:
    """Return the options in these words, in their order. Several values of an option are joined by
    spaces."""
    parser = _Parser(prog=prog, add_help=False)
    rows = {option.names[0]: option for option in options}
    for option in options:
        if not option.positional:
            parser.add_argument(
                *option.names, dest=option.names[0], action=_Note, nargs=option.takes
            )
    found, rest = parser.parse_known_args(words, argparse.Namespace(words=[]))
    positional = [option for option in options if option.positional]
    if len(rest) > len(positional):
        parser.error(f"unrecognized arguments: {' '.join(rest[len(positional) :])}")
    arguments = [
        Word(option, option.names[0], value)
        for option, value in zip(positional, rest, strict=False)
    ]
    return [Word(rows[name], typed, value) for name, typed, value in found.words] + arguments
