"""Options that a command does not have: often those of other programs, which are fields of the
recipe here."""

from typing import Any

from typer.core import TyperCommand

from lockstep.system.errors import UserError


class Command(TyperCommand):
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
            if type(error).__name__ != "NoSuchOption":
                raise
            option = getattr(error, "option_name", "")
            hint = _suggest(option, words, options)
            if not hint:
                raise
            raise UserError(f"{ctx.info_name} has no option {option}. {hint}") from None


def _suggest(option: str, words: list[str], options: list[str]) -> str:
    """Return what to type instead of an option; "" if nothing is known. `options` exist."""
    from lockstep.recipes import Execution, Recipe
    from lockstep.recipes.synonyms import suggest_option

    fields = [*Recipe.model_fields, *Execution.model_fields] if "--set" in options else []
    return suggest_option(option, _find_value(option, words), options, fields)


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
