"""Limits on the decoded bytes of tensors, checked before any work begins.

A few bytes of a sparse or compressed tensor may decode to any size. The decoded size is compared with the stored size,
and with the free memory if the values are decoded into memory (``spec/operations.md``, "Limits").
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Protocol

from ingot.core.numeric.dtypes import DTYPES
from ingot.core.runtime.memory import format_size, parse_size, require_ram
from ingot.errors import FormatError, ResourceError
from ingot.model.layouts.dense import DenseLayout
from ingot.model.part import Part

VARIABLE = "INGOT_MAX_DECODED"
RATIO = 1 << 16
"""Decoded bytes per stored byte. An empty sparse matrix of f32 with 2**17 columns has this ratio."""
FLOOR = 4 << 30
DECOMPRESSED = "INGOT_MAX_DECOMPRESSED"
_SMALL = 1 << 28


class StoredTensor(Protocol):
    """The attributes of a ``Tensor`` that limits depend on; ``Tensor`` checks limits itself before it decodes."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def codec(self) -> str: ...
    @property
    def parts(self) -> Mapping[str, Part]: ...
    @property
    def size(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


def max_decoded(stored: int) -> int:
    """Return the limit of the decoded bytes for ``stored`` bytes.

    The limit is ``INGOT_MAX_DECODED`` if it is set (a size such as ``100GiB``), else ``FLOOR + RATIO * stored``. Raises
    ``UsageError`` ``size.syntax``.
    """
    setting = os.environ.get(VARIABLE, "").strip()
    return parse_size(setting) if setting else FLOOR + RATIO * stored


def require_decompressed(tensors: Iterable[StoredTensor], requested: int | str | None, location: str) -> None:
    """Refuse compressed parts whose decompressed size exceeds the limit, before any part is decompressed.

    Parameters
    ----------
    tensors : iterable of tensors
        Iterated only if there is a limit.
    requested : int, str or None
        The limit in bytes for one part; None for ``INGOT_MAX_DECOMPRESSED`` if it is set.
    location : str
        The location for error messages.

    Raises
    ------
    FormatError
        ``part.max-decompressed``.
    UsageError
        ``size.syntax``.
    """
    limit = requested if requested is not None else os.environ.get(DECOMPRESSED, "").strip() or None
    if limit is None:
        return
    max_bytes = parse_size(limit)
    for tensor in tensors:
        for role, part in tensor.parts.items():
            if part.encoding != "raw" and part.nbytes > max_bytes:
                raise FormatError(
                    "part.max-decompressed",
                    f"expected a compressed part to become at most {max_bytes} bytes, found {part.nbytes}; raise "
                    f"max_decompressed or {DECOMPRESSED} if this is meant",
                    where=part.where or f"{location}: {tensor.name[:200]}: {role}",
                )


def require_in_proportion(tensors: Iterable[StoredTensor], location: str) -> list[int]:
    """Return the decoded bytes of each tensor.

    Raises
    ------
    ResourceError
        ``decoded.limit``: the total decoded size exceeds ``max_decoded`` of the total stored size.
    """
    stored = 0
    sizes = []
    for tensor in tensors:
        stored += tensor.nbytes
        sizes.append(decoded_bytes(tensor))
    decoded = sum(sizes)
    if decoded > FLOOR or os.environ.get(VARIABLE):
        _require(stored, decoded, location)
    return sizes


def require_room(tensors: Iterable[StoredTensor], location: str, *, retyped: bool = False) -> None:
    """Refuse to decode ``tensors`` into memory together if the free memory is not sufficient.

    ``retyped`` means that dense tensors of mapped files are converted, and therefore need memory too.

    Raises ``ResourceError`` ``ram.guard`` or ``decoded.limit``.
    """
    chosen = list(tensors)
    sizes = require_in_proportion(chosen, location)
    needed = sum(size for size, tensor in zip(sizes, chosen, strict=True) if retyped or not _is_mapped(tensor))
    if needed > _SMALL:
        require_ram(needed, "decoded tensors", "decode them one by one, or name fewer", location=location)


def decoded_bytes(tensor: StoredTensor) -> int:
    """Return the number of bytes of a tensor's values, or of its parts after decompression if they are larger."""
    row = DTYPES.get(tensor.dtype)
    parts = 0
    for part in tensor.parts.values():
        parts += part.nbytes
    return parts if row is None else max(row.nbytes(tensor.size), parts)


def _is_mapped(tensor: StoredTensor) -> bool:
    part = tensor.parts.get("data")
    return tensor.codec == DenseLayout.codec and part is not None and part.encoding == "raw" and part.source.mapped


def _require(stored: int, decoded: int, location: str) -> None:
    limit = max_decoded(stored)
    if decoded > limit:
        raise ResourceError(
            f"expected at most {format_size(limit)} decoded from {format_size(stored)} stored, found "
            f"{format_size(decoded)}; set {VARIABLE} to a size above that if this is meant",
            rule="decoded.limit",
            where=location,
        )
