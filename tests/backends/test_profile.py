"""The file that each framework's own profiler writes for some steps."""

import json
import pstats
from pathlib import Path

from lockstep.backends import Backend, Engine
from lockstep.recipes import Recipe
from tests.backends.cases import all_bits
from tests.backends.conftest import Start
from tests.backends.drawing import draw_batches


def train(engine: Engine, recipe: Recipe, first: int = 0) -> None:
    handle = engine.train(draw_batches(recipe, 2, count=8), first)
    engine.fetch(handle)


def names_in(file: Path) -> set[str]:
    """Return the names in a trace, read as its viewer reads them."""
    if file.suffix == ".json":  # Chrome's trace format
        content = json.loads(file.read_text())
        events = content["traceEvents"] if isinstance(content, dict) else content
        return {str(event["name"]) for event in events if "name" in event}
    if file.suffix == ".pstats":
        return {function for _, _, function in pstats.Stats(str(file)).stats}  # type: ignore[attr-defined]
    assert file.name.endswith(".xplane.pb")
    from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace

    planes = XSpace.FromString(file.read_bytes()).planes
    return {event.name for plane in planes for event in plane.event_metadata.values()}


def names_convolution(name: str) -> bool:
    return "conv" in name.lower().replace("convert", "")


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_trace_is_one_file_that_names_convolutions(
    backend: Backend, start: Start, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    engine = start(tiny_recipe)
    with backend.profile(tmp_path):
        train(engine, tiny_recipe)
    (file,) = files(tmp_path)
    assert any(names_convolution(name) for name in names_in(file))


def test_a_process_can_trace_again_and_steps_in_between_are_not_in_it(
    backend: Backend, start: Start, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    engine = start(tiny_recipe)
    for number in (0, 1, 2):
        (tmp_path / str(number)).mkdir()
    with backend.profile(tmp_path / "0"):
        train(engine, tiny_recipe)
    train(engine, tiny_recipe, 2)
    with backend.profile(tmp_path / "1"):
        train(engine, tiny_recipe, 4)
    with backend.profile(tmp_path / "2"):
        pass
    traced = [
        [name for name in names_in(file) if names_convolution(name)]
        for n in "01"
        for file in files(tmp_path / n)
    ]
    assert len(traced) == 2
    assert all(traced)
    assert not [
        name for file in files(tmp_path / "2") for name in names_in(file) if names_convolution(name)
    ]


def test_the_numbers_are_the_same_bits_with_and_without(
    backend: Backend, start: Start, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    engine = start(tiny_recipe)  # one: bits of MXNet can depend on where its memory is
    first = engine.read()
    train(engine, tiny_recipe)
    train(engine, tiny_recipe, 2)
    plain = all_bits(engine.read())
    engine.write(first)
    with backend.profile(tmp_path):
        train(engine, tiny_recipe)
    train(engine, tiny_recipe, 2)
    assert all_bits(engine.read()) == plain
