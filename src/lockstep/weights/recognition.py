"""Recognise the format of another program's weights."""

from pathlib import Path

from lockstep.system.errors import CheckpointError
from lockstep.system.regular_files import WEIGHTS, open_regular
from lockstep.weights.formats.format_list import FORMATS, HEAD_BYTES, Format, load_formats
from lockstep.weights.formats.lfs_pointers import refuse_packed, refuse_stand_in

_ENDINGS = (
    *(".bin", ".h5", ".keras", ".msgpack", ".npz", ".onnx", ".pb", ".pt", ".pth", ".pth.tar"),
    ".safetensors",
)
"""How the names of files end that may hold weights, but do not make their folder one of weights."""
_PROGRAMS = {
    **dict.fromkeys((".pdiparams", ".pdmodel"), "Paddle Inference"),
    **dict.fromkeys((".mlmodel", ".mlpackage"), "Core ML"),
    **dict.fromkeys((".engine", ".plan"), "TensorRT"),
    **{".pte": "ExecuTorch", ".stablehlo": "XLA", ".tflite": "LiteRT"},
}
"""What runs the programs whose files' names end like this."""


def recognise(path: Path) -> tuple[Format, Path]:
    """Return the format of another program's weights and the file or prefix to read.

    Raises `CheckpointError` if a path names nothing that can be read, or several things.
    """
    if path.exists() and not path.is_dir():
        format = _recognise_file(path)
        if format is not None:
            return format, format.find(path) or path
    places = _find_places(path)
    if len(places) == 1:
        [(place, format)] = places.items()
        return format, place
    if places:
        several = ", ".join(f"{place} ({format.NAME})" for place, format in places.items())
        raise CheckpointError(
            f"{path} holds weights in several formats: {several}; name one of these"
        )
    _refuse_program(path)
    if not path.exists():
        hint = _suggest_published(path)
        raise CheckpointError(f"there is no run, no file and no checkpoint {path}{hint}")
    raise _describe_unknown(path)


def _suggest_published(path: Path) -> str:
    """Return which published weights the end of a path can mean; "" if none.

    >>> _suggest_published(Path("resnet50.a1_in1k"))
    '. Did you mean timm/resnet50.a1_in1k? `lockstep weights` lists published weights'
    """
    from lockstep.weights.known_weights import read_known_weights

    name = path.name.lower()
    same_name = []
    same_network = []
    for known in read_known_weights():
        tail = known.partition("/")[2].lower()
        if tail == name:
            same_name.append(known)
        if tail.partition(".")[0] == name:
            same_network.append(known)
    meant = " or ".join(same_name or same_network[:3])
    return f". Did you mean {meant}? `lockstep weights` lists published weights" if meant else ""


def check_exists(path: Path) -> None:
    """Raise `CheckpointError` if there is nothing at a path, before a framework is imported."""
    if not path.exists():
        recognise(path)  # some formats are named by the beginning of their files' names


def read_head(path: Path) -> bytes:
    """Return the beginning of a file, by which formats recognise it."""
    with open_regular(path, WEIGHTS) as file:
        return file.read(HEAD_BYTES)


def _recognise_file(path: Path) -> Format | None:
    """Return the format of a file: by its content, else by its name, so that the format's reader
    reports what is wrong with it. Raises `CheckpointError` if the file cannot be weights."""
    head = read_head(path)
    if not head:
        raise CheckpointError(
            f"{path} is empty: it was not written or copied completely; copy it again"
        )
    refuse_stand_in(path, head)
    refuse_packed(path, head)
    for format in load_formats():
        if format.matches(head, path):
            return format
    for format in load_formats():
        if format.find(path) is not None:
            return format
    return None


def _find_places(path: Path) -> dict[Path, Format]:
    """Return the files and prefixes that a folder or a prefix stands for, with their formats."""
    folders = [FORMATS[name].load() for name in ("timm_folder", "transformers_folder")]
    places: dict[Path, Format] = {}
    for format in load_formats():
        place = format.find(path)
        if place is None:
            continue
        # A hub's folder may hold the same weights twice, of which one is read.
        is_hubs = any(folder in places.values() for folder in folders)
        if is_hubs and place.name in folders[0].FILES:
            continue
        places.setdefault(place, format)
    return places


def _refuse_program(path: Path) -> None:
    """Raise `CheckpointError` if a path is a program, its prefix, or a folder of one."""
    for ending, runtime in _PROGRAMS.items():
        files = [path.with_name(f"{path.stem}{ending}"), path.with_name(f"{path.name}{ending}")]
        for file in filter(Path.exists, [*files, *path.glob(f"*{ending}")] if path.name else []):
            raise CheckpointError(
                f"{file} is part of a program for {runtime}, not weights; name the weights that it"
                " was made from, in Paddle those of paddle.save(model.state_dict(), 'a.pdparams')"
            )


def _describe_unknown(path: Path) -> CheckpointError:
    """Return the error for a file or folder of no known format."""
    inside = [
        file for file in sorted(path.glob("*")) if file.name.endswith(_ENDINGS) and file.is_file()
    ]
    for file in inside:
        refuse_stand_in(file)
    if inside:
        return CheckpointError(
            f"{path} is not a folder of a known format; name a file in it, such as {inside[0]}"
        )
    if (path / "fold-1").is_dir():
        raise CheckpointError(
            f"{path} holds a run for each fold; expected one run. Name one, such as"
            f" {path / 'fold-1'}, or train without --folds"
        )
    names = ", ".join(format.NAME for format in load_formats())
    return CheckpointError(
        f"{path} holds no weights that can be read; expected a run's folder, a checkpoint, or"
        f" weights of {names}"
    )
