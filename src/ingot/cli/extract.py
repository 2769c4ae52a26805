"""``ingot extract``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ingot.cli.output import Json, print_json
from ingot.errors import UsageError, printable

EPILOG = (
    "Examples:\n\n"
    "  ingot extract model.squizd --draft eagle3.safetensors\n\n"
    "  ingot extract model.squizd --coreml\n\n"
    "  ingot extract model.squizd --coreml --cache ./packages --json"
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("extract", epilog=EPILOG)(command)


def command(
    path: Annotated[str, typer.Argument(help="Artifact that carries a draft head or a Core ML package.")],
    draft: Annotated[
        str | None, typer.Option(help="Write the draft head here: a file name with a format's suffix, or a folder.")
    ] = None,
    coreml: Annotated[
        bool, typer.Option("--coreml", help="Unpack the Core ML package into the cache and print where.")
    ] = False,
    cache: Annotated[
        str | None, typer.Option(help="Folder for packages; default: coreml in $INGOT_CACHE or the user's cache.")
    ] = None,
    format: Annotated[
        str | None, typer.Option("--format", "-f", help="Format of the draft head; default: by the suffix.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder that exists.")] = False,
    json: Json = False,
) -> None:
    """Take out what an artifact carries beside its weights: the draft head, the Core ML package.

    Both are checked on the way out. Exit code 2 if the artifact has none.
    """
    if draft is None and not coreml:
        raise UsageError("expected --draft OUT, --coreml or both", rule="extract.nothing")
    import dataclasses

    from ingot.ops.attachments import extract_coreml, extract_draft

    found: dict[str, Any] = {"path": path}
    if draft is not None:
        shape = extract_draft(path, draft, format=format, overwrite=overwrite)
        found["draft"] = {"path": draft, **dataclasses.asdict(shape)}
    if coreml:
        found["coreml"] = {"path": str(extract_coreml(path, cache))}
    if json:
        print_json(found)
        return
    if draft is not None:
        one = found["draft"]
        print(
            f"{printable(draft)}: draft head, {one['layers']} layer(s), hidden size {one['hidden']}, vocabulary "
            f"{one['draft_vocab']} of {one['vocab']}"
        )
    if coreml:
        print(printable(found["coreml"]["path"]))
