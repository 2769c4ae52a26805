"""The storage scheme of a tensor, in the terms that runtime profiles use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ingot.model.layouts.affine import NO_ZERO, AffineLayout, Blocks, Constant, Group, Row
from ingot.model.layouts.base import Layout
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.ggml import GgmlBlocksLayout
from ingot.model.layouts.packed_ints import INTS, PACKED, PackedIntLayout
from ingot.model.layouts.palette import PaletteLayout
from ingot.model.layouts.scaled_codebook import Run, ScaledCodebookLayout, Tiles
from ingot.model.layouts.table import layout_of
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Tensor
from ingot.runtimes.profile import Scheme

_TABLE = "codebook"
_FLAT = "flat "


@dataclass(frozen=True, slots=True)
class StoredScheme:
    """How a tensor is stored.

    ``storage`` is a value of ``Scheme.storage``, or the codec if no scheme describes it. ``type`` is the dense element
    type, the number type, or the block type. ``group`` is the unit that shares a scale: columns, ``row``, ``tensor``,
    ``128x128``, ``flat 64`` for consecutive elements across rows, or None. ``columns`` is the length of a row.
    """

    storage: str
    type: str
    rows: int
    columns: int
    packing: str = ""
    bits: int | None = None
    symmetric: bool | None = None
    group: int | str | None = None
    scales: str = ""
    second: bool = False

    @property
    def scheme_text(self) -> str:
        """The scheme as text, such as ``4-bit integers, symmetric, groups of 64``."""
        if self.storage == "dense":
            return f"dense {self.type}"
        if self.storage == "blocks":
            return self.type.upper()
        points = "" if self.symmetric is None else ", symmetric" if self.symmetric else ", with zero points"
        name = f"{self.bits}-bit integers" if self.storage == "integers" else f"{self.storage} of {self.type}"
        return f"{name}{points}{group_text(self.group)}{f' ({self.packing})' if self.packing else ''}"


def group_text(group: int | str | None) -> str:
    """Return the unit that shares a scale as text for messages, such as ``, groups of 64``."""
    if group is None:
        return ""
    if isinstance(group, int):
        return f", groups of {group}"
    if group.startswith(_FLAT):
        return f", blocks of {group.removeprefix(_FLAT)} elements across rows"
    return f", a scale per {group}" if group in ("row", "tensor") else f", blocks of {group}"


def stored_scheme(tensor: Tensor | TensorSpec, container: str, *, symmetric: bool | None = None) -> StoredScheme:
    """Return the scheme of a tensor in a container; raise ``CodecError`` if its attributes contradict each other.

    ``symmetric`` states whether ``config.json`` declares symmetric integers; it matters for integers with stored zero
    points. None if the container has no such key.
    """
    layout = layout_of(tensor)
    rows = tensor.shape[-2] if len(tensor.shape) > 1 else 1
    columns = tensor.shape[-1] if tensor.shape else 1
    if isinstance(layout, DenseLayout):
        return StoredScheme("dense", tensor.dtype, rows, columns)
    if isinstance(layout, GgmlBlocksLayout):
        return StoredScheme("blocks", layout.type, rows, columns)
    values = _values(layout, container, symmetric)
    return replace(values or StoredScheme(tensor.codec, "", 0, 0), rows=rows, columns=columns)


def _values(layout: Layout, container: str, symmetric: bool | None) -> StoredScheme | None:
    """Return the scheme of integers, small floats or a palette; None for another layout."""
    if isinstance(layout, AffineLayout):
        packing = "" if container != "compressed-tensors" else INTS if layout.signed else PACKED
        zero = layout.zero == NO_ZERO or layout.zero == Constant(1 << (layout.bits - 1))
        grid = _group(layout.grid)
        return StoredScheme("integers", "", 0, 0, packing, layout.bits, zero, grid, layout.scales)
    if isinstance(layout, PackedIntLayout):
        group: int | str = "row" if layout.group is None else layout.group
        zero = isinstance(layout.zero, Constant) if symmetric is None else symmetric
        return StoredScheme("integers", "", 0, 0, layout.packing, layout.bits, zero, group, layout.scales)
    if isinstance(layout, ScaledCodebookLayout):
        scales = str(layout.scales)
        second = layout.second is not None
        grid = _group(layout.grid)
        return StoredScheme(
            "floats", layout.values or _TABLE, 0, 0, bits=layout.bits, group=grid, scales=scales, second=second
        )
    return StoredScheme("palette", "", 0, 0, bits=layout.bits) if isinstance(layout, PaletteLayout) else None


def _group(grid: object) -> int | str:
    """Return the unit that shares a scale, spelled as in profiles."""
    if isinstance(grid, Group):
        return grid.columns
    if isinstance(grid, Tiles):
        return f"{grid.rows}x{grid.columns}"
    if isinstance(grid, Blocks):
        return "x".join(map(str, grid.shape))
    if isinstance(grid, Run):
        return f"{_FLAT}{grid.elements}"
    return "row" if isinstance(grid, Row) else "tensor"


def mismatch(scheme: Scheme, stored: StoredScheme, *, activations: bool) -> list[str]:
    """Return the differences between a stored tensor and a scheme of its container and storage; empty if it matches."""
    problems = []
    if scheme.types and stored.type not in scheme.types:
        problems.append(f"{stored.type or 'no type'}, not {_listed(scheme.types)}")
    if scheme.packings and stored.packing not in scheme.packings:
        problems.append(f"{stored.packing}, not {_listed(scheme.packings)}")
    if scheme.bits and stored.bits not in scheme.bits:
        problems.append(f"{stored.bits} bits, not {_listed(scheme.bits)}")
    if scheme.symmetric is not None and stored.symmetric is not scheme.symmetric:
        problems.append("with zero points" if scheme.symmetric else "without zero points")
    if scheme.groups and stored.group not in scheme.groups:
        problems.append(f"{group_text(stored.group).removeprefix(', ') or 'no groups'}, not {_listed(scheme.groups)}")
    if scheme.scales and stored.scales not in scheme.scales:
        problems.append(f"scales in {stored.scales}, not {_listed(scheme.scales)}")
    if scheme.activations is not None and activations is not scheme.activations:
        problems.append("inputs of layers are quantized" if activations else "inputs of layers are not quantized")
    if scheme.whole_groups and isinstance(stored.group, int) and stored.columns % stored.group:
        problems.append(f"groups of {stored.group} do not divide {stored.columns} columns")
    flat = str(stored.group).removeprefix(_FLAT) if str(stored.group).startswith(_FLAT) else ""
    if scheme.whole_groups and flat and stored.columns % int(flat):
        problems.append(f"blocks of {flat} elements do not divide {stored.columns} columns")
    if scheme.whole_groups and "x" in str(stored.group):
        height, width = (int(size) for size in str(stored.group).split("x"))
        if stored.rows % height or stored.columns % width:
            problems.append(f"blocks of {stored.group} do not divide {stored.rows} x {stored.columns}")
    return problems


def _listed(values: tuple[Any, ...]) -> str:
    return " or ".join(str(value) for value in values)
