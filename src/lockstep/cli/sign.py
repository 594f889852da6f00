"""`lockstep sign`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.terminal import print


def command(
    path: Annotated[Path, typer.Argument(help="A folder or a file of convert or export.")],
    key: Annotated[
        Path, typer.Option(help="Private key (PEM, ECDSA) that only you can read.", metavar="FILE")
    ],
    certificate_chain: Annotated[
        Path | None,
        typer.Option(
            help="Certificate of the key, and those between it and the root (PEM).", metavar="FILE"
        ),
    ] = None,
    signature: Annotated[
        Path | None,
        typer.Option(help="New file; by default PATH/model.sig or PATH.sig.", metavar="FILE"),
    ] = None,
) -> None:
    """Sign weights in the format of OpenSSF Model Signing.

    Keyless signing (Sigstore) is missing. The environment variable LOCKSTEP_SIGN_PASSWORD has the
    password of an encrypted key, which is asked for on a terminal.
    """
    from lockstep import sign

    for written in sign(path, key, certificate_chain=certificate_chain, signature=signature):
        print(f"wrote {written}")
