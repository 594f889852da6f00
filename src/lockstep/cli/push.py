"""`lockstep push`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.terminal import escape_line, print


def command(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder that `convert --to transformers`, `--to timm` or `export` wrote."
        ),
    ],
    target: Annotated[str, typer.Argument(help="hf:OWNER/NAME or hf:OWNER/NAME@REVISION.")],
    public: Annotated[
        bool,
        typer.Option("--public", help="Make a new repository public (default: private)."),
    ] = False,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="Replace files that differ; the history keeps the old ones."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be uploaded; upload nothing.")
    ] = False,
    message: Annotated[
        str, typer.Option(metavar="TEXT", help="Commit message.")
    ] = "Upload weights with Lockstep",
) -> None:
    """Upload a folder to Hugging Face's hub, as one commit.

    Uses the token of `hf auth login` or HF_TOKEN, refuses files that Lockstep does not write, and
    keeps other files of the repository.
    """
    from lockstep.system.errors import CheckpointError
    from lockstep.weights.hub import HUB_WEIGHTS
    from lockstep.weights.upload import carry_out, plan_push

    push = plan_push(folder, target, public=public)
    seen = "public" if push.is_public else "private"
    about = "a new repository" if push.parent is None else f"commit {push.parent[:8]}"
    print(f"hf:{push.name} ({seen}, {about})")
    if public and not push.is_public:
        print(
            "note: the repository stays private: --public is for new ones. To change that, open the"
            " settings of its page on the hub"
        )
    for name, path in push.files.items():
        change = "replaces" if name in push.replaced else "adds"
        print(f"  {change} {escape_line(name)}, {path.stat().st_size:,} bytes")
    if push.stay:
        names = escape_line(", ".join(push.stay[:10]))
        print(
            f"note: the repository keeps {names}, which {folder} does not have. Delete files of"
            f" other formats: hf repos delete-files {push.name} FILE"
        )
    if not any((folder / name).exists() for name in HUB_WEIGHTS):
        print(
            f"note: Lockstep reads {', '.join(HUB_WEIGHTS)} from the hub, but the folder has none:"
            " download the repository to use it"
        )
    if not push.files:
        print("the repository already has these files; nothing is uploaded")
    elif push.replaced and not (replace or dry_run):
        raise CheckpointError(
            f"hf:{push.name} has {len(push.replaced)} of these files with other contents. Nothing"
            " is uploaded; --replace replaces them in a new commit, and the history keeps the old"
        )
    elif not dry_run:
        print(f"uploaded as {escape_line(carry_out(push, message))}")
