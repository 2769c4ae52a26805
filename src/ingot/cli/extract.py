"""``ingot extract``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ingot.cli.options import Overwrite
from ingot.cli.output import Json, print_json, progress_bar
from ingot.cli.render import render
from ingot.errors import UsageError, printable

EPILOG = (
    "Examples:\n\n"
    "  ingot extract model.squizd --draft eagle3.safetensors\n\n"
    "  ingot extract model.squizd --coreml\n\n"
    "  ingot extract model.squizd --coreml --cache ./packages --json\n\n"
    "  ingot extract model.safetensors --layer model.layers.0.mlp.up_proj.weight --out up.mlpackage --opset iOS18\n\n"
    "  ingot extract ./model --model -o model.mlpackage --context 128"
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("extract", epilog=EPILOG)(command)


def command(
    path: Annotated[
        str, typer.Argument(help="Artifact that carries a draft head or a Core ML package; any for --layer, --model.")
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
    model: Annotated[
        bool, typer.Option("--model", help="Make a Core ML package of the whole model, a folder with a Llama.")
    ] = False,
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="Package to write for --layer or --model: X.mlpackage.")
    ] = None,
    opset: Annotated[str, typer.Option(help="For --layer and --model: iOS16, iOS17 or iOS18.")] = "iOS16",
    context: Annotated[
        int | None, typer.Option(help="For --model: tokens at once; default: the model's own, at most 512.")
    ] = None,
    max_ram: Annotated[str | None, typer.Option(help="For --model: memory ceiling, such as 2GiB.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="For --model: go on where a killed run stopped.")] = False,
    format: Annotated[
        str | None, typer.Option("--format", "-f", help="Format of the draft head; default: by the suffix.")
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Take out what an artifact carries beside its weights (the draft head, the Core ML package), or make a Core ML
    package of one layer or of the whole model.

    All are checked on the way out. Exit code 2 if the artifact has none.
    """
    settings = ModelOptions(opset, context, max_ram, resume, overwrite)
    _require(_Asked(draft is not None, coreml, layer is not None, model), settings, out)
    if model and out is not None:
        _model(path, out, settings, json=json)
        return
    import dataclasses

    from ingot.ops.ane.coreml_layer import extract_layer
    from ingot.ops.attachments import extract_coreml, extract_draft

    figures: dict[str, Any] = {"path": path}
    if layer is not None and out is not None:
        figures["layer"] = dataclasses.asdict(extract_layer(path, layer, out, opset=opset, overwrite=overwrite))
    if draft is not None:
        shape = extract_draft(path, draft, format=format, overwrite=overwrite)
        figures["draft"] = {"path": draft, **({} if shape is None else dataclasses.asdict(shape))}
    if coreml:
        figures["coreml"] = {"path": str(extract_coreml(path, cache))}
    if json:
        print_json(figures)
        return
    if draft is not None:
        head = figures["draft"]
        if "layers" not in head:
            print(f"{printable(draft)}: draft head without names")
    if draft is not None and "layers" in figures["draft"]:
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


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What ``--model`` takes."""

    opset: str
    context: int | None
    max_ram: str | None
    resume: bool
    overwrite: bool


@dataclass(frozen=True, slots=True)
class _Asked:
    """Which of the things that can be taken out or made are asked for."""

    draft: bool
    coreml: bool
    layer: bool
    model: bool


def _require(asked: _Asked, settings: ModelOptions, out: str | None) -> None:
    """Refuse options that do not belong together: ``extract.nothing``."""
    if not (asked.draft or asked.coreml or asked.layer or asked.model):
        raise UsageError("expected --draft OUT, --coreml, --layer NAME or --model", rule="extract.nothing")
    if asked.model and (asked.draft or asked.coreml or asked.layer):
        raise UsageError("expected --model alone, found something else to extract too", rule="extract.nothing")
    if (asked.layer or asked.model) != (out is not None):
        raise UsageError("expected --layer NAME or --model, and --out X.mlpackage with it", rule="extract.nothing")
    if not asked.model and (settings.context, settings.max_ram, settings.resume) != (None, None, False):
        raise UsageError("expected --model with --context, --max-ram and --resume", rule="extract.nothing")


def _model(path: str, out: str, options: ModelOptions, *, json: bool) -> None:
    from ingot.ops.ane.coreml_model import extract_model

    with progress_bar("writing", quiet=json) as progress:
        report = extract_model(
            path,
            out,
            opset=options.opset,
            context=options.context,
            max_ram=options.max_ram,
            resume=options.resume,
            overwrite=options.overwrite,
            progress=progress,
        )
    render(report.report(), json=json)
