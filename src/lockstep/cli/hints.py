"""What is meant by an option that a command does not have: what other programs have as options is a field of the recipe."""

from typing import Any

from typer.core import TyperCommand

from lockstep.system.errors import UserError


class Command(TyperCommand):
    """A command that says what to type instead of an option that it does not have."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line. Raises `UserError` for an unknown option, if what it can mean is known."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # Typer brings its own copy of click or uses click's, by its version: the class has a name alone in common.
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

        options = [name for parameter in self.params for name in parameter.opts if name.startswith("--")]
        known = [*Recipe.model_fields, *Execution.model_fields] if "--set" in options else []
        return instead_of_option(option, _value_of(option, given), options, known)


def _value_of(option: str, given: list[str]) -> str:
    """Return what a command line says behind an option; VALUE if it says nothing.

    >>> _value_of("--lr", ["--lr", "0.1"]), _value_of("--lr", ["--lr=0.1"]), _value_of("--amp", ["--amp", "--lr", "1"])
    ('0.1', '0.1', 'VALUE')
    """
    for argument, following in zip(given, [*given[1:], ""], strict=True):
        name, equals, text = argument.partition("=")
        if name == option:
            value = text if equals else following
            return value if value and not value.startswith("--") else "VALUE"
    return "VALUE"
