"""``ingot inspect``."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import typer

from ingot.cli.output import Json, codec_text, print_json, shape_text, size_text, table
from ingot.errors import UsageError, printable

EPILOG = (
    "Examples:\n\n"
    "  ingot inspect model.zt\n\n"
    "  ingot inspect ./Llama-3-8B --by role\n\n"
    "  ingot inspect model.zt --tensor lm_head.weight --json\n\n"
    "  ingot inspect model.squizd --no-tensors     (features, and the stack chosen per platform)"
)
KEYS = ("layer", "codec", "dtype", "role")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("inspect", epilog=EPILOG)(command)


def command(
    path: Annotated[str, typer.Argument(help="File or folder.")],
    tensor: Annotated[str | None, typer.Option(help="Show one tensor with its parts and parameters.")] = None,
    by: Annotated[
        Literal["layer", "codec", "dtype", "role"], typer.Option(help="Totals by layer, codec, dtype or role.")
    ] = "layer",
    list_tensors: Annotated[bool, typer.Option("--tensors/--no-tensors", help="List every tensor.")] = True,
    json: Json = False,
) -> None:
    """Show what is in a checkpoint: tensors, sizes, codecs, totals. Reads headers, no weights.

    Of a .squizd also its features, and which stack would run it on this machine and on named platforms, with reasons.
    """
    from ingot.ops.inspect import inspect

    found = inspect(path)
    if tensor is not None:
        _one(found, tensor, json)
        return
    if json:
        totals = {key: found.totals(key) for key in KEYS}
        print_json({**dataclasses.asdict(found), "elements": found.elements, "nbytes": found.nbytes, "totals": totals})
        return
    _overview(found, by, list_tensors)


def _overview(found: Any, by: str, list_tensors: bool) -> None:
    print(f"{found.path}: {found.format}, {len(found.tensors)} tensors, {found.elements:,} elements")
    bits = 8 * found.file_size / max(found.elements, 1)
    print(
        f"  {size_text(found.file_size)} in {len(found.files)} file(s), {bits:.3f} bits per element, read by {found.io}"
    )
    for key, value in found.metadata.items():
        print(f"  {printable(str(key))}: {printable(str(value))[:160]}")
    if found.companions:
        print(f"  companions: {', '.join(map(printable, found.companions))}")
    if list_tensors:
        rows = [
            (
                item.name,
                shape_text(item.shape),
                item.dtype,
                _codec(item),
                item.role,
                size_text(item.nbytes),
                _bits(item.nbytes, item.size),
            )
            for item in found.tensors
        ]
        table(("tensor", "shape", "dtype", "codec", "role", "stored", "bits"), rows, left=5)
    for key in dict.fromkeys((by, "codec")):
        totals = [
            (
                label,
                f"{count:,}",
                f"{elements:,}",
                size_text(nbytes),
                _bits(nbytes, elements),
                _share(nbytes, found.nbytes),
            )
            for label, (count, elements, nbytes) in _ordered(found.totals(key))
        ]
        table((key, "tensors", "elements", "stored", "bits", "share"), totals)
    for detail in found.details:
        print(detail.title)
        table(detail.columns, detail.rows, left=len(detail.columns))


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"


def _ordered(totals: dict[str, tuple[int, int, int]]) -> list[tuple[str, tuple[int, int, int]]]:
    return sorted(
        totals.items(), key=lambda item: (not item[0].isdigit(), int(item[0]) if item[0].isdigit() else 0, item[0])
    )


def _bits(nbytes: int, elements: int) -> str:
    return f"{8 * nbytes / elements:.2f}" if elements else "-"


def _codec(item: Any) -> str:
    return codec_text(item.codec, item.params, (part.encoding for part in item.parts))


def _one(found: Any, name: str, json: bool) -> None:
    chosen = [item for item in found.tensors if item.name == name]
    if not chosen:
        raise UsageError(f"no tensor named {name!r}", rule="tensor.unknown", where=found.path)
    item = chosen[0]
    if json:
        print_json(item)
        return
    stored = size_text(item.nbytes)
    print(f"{printable(item.name)}: {shape_text(item.shape)} {item.dtype}, {_codec(item)}, {stored} stored")
    for key, value in item.params.items():
        print(f"  {printable(str(key))}: {printable(str(value))}")
    rows = [
        (
            part.role,
            part.dtype,
            part.type or "",
            part.encoding,
            part.file,
            part.digest or "none",
            f"{part.offset}",
            f"{part.length}",
            f"{part.nbytes}",
        )
        for part in item.parts
    ]
    table(("part", "dtype", "type", "encoding", "file", "digest", "offset", "stored", "decoded"), rows, left=6)
