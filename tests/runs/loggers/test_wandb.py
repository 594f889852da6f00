"""Weights & Biases' own client, offline. Skipped if it is not installed."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.runs.loggers import Loggers, Opening, Picture
from tests.processes import wait_until

pytest.importorskip("wandb")
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings inside the client and its packages


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def open_loggers(folder: Path, step: int, warned: list[str]) -> Loggers:
    folder.mkdir(exist_ok=True)
    return Loggers(["wandb"], Opening(folder, step, {"epochs": 2}, None), warned.append)


def wait_for_the_next_second() -> None:
    now = int(time.time())
    wait_until(lambda: int(time.time()) != now)


def payloads(data: bytes) -> Iterator[bytes]:
    """Yield the records of a client's file: a header of 7 bytes, then LevelDB's log format in
    blocks of 32 KiB.

    A piece has a checksum, length, kind (1 complete, 2 first, 3 middle, 4 last) and bytes.
    """
    place = 7
    parts = b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def records(folder: Path) -> list[list[Any]]:
    """Return the records of all processes' files, in the order of the files."""
    import wandb

    # as at the end of a process: before that, the client's process may still be writing
    wandb.teardown()
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    return [list(map(Record.FromString, payloads(file.read_bytes()))) for file in files]


def history(records: list[Any]) -> list[dict[str, Any]]:
    rows = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            row = {}
            for item in record.history.item:
                row[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            rows.append(row)
    return rows


def test_a_run_keeps_its_id_and_has_each_step_once(picture: Picture, tmp_path: Path) -> None:
    warned: list[str] = []
    for first, outcome in ((2, "stopped"), (4, "finished")):
        wait_for_the_next_second()  # the client names folders by it
        several = open_loggers(tmp_path / "my run", first - 2, warned)
        for step in (first, first + 2, first + 4):
            several.figures("train", {"loss": 1 / step}, step)
        several.figures("val_trained", {"loss": 2.0}, first + 4)
        if outcome == "finished":
            several.images("mistakes", [picture], 8)
        several.close(outcome)  # type: ignore[arg-type]
    assert warned == []
    files = records(tmp_path / "my run")
    ids = [
        record.run.run_id
        for file in files
        for record in file
        if record.WhichOneof("record_type") == "run"
    ]
    assert len(files) == 2
    assert len(set(ids)) == 1
    steps = [[(row["_step"], row.get("train/loss")) for row in history(file)] for file in files]
    assert steps == [[(2, 1 / 2), (4, 1 / 4), (6, 1 / 6)], [(8, 1 / 8)]]
    assert history(files[1])[0]["val_trained/loss"] == 2.0
    assert history(files[1])[0]["mistakes/01/caption"] == "dots predicted as rays"
