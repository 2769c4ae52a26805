"""How much may be decoded from how little: asked once, before any work begins.

A few bytes of a sparse or compressed tensor may stand for any size. What an operation is about to decode is compared
with what is stored, and what is decoded into memory with what is free (``spec/operations.md``, "Limits").
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ingot.core.dtypes import DTYPES
from ingot.core.memory import format_size, parse_size, require_ram
from ingot.errors import FormatError, ResourceError
from ingot.model.layouts.dense import DenseLayout

if TYPE_CHECKING:
    from ingot.model.tensor import Tensor

VARIABLE = "INGOT_MAX_DECODED"
RATIO = 1 << 16
"""Decoded bytes per stored byte: an empty sparse matrix of f32 with 2**17 columns has as many."""
FLOOR = 4 << 30
DECOMPRESSED = "INGOT_MAX_DECOMPRESSED"
_SMALL = 1 << 28


def max_decoded(stored: int) -> int:
    """Return how many bytes ``stored`` ones may decode to: ``INGOT_MAX_DECODED`` if it is set (a size such as
    ``100GiB``), else ``FLOOR + RATIO * stored``.

    Raises ``UsageError`` ``size.syntax``.
    """
    asked = os.environ.get(VARIABLE, "").strip()
    return parse_size(asked) if asked else FLOOR + RATIO * stored


def require_decompressed(tensors: Iterable[Tensor], asked: int | str | None, where: str) -> None:
    """Refuse compressed parts that would become larger than is allowed, before any is decompressed.

    Parameters
    ----------
    tensors : iterable of Tensor
        Looked at only where there is a limit.
    asked : int, str or None
        The most bytes that one part may become; None for what ``INGOT_MAX_DECOMPRESSED`` says, if it is set.
    where : str
        For messages.

    Raises
    ------
    FormatError
        ``part.max-decompressed``.
    UsageError
        ``size.syntax``.
    """
    limit = asked if asked is not None else os.environ.get(DECOMPRESSED, "").strip() or None
    if limit is None:
        return
    most = parse_size(limit)
    for tensor in tensors:
        for role, part in tensor.parts.items():
            if part.encoding != "raw" and part.nbytes > most:
                raise FormatError(
                    "part.max-decompressed",
                    f"expected a compressed part to become at most {most} bytes, found {part.nbytes}; raise "
                    f"max_decompressed or {DECOMPRESSED} if this is meant",
                    where=part.where or f"{where}: {tensor.name[:200]}: {role}",
                )


def require_in_proportion(tensors: Iterable[Tensor], where: str) -> list[int]:
    """Refuse to decode ``tensors`` where their stored bytes stand for too many; return the decoded bytes of each.

    Raises
    ------
    ResourceError
        ``decoded.limit``.
    """
    stored, sizes = 0, []
    for tensor in tensors:
        stored += tensor.nbytes
        sizes.append(decoded_bytes(tensor))
    decoded = sum(sizes)
    if decoded > FLOOR or os.environ.get(VARIABLE):
        _require(stored, decoded, where)
    return sizes


def require_room(tensors: Iterable[Tensor], where: str, *, retyped: bool = False) -> None:
    """Refuse to decode ``tensors`` into memory together where there is not enough of it; errors also as
    ``require_in_proportion``.

    ``retyped`` tells that dense tensors of mapped files do not come as they lie there.

    Raises ``ResourceError`` ``ram.guard``.
    """
    chosen = list(tensors)
    sizes = require_in_proportion(chosen, where)
    needed = sum(size for size, tensor in zip(sizes, chosen, strict=True) if retyped or not _lies_ready(tensor))
    if needed > _SMALL:
        require_ram(needed, "decoded tensors", "take them one by one, or a part of them by name", where=where)


def decoded_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's values, or of its parts without their encoding where those are more."""
    row = DTYPES.get(tensor.dtype)
    parts = 0
    for part in tensor.parts.values():
        parts += part.nbytes
    return parts if row is None else max(row.nbytes(tensor.size), parts)


def _lies_ready(tensor: Tensor) -> bool:
    part = tensor.parts.get("data")
    return tensor.codec == DenseLayout.codec and part is not None and part.encoding == "raw" and part.source.mapped


def _require(stored: int, decoded: int, where: str) -> None:
    limit = max_decoded(stored)
    if decoded > limit:
        raise ResourceError(
            f"expected at most {format_size(limit)} decoded from {format_size(stored)} stored, found "
            f"{format_size(decoded)}; set {VARIABLE} to a size above that if this is meant",
            rule="decoded.limit",
            where=where,
        )
