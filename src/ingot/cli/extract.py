"""``ingot extract``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ingot.cli.options import Overwrite
from ingot.cli.output import Json, print_json
from ingot.errors import UsageError, printable

EPILOG = (
    "Examples:\n\n"
    "  ingot extract model.squizd --draft eagle3.safetensors\n\n"
    "  ingot extract model.squizd --coreml\n\n"
    "  ingot extract model.squizd --coreml --cache ./packages --json\n\n"
    "  ingot extract model.safetensors --layer model.layers.0.mlp.up_proj.weight --out up.mlpackage --opset iOS18"
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("extract", epilog=EPILOG)(command)


def command(
    path: Annotated[
        str, typer.Argument(help="Artifact that carries a draft head or a Core ML package; any for --layer.")
    ],
    draft: Annotated[
        str | None, typer.Option(help="Write the draft head here: a file name with a format's suffix, or a folder.")
    ] = None,
    coreml: Annotated[
        bool, typer.Option("--coreml", help="Unpack the Core ML package into the cache and print where.")
    ] = False,
    cache: Annotated[
        str | None, typer.Option(help="Folder for packages; default: coreml in $INGOT_CACHE or the user's cache.")
    ] = None,
    layer: Annotated[
        str | None, typer.Option(help="Make a Core ML package of the linear or convolution layer with this weight.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="Package to write for --layer: X.mlpackage.")] = None,
    opset: Annotated[str, typer.Option(help="For --layer: iOS16, iOS17 or iOS18.")] = "iOS16",
    format: Annotated[
        str | None, typer.Option("--format", "-f", help="Format of the draft head; default: by the suffix.")
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Take out what an artifact carries beside its weights (the draft head, the Core ML package), or one layer.

    All are checked on the way out. Exit code 2 if the artifact has none.
    """
    if draft is None and not coreml and layer is None:
        raise UsageError("expected --draft OUT, --coreml or --layer NAME", rule="extract.nothing")
    if (layer is None) != (out is None):
        raise UsageError("expected --layer NAME and --out X.mlpackage together", rule="extract.nothing")
    import dataclasses

    from ingot.ops.ane.coreml_layer import extract_layer
    from ingot.ops.attachments import extract_coreml, extract_draft

    figures: dict[str, Any] = {"path": path}
    if layer is not None and out is not None:
        figures["layer"] = dataclasses.asdict(extract_layer(path, layer, out, opset=opset, overwrite=overwrite))
    if draft is not None:
        shape = extract_draft(path, draft, format=format, overwrite=overwrite)
        figures["draft"] = {"path": draft, **dataclasses.asdict(shape)}
    if coreml:
        figures["coreml"] = {"path": str(extract_coreml(path, cache))}
    if json:
        print_json(figures)
        return
    if draft is not None:
        head = figures["draft"]
        print(
            f"{printable(draft)}: draft head, {head['layers']} layer(s), hidden size {head['hidden']}, vocabulary "
            f"{head['draft_vocab']} of {head['vocab']}"
        )
    if coreml:
        print(printable(figures["coreml"]["path"]))
    if layer is not None:
        head = figures["layer"]
        rounded = ", rounded to f16" if head["rounded"] else ""
        print(
            f"{printable(head['path'])}: x {list(head['input'])} -> y {list(head['output'])}, "
            f"weight {head['codec']}{rounded}, {head['size']} bytes"
        )
