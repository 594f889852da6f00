"""Run the commands and the Python of the pages, and compare what they print with what is shown.

    python -m tests.docs.run_pages                       # all pages
    python -m tests.docs.run_pages docs/how-to/serve.md  # some

Each page has a new folder in build/docs-run. A tutorial begins in an empty one; other pages find a
small data set and a small run under the names that pages use (`PLACES`). Numbers, spaces and times
may differ from the page; words and the number of lines may not, except where it shows `...`.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.docs.pages import PAGES, ROOT, Block, Command, read_blocks, read_commands

WORK = ROOT / "build/docs-run"
PLACES = ("DATA", "RUN", "demo", "photos", "photo.jpg", "a.jpg", "b.jpg", "images")
OTHER_PROGRAMS = re.compile(
    r"(sudo |apt-get |git clone |docker |kubectl |make |pip |python\S* -m (venv|pip)|tar "
    r"|tensorboard |mpirun|sbatch|srun|\. |source |export |curl .*https://example)"
)
"""Commands that install, or that need a network or a machine that is set up for them."""
WRITES = re.compile(r"lockstep (export \S+|train .*--data .*--out) (?P<folder>FOLDER|RUN)\b")
"""Commands that want a new folder. Pages show several of them under one name."""
LIMIT_SEC = 900
SMALL = {
    "model": "resnet18",
    "image_size": "32",
    "eval_resize": "36",
    "eval_crop": "32",
    "epochs": "2",
    "global_batch_images": "8",
    "precision": "fp32",
    "logits": "10",
}
"""What makes a training small, outside tutorials."""
NUMBER = re.compile(r"\d+(?:[.,:]\d+)*(?:e[-+]?\d+)?")
TIME_LEFT = re.compile(r",? (?:at most )?# (?:s|min|h|d)(?: # (?:s|min|h))? left")
DURATION = re.compile(r"\b# (?:s|min|h)\b(?: # (?:s|min)\b)?")


@dataclass
class Session:
    """What the blocks of a page share: a folder, an environment, and a server that one of them
    started."""

    folder: Path
    servers: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """The surroundings of a command: `lockstep` is that of this Python."""
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        places = {"PATH": programs, "XDG_CACHE_HOME": str(WORK / "cache")}
        return {**os.environ, **places, "MPLBACKEND": "Agg", "PYTHONUNBUFFERED": "1"}

    def run(self, arguments: list[str]) -> tuple[int, str]:
        """Run a program to its end. Return its exit code and all that it printed."""
        done = subprocess.run(
            arguments,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_SEC,
            check=False,
        )
        return done.returncode, done.stdout

    def serve(self, line: str) -> tuple[int, str]:
        """Start a server in place of an earlier one, and return when it prints its address."""
        self.stop()
        log = self.folder / "server.log"
        with log.open("w") as output:
            server = subprocess.Popen(
                ["bash", "-c", f"exec {line}"],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.servers.append(server)
        end = time.monotonic() + LIMIT_SEC
        while "http://" not in log.read_text() and server.poll() is None and time.monotonic() < end:
            time.sleep(0.2)
        return server.poll() or 0, log.read_text()

    def stop(self) -> None:
        """Stop the server, which must end with exit code 0."""
        while self.servers:
            server = self.servers.pop()
            server.send_signal(signal.SIGTERM)
            if server.wait(60):
                raise SystemExit(f"the server ended with exit code {server.returncode}")


def mask(text: str) -> str:
    """Return a line without what differs between two runs: numbers, times and widths of columns."""
    text = re.sub(r"\s+", " ", NUMBER.sub("#", text)).strip()
    return DURATION.sub("# s", TIME_LEFT.sub("", text))


def has_shape(shown: str, printed: str) -> bool:
    """Whether an output has the lines and words that a page shows."""
    pattern = ""
    for line in shown.rstrip().splitlines():
        if line.strip() == "...":
            pattern += r"(?:.*\n)*"
        else:
            pattern += re.escape(mask(line)).replace(r"\.\.\.", ".*") + r"\n"
    lines = [mask(line) for line in printed.rstrip().splitlines()]
    return re.fullmatch(pattern, "\n".join([*lines, ""])) is not None


def shorten(line: str) -> str:
    """Return a command that trains on DATA with the fields of `SMALL` that it does not set."""
    call = "lockstep train "
    if call not in line or "--data DATA" not in line or "--out RUN" not in line:
        return line
    fields = [f"--set {name}={value} " for name, value in SMALL.items() if f"{name}=" not in line]
    return line.replace(call, f"{call}--stop-after-steps 2 {''.join(fields)}")


def run_command(session: Session, command: Command, exit_code: int) -> str:
    """Run a command of a page. Return what is wrong; an empty text if nothing is."""
    line = command.line
    if name := WRITES.search(line):
        shutil.rmtree(session.folder / name["folder"], ignore_errors=True)
    is_error = command.output.startswith("lockstep: ")
    if re.match(r"lockstep serve\b", line) and not is_error:
        code, printed = session.serve(line.partition(" #")[0])
    else:
        code, printed = session.run(["bash", "-o", "pipefail", "-c", line])
    if code != exit_code and not (is_error and code):
        return f"$ {line}\nended with exit code {code}; expected {exit_code}\n{printed}"
    if command.output.strip() and not has_shape(command.output, printed):
        return f"$ {line}\nprinted\n{printed}\nThe page shows\n{command.output}"
    return ""


def run_block(session: Session, block: Block) -> Iterator[str]:
    """Run a block. Yields what is wrong."""
    if block.language == "python":
        code, printed = session.run([sys.executable, "-c", f"{block.before}\n{block.text}"])
        if code:
            yield f"{block.place}: ended with exit code {code}\n{printed}"
        return
    if block.before and (mistake := run_command(session, Command(block.before, ""), 0)):
        yield f"{block.place}: {mistake}"
    for command in read_commands(block):
        if " ... " in f" {command.line} " or OTHER_PROGRAMS.match(command.line):
            continue
        if "tutorial" not in block.page.parts:
            command = Command(shorten(command.line), command.output)
        if mistake := run_command(session, command, block.exit_code):
            yield f"{block.place}: {mistake}"


def make_places() -> Path:
    """Draw the small data set and train the small run, unless an earlier call has. Returns their
    folder."""
    folder = WORK / "places"
    if (folder / "RUN/report.json").exists():
        return folder
    from lockstep.data.textures import draw_data_set

    draw_data_set(folder / "DATA", train_images=60, val_images=20)
    session = Session(folder)
    line = "lockstep train --recipe demo --data DATA --out RUN"
    fields = [f"--set {name}={value}" for name, value in SMALL.items()]
    code, printed = session.run(["bash", "-c", " ".join([line, *fields])])
    if code:
        raise SystemExit(printed)
    photos = sorted((folder / "DATA/val").glob("*/*.jpg"))
    (folder / "demo").mkdir()
    (folder / "demo/data").symlink_to("../DATA")
    (folder / "demo/run").symlink_to("../RUN")
    (folder / "photos").mkdir()
    (folder / "images").symlink_to("photos")
    for name, photo in zip(("a.jpg", "b.jpg"), photos, strict=False):
        shutil.copy(photo, folder / name)
        shutil.copy(photo, folder / "photos" / name)
    shutil.copy(photos[0], folder / "photo.jpg")
    return folder


@contextmanager
def open_session(page: Path) -> Iterator[Session]:
    """Make the folder of a page, and stop the page's server at the end."""
    folder = WORK / page.relative_to(ROOT).with_suffix("")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if "tutorial" not in page.parts:
        places = make_places()
        for name in PLACES:
            source = places / name
            if source.is_dir():
                shutil.copytree(source, folder / name, symlinks=True)
            else:
                shutil.copy(source, folder / name)
    session = Session(folder)
    try:
        yield session
    finally:
        session.stop()


def main() -> None:
    pages = [Path(name).resolve() for name in sys.argv[1:]] or PAGES
    mistakes = []
    for page in pages:
        blocks = [block for block in read_blocks(page) if block.language in {"console", "python"}]
        runs = [block for block in blocks if not block.not_run]
        print(f"{page.relative_to(ROOT)}: {len(runs)} of {len(blocks)} blocks", flush=True)
        if not runs:
            continue
        begin = time.monotonic()
        with open_session(page) as session:
            for block in runs:
                for mistake in run_block(session, block):
                    print(mistake, flush=True)
                    mistakes.append(mistake.partition("\n")[0])
        print(f"  {time.monotonic() - begin:.0f} s", flush=True)
    if mistakes:
        raise SystemExit("\n".join([f"{len(mistakes)} blocks differ:", *mistakes]))


if __name__ == "__main__":
    main()
