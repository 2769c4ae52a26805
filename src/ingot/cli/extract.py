"""The command ``ingot extract``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from ingot.artifacts.extract_options import CoremlOptions, DraftOptions, LayerOptions, ModelOptions
from ingot.cli.declare import declare, option
from ingot.cli.output import Json, print_json, progress_bar, render
from ingot.core.about import About
from ingot.errors import UsageError, printable
from ingot.stores.location import Location

EPILOG = (
    "Examples:\n\n"
    "  ingot extract model.squizd --draft eagle3.safetensors\n\n"
    "  ingot extract model.squizd --coreml\n\n"
    "  ingot extract model.squizd --coreml --cache ./packages --json\n\n"
    "  ingot extract model.safetensors --layer model.layers.0.mlp.up_proj.weight -o up.mlpackage --opset iOS18\n\n"
    "  ingot extract ./model --model -o model.mlpackage --context 4096"
)


@declare("extract", EPILOG)
def command(
    path: Annotated[str, option(DraftOptions, "path")],
    draft: Annotated[str | None, option(DraftOptions, "out")] = None,
    coreml: Annotated[bool, About("Unpack the Core ML package into the cache and print its path.")] = False,
    cache: Annotated[str | None, option(CoremlOptions, "cache")] = None,
    layer: Annotated[str | None, option(LayerOptions, "name")] = None,
    model: Annotated[bool, About("Create a Core ML package of a full Llama, Mistral, Qwen or Gemma.")] = False,
    out: Annotated[str | None, option(ModelOptions, "out")] = None,
    opset: Annotated[str | None, option(LayerOptions, "opset")] = None,
    context: Annotated[int | None, option(ModelOptions, "context")] = None,
    max_ram: Annotated[str | None, option(ModelOptions, "max_ram")] = None,
    resume: Annotated[bool, option(ModelOptions, "resume")] = False,
    format: Annotated[str | None, option(DraftOptions, "format")] = None,
    overwrite: Annotated[bool, option(ModelOptions, "overwrite")] = False,
    json: Json = False,
) -> None:
    """Extract an artifact's attachments (the draft head, the Core ML package), or make a Core ML package of one layer
    or of the full model.

    Every result is checked. Exit code 2 if the artifact lacks the attachment.
    """
    model_options = ModelOptions(path, out or "", context=context, max_ram=max_ram, resume=resume, overwrite=overwrite)
    _require_one_request(_Requests(draft is not None, coreml, layer is not None, model), model_options, opset)
    if model:
        _extract_model(model_options, json=json)
        return
    results: dict[str, tuple[Any, str]] = {}
    if layer is not None:
        results["layer"] = _extract_layer(
            LayerOptions(path, layer, model_options.out, opset=opset or "iOS16", overwrite=overwrite)
        )
    if draft is not None:
        results["draft"] = _extract_draft(DraftOptions(path, draft, format=format, overwrite=overwrite))
    if coreml:
        results["coreml"] = _extract_coreml(CoremlOptions(path, cache))
    if json:
        print_json({"path": path, **{name: figures for name, (figures, _) in results.items()}})
        return
    for name in ("draft", "coreml", "layer"):
        if name in results:
            print(results[name][1])


@dataclass(frozen=True, slots=True)
class _Requests:
    """The results that the options request: one flag for each type of result."""

    draft: bool
    coreml: bool
    layer: bool
    model: bool


def _require_one_request(requests: _Requests, options: ModelOptions, opset: str | None) -> None:
    """Raise ``extract.nothing`` if no result is requested, or if the options contradict each other."""
    if not (requests.draft or requests.coreml or requests.layer or requests.model):
        raise UsageError("expected --draft OUT, --coreml, --layer NAME or --model", rule="extract.nothing")
    if requests.model and (requests.draft or requests.coreml or requests.layer):
        raise UsageError("--model is extracted alone; leave out --draft, --coreml and --layer", rule="extract.nothing")
    if (requests.layer or requests.model) != bool(options.out):
        raise UsageError("-o X.mlpackage is for --layer NAME or --model, which need it", rule="extract.nothing")
    if opset is not None and not requests.layer:
        raise UsageError("--opset is for --layer; a full model needs iOS18", rule="extract.nothing")
    if not requests.model and (options.context, options.max_ram, options.resume) != (None, None, False):
        raise UsageError("--context, --max-ram and --resume need --model", rule="extract.nothing")


def _extract_draft(options: DraftOptions) -> tuple[dict[str, Any], str]:
    """Extract the draft head; return its figures for ``--json``, and a line of text."""
    from ingot.artifacts.attachments import extract_draft

    shape = extract_draft(options)
    out = Location.parse(options.out).display
    label = printable(out)
    if shape is None:
        return {"path": out}, f"{label}: draft head without names"
    line = (
        f"{label}: draft head, {shape.layers} layer(s), hidden size {shape.hidden}, vocabulary {shape.draft_vocab} of "
        f"{shape.vocab}"
    )
    return {"path": out, **asdict(shape)}, line


def _extract_coreml(options: CoremlOptions) -> tuple[dict[str, Any], str]:
    from ingot.artifacts.attachments import extract_coreml

    package = str(extract_coreml(options))
    return {"path": package}, printable(package)


def _extract_layer(options: LayerOptions) -> tuple[dict[str, Any], str]:
    from ingot.conversion.coreml.layer import extract_layer

    report = extract_layer(options)
    rounded = ", rounded to f16" if report.rounded else ""
    line = (
        f"{printable(report.path)}: x {list(report.input)} -> y {list(report.output)}, weight {report.codec}{rounded}, "
        f"{report.size} bytes"
    )
    return asdict(report), line


def _extract_model(options: ModelOptions, *, json: bool) -> None:
    from ingot.conversion.coreml.model import extract_model

    with progress_bar("writing", quiet=json) as progress:
        report = extract_model(replace(options, progress=progress))
    render(report.report(), json=json)
