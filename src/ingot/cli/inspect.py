"""``ingot inspect``."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Annotated, Any, Literal

import typer

from ingot.cli import kernel, program
from ingot.cli.output import Json, codec_text, print_json, progress_bar, shape_text, size_text
from ingot.cli.tables import equal_layers, line, table
from ingot.errors import printable
from ingot.model.checkpoint import unknown_tensor
from ingot.model.delta import KEY, delta_of

EPILOG = (
    "Examples:\n\n"
    "  ingot inspect model.zt\n\n"
    "  ingot inspect ./Llama-3-8B --by role\n\n"
    "  ingot inspect model.zt --content-id\n\n"
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
        Literal["layer", "codec", "dtype", "role"],
        typer.Option(metavar="KEY", help="Totals by layer, codec, dtype or role."),
    ] = "layer",
    list_tensors: Annotated[bool, typer.Option("--tensors/--no-tensors", help="List the tensors.")] = True,
    every: Annotated[bool, typer.Option("--all", help="Show every tensor, not one line for equal layers.")] = False,
    content_id: Annotated[
        bool, typer.Option("--content-id", help="Hash all weights: the same id for the same tensors in any container.")
    ] = False,
    json: Json = False,
) -> None:
    """Show what is in a checkpoint: tensors, sizes, codecs, totals. Reads headers, no weights.

    Of a .squizd also its features, and which stack would run it on this machine and on named platforms, with reasons.
    Of a kernel unit (`ingot kernel`) its sections and records, of a compiled program (.hwx) its sections, registers and
    kernels.
    """
    from ingot.ops.ane.kernel import is_kernel_file
    from ingot.ops.ane.program import is_program_file
    from ingot.ops.check.inspect import inspect

    if is_kernel_file(path):
        kernel.show(path, list_tensors, json)
        return
    if is_program_file(path):
        program.show(path, list_tensors, json)
        return
    if content_id:
        _content_id(path, json)
        return
    found = inspect(path)
    if tensor is not None:
        _one(found, tensor, json)
        return
    if json:
        totals = {key: found.totals(key) for key in KEYS}
        print_json({**dataclasses.asdict(found), "elements": found.elements, "nbytes": found.nbytes, "totals": totals})
        return
    _overview(found, by, list_tensors, every)


def _content_id(path: str, json: bool) -> None:
    from ingot.ops.identity import content_id
    from ingot.ops.open import open as open_checkpoint

    with open_checkpoint(path, io="pread") as checkpoint, progress_bar("hashing", quiet=json) as progress:
        found = content_id(checkpoint, progress=progress)
    if json:
        print_json({"path": path, "content_id": found})
    else:
        print(found)


def _delta(found: Any) -> bool:
    """Print what a delta says of itself; False if it is an ordinary checkpoint."""
    info = delta_of(found.metadata, found.path)
    if info is None:
        return False
    counts = Counter(change.op for change in info.tensors.values())
    ops = ", ".join(f"{count} {op}" for op, count in counts.items()) or "no tensors"
    removed = f"; removes {len(info.removed)}" if info.removed else ""
    line(f"  a delta, strategy {printable(info.strategy)[:80]}: {ops}{removed}")
    for label, identity in (("base", info.base), ("result", info.result)):
        hashes = [f"{name}:{value}" for name, value in identity.hashes.items()]
        text = ", ".join([*([identity.content] if identity.content else []), *hashes]) or "not stated"
        line(f"  {label}: {text[:200]}")
    return True


def _overview(found: Any, by: str, list_tensors: bool, every: bool) -> None:
    line(f"{found.path}: {found.format}, {len(found.tensors)} tensors, {found.elements:,} elements")
    bits = 8 * found.file_size / max(found.elements, 1)
    line(
        f"  {size_text(found.file_size)} in {len(found.files)} file(s), {bits:.3f} bits per element, read by {found.io}"
    )
    hidden = KEY if _delta(found) else None
    for key, value in found.metadata.items():
        if key == hidden:
            continue
        line(f"  {key}: {str(value)[:160]}")
    if found.companions:
        line(f"  companions: {', '.join(found.companions)}")
    for note in found.notes:
        line(f"  note: {note}")
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
        print()
        table((key, "tensors", "elements", "stored", "bits", "share"), totals)
    for detail in found.details:
        print()
        line(detail.title)
        table(detail.columns, detail.rows, left=len(detail.columns))
    if list_tensors:
        print()
        _tensors(found.tensors, every)


def _tensors(tensors: Any, every: bool) -> None:
    def key(item: Any) -> tuple[str, ...]:
        return (shape_text(item.shape), item.dtype, _codec(item), item.role)

    def ungrouped(item: Any) -> tuple[str, ...]:
        return (*key(item), item.name)

    rows = []
    for name, group in equal_layers(tensors, lambda item: str(item.name), ungrouped if every else key):
        nbytes = sum(item.nbytes for item in group)
        count = f"{len(group)}" if len(group) > 1 else ""
        rows.append((name, *key(group[0]), count, size_text(nbytes), _bits(nbytes, sum(item.size for item in group))))
    columns = ("tensor", "shape", "dtype", "codec", "role", "n", "stored", "bits")
    table(columns, rows, left=5, optional=("role", "dtype"))


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
        raise unknown_tensor(name, (item.name for item in found.tensors), found.path)
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
    columns = ("part", "dtype", "type", "encoding", "file", "digest", "offset", "stored", "decoded")
    table(columns, rows, left=6, optional=("file", "decoded", "encoding"))
