"""`lockstep convert`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli import options
from lockstep.cli.terminal import in_line, print, print_json


def command(
    source: Annotated[Path, typer.Argument(help=options.WEIGHTS)],
    target: Annotated[
        Path | None,
        typer.Argument(
            help="A new file, folder, or for NVIDIA's formats a prefix such as model.ckpt-0."
        ),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            help=(
                "Format: safetensors, torchvision, timm, keras, nvidia-pytorch, nvidia-tensorflow,"
                " nvidia-paddle or "
                "nvidia-mxnet."
            )
        ),
    ] = "safetensors",
    checkpoint: options.Checkpoint = "newest",
    ema: options.Ema = False,
    classes: options.Classes = None,
    model: options.Model = None,
    certificate: Annotated[
        bool,
        typer.Option(
            help="Check that source and target compute the same, and write TARGET.certificate.json."
        ),
    ] = True,
    assignments: options.SetPreprocessing = None,
    like: options.AsRecipe = None,
    inspected: Annotated[
        bool, typer.Option("--inspect", help="Show what SOURCE is, and convert nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --inspect: print JSON.")] = False,
) -> None:
    """Write weights in another format, with a certificate."""
    if inspected:
        if target is not None or classes is not None or ema or assignments or like is not None:
            raise typer.BadParameter(
                "--inspect shows SOURCE as it is; leave out TARGET, --classes, --ema, --set,"
                " --recipe"
            )
        _inspect(source, checkpoint, model, as_json)
        return
    if as_json:
        raise typer.BadParameter(
            "it prints what --inspect finds; add --inspect", param_hint="--json"
        )
    if target is None:
        raise typer.BadParameter("expected a target to write to, or --inspect", param_hint="TARGET")
    from lockstep import convert

    how: dict[str, Any] = {"checkpoint": checkpoint, "ema": ema, "classes": classes, "model": model}
    how |= options.for_writing(assignments, like)
    result = convert(source, target, to=to, certificate=certificate, **how)
    for path in result["written"]:
        print(f"wrote {path}")
    for remark in result["remarks"]:
        print(f"note: {in_line(remark)}")
    found = result["certificate"]
    if found is not None:
        print(
            f"certificate: logits differ by at most {found['largest_difference']:.2g} of the"
            f" largest (bound {found['bound']:g}), {found['tensors_equal']} of {found['tensors']}"
            " tensors are equal; computed by"
            f" {' and '.join(dict.fromkeys(found['engines'].values()))}"
            + (f"; read by {found['read_by']}" if found["read_by"] else "")
        )


def _inspect(source: Path, checkpoint: str, model: str | None, as_json: bool) -> None:
    from lockstep.weights.inspection import by_kind, inspect

    found = inspect(source, checkpoint=checkpoint, model=model)
    if as_json:
        print_json(found)
        return
    for name, value in found.items():
        lines = (
            by_kind(value) if name == "stored" else {name.replace("_", " "): _shown(name, value)}
        )
        for title, line in lines.items() if name not in ("remarks", "oddities") else ():
            print(f"{title:<16} {in_line(line)}")
    for remark in found["remarks"]:
        print(f"note: {in_line(remark)}")
    for oddity in found["oddities"]:
        print(f"odd: {in_line(oddity)}")


def _shown(name: str, value: Any) -> str:
    if name == "classes":
        return (
            f"{len(value)}: {', '.join(value[:5])}{' ...' if len(value) > 5 else ''}"
            if value
            else "no names"
        )
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none" if name == "logits" else "unknown"
    return str(value)
