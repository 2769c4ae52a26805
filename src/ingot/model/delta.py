"""The description of a delta in its metadata, equal in all containers: base, result, the change of each tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ingot.core.parsing.strictjson import preload
from ingot.errors import FormatError

KEY = "delta"
"""The metadata key of the description. A checkpoint with this key is a delta."""

OPS = ("apply", "replace", "same")

VERSION, FITTED = 1, 2
"""Versions of the description. ``FITTED`` is written only if a change has ``base_dtype`` or ``base_shape``, so that
readers without these fields refuse it.
"""


@preload
class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """The change of one tensor of the fine-tune.

    Parameters
    ----------
    op : str
        ``apply``: the delta contains a difference. ``replace``: the delta contains the full tensor, because it is new
        or cannot be expressed as a difference. ``same``: equal to the base, nothing is stored.
    dtype : str
        The fine-tune's element type.
    base_dtype : str or None
        The base's element type, if it differs. Exact differences refer to the base's values rounded to ``dtype``.
    base_shape : tuple of int or None
        The base's shape, if its number of rows differs. The difference covers the rows that both tensors have.
    """

    op: str
    dtype: str
    base_dtype: str | None = None
    base_shape: tuple[int, ...] | None = None

    @property
    def fitted(self) -> bool:
        """Whether the element type or the shape of the base's tensor differs from those of the fine-tune."""
        return self.base_dtype is not None or self.base_shape is not None


@preload
class Identity(msgspec.Struct, frozen=True, omit_defaults=True):
    """The ids of a set of tensors; a delta recognizes its base by them.

    ``content`` is independent of the layout: ``blake3:hex`` over the sorted names, element types, shapes and bytes.
    ``hashes`` are ids of other tools, such as ``wdelta``: the ``parent_hash`` of a ``.wdelta`` file.
    """

    content: str | None = None
    hashes: dict[str, str] = {}


@preload
class DeltaInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """The description of a delta: its strategy, the ids of base and result, and the change of each tensor.

    ``tensors`` are the changes of the fine-tune's tensors in order; ``removed`` are tensors that only the base has.
    """

    version: int
    strategy: str
    base: Identity
    result: Identity = Identity()
    tensors: dict[str, Change] = {}
    removed: list[str] = []

    def to_metadata(self) -> dict[str, Any]:
        """Return the JSON-like value for the metadata key ``KEY``.

        Tensors with equal changes share one dict object, which saves memory.
        """
        fields: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(self, tensors={}))
        removed = fields.pop("removed", None)
        if self.tensors:
            plain_changes = {change: _change_data(change) for change in set(self.tensors.values())}
            fields["tensors"] = {name: plain_changes[change] for name, change in self.tensors.items()}
        return fields if removed is None else {**fields, "removed": removed}


def _change_data(change: Change) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(change)
    return plain if change.base_shape is None else {**plain, "base_shape": [*change.base_shape]}


def delta_of(metadata: Mapping[str, Any], location: str = "") -> DeltaInfo | None:
    """Return the description of a delta from a checkpoint's metadata; None for an ordinary checkpoint.

    Raises ``FormatError`` ``delta.metadata`` (a field is missing or has a wrong type), ``delta.version`` or
    ``delta.op``.
    """
    if KEY not in metadata:
        return None
    value = metadata[KEY]
    try:
        # Containers whose metadata is text only store the value as JSON text (``Format.metadata``).
        info = msgspec.json.decode(value, type=DeltaInfo) if isinstance(value, str) else _converted(value)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise FormatError("delta.metadata", str(error), where=location) from error
    if info.version not in (VERSION, FITTED):
        raise FormatError(
            "delta.version", f"expected delta version {VERSION} or {FITTED}, found {info.version}", where=location
        )
    for name, change in info.tensors.items():
        if change.op not in OPS:
            raise FormatError(
                "delta.op", f"expected {', '.join(OPS)}, found {change.op[:40]!r} for {name[:200]!r}", where=location
            )
        if change.fitted and (info.version != FITTED or change.op != "apply"):
            raise FormatError(
                "delta.metadata",
                f"expected base_dtype and base_shape only in version {FITTED}, for op apply, found them for "
                f"{name[:200]!r}",
                where=location,
            )
    return info


def version_for(changes: Iterable[Change]) -> int:
    """Return the lowest version of the description that can express the changes."""
    return FITTED if any(change.fitted for change in changes) else VERSION


def _converted(value: Any) -> DeltaInfo:
    """Return the description of a delta from a JSON-like value.

    Tensors that share one dict object in ``value`` share one ``Change`` in the result.

    Raises ``msgspec.ValidationError``.
    """
    tensors = value.get("tensors") if isinstance(value, dict) else None
    if not isinstance(tensors, dict) or any(type(name) is not str for name in tensors):
        return msgspec.convert(value, DeltaInfo)
    firsts = {}
    seen = set()
    for name, fields in tensors.items():
        if id(fields) not in seen:
            firsts[name] = fields
            seen.add(id(fields))
    info = msgspec.convert({**value, "tensors": firsts}, DeltaInfo)
    changes = {id(fields): info.tensors[name] for name, fields in firsts.items()}
    return msgspec.structs.replace(info, tensors={name: changes[id(fields)] for name, fields in tensors.items()})
