"""The options of a command have the names of the parameters of the function that it wraps."""

import inspect
from dataclasses import fields
from typing import Any

import pytest
import typer

import lockstep
from lockstep.cli import app
from lockstep.inference.serving import Limits
from lockstep.recipes import Execution

FUNCTIONS: dict[str, Any] = {
    "train": lockstep.train,
    "evaluate": lockstep.evaluate,
    "predict": lockstep.Predictor,
    "convert": lockstep.convert,
    "export": lockstep.export,
    "serve": lockstep.serve,
    "verify": lockstep.verify,
    "report": lockstep.report,
}
ONLY_OPTIONS = {
    "train": {"tensorboard", "profile", "early_stopping_epochs", "folds"},
    "evaluate": {"json"},
    "predict": {"run", "images", "top", "format", "json", "output", "embeddings"},
    "convert": {"inspect", "json"},
    "serve": {"token_file"},
    "verify": {"json", "plot"},
}
"""What only the console has: how results are shown, where they come from and go, and an option for
a field of the recipe."""
ONLY_PARAMETERS = {
    "train": {"changes"},
    "predict": {"source", "features"},
    "serve": {"token", "limits"},
}
"""What only Python has, besides what `--set` and `--recipe` give."""
SETTINGS = {"changes", "execution", "precision", "preprocessing", "listener"}
CHOICE = {"ignore", "model"}
"""Options that Python has in a `WeightsChoice`, in place of the weights."""
PLURALS = {"logger": "loggers", "allow_host": "allow_hosts"}
"""Options that may be repeated, and the parameter that has all values."""


def list_options(command: str) -> set[str]:
    """Return the options and arguments of a command, with the names that parameters would have."""
    group: Any = typer.main.get_command(app)
    names = set()
    for parameter in group.commands[command].params:
        if not getattr(parameter, "hidden", False):
            options = [name for name in parameter.opts if name.startswith("--")] or [parameter.name]
            name = options[0].removeprefix("--").replace("-", "_")
            names.add(PLURALS.get(name, name))
    return names


@pytest.mark.parametrize("command", FUNCTIONS)
def test_options_and_parameters_have_the_same_names(command: str) -> None:
    options = list_options(command)
    parameters = set(inspect.signature(FUNCTIONS[command]).parameters)
    settings = set(Execution.model_fields)
    if command == "serve":
        settings |= {field.name for field in fields(Limits)}
    if SETTINGS & parameters:
        settings |= {"set", "recipe"}
    assert options - parameters - settings - CHOICE == ONLY_OPTIONS.get(command, set())
    assert parameters - options - SETTINGS == ONLY_PARAMETERS.get(command, set()) - SETTINGS
