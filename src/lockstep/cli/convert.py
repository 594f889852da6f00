"""`lockstep convert`."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options
from lockstep.cli.command import rare
from lockstep.cli.terminal import escape_line, print, print_json

if TYPE_CHECKING:
    from lockstep.weights import WeightsChoice


def command(
    source: options.WeightsArgument,
    target: Annotated[
        Path | None,
        typer.Argument(
            help="A new file or folder; for NVIDIA's formats but nvidia-pytorch, a prefix."
        ),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help=(
                "safetensors (default), torchvision, timm, transformers, keras, flax, torchax,"
                " nvidia-pytorch, nvidia-tensorflow, nvidia-paddle or nvidia-mxnet."
            ),
            show_default=False,
        ),
    ] = "safetensors",
    checkpoint: options.Checkpoint = None,
    ema: options.Ema = None,
    classes: options.Classes = None,
    model: options.Model = None,
    ignore: options.Ignore = None,
    certificate: Annotated[
        bool,
        rare(help="Compare SOURCE with TARGET, and write TARGET.certificate.json."),
    ] = True,
    assignments: options.SetPreprocessing = None,
    like: options.AsRecipe = None,
    inspected: Annotated[
        bool, typer.Option("--inspect", help="Show what SOURCE is, and convert nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --inspect: print JSON.")] = False,
    require_signature: options.RequireSignature = None,
    key: options.Sign = None,
) -> None:
    """Write weights in another format, with a certificate.

    Example: lockstep convert run weights --to timm
    """
    if inspected:
        if ema or assignments or {target, classes, like, require_signature, key} != {None}:
            raise typer.BadParameter(
                "--inspect shows SOURCE as is; leave out TARGET, --classes, --ema, --set, --recipe,"
                " --require-signature, --sign"
            )
        _inspect(options.choose_weights(source, checkpoint, None, model, ignore), as_json)
        return
    if as_json:
        raise typer.BadParameter(
            "it prints what --inspect finds; add --inspect", param_hint="--json"
        )
    if target is None:
        raise typer.BadParameter("expected a target to write to, or --inspect", param_hint="TARGET")
    preprocessing = options.read_preprocessing(assignments, like)
    chosen: dict[str, Any] = {"checkpoint": checkpoint, "ema": ema, "classes": classes}
    chosen |= {"preprocessing": preprocessing, "require_signature": require_signature}
    loaded = options.load_model(source, model, ignore, **chosen)
    result = loaded.save(target, to=to, certificate=certificate)
    for path in result["written"]:
        print(f"wrote {path}")
    for remark in result["remarks"]:
        print(f"note: {escape_line(remark)}")
    if result["certificate"] is not None:
        print(_describe_certificate(result["certificate"]))
    options.sign_target(target, key)


def _describe_certificate(certificate: dict[str, Any]) -> str:
    text = (
        f"certificate: logits differ by at most {certificate['largest_difference']:.2g} of the"
        f" largest logit (bound {certificate['bound']:g}), {certificate['tensors_equal']} of"
        f" {certificate['tensors']} tensors are equal; computed by"
        f" {' and '.join(dict.fromkeys(certificate['engines'].values()))}"
    )
    if certificate["read_by"]:
        text += f"; read by {certificate['read_by']}"
    lines = [text, f"original: {certificate['compared']}"]
    through = certificate["through_target"]
    if through is not None:
        equal = round(through["top1_agreement"] * certificate["images"])
        lines.append(
            f"prepared by {through['by']}: {equal} of {certificate['images']} top-1 classes are"
            f" equal, and probabilities differ by at most {through['largest_difference']:.1e}. Any"
            " difference comes from preparing these odd-sized textures, not from the weights"
        )
    return "\n".join(lines)


def _inspect(choice: "WeightsChoice", as_json: bool) -> None:
    from lockstep.weights.formats.account import Part
    from lockstep.weights.inspection import group_by_kind, group_parts, inspect

    description = inspect(choice)
    if as_json:
        print_json(description)
        return
    for name, value in description.items():
        if name in ("preprocessing_from", "remarks", "oddities"):
            continue
        lines = [(name.replace("_", " "), _format_value(name, value))]
        if name == "stored":
            lines = [*group_by_kind(value).items()]
        elif name == "account":
            lines = [*group_parts(Part(**part) for part in value)]
        elif name == "preprocessing":
            lines = [*_group_by_place(value, description["preprocessing_from"])]
        for title, line in lines:
            print(f"{title:<16} {escape_line(line)}")
    for remark in description["remarks"]:
        print(f"note: {escape_line(remark)}")
    for oddity in description["oddities"]:
        print(f"odd: {escape_line(oddity)}")


def _group_by_place(values: dict[str, Any], places: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield a line of preprocessing values for each place that they come from."""
    for place in dict.fromkeys(places.values()):
        held = {name: value for name, value in values.items() if places[name] == place}
        title = place if place == "assumed" else f"from the {place}"
        yield "preprocessing", f"{title}: {_format_value('', held)}"


def _format_value(name: str, value: Any) -> str:
    if name == "classes":
        if not value:
            return "no names"
        more = ["..."] if len(value) > 5 else []
        return f"{len(value)}: {' '.join([', '.join(value[:5]), *more])}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {part}" for key, part in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none" if name == "logits" else "unknown"
    return str(value)
