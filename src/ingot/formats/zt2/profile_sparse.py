"""``zt.sparse_csr/1`` and ``zt.sparse_coo/1``: the codecs ``sparse_csr`` and ``sparse_coo``."""

from __future__ import annotations

from typing import Any

from ingot.errors import FormatError, UnsupportedError
from ingot.formats.zt2.checks import refuse, require_parts, require_size
from ingot.formats.zt2.manifest import Object, stated
from ingot.formats.zt2.types import ITEM_BYTES, nbytes_of
from ingot.model.layouts.sparse import CsrLayout
from ingot.model.spec import TensorSpec


def check_csr(where: str, obj: Object) -> None:
    """A matrix of three parts; row pointers are one more than rows, columns as many as values."""
    if len(obj.shape) != 2:
        raise refuse(where, f"two dimensions, found shape {list(obj.shape)}")
    require_parts(where, obj, {"values", "indices", "indptr"})
    width = _index_width(where, obj, "indices")
    if obj.parts["indptr"].dtype != obj.parts["indices"].dtype or stated(obj.parts["indptr"].type) is not None:
        raise refuse(where, "indptr of the type of indices, and of no logical type")
    require_size(where, obj, "indptr", (obj.shape[0] + 1) * width)
    _require_values(where, obj, *divmod(obj.parts["indices"].nbytes, width))


def check_coo(where: str, obj: Object) -> None:
    """Coordinates of as many dimensions as the shape has, one after the other."""
    rank = len(obj.shape)
    if rank < 1:
        raise refuse(where, "one dimension at least, found none")
    require_parts(where, obj, {"values", "coords"})
    width = _index_width(where, obj, "coords")
    _require_values(where, obj, *divmod(obj.parts["coords"].nbytes, width * rank))


def read_csr(obj: Object) -> dict[str, Any]:
    """Return the codec's attributes: columns ascend in every row, which the profile asks for."""
    return {**(stated(obj.attributes) or {}), "ascending": True}


def read_coo(obj: Object) -> dict[str, Any]:
    """Return the codec's attributes: the profile has none."""
    return dict(stated(obj.attributes) or {})


def write_csr(spec: TensorSpec) -> dict[str, Any]:
    """Return the object's attributes; raises ``UnsupportedError`` ``zt2.csr-order``: columns may have any order."""
    if not CsrLayout.of(spec).ascending:
        raise UnsupportedError(
            "zt.sparse_csr/1 has columns that ascend in every row, which is not known of these", rule="zt2.csr-order"
        )
    return {key: value for key, value in spec.params.items() if key != "ascending"}


def _index_width(where: str, obj: Object, role: str) -> int:
    part = obj.parts[role]
    if part.dtype not in ("u32", "u64") or stated(part.type) is not None:
        raise refuse(where, f"{role} of u32 or u64, found {stated(part.type) or part.dtype}")
    return ITEM_BYTES[part.dtype]


def _require_values(where: str, obj: Object, count: int, rest: int) -> None:
    """As many values as positions, where the size of a value is known."""
    if rest:
        raise FormatError("zt2.size", f"expected whole positions, found {rest} bytes more", where=where)
    values = obj.parts["values"]
    require_size(where, obj, "values", nbytes_of(values.dtype, stated(values.type), count))
