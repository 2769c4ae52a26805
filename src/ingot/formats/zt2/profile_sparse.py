"""The profiles ``zt.sparse_csr/1`` and ``zt.sparse_coo/1`` (codecs ``sparse_csr`` and ``sparse_coo``)."""

from __future__ import annotations

from typing import Any

from ingot.errors import FormatError, UnsupportedError
from ingot.formats.zt2.checks import refuse, require_parts, require_size
from ingot.formats.zt2.manifest import Object, optional_value
from ingot.formats.zt2.types import ITEM_BYTES, nbytes_of
from ingot.model.layouts.sparse import CsrLayout
from ingot.model.spec import TensorSpec


def check_csr(location: str, obj: Object) -> None:
    """Check the three parts of a matrix: one row pointer more than rows, as many columns as values."""
    if len(obj.shape) != 2:
        raise refuse(location, f"two dimensions, found shape {list(obj.shape)}")
    require_parts(location, obj, {"values", "indices", "indptr"})
    width = _index_width(location, obj, "indices")
    if obj.parts["indptr"].dtype != obj.parts["indices"].dtype or optional_value(obj.parts["indptr"].type) is not None:
        raise refuse(location, "indptr of the type of indices, and of no logical type")
    require_size(location, obj, "indptr", (obj.shape[0] + 1) * width)
    _require_values(location, obj, *divmod(obj.parts["indices"].nbytes, width))


def check_coo(location: str, obj: Object) -> None:
    """Check that there are coordinates for every dimension of the shape, and one coordinate tuple per value."""
    rank = len(obj.shape)
    if rank < 1:
        raise refuse(location, "at least one dimension, found a scalar")
    require_parts(location, obj, {"values", "coords"})
    width = _index_width(location, obj, "coords")
    _require_values(location, obj, *divmod(obj.parts["coords"].nbytes, width * rank))


def read_csr(obj: Object) -> dict[str, Any]:
    """Return the codec's attributes; columns ascend in every row, because the profile requires it."""
    return {**(optional_value(obj.attributes) or {}), "ascending": True}


def read_coo(obj: Object) -> dict[str, Any]:
    """Return the codec's attributes; the profile has none."""
    return dict(optional_value(obj.attributes) or {})


def write_csr(spec: TensorSpec) -> dict[str, Any]:
    """Return the attributes of the object.

    Raises ``UnsupportedError`` ``zt2.csr-order``: columns may have any order.
    """
    if not CsrLayout.of(spec).ascending:
        raise UnsupportedError(
            "expected columns that ascend in every row, which zt.sparse_csr/1 requires; the tensor does not declare it",
            rule="zt2.csr-order",
        )
    return {key: value for key, value in spec.params.items() if key != "ascending"}


def _index_width(location: str, obj: Object, role: str) -> int:
    part = obj.parts[role]
    if part.dtype not in ("u32", "u64") or optional_value(part.type) is not None:
        raise refuse(location, f"{role} of u32 or u64, found {optional_value(part.type) or part.dtype}")
    return ITEM_BYTES[part.dtype]


def _require_values(location: str, obj: Object, count: int, remainder: int) -> None:
    """Check that there are as many values as positions, if the size of a value is known."""
    if remainder:
        raise FormatError("zt2.size", f"expected complete positions, found {remainder} extra bytes", where=location)
    values = obj.parts["values"]
    require_size(location, obj, "values", nbytes_of(values.dtype, optional_value(values.type), count))
