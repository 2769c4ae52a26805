"""The model card that a pushed model gets on the Hub: source, preset, measured error, command.

Texts from files are untrusted. They are quoted in the card's metadata and escaped in its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from ingot.core.runtime.memory import format_size
from ingot.errors import INGOT_VERSION, printable
from ingot.inspect.inspect import Inspection
from ingot.inspect.receipt import describe_entry
from ingot.model.layouts.dense import DenseLayout
from ingot.publishing.model import ROUNDING, PushedModel
from ingot.recipes.load import ALL_PRESETS
from ingot.stores.location import Location

_LONGEST = 400
_MARKUP = re.compile(r"([\\`*_{}\[\]<>|#$])")
_MAX_ENTRIES = 16


def card(model: PushedModel, base: str) -> str:
    """Return the text of ``README.md``; ``base`` is the id of the original model, empty if it is unknown."""
    name = Location.parse(model.location).name
    quantization = model.quantization()
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in _header(model, base, quantization).items()),
        "---",
        "",
        f"# {_text(name)}",
        "",
        *_facts(model, base, quantization),
        "",
        "## Error",
        "",
        *_errors(model.inspection),
        "",
        *_command(base, name, quantization),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _header(model: PushedModel, base: str, quantization: str) -> dict[str, Any]:
    """Return the card's metadata, by which the Hub finds the model."""
    header: dict[str, Any] = {}
    if base and Location.parse(base).may_be_hub_id:
        header["base_model"] = base
        if quantization:
            header["base_model_relation"] = "quantized"
    container = model.container()
    if library := _library(model, container):
        header["library_name"] = library
    tags = ["ingot", container, *(["quantized", quantization] if quantization else [])]
    header["tags"] = [printable(tag)[:_LONGEST] for tag in tags if tag]
    return header


def _library(model: PushedModel, container: str) -> str:
    """Return the Hub's name of the library that loads the model; empty if the Hub has no name for it."""
    if model.inspection is None:
        return ""
    if model.inspection.format == "mlx" or container == "gguf":
        return model.inspection.format
    return "transformers" if container == "safetensors" and "config.json" in model.files else ""


def _facts(model: PushedModel, base: str, quantization: str) -> Iterator[str]:
    """Yield the rows of the table that describes the model."""
    inspection = model.inspection
    rows = [("Source", _text(base) or "not stated")]
    if quantization:
        rows.append(("Quantization", _text(quantization)))
    if rounding := model.metadata(ROUNDING):
        rows.append(("Rounding", _text(rounding)))
    if inspection is not None:
        bits = 8 * inspection.nbytes / max(inspection.elements, 1)
        rows += [
            ("Format", _text(inspection.format)),
            ("Weights", f"{inspection.elements:,} in {format_size(inspection.nbytes)}: {bits:.2f} bits per weight"),
        ]
        for label, (count, _, nbytes) in sorted(_types(inspection).items(), key=lambda item: -item[1][2]):
            rows.append((f"- {_text(label)}", f"{count} tensors, {format_size(nbytes)}"))
    rows.append(("Pushed by", f"Ingot {INGOT_VERSION}"))
    yield "| | |"
    yield "| --- | --- |"
    for title, value in rows:
        yield f"| {title} | {value} |"


def _types(inspection: Inspection) -> dict[str, tuple[int, int, int]]:
    """Return the numbers of tensors, elements and bytes for each stored type."""
    totals: dict[str, tuple[int, int, int]] = {}
    for tensor in inspection.tensors:
        label = str(tensor.params.get("type") or (tensor.dtype if tensor.codec == DenseLayout.codec else tensor.codec))
        count, elements, nbytes = totals.get(label, (0, 0, 0))
        totals[label] = count + 1, elements + tensor.size, nbytes + tensor.nbytes
    return totals


def _errors(inspection: Inspection | None) -> Iterator[str]:
    """Yield the measured errors in the model's receipt, or a sentence that nothing was measured."""
    entries = () if inspection is None else inspection.receipt[:_MAX_ENTRIES]
    for entry in entries:
        yield f"- {_text(describe_entry(entry))}"
    if not entries:
        yield "The model has no measurements of its error. `ingot eval MODEL --reference ORIGINAL` measures it."


def _command(base: str, name: str, quantization: str) -> Iterator[str]:
    """Yield the command that repeats the quantization; nothing if the source or the preset is unknown."""
    if not base or quantization not in ALL_PRESETS:
        return
    yield "## Command"
    yield ""
    yield "```sh"
    yield f"ingot quantize {_word(base)} -o {_word(name)} --preset {_word(quantization)}"
    yield "```"


def _text(text: str) -> str:
    """Return text escaped for Markdown, on one line."""
    return _MARKUP.sub(r"\\\1", printable(text)[:_LONGEST])


def _word(text: str) -> str:
    """Return text as a quoted word of a shell command that cannot end the Markdown fence around it."""
    return re.sub(r"[^\w@%+=:,./-]", "_", text, flags=re.ASCII)
