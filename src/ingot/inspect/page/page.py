"""The page: one HTML file that asks for nothing, with the numbers of every chart in a table too."""

from __future__ import annotations

import hashlib
import math
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files

from ingot.core.runtime.memory import format_size
from ingot.errors import INGOT_VERSION
from ingot.inspect.page import svg
from ingot.inspect.page.look import Cell, Look, Row, Score
from ingot.inspect.page.svg import Piece
from ingot.naming.names import ROLES
from ingot.reporting.html import percent, table_html, text_of
from ingot.reporting.report import Column, Table, Unit, table_of

_COLOURS = 10
_ERROR = 6  # the colour of errors
_ROW_HEADS = {
    "name": "tensor",
    "layer": "layer",
    "role": "role",
    "shape": "shape",
    "dtype": "dtype",
    "codec": "codec",
    "nbytes": "bytes",
    "bits": "bits",
    "action": "done",
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


def page(found: Look) -> str:
    """Return the page of what was found."""
    style, script = (files(__package__).joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    sections = {
        "Where the bytes are": _bytes(found),
        "Layers": _layers(found),
        "Values": _values(found),
        "Quality": _quality(found),
        **{section.title: _wide(section.page) for section in found.sections if section.page.rows},
        "Tensors": _tensors(found),
        "Receipts": _receipts(found),
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
        f"<title>{text_of(found.path)}</title><style>{style}</style></head>\n<body>"
        f'<a class="skip" href="#tensors">To the tensors</a><header>{_head(found)}'
        f'<nav aria-label="Sections">{links}</nav></header>\n<main>{body}</main>\n'
        f"<footer>Made by ingot {text_of(INGOT_VERSION)}. This file asks for nothing on any network.</footer>\n"
        f"<script>{script}</script></body></html>\n"
    )


def _digest(text: str) -> str:
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _head(found: Look) -> str:
    figures = {
        "stored": format_size(found.nbytes),
        "bits per element": f"{8 * found.nbytes / max(found.elements, 1):.3f}",
        "elements": f"{found.elements:,}",
        "tensors": f"{len(found.rows):,}",
        "format": found.format,
    }
    if found.reference is not None:
        worst = max((row.error for row in found.rows if row.error is not None), default=0.0)
        differ = sum(row.status not in ("identical", "equal") for row in found.rows)
        figures |= {"largest relative error": percent(worst), "tensors that differ": f"{differ:,}"}
    beside = "" if found.reference is None else f"<p>Against A: {text_of(found.reference)}</p>"
    beside += "".join(f"<p>Not in any figure: {text_of(sentence)}</p>" for sentence in found.unread)
    items = "".join(f"<div><dt>{name}</dt><dd>{text_of(value)}</dd></div>" for name, value in figures.items())
    return f'<h1>{text_of(found.path)}</h1>{beside}<dl class="figures">{items}</dl>'


def _bytes(found: Look) -> str:
    groups: dict[str, list[Piece]] = {}
    for item in found.cells:
        where = "outside the layers" if item.layer is None else f"layer {item.layer}"
        title = f"{where}, {item.role}: {format_size(item.nbytes)} in {item.tensors} tensors"
        piece = Piece(item.nbytes, ROLES.index(item.role), title)
        groups.setdefault(item.role if item.layer is None else str(item.layer), []).append(piece)
    key = _key({role: ROLES.index(role) for role in _roles(found.cells)})
    caption = f"Area is bytes: a rectangle per layer (its number) or role outside the layers. {key}"
    total = max(found.nbytes, 1)
    rows = []
    for codec in _codecs(found):
        them = [row for row in found.rows if row.codec == codec]
        rows.append((codec, len(them), _sum(them), _sum(them) / total))
    codecs = Table("", [Column("", kind, head) for kind, head in _CODEC_HEADS], rows)
    told = {name for item in found.cells for name in _CELL_HEADS if getattr(item, name) is not None}
    numbers = table_of("", found.cells, Cell, {name: head for name, head in _CELL_HEADS.items() if name in told})
    return (
        _figure(svg.treemap(groups, "Bytes by layer and role"), caption, fit=True)
        + _wide(codecs)
        + f"<details><summary>The numbers by layer and role</summary>{_wide(numbers)}</details>"
    )


def _layers(found: Look) -> str:
    layers = sorted({row.layer for row in found.rows if row.layer is not None})
    cells = [item for item in found.cells if item.layer is not None]
    if not cells:
        return ""
    colours = {codec: min(index, _COLOURS - 1) for index, codec in enumerate(_codecs(found))}
    stacks = {str(layer): _stack([row for row in found.rows if row.layer == layer], colours) for layer in layers}
    most = max(sum(piece.amount for piece in stack) for stack in stacks.values())
    text = _figure(
        svg.columns(stacks, "Bytes of each layer by codec", format_size(int(most))),
        f"Bytes of each layer by codec. {_key(colours)}",
    )
    if found.reference is None:
        bits = {(item.role, str(item.layer)): 8 * item.nbytes / max(item.elements, 1) for item in cells}
        return text + _heat(bits, "Bits per element by role and layer", lambda value: f"{value:.2f}")
    errors = {str(layer): _layer_error(cells, layer) for layer in layers}
    if any(errors.values()):
        bars = {name: [Piece(value, _ERROR, f"layer {name}: {percent(value)}")] for name, value in errors.items()}
        chart = svg.columns(bars, "Relative error of each layer", percent(max(errors.values())))
        text += _figure(chart, "Relative error of each layer against A.")
    by_role = {(item.role, str(item.layer)): item.error for item in cells if item.error is not None}
    changed = {(item.role, str(item.layer)): item.changed for item in cells if item.changed is not None}
    text += _heat(by_role, "Relative error against A by role and layer", percent)
    return text + _heat(changed, "Share of values that are not A's, by role and layer", percent)


def _heat(values: Mapping[tuple[str, str], float], label: str, told: Callable[[float], str]) -> str:
    if not any(value > 0 for value in values.values()):
        return ""
    titled = {
        (role, layer): (value, f"{role}, layer {layer}: {told(value)}") for (role, layer), value in values.items()
    }
    roles = sorted({role for role, _ in values}, key=ROLES.index)
    layers = sorted({layer for _, layer in values}, key=int)
    faint, strong = svg.heat_range(values.values())
    scale = f"faint is {told(faint)}, strong {told(strong)}, grey none"
    return _figure(svg.heat(roles, layers, titled, label), f"{label}: {scale}.")


def _layer_error(cells: Sequence[Cell], layer: int) -> float:
    """Return a layer's relative error, of all its tensors together."""
    them = [item for item in cells if item.layer == layer and item.error is not None]
    total = sum(item.squared for item in them)
    mean = sum((item.error or 0.0) * (item.error or 0.0) * item.squared for item in them) / total if total else 0.0
    return math.sqrt(mean) if math.isfinite(mean) else 0.0


def _values(found: Look) -> str:
    cards = []
    for item in found.histograms:
        told = f"{item.values:,} values sampled; {item.codec}"
        if item.levels:
            told += f"; ticks: the {len(item.levels)} levels in use among {item.run} values of the first row"
        if item.reference is not None:
            told += "; line: A"
        caption = f"<figcaption>{text_of(item.name)}<br>{text_of(told)}</figcaption>"
        cards.append(f'<figure class="card fit">{caption}{svg.histogram(item)}</figure>')
    return f'<div class="cards">{"".join(cards)}</div>' if cards else ""


def _quality(found: Look) -> str:
    if not found.scores:
        return ""
    names = [item.model.rstrip("/").rpartition("/")[2] or item.file for item in found.scores]
    names = [name if names.count(name) == 1 else f"{name} {index + 1}" for index, name in enumerate(names)]
    series: dict[str, Sequence[float | None]] = {
        "Perplexity": [item.perplexity for item in found.scores],
        "KL(reference || model), nats": [item.kl for item in found.scores],
        "Top-1 agreement": [item.agreement for item in found.scores],
    }
    mark = next((item.reference_perplexity for item in found.scores if item.reference_perplexity is not None), None)
    text = ""
    for title, values in series.items():
        known = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        if known:
            chart = svg.dots(known, title, mark if title == "Perplexity" else None)
            text += _figure(chart, f"{title}, in the order of the files, on a scale from the least to the largest.")
    return text + _wide(table_of("", found.scores, Score, _SCORE_HEADS))


def _tensors(found: Look) -> str:
    told = {name for row in found.rows for name in _ROW_HEADS if getattr(row, name) not in (None, "")}
    table = table_of("", found.rows, Row, {name: head for name, head in _ROW_HEADS.items() if name in told})
    count = f"{len(found.rows)} of {len(found.rows)} tensors"
    return (
        '<p class="controls"><label>Search <input id="search" type="search" placeholder="name, role or codec"></label> '
        f'<span id="count" role="status">{count}</span></p>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Tensors">'
        f"{table_html(table, id='table', sortable=True)}</div>"
    )


def _receipts(found: Look) -> str:
    return _wide(Table("", [Column("", head="what"), Column("", head="says")], found.receipts))


def _wide(table: Table) -> str:
    """Return a table that scrolls within itself where a screen is narrow."""
    return f'<div class="wide" tabindex="0">{table_html(table)}</div>'


def _figure(chart: str, caption: str, *, fit: bool = False) -> str:
    inside = f'<div class="fit">{chart}</div>' if fit else f'<div class="wide" tabindex="0">{chart}</div>'
    return f"<figure><figcaption>{caption}</figcaption>{inside}</figure>"


def _key(colours: Mapping[str, int]) -> str:
    square = '<svg viewBox="0 0 12 12" aria-hidden="true"><rect width="12" height="12" class="c{}"/></svg>'
    names = (f'<span class="key">{square.format(colour)}{text_of(name)}</span>' for name, colour in colours.items())
    return "".join(names)


def _stack(rows: Sequence[Row], colours: Mapping[str, int]) -> list[Piece]:
    pieces = []
    for codec, colour in colours.items():
        them = [row for row in rows if row.codec == codec]
        if them:
            title = f"layer {them[0].layer}, {codec}: {format_size(_sum(them))} in {len(them)} tensors"
            pieces.append(Piece(_sum(them), colour, title))
    return pieces


def _codecs(found: Look) -> list[str]:
    totals: dict[str, int] = {}
    for row in found.rows:
        if row.codec:
            totals[row.codec] = totals.get(row.codec, 0) + row.nbytes
    return sorted(totals, key=lambda codec: (-totals[codec], codec))


def _roles(cells: Sequence[Cell]) -> list[str]:
    return sorted({item.role for item in cells}, key=ROLES.index)


def _sum(rows: Sequence[Row]) -> int:
    return sum(row.nbytes for row in rows)
