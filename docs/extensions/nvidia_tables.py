"""The tables of docs/reference/nvidia-pytorch.md and its like, from the same rows that commands are
translated with. The pages hold them, for readers of the Markdown: run this file to write them.
"""

import re
from pathlib import Path

from lockstep.recipes.nvidia.equivalents import (
    describe_equivalent,
    describe_names,
    describe_script,
)
from lockstep.recipes.nvidia.table import System, systems

REFERENCE = Path(__file__).parents[1] / "reference"


def write_pages() -> None:
    """Replace the tables of all pages, which begin with the launchers and end the page."""
    for system in systems().values():
        page = REFERENCE / f"nvidia-{system.name}.md"
        tables = write_system(system)
        text = page.read_text(encoding="utf-8")
        page.write_text(text.partition(tables.partition("\n")[0])[0] + tables, encoding="utf-8")


def write_system(system: System) -> str:
    """Return the tables of an example."""
    title = f"## {system.title}: launchers and environment"
    lines = [title, "", "| NVIDIA's | Lockstep |", "|---|---|"]
    for launcher in system.launchers:
        number = " or ".join(f"`{name}`" for name in launcher.ranks)
        what = "has n entries" if launcher.lists else "is n"
        lines.append(
            f"| `{launcher.name}`, where {number} {what} | `lockstep launch -n <n> -- ...` |"
        )
        lines += [
            f"| `{launcher.program}`: {describe_names(option)} | {describe_equivalent(option)} |"
            for option in launcher.options
        ]
    lines += [
        f"| `{shell.shown}` | that of `{show_command(shell.runs)}` |" for shell in system.shells
    ]
    lines += [
        f"| {describe_names(option)} | {describe_equivalent(option)} |"
        for option in system.environment
    ]
    return "\n".join([*lines, "", *(describe_script(system, script) for script in system.scripts)])


def show_command(runs: str) -> str:
    """Return a command without the marks of its pattern: a group is shown as three dots."""
    return re.sub(r"\\\d", "...", runs)


if __name__ == "__main__":
    write_pages()
