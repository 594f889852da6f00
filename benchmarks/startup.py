"""Measure the seconds that `lockstep --help` and `import lockstep` take, next to an interpreter that does nothing."""

import subprocess
import sys

from measuring import median, record, seconds

ROUNDS = 15


def run(*arguments: str) -> float:
    """Run a Python process and return the seconds it takes."""
    return seconds(lambda: subprocess.run([sys.executable, *arguments], capture_output=True, check=True))


def main() -> None:
    commands = {
        "help_sec": ["-m", "lockstep", "--help"],
        "import_sec": ["-c", "import lockstep"],
        "nothing_sec": ["-c", "pass"],
    }
    rounds = [{name: run(*command) for name, command in commands.items()} for _ in range(ROUNDS)]
    record("startup", {name: round(median(times[name] for times in rounds), 4) for name in commands})


if __name__ == "__main__":
    main()
