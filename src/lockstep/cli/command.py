"""The class of all commands: its help fits a screen, and it suggests what to type instead of an
unknown option. Many options of other programs are recipe fields here.
"""

import re
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from lockstep.system.errors import UserError

MOST_SHOWN = 12
"""`--help` shows this many options, and more only if none of them is rare."""
_RARE = "rare"
rare = partial(typer.Option, rich_help_panel=_RARE)
"""Declares an option that only `--help-all` shows if the command has many options."""
_NUMBER = re.compile(r"<(int|float)( range)?>|(INTEGER|FLOAT)( RANGE)?")
_RANGE = re.compile(r"(; )?[\d.<=]*x[<>]=?[\d.]+(; )?")


class ShortHelp:
    """A command or group whose `--help` leaves out rare options. Mix it in before a Typer class."""

    params: list[Any]
    _help_all: Any = None

    def list_rare(self) -> list[Any]:
        """Return the parameters that only `--help-all` shows."""
        options = [option for option in self.params if option.param_type_name == "option"]
        if len(options) <= MOST_SHOWN:
            return []
        return [option for option in options if option.rich_help_panel == _RARE]

    def describe_rare(self) -> str:
        """Return what `--help-all` adds, as words; "" if it adds nothing."""
        count = len(self.list_rare())
        return f"{count} more options" if count else ""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, `--help` and `--help-all`, which is hidden if it adds nothing."""
        parameters = super().get_params(ctx)  # type: ignore[misc]
        if self._help_all is None:
            self._help_all = _make_help_all(parameters[-1], hidden=not self.describe_rare())
        return [*parameters, self._help_all]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage, without the braces of some versions of Typer."""
        pieces = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [re.sub("[{}]", "", piece).upper() for piece in pieces]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write what arguments and options mean."""
        parameters = self.get_params(ctx)
        left_out = [] if shows_all(ctx) else [*self.list_rare(), self._help_all]
        for kind in ("argument", "option"):
            rows = []
            for parameter in parameters:
                record = describe_parameter(parameter, ctx)
                if record and parameter.param_type_name == kind and parameter not in left_out:
                    rows.append(record)
            if rows:
                with formatter.section(f"{kind.capitalize()}s"):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write what `--help-all` adds."""
        rare_ones = self.describe_rare()
        if rare_ones and not shows_all(ctx):
            formatter.write_paragraph()
            formatter.write_text(f"--help-all shows {rare_ones}.")


class Group(ShortHelp, TyperGroup):
    """A group of commands with the same help."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write what options mean, and the commands."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


class Command(ShortHelp, TyperCommand):
    """A command that suggests what to type instead of an option that it does not have."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line. Raises `UserError` for an unknown option if there is something to
        suggest."""
        options = [
            name for parameter in self.params for name in parameter.opts if name.startswith("--")
        ]
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # Some versions of Typer use click, others contain a copy of it. Only the name of the
            # class is the same in both.
            if type(error).__name__ == "UsageError" and "--data" in options:
                _refuse_folder(ctx.info_name, str(error))
            if type(error).__name__ != "NoSuchOption":
                raise
            option = getattr(error, "option_name", "")
            hint = _suggest(option, words, options)
            if not hint:
                raise
            raise UserError(f"{ctx.info_name} has no option {option}. {hint}") from None


def shows_all(context: Any) -> bool:
    """Return whether `--help-all` was given."""
    return bool(context.meta.get("shows_all"))


def describe_parameter(parameter: Any, context: Any) -> tuple[str, str] | None:
    """Return how an argument or option is written, and its meaning; None if it is hidden."""
    record = parameter.get_help_record(context)
    if record is None:
        return None
    names, meaning = record
    names = _NUMBER.sub("N", names)
    if parameter.param_type_name == "argument":
        names = parameter.metavar or parameter.name.upper()
        meaning = meaning.removesuffix("  [required]")
    return names, _RANGE.sub("", meaning).replace("  []", "")


def needs_help_all(misuse: Any) -> bool:
    """Return whether an error is about an option that `--help` may not show."""
    command = getattr(getattr(misuse, "ctx", None), "command", None)
    rare_ones = command.list_rare() if isinstance(command, ShortHelp) else []
    if type(misuse).__name__ == "NoSuchOption":
        return bool(rare_ones)
    return getattr(misuse, "param", None) in rare_ones


def _make_help_all(shown: Any, *, hidden: bool) -> Any:
    """Return the option `--help-all`, made from `--help`."""
    option = copy(shown)
    option.name = "help_all"
    option.hidden = hidden
    option.opts = ["--help-all"]
    option.help = "Show this message with all options and exit."

    def show(context: Any, parameter: Any, value: bool) -> None:
        context.meta["shows_all"] = value
        shown.callback(context, parameter, value)

    option.callback = show
    return option


def _suggest(option: str, words: list[str], options: list[str]) -> str:
    """Return what to type instead of an option, given those that exist; "" if nothing is known."""
    from lockstep.recipes import Execution, Recipe
    from lockstep.recipes.synonyms import suggest_option

    fields = [*Recipe.model_fields, *Execution.model_fields] if "--set" in options else []
    if "--dtype" in options:
        from lockstep.benchmark.cells import GIVEN_OTHERWISE

        fields = [field for field in fields if field not in GIVEN_OTHERWISE]
    elif "--checkpoint" in options and fields:  # trained weights
        from lockstep.weights.preprocessing import SETTABLE

        computed = [] if "--to" in options else ["precision", *Execution.model_fields]
        fields = [*SETTABLE, *computed]
    return suggest_option(option, _find_value(option, words), options, fields)


def _refuse_folder(command: str, misuse: str) -> None:
    """Raise `UserError` if a command line is wrong because it names a folder without an option."""
    extra = re.search(r"unexpected extra argument\S* \((.+)\)", misuse)
    if extra and Path(extra[1]).is_dir():
        raise UserError(f"{command} needs an option in front of {extra[1]}: --data {extra[1]}")


def _find_value(option: str, words: list[str]) -> str:
    """Return the value of an option in a command line; "VALUE" if it has none.

    >>> _find_value("--lr", ["--lr", "0.1"]), _find_value("--lr", ["--lr=0.1"])
    ('0.1', '0.1')
    >>> _find_value("--amp", ["--amp", "--lr", "1"])
    'VALUE'
    """
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, text = word.partition("=")
        if name == option:
            if not equals:
                text = following
            if text and not text.startswith("--"):
                return text
            break
    return "VALUE"
