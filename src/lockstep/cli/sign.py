"""`lockstep sign`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.terminal import print


def command(
    path: Annotated[Path, typer.Argument(help="A folder or file that convert or export wrote.")],
    key: Annotated[
        Path, typer.Option(help="Private key (ECDSA, PEM), readable only by you.", metavar="FILE")
    ],
    certificate_chain: Annotated[
        Path | None,
        typer.Option(help="The key's certificate and its chain to the root (PEM).", metavar="FILE"),
    ] = None,
    signature: Annotated[
        Path | None,
        typer.Option(help="New file (default: PATH/model.sig or PATH.sig).", metavar="FILE"),
    ] = None,
) -> None:
    """Sign weights in the format of OpenSSF Model Signing.

    The password of an encrypted key comes from the terminal or LOCKSTEP_SIGN_PASSWORD.
    """
    from lockstep import sign

    for written in sign(path, key, certificate_chain=certificate_chain, signature=signature):
        print(f"wrote {written}")
