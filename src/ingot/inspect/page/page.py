"""Render the page as one HTML file without external resources. Tables repeat the numbers of every chart."""

from __future__ import annotations

import hashlib
import math
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files

from ingot.core.runtime.memory import format_size
from ingot.errors import INGOT_VERSION
from ingot.inspect.page import svg
from ingot.inspect.page.look import Cell, PageData, Row, Score
from ingot.inspect.page.svg import Segment
from ingot.naming.names import ROLES
from ingot.reporting.html import percent, table_html, text_of
from ingot.reporting.report import Column, Table, Unit, table_of

_COLOURS = 10
_ERROR = 6  # the colour of errors
_LARGEST = 10
"""The number of tensors in the table of the largest differences."""
_ROW_HEADS = {
    "name": "tensor",
    "layer": "layer",
    "role": "role",
    "shape": "shape",
    "dtype": "dtype",
    "codec": "codec",
    "nbytes": "bytes",
    "bits": "bits",
    "action": "action",
    "status": "against A",
    "error": "error",
    "cosine": "cosine",
    "changed": "changed",
}
_CELL_HEADS = {name: name for name in ("layer", "role", "tensors", "nbytes", "error", "changed")} | {"nbytes": "bytes"}
_SCORE_HEADS = {
    "file": "file",
    "model": "model",
    "perplexity": "perplexity",
    "window_prefix": "windows begin with",
    "reference_perplexity": "of the reference",
    "kl": "KL, nats",
    "agreement": "top-1 agreement",
    "tokens_per_second": "tokens/s",
}
_CODEC_HEADS: tuple[tuple[Unit, str], ...] = (
    ("text", "codec"),
    ("count", "tensors"),
    ("bytes", "bytes"),
    ("ratio", "share"),
)


def page(data: PageData) -> str:
    """Return the HTML of a page."""
    style, script = (files(__package__).joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    sections = {
        "Quality": _quality(data),
        "Largest differences": _largest_differences(data),
        "Bytes by layer and role": _bytes(data),
        "Layers": _layers(data),
        **{section.title: _wide(section.page) for section in data.sections if section.page.rows},
        "Tensors": _tensors(data),
        "Values": _values(data),
        "Receipts": _receipts(data),
    }
    ids = {title: title.split()[0].lower() for title, text in sections.items() if text}
    links = "".join(f'<a href="#{id}">{title}</a>' for title, id in ids.items())
    body = "".join(
        f'<section aria-labelledby="{id}"><h2 id="{id}">{title}</h2>{sections[title]}</section>\n'
        for title, id in ids.items()
    )
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        f"<title>{text_of(data.path)}</title><style>{style}</style></head>\n<body>"
        f'<a class="skip" href="#tensors">To the tensors</a><header>{_head(data)}'
        f'<nav aria-label="Sections">{links}</nav></header>\n<main>{body}</main>\n'
        f"<footer>Made by ingot {text_of(INGOT_VERSION)}. This file loads nothing from a network.</footer>\n"
        f"<script>{script}</script></body></html>\n"
    )


def _digest(text: str) -> str:
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _head(data: PageData) -> str:
    figures = {**_quality_figures(data.scores), "stored": format_size(data.nbytes)}
    if data.reference_bytes and not data.adapter:
        figures["of A's bytes"] = percent(data.nbytes / data.reference_bytes)
    figures["bits per element"] = f"{8 * data.nbytes / max(data.elements, 1):.3f}"
    if data.reference is not None:
        worst = max((row.error for row in data.rows if row.error is not None), default=0.0)
        differ = sum(row.status not in ("identical", "equal") for row in data.rows)
        figures |= {
            "largest relative error": percent(worst),
            "tensors that differ": f"{differ:,} of {len(data.rows):,}",
        }
    else:
        figures["tensors"] = f"{len(data.rows):,}"
    figures |= {"elements": f"{data.elements:,}", "format": data.format}
    remarks = "" if data.reference is None else f"<p>Against A: {text_of(data.reference)}</p>"
    if data.adapter:
        remarks += f"<p>{text_of(data.adapter)}</p>"
        if data.reference is not None:
            remarks += "<p>The figures are those of A with the adapter's changes.</p>"
    remarks += "".join(f"<p>Not in any figure: {text_of(sentence)}</p>" for sentence in data.unread)
    items = "".join(f"<div><dt>{name}</dt><dd>{text_of(value)}</dd></div>" for name, value in figures.items())
    return f'<h1>{text_of(data.path)}</h1>{remarks}<dl class="figures">{items}</dl>'


def _quality_figures(scores: Sequence[Score]) -> dict[str, str]:
    """Return the figures of the last evaluation against a reference; if there is none, of the last evaluation."""
    compared = [item for item in scores if item.kl is not None]
    if not scores:
        return {}
    score = (compared or scores)[-1]
    figures = {} if score.kl is None else {"KL to the reference, nats": f"{score.kl:.4f}"}
    reference = "" if score.reference_perplexity is None else f" (reference {score.reference_perplexity:.2f})"
    return figures | {"perplexity": f"{score.perplexity:.2f}{reference}"}


def _largest_differences(data: PageData) -> str:
    rows = sorted((row for row in data.rows if row.error), key=lambda row: -(row.error or 0.0))[:_LARGEST]
    heads = {name: _ROW_HEADS[name] for name in ("name", "codec", "nbytes", "bits", "error", "cosine", "changed")}
    return _wide(table_of("", rows, Row, heads)) if rows else ""


def _bytes(data: PageData) -> str:
    groups: dict[str, list[Segment]] = {}
    for item in data.cells:
        layer = "outside the layers" if item.layer is None else f"layer {item.layer}"
        title = f"{layer}, {item.role}: {format_size(item.nbytes)} in {item.tensors} tensors"
        segment = Segment(item.nbytes, ROLES.index(item.role), title)
        groups.setdefault(item.role if item.layer is None else str(item.layer), []).append(segment)
    key = _key({role: ROLES.index(role) for role in _roles(data.cells)})
    caption = f"Area is bytes: a rectangle per layer (its number) or role outside the layers. {key}"
    total = max(data.nbytes, 1)
    rows = []
    for codec in _codecs(data):
        selected = [row for row in data.rows if row.codec == codec]
        rows.append((codec, len(selected), _sum(selected), _sum(selected) / total))
    codecs = Table("", [Column("", value_type, head) for value_type, head in _CODEC_HEADS], rows)
    shown = {name for item in data.cells for name in _CELL_HEADS if getattr(item, name) is not None}
    numbers = table_of("", data.cells, Cell, {name: head for name, head in _CELL_HEADS.items() if name in shown})
    return (
        _figure(svg.treemap(groups, "Bytes by layer and role"), caption, fit=True)
        + _wide(codecs)
        + f"<details><summary>The numbers by layer and role</summary>{_wide(numbers)}</details>"
    )


def _layers(data: PageData) -> str:
    layers = sorted({row.layer for row in data.rows if row.layer is not None})
    cells = [item for item in data.cells if item.layer is not None]
    if not cells:
        return ""
    colours = {codec: min(index, _COLOURS - 1) for index, codec in enumerate(_codecs(data))}
    stacks = {str(layer): _stack([row for row in data.rows if row.layer == layer], colours) for layer in layers}
    max_bytes = max(sum(segment.amount for segment in stack) for stack in stacks.values())
    text = _figure(
        svg.columns(stacks, "Bytes of each layer by codec", format_size(int(max_bytes))),
        f"Bytes of each layer by codec. {_key(colours)}",
    )
    if data.reference is None:
        bits = {(item.role, str(item.layer)): 8 * item.nbytes / max(item.elements, 1) for item in cells}
        return text + _heat(bits, "Bits per element by role and layer", lambda value: f"{value:.2f}")
    errors = {str(layer): _layer_error(cells, layer) for layer in layers}
    if any(errors.values()):
        bars = {name: [Segment(value, _ERROR, f"layer {name}: {percent(value)}")] for name, value in errors.items()}
        chart = svg.columns(bars, "Relative error of each layer", percent(max(errors.values())))
        text += _figure(chart, "Relative error of each layer against A.")
    by_role = {(item.role, str(item.layer)): item.error for item in cells if item.error is not None}
    changed = {(item.role, str(item.layer)): item.changed for item in cells if item.changed is not None}
    text += _heat(by_role, "Relative error against A by role and layer", percent)
    return text + _heat(changed, "Share of values that differ from A by role and layer", percent)


def _heat(values: Mapping[tuple[str, str], float], label: str, format_value: Callable[[float], str]) -> str:
    if not any(value > 0 for value in values.values()):
        return ""
    titled = {
        (role, layer): (value, f"{role}, layer {layer}: {format_value(value)}")
        for (role, layer), value in values.items()
    }
    roles = sorted({role for role, _ in values}, key=ROLES.index)
    layers = sorted({layer for _, layer in values}, key=int)
    faint, strong = svg.heat_range(values.values())
    scale = f"faint is {format_value(faint)}, strong {format_value(strong)}, grey none"
    return _figure(svg.heat(roles, layers, titled, label), f"{label}: {scale}.")


def _layer_error(cells: Sequence[Cell], layer: int) -> float:
    """Return the relative error over all tensors of ``layer``, from the cells of its roles."""
    selected = [item for item in cells if item.layer == layer and item.error is not None]
    total = sum(item.squared for item in selected)
    mean = sum((item.error or 0.0) * (item.error or 0.0) * item.squared for item in selected) / total if total else 0.0
    return math.sqrt(mean) if math.isfinite(mean) else 0.0


def _values(data: PageData) -> str:
    cards = []
    for item in data.histograms:
        text = f"{item.values:,} values sampled; {item.codec}"
        if item.levels:
            text += f"; ticks: the {len(item.levels)} levels in use among {item.run} values of the first row"
        if item.reference is not None:
            text += "; line: A"
        caption = f"<figcaption>{text_of(item.name)}<br>{text_of(text)}</figcaption>"
        cards.append(f'<figure class="card fit">{caption}{svg.histogram(item)}</figure>')
    if not cards:
        return ""
    summary = f"Histograms of sampled values of {len(cards)} tensors"
    return f'<details><summary>{summary}</summary><div class="cards">{"".join(cards)}</div></details>'


def _quality(data: PageData) -> str:
    if not data.scores:
        if data.reference is None or data.adapter:
            return ""
        return (
            "<p>Not measured. <code>ingot eval B --reference A --text TEXT --json &gt; b.json</code> measures KL and "
            "perplexity; give b.json to <code>ingot report --eval</code>.</p>"
        )
    names = [item.model.rstrip("/").rpartition("/")[2] or item.file for item in data.scores]
    names = [name if names.count(name) == 1 else f"{name} {index + 1}" for index, name in enumerate(names)]
    series: dict[str, Sequence[float | None]] = {
        "Perplexity": [item.perplexity for item in data.scores],
        "KL(reference || model), nats": [item.kl for item in data.scores],
        "Top-1 agreement": [item.agreement for item in data.scores],
    }
    mark = next((item.reference_perplexity for item in data.scores if item.reference_perplexity is not None), None)
    text = _wide(table_of("", data.scores, Score, _SCORE_HEADS))
    for title, values in series.items():
        measured = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        if len(measured) > 1:
            chart = svg.dots(measured, title, mark if title == "Perplexity" else None)
            text += _figure(chart, f"{title}, in the order of the files, on a scale from the least to the largest.")
    return text


def _tensors(data: PageData) -> str:
    shown = {name for row in data.rows for name in _ROW_HEADS if getattr(row, name) not in (None, "")}
    table = table_of("", data.rows, Row, {name: head for name, head in _ROW_HEADS.items() if name in shown})
    count = f"{len(data.rows)} of {len(data.rows)} tensors"
    return (
        '<p class="controls"><label>Search <input id="search" type="search" placeholder="name, role or codec"></label> '
        f'<span id="count" role="status">{count}</span></p>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Tensors">'
        f"{table_html(table, id='table', sortable=True)}</div>"
    )


def _receipts(data: PageData) -> str:
    return _wide(Table("", [Column("", head="subject"), Column("", head="value")], data.receipts))


def _wide(table: Table) -> str:
    """Return a table in a frame that scrolls horizontally on narrow screens."""
    return f'<div class="wide" tabindex="0">{table_html(table)}</div>'


def _figure(chart: str, caption: str, *, fit: bool = False) -> str:
    inside = f'<div class="fit">{chart}</div>' if fit else f'<div class="wide" tabindex="0">{chart}</div>'
    return f"<figure><figcaption>{caption}</figcaption>{inside}</figure>"


def _key(colours: Mapping[str, int]) -> str:
    square = '<svg viewBox="0 0 12 12" aria-hidden="true"><rect width="12" height="12" class="c{}"/></svg>'
    names = (f'<span class="key">{square.format(colour)}{text_of(name)}</span>' for name, colour in colours.items())
    return "".join(names)


def _stack(rows: Sequence[Row], colours: Mapping[str, int]) -> list[Segment]:
    segments = []
    for codec, colour in colours.items():
        selected = [row for row in rows if row.codec == codec]
        if selected:
            title = f"layer {selected[0].layer}, {codec}: {format_size(_sum(selected))} in {len(selected)} tensors"
            segments.append(Segment(_sum(selected), colour, title))
    return segments


def _codecs(data: PageData) -> list[str]:
    totals: dict[str, int] = {}
    for row in data.rows:
        if row.codec:
            totals[row.codec] = totals.get(row.codec, 0) + row.nbytes
    return sorted(totals, key=lambda codec: (-totals[codec], codec))


def _roles(cells: Sequence[Cell]) -> list[str]:
    return sorted({item.role for item in cells}, key=ROLES.index)


def _sum(rows: Sequence[Row]) -> int:
    return sum(row.nbytes for row in rows)
