"""`lockstep verify-signature`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.terminal import print
from lockstep.system.text import format_count


def command(
    path: Annotated[Path, typer.Argument(help="Signed folder or file.")],
    key: Annotated[
        Path,
        typer.Option(
            "--key",
            "--certificate-chain",
            help="The signer's public key, or trusted certificates (PEM).",
            metavar="FILE",
        ),
    ],
    signature: Annotated[
        Path | None,
        typer.Option(help="Signature (default: PATH/model.sig or PATH.sig).", metavar="FILE"),
    ] = None,
) -> None:
    """Verify a signature, and all files that it covers.

    Reads signatures of OpenSSF Model Signing, except keyless ones (Sigstore).
    """
    from lockstep import verify_signature

    result = verify_signature(path, key, signature=signature)
    print(f"{path}: {format_count(len(result['files']), 'file')} as signed by {result['signer']}")
