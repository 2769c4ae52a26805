"""``zt.sparse_csr/1`` and ``zt.sparse_coo/1``: the codecs ``sparse_csr`` and ``sparse_coo``."""

from __future__ import annotations

from typing import Any

from ingot.errors import FormatError, UnsupportedError
from ingot.formats.zt2.manifest import Object, stated
from ingot.formats.zt2.types import ITEM_BYTES, nbytes_of
from ingot.model.layouts.sparse import CsrLayout
from ingot.model.spec import TensorSpec


def check_csr(where: str, obj: Object) -> None:
    """A matrix of three parts; row pointers are one more than rows, columns as many as values."""
    if len(obj.shape) != 2:
        raise _refuse(where, f"two dimensions, found shape {list(obj.shape)}")
    _require_parts(where, obj, {"values", "indices", "indptr"})
    width = _index_width(where, obj, "indices")
    if obj.parts["indptr"].dtype != obj.parts["indices"].dtype or stated(obj.parts["indptr"].type) is not None:
        raise _refuse(where, "indptr of the type of indices, and of no logical type")
    _require_size(where, obj, "indptr", (obj.shape[0] + 1) * width)
    _require_values(where, obj, *divmod(obj.parts["indices"].nbytes, width))


def check_coo(where: str, obj: Object) -> None:
    """Coordinates of as many dimensions as the shape has, one after the other."""
    rank = len(obj.shape)
    if rank < 1:
        raise _refuse(where, "one dimension at least, found none")
    _require_parts(where, obj, {"values", "coords"})
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


def _refuse(where: str, expected: str) -> FormatError:
    return FormatError("zt2.layout", f"expected {expected}", where=where)


def _require_parts(where: str, obj: Object, roles: set[str]) -> None:
    if set(obj.parts) != roles:
        raise _refuse(where, f"the parts {sorted(roles)} of {obj.layout}, found {sorted(obj.parts)[:5]}")


def _index_width(where: str, obj: Object, role: str) -> int:
    part = obj.parts[role]
    if part.dtype not in ("u32", "u64") or stated(part.type) is not None:
        raise _refuse(where, f"{role} of u32 or u64, found {stated(part.type) or part.dtype}")
    return ITEM_BYTES[part.dtype]


def _require_size(where: str, obj: Object, role: str, expected: int) -> None:
    found = obj.parts[role].nbytes
    if found != expected:
        raise FormatError("zt2.size", f"expected {expected} bytes of {role}, found {found}", where=where)


def _require_values(where: str, obj: Object, count: int, rest: int) -> None:
    """As many values as positions, where the size of a value is known."""
    if rest:
        raise FormatError("zt2.size", f"expected whole positions, found {rest} bytes more", where=where)
    values = obj.parts["values"]
    expected = nbytes_of(values.dtype, stated(values.type), count)
    if expected is not None:
        _require_size(where, obj, "values", expected)
