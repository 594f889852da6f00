"""The blocks of code in the pages of the documentation, and how they are to be run.

Comments of HTML, which no reader sees, say what a runner must know:

    <!-- not run: REASON -->               the next block is checked and not run
    <!-- not run on this page: REASON -->  the same for all blocks of the page
    <!-- before: LINE -->                  a line that is run before the next block, in its language
    <!-- exit code: N -->                  that of the commands of the next block, if it is not 0
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
        *(ROOT / "benchmarks").glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
FENCE = re.compile(r" *(`{3,}|~{3,}|:{3,}) *(.*?) *")
COMMENT = re.compile(r"<!-- (not run|not run on this page|before|exit code): (.+) -->")
OTHERS = ("kubectl", "pip")
"""Programs to which `lockstep` is a name."""
PROMPT = re.compile(r"(?:\w+)?\$ ")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    """The number of its first line of code."""
    language: str
    text: str
    not_run: str = ""
    """Why it is not run; empty if it is."""
    before: str = ""
    exit_code: int = 0

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command of a console block, and the output that the page shows for it."""

    line: str
    """As a shell reads it: lines that a backslash continues are one, and comments remain."""
    output: str


def read_blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page that name a language, also those inside directives."""
    lines = page.read_text(encoding="utf-8").splitlines()
    blocks: list[Block] = []
    marks: dict[str, str] = {}
    directives: list[str] = []
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        fence = FENCE.fullmatch(line)
        if comment := COMMENT.fullmatch(line.strip()):
            marks[comment[1]] = comment[2]
        elif fence is None:
            if line.strip():
                marks = keep_mark_of_page(marks)
        elif fence[2].startswith("{"):
            directives.append(fence[1])
        elif directives and not fence[2] and directives[-1] == fence[1]:
            directives.pop()
        else:
            indent = len(line) - len(line.lstrip())
            first = number
            while lines[number].strip() != fence[1]:
                number += 1
            text = "\n".join(code[indent:] for code in lines[first:number])
            number += 1
            reason = marks.get("not run") or marks.get("not run on this page", "")
            code = int(marks.get("exit code", "0"))
            before = marks.get("before", "")
            blocks.append(Block(page, first + 1, fence[2], text, reason, before, code))
            marks = keep_mark_of_page(marks)
    return blocks


def keep_mark_of_page(marks: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in marks.items() if name == "not run on this page"}


def read_commands(block: Block) -> list[Command]:
    """Return the commands of a console block. What comes before the first prompt is left out."""
    commands: list[Command] = []
    lines = iter(block.text.splitlines())
    for line in lines:
        prompt = PROMPT.match(line)
        if prompt is None:
            if commands:
                shown = commands.pop()
                commands.append(Command(shown.line, f"{shown.output}{line}\n"))
            continue
        line = line[prompt.end() :]
        while line.endswith("\\"):
            line = line.removesuffix("\\") + next(lines).strip()
        while is_open(line):
            line = f"{line}\n{next(lines)}"
        commands.append(Command(line, ""))
    return commands


def is_open(line: str) -> bool:
    """Whether a quotation of a command goes on in the next line."""
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return True
    return False


def find_calls(line: str) -> list[list[str]]:
    """Return the words after `lockstep` of every call of it in a line of a shell."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    calls: list[list[str]] = []
    words: list[str] = []
    for word in [*lexer, ";"]:
        if not set(word) <= set(";&|<>"):
            words.append(word)
            continue
        if "lockstep" in words and words[0] not in OTHERS:
            calls.append(words[words.index("lockstep") + 1 :])
        words = []
    return calls
