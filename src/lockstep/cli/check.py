"""`lockstep check`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.terminal import escape_line, print

if TYPE_CHECKING:
    from lockstep.proof.record import Proof

Runtime = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=(
            "native, onnxruntime, openvino, tensorrt, auto, or program (runs an export's own code:"
            " trust its author). Default: as for `lockstep evaluate`."
        ),
    ),
]


def command(
    folder: Annotated[Path, typer.Argument(help="A folder with a proof/, such as an export.")],
    runtime: Runtime = None,
) -> None:
    """Check a model with the probe photos of its proof.

    Runs Lockstep's code, never the folder's check.py; exit code 1 if something differs.
    """
    from lockstep.proof.record import CannotCheck, find_changes, read_proof
    from lockstep.system.errors import CheckpointError

    place = _find_proof(folder)
    try:
        proof = read_proof(place)
    except CannotCheck as error:
        raise CheckpointError(str(error)) from None
    lines = find_changes(proof, place.parent)
    code = 1
    if lines:
        lines.append("The model was not run: export it again, or restore its files")
    else:
        lines, code = _run_model(folder, proof, runtime)
    for line in lines:
        print(escape_line(line))
    raise typer.Exit(code)


def _find_proof(folder: Path) -> Path:
    """Return the folder of the proof: next to the model, or with it in a Triton repository.
    Raises `CheckpointError` if there is not exactly one."""
    from lockstep.system.errors import CheckpointError

    places = [*folder.glob("proof/proof.json"), *folder.glob("*/proof/proof.json")]
    if len(places) != 1 or places[0].parent.is_symlink():
        raise CheckpointError(
            f"{folder!s:.200} has no proof of a model; expected a folder with proof/proof.json, as"
            " written by lockstep export and lockstep convert --to timm or transformers"
        )
    return places[0].parent


def _run_model(folder: Path, proof: "Proof", runtime: str | None) -> tuple[list[str], int]:
    """Return what differs in the model's answers to the probe photos, and the exit code."""
    from lockstep.cli.console import Reporter
    from lockstep.inference.programs import ExportedProgram
    from lockstep.inference.session import SessionOptions, open_session
    from lockstep.inference.source import ModelSource
    from lockstep.proof import faults
    from lockstep.proof.command import check_model, take_photo
    from lockstep.system.regular_files import IMAGE, read_regular
    from lockstep.weights import WeightsChoice

    with Reporter() as reporter:
        source = ModelSource(WeightsChoice(folder))
        options = SessionOptions().change(runtime, listener=reporter)
        export = source.find_export(options)
        weights = source.choose_weights(export)
        recipe = weights.recipe.replace(dct_scaling=False)
        if isinstance(export, ExportedProgram):
            opening = export.open_session(weights, reporter)
        else:
            opening = open_session(weights, options, exported=export)
        with opening as session:
            prepare = take_photo
            if not session.takes_photos:
                prepare = lambda pixels: faults.cut(pixels, recipe)[None]  # noqa: E731
            lines, code = check_model(
                proof,
                prepare,
                session.predict,
                lambda path: faults.decode(read_regular(path, IMAGE), recipe),
            )
    if export is None:
        lines += source.remark_on_program(runtime)
    return lines, code
