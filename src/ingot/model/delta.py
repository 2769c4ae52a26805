"""What a delta says of itself, whatever its container: its base, its result, and what becomes of every tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ingot.core.parsing.strictjson import preload
from ingot.errors import FormatError

KEY = "delta"
"""The key of a checkpoint's metadata that makes it a delta."""

OPS = ("apply", "replace", "same")

VERSION, FITTED = 1, 2
"""Versions of the description. ``FITTED`` only if a change has ``base_dtype`` or ``base_shape``: readers that do not
know these refuse it."""


@preload
class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tensor of the fine-tune.

    Parameters
    ----------
    op : str
        ``apply`` (the delta holds a difference of its codec), ``replace`` (the delta holds the tensor itself: it is
        new, or no difference leads to it), ``same`` (as in the base, nothing is stored).
    dtype : str
        The fine-tune's element type.
    base_dtype : str or None
        The base's element type, if it is another. Exact differences are to the base's values rounded to ``dtype``.
    base_shape : tuple of int or None
        The base's shape, if it has another number of rows. The difference is to the rows that both have.
    """

    op: str
    dtype: str
    base_dtype: str | None = None
    base_shape: tuple[int, ...] | None = None

    @property
    def fitted(self) -> bool:
        """Whether the base's tensor has another element type or shape than the difference."""
        return self.base_dtype is not None or self.base_shape is not None


@preload
class Identity(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a set of tensors is recognised.

    ``content``: layout-free id, ``blake3:hex`` over the sorted tensors' names, element types, shapes and bytes.
    ``hashes``: ids of other tools by name (``wdelta``: the ``parent_hash`` of a ``.wdelta``).
    """

    content: str | None = None
    hashes: dict[str, str] = {}


@preload
class DeltaInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """The delta as a whole. ``tensors`` are those of the fine-tune in its order; ``removed`` are the base's others."""

    version: int
    strategy: str
    base: Identity
    result: Identity = Identity()
    tensors: dict[str, Change] = {}
    removed: list[str] = []

    def to_metadata(self) -> dict[str, Any]:
        """Return the JSON-like value that stands under ``KEY``. Of equal changes there is one object."""
        plain: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(self, tensors={}))
        removed = plain.pop("removed", None)
        if self.tensors:
            known = {change: _plain(change) for change in set(self.tensors.values())}
            plain["tensors"] = {name: known[change] for name, change in self.tensors.items()}
        return plain if removed is None else {**plain, "removed": removed}


def _plain(change: Change) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(change)
    return plain if change.base_shape is None else {**plain, "base_shape": [*change.base_shape]}


def delta_of(metadata: Mapping[str, Any], where: str = "") -> DeltaInfo | None:
    """Return what a checkpoint's metadata says of a delta; None if it is an ordinary checkpoint.

    Raises ``FormatError``: ``delta.metadata`` (a field that is missing or of a wrong type), ``delta.version``,
    ``delta.op``.
    """
    if KEY not in metadata:
        return None
    value = metadata[KEY]
    try:
        # A container that holds text only has the value as its JSON text (``Format.metadata``).
        info = msgspec.json.decode(value, type=DeltaInfo) if isinstance(value, str) else _converted(value)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise FormatError("delta.metadata", str(error), where=where) from error
    if info.version not in (VERSION, FITTED):
        raise FormatError(
            "delta.version", f"expected delta version {VERSION} or {FITTED}, found {info.version}", where=where
        )
    for name, change in info.tensors.items():
        if change.op not in OPS:
            raise FormatError(
                "delta.op", f"expected {', '.join(OPS)}, found {change.op[:40]!r} for {name[:200]!r}", where=where
            )
        if change.fitted and (info.version != FITTED or change.op != "apply"):
            raise FormatError(
                "delta.metadata",
                f"expected base_dtype and base_shape only in version {FITTED}, for op apply, found them for "
                f"{name[:200]!r}",
                where=where,
            )
    return info


def version_for(changes: Iterable[Change]) -> int:
    """Return the lowest version of the description that can express the changes."""
    return FITTED if any(change.fitted for change in changes) else VERSION


def _converted(value: Any) -> DeltaInfo:
    """Convert a JSON-like value; tensors that share what becomes of them still do. Errors as ``msgspec.convert``."""
    tensors = value.get("tensors") if isinstance(value, dict) else None
    if not isinstance(tensors, dict) or any(type(name) is not str for name in tensors):
        return msgspec.convert(value, DeltaInfo)
    firsts = {}
    seen = set()
    for name, said in tensors.items():
        if id(said) not in seen:
            firsts[name] = said
            seen.add(id(said))
    info = msgspec.convert({**value, "tensors": firsts}, DeltaInfo)
    known = {id(said): info.tensors[name] for name, said in firsts.items()}
    return msgspec.structs.replace(info, tensors={name: known[id(said)] for name, said in tensors.items()})
