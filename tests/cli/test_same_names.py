"""The options of a command have the names of the parameters of the functions and methods that it
calls."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import typer

import lockstep
from lockstep.cli import app
from lockstep.inference.serving import Limits
from lockstep.recipes import Execution

Model = lockstep.Model
CALLS: dict[str, list[Callable[..., Any]]] = {
    "train": [lockstep.train],
    "evaluate": [lockstep.load, Model.on, Model.evaluate],
    "predict": [lockstep.load, Model.on, Model.predict],
    "convert": [lockstep.load, Model.save],
    "export": [lockstep.load, Model.export, lockstep.Int8],
    "serve": [lockstep.load, Model.on, Model.serve],
    "verify": [lockstep.verify],
    "report": [lockstep.report],
    "sign": [lockstep.sign],
    "verify-signature": [lockstep.verify_signature],
}
ONLY_OPTIONS = {
    "train": {
        "tensorboard",
        "profile",
        "early_stopping_epochs",
        "folds",
        "ignore",
        "network",
        "verbose",
    },
    "evaluate": {"json"},
    "predict": {"run", "format", "json", "output", "embeddings"},
    "convert": {"inspect", "json", "sign"},
    "export": {"sign"},
    "serve": {"token_file"},
    "verify": {"json", "network", "plot"},
}
"""What only the console has: how results are shown, where they come from and go, and an option for
a field of the recipe."""
ONLY_PARAMETERS = {
    "train": {"changes", "progress"},
    "verify": {"model"},
    "predict": {"source", "features", "on_error"},
    "convert": {"unknown_below"},
    "evaluate": {"unknown_below", "progress"},
    "export": {"unknown_below"},
    "serve": {"token", "limits"},
}
"""What only Python has, besides what `--set` and `--recipe` give."""
SETTINGS = {"changes", "execution", "precision", "preprocessing", "listener", "where", "device"}
NAMES = {
    "logger": "loggers",  # may be repeated; the parameter has all values
    "allow_host": "allow_hosts",
    "calibration_images": "images",
    "model": "network",  # a `Model` is what `load` returns
    "runtime": "where",
}
"""Options whose parameters have another name."""


def list_options(command: str) -> set[str]:
    """Return the options and arguments of a command, with the names that parameters would have."""
    group: Any = typer.main.get_command(app)
    names = set()
    for parameter in group.commands[command].params:
        if not getattr(parameter, "hidden", False):
            options = [name for name in parameter.opts if name.startswith("--")] or [parameter.name]
            name = options[0].removeprefix("--").replace("-", "_")
            names.add(NAMES.get(name, name))
    return names


@pytest.mark.parametrize("command", CALLS)
def test_options_and_parameters_have_the_same_names(command: str) -> None:
    options = list_options(command)
    parameters = set()
    for call in CALLS[command]:
        parameters |= set(inspect.signature(call).parameters) - {"self"}
    settings = set(Execution.model_fields)
    if command == "serve":
        settings |= {field.name for field in fields(Limits)}
        parameters -= {"batch"}
    if SETTINGS & parameters:
        settings |= {"set", "recipe"}
    assert options - parameters - settings == ONLY_OPTIONS.get(command, set())
    assert parameters - options - SETTINGS == ONLY_PARAMETERS.get(command, set()) - SETTINGS
