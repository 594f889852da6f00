"""`lockstep serve`."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli import options
from lockstep.cli.command import rare
from lockstep.system.defaults import DEFAULT_BACKEND
from lockstep.system.errors import UserError
from lockstep.system.regular_files import SETTINGS, read_regular_text

TOKEN = "LOCKSTEP_SERVE_TOKEN"
"""Environment variable with the token."""


def command(
    source: Annotated[
        str, typer.Argument(metavar="RUN", help=f"{options.WEIGHTS}, or an ONNX export.")
    ],
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Address to listen on; all but loopback need a token."
        ),
    ] = "127.0.0.1",
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"File with the clients' token; or set {TOKEN}."),
    ] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Serve anyone who can reach the address.")
    ] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Accept this host name too, such as a proxy's; repeatable."
        ),
    ] = None,
    name: Annotated[
        str | None,
        rare(
            metavar="NAME",
            help="Name of the model in URLs (default: its architecture or, of an export, model).",
        ),
    ] = None,
    max_batch: Annotated[int, rare(help="Largest batch, and most images per request.", min=1)] = 32,
    max_wait_ms: Annotated[
        float, rare(help="Longest wait for images in progress before a batch starts.", min=0)
    ] = 2.0,
    max_queue: Annotated[
        int, rare(help="Maximum number of images in the server at once; others get 429.", min=1)
    ] = 256,
    max_body_mb: Annotated[int, rare(help="Largest body of a request, in MiB.", min=1)] = 32,
    max_megapixels: Annotated[float, rare(help="Largest image, in megapixels.", min=1)] = 50.0,
    max_connections: Annotated[int, rare(help="Maximum number of open connections.", min=1)] = 512,
    timeout_sec: Annotated[
        float, rare(help="Time limit for sending a body, and for its result.", min=1)
    ] = 30.0,
    drain_sec: Annotated[
        float, rare(help="Accept requests for this long after a signal to stop.", min=0)
    ] = 1.0,
    quiet: Annotated[bool, rare("--quiet", help="Log only requests that fail.")] = False,
    checkpoint: options.Checkpoint = None,
    ema: options.Ema = None,
    model: options.Model = None,
    ignore: options.Ignore = None,
    classes: options.Classes = None,
    unknown_below: options.UnknownBelow = None,
    runtime: options.Runtime = None,
    backend: options.Backend = DEFAULT_BACKEND,
    assignments: options.SetForWeights = None,
    like: options.AsRecipe = None,
    require_signature: options.RequireSignature = None,
) -> None:
    """Serve a model over HTTP, with a page to drop images on.

    Answers /predict and Triton's clients; on SIGTERM or Ctrl-C, finishes accepted requests.
    """
    from lockstep.inference.serving import Limits

    how, preprocessing = options.read_inference_options(assignments, backend, like)
    limits = Limits(
        max_batch=max_batch,
        max_wait_ms=max_wait_ms,
        max_queue=max_queue,
        max_body_mb=max_body_mb,
        max_megapixels=max_megapixels,
        timeout_sec=timeout_sec,
        max_connections=max_connections,
        drain_sec=drain_sec,
    )
    token = _token(token_file)
    access: dict[str, Any] = {
        "host": host,
        "port": port,
        "token": token,
        "no_token": no_token,
        "allow_hosts": allow_host or (),
    }
    chosen: dict[str, Any] = {"checkpoint": checkpoint, "ema": ema, "classes": classes}
    chosen |= {"unknown_below": unknown_below, "preprocessing": preprocessing}
    chosen["require_signature"] = require_signature
    loaded = options.load_model(source, model, ignore, **chosen).on(runtime, **how)
    loaded.serve(**access, name=name, limits=limits, quiet=quiet)


def _token(file: Path | None) -> str | None:
    """Return the token in a file, or in the environment; None if there is neither. Raises
    `UserError`."""
    if file is None:
        return os.environ.get(TOKEN) or None
    try:
        return read_regular_text(file, SETTINGS, encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise UserError(
            f"the token file {file} cannot be read: {reason}; give a regular file with the"
            f" token as one line, or set {TOKEN}"
        ) from None
