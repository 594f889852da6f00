"""Kill the loaders of several libraries in mid-epoch, resume them as their documentation advises,
and count the images that are lost, seen twice, cropped otherwise or moved to another step.

    python -m benchmarks.resume_beside_peers --peers PEERS

PEERS has a folder for each library that is not installed here, made by `pip install --target
PEERS/NAME`: litdata (litdata), mosaic (mosaicml-streaming), torchdata (torchdata) and datasets
(datasets and torchdata). A run is an epoch of 240 drawn JPEGs in steps of 8. It is saved after
every fourth step and killed twice, by SIGKILL to all of its processes. What was read after the
checkpoint from which the next process resumes does not count. The other images are compared with an
uninterrupted epoch of the same seed on one rank with two workers.
"""

import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.measuring import make_parser, record
from benchmarks.resume_beside_peers.peers import (
    IMAGES,
    PEERS,
    SAVE_EVERY,
    Launch,
    replace_torchvision,
    train,
)

FIRST_KILLS = (9, 10, 11, 13, 14, 15)
SECOND_KILLS = (21, 22, 23, 25, 26, 27)
SECONDS = 120.0
"""A process that takes longer counts as hung."""
SCENARIOS = {
    "same": (10, ((1, 2), (1, 2), (1, 2))),
    "ranks": (5, ((1, 2), (2, 2), (1, 2))),
    "workers": (5, ((1, 2), (1, 3), (1, 1))),
}
"""How many runs each scenario has, and the ranks and workers of the three launches of a run."""
COUNTS = ("images", "lost", "twice", "cropped_otherwise", "in_another_step")
Seen = list[tuple[int, int, int]]
"""The number of each image, its step and the checksum of its pixels, in the order of the steps."""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--peers", type=Path, required=True, help="Folder of installed libraries.")
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS), metavar="PEER")
    parser.add_argument("--runs", type=int, default=100, help="At most this many of each scenario.")
    parser.add_argument("--peer", help="internal")
    arguments = parser.parse_args()
    if arguments.peer:
        print(json.dumps(compare_peer(arguments.peer, arguments.runs)))
        return
    results = {}
    for peer in arguments.only:
        paths = [str((arguments.peers / peer.partition("-")[0]).resolve())]
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable,
            "-m",
            "benchmarks.resume_beside_peers",
            *sys.argv[1:],
            "--peer",
            peer,
        ]
        done = subprocess.run(
            command, env=os.environ | own, stdout=subprocess.PIPE, text=True, check=True
        )
        results[peer] = json.loads(done.stdout.splitlines()[-1])
        print(peer, results[peer], file=sys.stderr)
    if arguments.only == list(PEERS):
        kills = [draw_kills(seed) for seed in range(SCENARIOS["same"][0])]
        what = __doc__ or ""
        about = {"what": what.partition("\n\n")[0].replace("\n", " "), "kills_by_seed": kills}
        record("resume_beside_peers", about | {"scenarios": SCENARIOS, "peers": results})


def draw_kills(seed: int) -> tuple[int, int]:
    """Return the steps after which a run is killed; none of them was just saved."""
    drawn = random.Random(seed)
    return drawn.choice(FIRST_KILLS), drawn.choice(SECOND_KILLS)


def compare_peer(peer: str, runs: int) -> dict[str, Any]:
    """Return the counts of each scenario."""
    library = PEERS[peer]
    if peer == "mosaic":
        replace_torchvision()
    for module in library.modules:
        import_module(module)  # once for all launches, which are forked
    counts = {name: Counter(dict.fromkeys(COUNTS, 0)) for name in SCENARIOS}
    failures: dict[str, Counter[str]] = {name: Counter() for name in SCENARIOS}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        draw_images(data)
        if library.prepare:
            fork(lambda: library.prepare(data), Path(folder) / "errors", 0).join()
        for seed in range(min(runs, SCENARIOS["same"][0])):
            whole = Launch(peer, data, Path(folder, str(seed)), seed)
            outcome = run(whole)
            expected = read_launch(whole)
            if sorted(number for number, _, _ in expected) != list(range(IMAGES)):
                raise SystemExit(f"{peer} does not read every image once without a kill: {outcome}")
            for name, (count, sizes) in SCENARIOS.items():
                if seed >= count:
                    continue
                history, outcome = run_interrupted(
                    Launch(peer, data, Path(folder, f"{seed}-{name}"), seed), sizes
                )
                if outcome == "ended":
                    counts[name].update(count_differences(expected, history))
                else:
                    failures[name][outcome] += 1
    results = {name: counts[name] | {"failures": failures[name]} for name in SCENARIOS}
    return {"versions": {name: version(name) for name in library.packages}, **results}


def draw_images(data: Path) -> None:
    """Write the JPEGs: `images/train/CLASS/NUMBER.jpg`, whose order is that of their numbers."""
    noise = np.random.default_rng(0)
    for number in range(IMAGES):
        path = data / "images/train" / f"class{2 * number // IMAGES}" / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = noise.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((128, 96), Image.Resampling.BICUBIC).save(path)


def run_interrupted(start: Launch, sizes: tuple[tuple[int, int], ...]) -> tuple[Seen, str]:
    """Run an epoch with two kills; return the images that count, and "ended", or why it failed."""
    seen: Seen = []
    launch = start
    for number, kill_step in enumerate((*draw_kills(start.seed), 0)):
        first = 0
        if number:
            first = find_saved_step(launch)
            seen += read_launch(launch, first)
        ranks, workers = sizes[number]
        changes = {"number": number, "ranks": ranks, "workers": workers, "first_step": first}
        launch = replace(start, **changes, kill_step=kill_step)
        outcome = run(launch)
        if outcome != "killed":
            break
    return seen + read_launch(launch), outcome


def run(launch: Launch) -> str:
    """Run a launch: return "ended", "killed" or why it failed."""
    folder = launch.find(launch.number)
    folder.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(launch.ranks):
        group = ranks[0].pid if ranks else 0
        work = partial(run_rank, launch, rank, port)
        ranks.append(fork(work, folder / f"errors-{rank}", group))
    for process in ranks:
        process.join(SECONDS)
    codes = [process.exitcode for process in ranks]
    with suppress(ProcessLookupError):  # workers of a rank that is gone, and ranks that hang
        os.killpg(ranks[0].pid, signal.SIGKILL)
    for process in ranks:
        process.join()
    if None in codes:
        return "hangs"
    if set(codes) == {0}:
        return "ended"
    if launch.kill_step and set(codes) == {-signal.SIGKILL}:
        return "killed"
    lines = [(folder / f"errors-{rank}").read_text().splitlines() for rank in range(launch.ranks)]
    return next(own[-1] for own, code in zip(lines, codes, strict=True) if code and own)


def fork(work: Callable[[], None], errors: Path, group: int) -> Any:
    """Start a process in a group, 0 for a new one, that does the work and prints to `errors`."""

    def start() -> None:
        os.setpgid(0, group)
        with errors.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        work()

    process = multiprocessing.get_context("fork").Process(target=start)
    process.start()
    return process


def find_saved_step(launch: Launch) -> int:
    """Return the step of the newest checkpoint that all ranks of a launch have written."""
    if launch.peer == "lockstep":
        folders = (launch.folder / "run").rglob("step-*")
        return max(int(path.name.removeprefix("step-")) for path in folders)
    steps = Counter(int(path.stem) for path in launch.find(launch.number).glob("*.state-*"))
    return max(step for step, ranks in steps.items() if ranks == launch.ranks)


def read_launch(launch: Launch, end: int = IMAGES) -> Seen:
    """Return what a launch read up to and including step `end`."""
    seen = []
    for path in launch.find(launch.number).glob("log-*"):
        for line in path.read_text().splitlines():
            if not line.endswith("]]"):
                continue  # the kill cut it
            step, numbers, sums = json.loads(line)
            if step <= end:
                seen += [(number, step, own) for number, own in zip(numbers, sums, strict=True)]
    return sorted(seen, key=lambda image: image[1])


def count_differences(expected: Seen, history: Seen) -> dict[str, int]:
    """Return how the images of a history differ from the uninterrupted ones."""
    times = Counter(number for number, _, _ in history)
    first = {number: (step, own) for number, step, own in reversed(history)}
    both = [(image, first[image[0]]) for image in expected if image[0] in first]
    return {
        "images": len(expected),
        "lost": len(expected) - len(both),
        "twice": sum(count > 1 for count in times.values()),
        "cropped_otherwise": sum(image[2] != own for image, (_, own) in both),
        "in_another_step": sum(image[1] != step for image, (step, _) in both),
    }


# What runs in the processes of a rank.


def run_rank(launch: Launch, rank: int, port: int) -> None:
    """Read an epoch from where the last launch saved it, log it, save and be killed."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": launch.ranks, "MASTER_PORT": port}
    own |= {"LOCAL_WORLD_SIZE": launch.ranks, "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {name: str(value) for name, value in own.items()}
    folder = launch.find(launch.number)
    if launch.peer == "lockstep":
        train(launch, rank, folder)
        return
    import torch
    from torch import distributed

    torch.manual_seed(launch.seed)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    files = launch.find(launch.number - 1).glob(f"{launch.first_step}.state-*")
    states = [torch.load(path, weights_only=True) for path in sorted(files)]
    batches, take_state = PEERS[launch.peer].open(launch, rank, states)
    iterator = iter(batches)
    step = launch.first_step
    with (folder / f"log-{rank}").open("w", buffering=1) as log:
        while True:
            batch = next(iterator, None)
            remaining = torch.tensor(int(batch is not None))
            distributed.all_reduce(remaining)
            if not remaining:
                break
            step += 1
            log.write(json.dumps([step, *(batch or ([], []))]) + "\n")
            if step % SAVE_EVERY == 0:
                torch.save(take_state(), folder / f"new-{rank}")
                (folder / f"new-{rank}").rename(folder / f"{step}.state-{rank}")
            distributed.barrier()
            if step == launch.kill_step:
                os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
