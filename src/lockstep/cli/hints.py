"""Hints for options that a command does not have: options of other programs are often fields of the
recipe here."""

from typing import Any

from typer.core import TyperCommand

from lockstep.system.errors import UserError


class Command(TyperCommand):
    """A command that suggests what to type instead of an option that it does not have."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line. Raises `UserError` for an unknown option if there is something to
        suggest."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # Some versions of Typer use click, others contain a copy of it. Only the name of the
            # class is the same in both.
            if type(error).__name__ != "NoSuchOption":
                raise
            option = getattr(error, "option_name", "")
            hint = self._instead(option, given)
            if not hint:
                raise
            raise UserError(f"{ctx.info_name} has no option {option}. {hint}") from None

    def _instead(self, option: str, given: list[str]) -> str:
        from lockstep.recipes import Execution, Recipe
        from lockstep.recipes.synonyms import instead_of_option

        options = [
            name for parameter in self.params for name in parameter.opts if name.startswith("--")
        ]
        known = [*Recipe.model_fields, *Execution.model_fields] if "--set" in options else []
        return instead_of_option(option, _value_of(option, given), options, known)


def _value_of(option: str, given: list[str]) -> str:
    """Return the value of an option in a command line; "VALUE" if it has none.

    >>> _value_of("--lr", ["--lr", "0.1"]), _value_of("--lr", ["--lr=0.1"]), _value_of("--amp", ["--amp", "--lr", "1"])
    ('0.1', '0.1', 'VALUE')
    """
    for argument, following in zip(given, [*given[1:], ""], strict=True):
        name, equals, text = argument.partition("=")
        if name == option:
            value = text if equals else following
            return value if value and not value.startswith("--") else "VALUE"
    return "VALUE"
