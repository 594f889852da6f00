"""The options of NVIDIA's scripts as data: the YAML files next to this one, one for each example.

A *template* translates an option: words such as `lr={value}`. A word names one of these,
followed by "=" and a value:

- a field of `Recipe` or `Execution`: `momentum={value}`;
- an option of the Lockstep command: `--data={value}`, or `--train-only`;
- a part of the command that is no option, in `SLOTS`: `@ranks={value}`.

`PLACEHOLDERS` are what a value can contain.
"""

import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lockstep.recipes.published import RECIPES
from lockstep.recipes.recipe import Recipe
from lockstep.system.plain_yaml import read_yaml

SYSTEMS = ("pytorch", "tensorflow", "paddle", "mxnet")
"""Names of the four examples, in the order in which an ambiguous command is tried."""

SLOTS: dict[str, str] = {
    "ranks": "lockstep launch -n {value} -- ...",
    "nodes": "lockstep launch --nodes {value} -- ...",
    "node_rank": "lockstep launch --node-rank {value} -- ...",
    "meeting": "lockstep launch --rendezvous {value} -- ...",
    "meeting_host": "lockstep launch --rendezvous {value}:PORT -- ...",
    "meeting_port": "lockstep launch --rendezvous HOST:{value} -- ...",
    "restarts": "lockstep launch --restarts {value} -- ...",
    "step_images": "global_batch_images={value} accumulation_steps=<{value} / (batch n)>",
    "command": "lockstep {value}",
    "benchmark": "lockstep benchmark train",
    "benchmark_ranks": "lockstep benchmark -n {value}",
    "benchmark_batches": "lockstep benchmark -b {value}",
    "steps": "-i, -e for {value} steps",
    "warmup_steps": "-i, -w for {value} steps",
    "epoch_steps": "-i {value}",
    "all_epochs": "-e <{value} without the warm-up>",
    "warmup_epochs": "-w {value}",
    "report": "-o {value}",
    "source": "SOURCE",
    "epoch": "--resume-from <P-000{value}.params>; SOURCE to evaluate",
    "layers": "model, with {value} layers",
    "model": "model={value}, # is the number of layers",
    "iterations": "epochs={value}; -i, -e of a benchmark",
    "unit": "epochs=90, stop_after_steps=<{value} of --num_iter>",
    "backend": "--backend {value}",
    "model_dir": (
        "--out {value}; SOURCE to evaluate; --resume-from {value} resumes NVIDIA's run in it"
    ),
    "image": "lockstep predict ... {value}",
    "target": "TARGET or FOLDER",
}
"""The parts of a command that are neither fields nor options, as the page shows them."""

COUNTS = (
    "@ranks",
    "@nodes",
    "@node_rank",
    "@meeting_port",
    "@restarts",
    "@step_images",
    "@iterations",
    "@steps",
    "@warmup_steps",
    "@epoch_steps",
    "@all_epochs",
    "@warmup_epochs",
)
"""The slots whose values are whole numbers."""


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.strip("[]").replace(",", " ").split()]


def _plain(number: float) -> str:
    """Return a number without the digits that come from computing with decimals, and an integer as
    one."""
    rounded = f"{number:.14g}"
    if len(repr(number)) > len(rounded) + 1:
        number = float(rounded)
    return str(int(number)) if number == int(number) else repr(number)


def _scale(text: str, factor: float) -> str:
    numbers = (_plain(number * factor) for number in _numbers(text))
    return f"[{', '.join(numbers)}]"


PLACEHOLDERS: dict[str, tuple[Callable[[str, int], str], str]] = {
    "value": (lambda text, ranks: text, "V"),
    "list": (lambda text, ranks: f"[{text.strip('[]')}]", "[V]"),
    "to_one": (lambda text, ranks: f"[{text}, 1]", "[V, 1]"),
    "one_minus": (lambda text, ranks: _plain(1 - float(text)), "<1 - V>"),
    "plus_32": (lambda text, ranks: str(int(text) + 32), "<V + 32>"),
    "times_255": (lambda text, ranks: _scale(text, 255), "<255 V>"),
    "times_ranks": (lambda text, ranks: _plain(float(text) * ranks), "<V n>"),
    "over_ranks": (lambda text, ranks: _plain(float(text) / ranks), "<V / n>"),
    "count": (lambda text, ranks: str(len(_numbers(text))), "<number of V>"),
    "parent": (lambda text, ranks: str(Path(text).parent), "<folder of V>"),
    "first": (lambda text, ranks: _plain(_numbers(text)[0]), "<first of V>"),
    "side": (lambda text, ranks: _plain(_numbers(text)[-1]), "<last of V>"),
}
"""What `{name}` in a template becomes, from the option's value and the number of ranks; and what
the page shows for it."""


class Row(BaseModel):
    """A part of a table."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)


class Option(Row):
    """One option of a script, or an environment variable that it reads."""

    names: tuple[str, ...]
    """Its names. A name without hyphens is a positional argument."""
    takes: Literal[0, 1, 2] = 1
    """Number of values. 0: a switch."""
    default: str | None = None
    """The value that the script uses if the option is left out. None: none."""
    required: bool = False
    to: str | None = None
    """The template for every value, or for those that `values` does not have."""
    values: dict[str, str] = Field(default_factory=dict)
    """The templates for single values."""
    absent: str = ""
    """The template for a switch that is left out."""
    needs: str = ""
    """The option without which the script ignores this one."""
    same: str = ""
    """Why Lockstep does not need it."""
    not_here: str = ""
    """Why it, or a value that `values` does not have, is not translated."""
    remark: str = ""
    """An additional remark of the page."""
    example: str = ""
    """A value for the tests, if there is no default."""

    @model_validator(mode="before")
    @classmethod
    def _keys_are_text(cls, fields: dict[str, Any]) -> dict[str, Any]:
        values = fields.get("values", {})
        return fields | {"values": {str(key): value for key, value in values.items()}}

    @model_validator(mode="after")
    def _is_answered(self) -> "Option":
        carried = self.to is not None or bool(self.values)
        assert carried or self.same or self.not_here, (
            f"{self.names[0]} has neither an equivalent nor a reason"
        )
        assert not (self.same and carried), (
            f"{self.names[0]} has an equivalent, but also a reason not to need one"
        )
        return self

    @property
    def positional(self) -> bool:
        """Whether it is a positional argument."""
        return not self.names[0].startswith("-")

    def template(self, value: str) -> str | None:
        """Return the template for a value. None: it is not translated."""
        for known, template in self.values.items():
            if is_equal(known, value):
                return template
        return self.to


class Preset(Row):
    """Options that a script adds for the values of other options, such as those of a configuration
    file."""

    when: dict[str, str]
    adds: str


class Script(Row):
    """One script of an example."""

    name: str
    revision: str = ""
    """The year of the revision, if revisions differ so much that they are separate rows."""
    about: str
    also: tuple[str, ...] = ()
    """Scripts whose options it passes on. Its own options take precedence."""
    command: str | None = None
    """The Lockstep command. None: there is none, for the reason in `not_here`."""
    arguments: str = ""
    """Template of what the script always does."""
    like: str = ""
    """The published recipe with the values that the script's code fixes. "": those of
    `Recipe()`."""
    fields: dict[str, Any] = Field(default_factory=dict)
    """Fields that the script's code fixes at other values than this recipe."""
    not_here: str = ""
    presets: tuple[Preset, ...] = ()
    options: tuple[Option, ...] = ()


def _drop_names(options: tuple[Option, ...], names: set[str]) -> list[Option]:
    """Return the options under their other names, if they have any."""
    renamed = []
    for option in options:
        others = tuple(name for name in option.names if name not in names)
        if others:
            renamed.append(option.model_copy(update={"names": others}))
    return renamed


class Launcher(Row):
    """A program that starts several processes of a script."""

    name: str
    """As it is typed, such as `python -m torch.distributed.launch`. The last word identifies it."""
    ranks: tuple[str, ...]
    """Options with the number of processes, or with a comma-separated list that has an entry for
    each process."""
    lists: bool = False
    """Whether the options have a list."""
    options: tuple[Option, ...] = ()
    """Its other options."""

    @property
    def program(self) -> str:
        """The word that identifies it, such as `torchrun`."""
        return self.name.split()[-1]

    @property
    def all_options(self) -> tuple[Option, ...]:
        """All options: those in `ranks`, too."""
        count = "{count}" if self.lists else "{value}"
        return (Option(names=self.ranks, to=f"@ranks={count}"), *self.options)


class Shell(Row):
    """Shell scripts of one pattern. `runs` is the command in them; \\1 is a group of the pattern,
    $1 an argument."""

    pattern: str
    shown: str
    """How the page names them."""
    runs: str
    defaults: tuple[str, ...] = ()
    """Values of $1, $2, ... if they are not given."""


class System(Row):
    """One of NVIDIA's examples: what its command lines consist of."""

    name: str
    title: str
    backend: str
    launchers: tuple[Launcher, ...]
    shells: tuple[Shell, ...] = ()
    environment: tuple[Option, ...] = ()
    """Environment variables. A name that ends in * stands for all that begin with it."""
    scripts: tuple[Script, ...]

    def script(self, name: str, revision: str = "") -> Script:
        """Return the script of a name, of this revision if there are several."""
        scripts = [script for script in self.scripts if script.name == name]
        return next((script for script in scripts if script.revision == revision), scripts[0])

    def options(self, script: Script) -> tuple[Option, ...]:
        """Return all options of a script: those that it passes on first, because its own take
        precedence."""
        own = {name for option in script.options for name in option.names}
        options: list[Option] = []
        for name in script.also:
            others = self.options(self.script(name, script.revision))
            options += _drop_names(others, own)
        return (*options, *script.options)

    def start(self, script: Script) -> Recipe:
        """Return the recipe before any option: what the code of a script, and of those it runs,
        fixes."""
        if script.like:
            recipe = RECIPES[script.like]()
        elif script.also:
            recipe = self.start(self.script(script.also[0], script.revision))
        else:
            recipe = Recipe()
        return recipe.replace(**script.fields)


@cache
def systems() -> Mapping[str, System]:
    """Return the four examples by name, read from the YAML files next to this module."""
    folder = Path(__file__).parent
    return {
        name: System(**read_yaml((folder / f"{name}.yaml").read_text(encoding="utf-8")))
        for name in SYSTEMS
    }


def is_equal(a: str, b: str) -> bool:
    """Return whether two texts are the same value.

    >>> is_equal("0.10", "0.1"), is_equal("-1", "-1.0"), is_equal("a", "b")
    (True, True, False)
    """
    try:
        return a == b or math.isclose(float(a), float(b))
    except ValueError:
        return False


def fill_template(template: str, value: str, ranks: int) -> list[tuple[str, str]]:
    """Return the words of a template as pairs of a name and a value, with the value of an option
    put in.

    Raises `ValueError` if the value is not of the kind that a placeholder takes.

    >>> fill_template("lr={times_ranks} lr_scaling=none --train-only", "0.25", 8)
    [('lr', '2'), ('lr_scaling', 'none'), ('--train-only', '')]
    """
    words = [word.partition("=") for word in template.split()]
    try:
        pairs = [(name, _replace_placeholders(text, value, ranks)) for name, _, text in words]
    except (OverflowError, IndexError):
        raise ValueError(f"{value!r} is not a number that can be used") from None
    for name, text in pairs:
        if name in COUNTS and not re.fullmatch(r"\d{1,12}", text):
            raise ValueError(f"{text!r} is not a count")
    return pairs


def _replace_placeholders(text: str, value: str, ranks: int) -> str:
    for name, (function, _) in PLACEHOLDERS.items():
        if f"{{{name}}}" in text:
            text = text.replace(f"{{{name}}}", function(value, ranks))
    return text
