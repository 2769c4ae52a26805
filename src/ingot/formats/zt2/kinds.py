"""What is found out once of tensors that differ in their names alone, of which there may be very many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from ingot.core import cbor
from ingot.core.checksums import digest as digest_of
from ingot.formats.entry_template import EntryTemplate
from ingot.formats.zt2.specs import Placed, breaks_no_rule, describe, is_dense_raw, written_as
from ingot.model.layouts.dense import DATA
from ingot.model.spec import TensorSpec

T = TypeVar("T")

_MOST = 256  # kinds that are known at a time
_FAR = 2**63 - 1  # stands for an offset: no number in front of it is as large


class ByKind(Generic[T]):
    """What ``find`` returns of specs, asked once of those of a kind whose names break no rule."""

    def __init__(self, find: Callable[[TensorSpec], T]) -> None:
        self._find = find
        self._known: dict[int, tuple[TensorSpec, T]] = {}

    def of(self, spec: TensorSpec) -> T:
        """Return what was found of the spec's kind; errors as of ``find``."""
        key = id(spec.parts)  # nobody else's while the spec is kept
        known = self._known.get(key)
        if known is not None and spec.is_like(known[0]) and breaks_no_rule(spec.name):
            return known[1]
        found = self._find(spec)
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[key] = spec, found
        return found


def template(spec: TensorSpec, algorithm: str | None, shard: str | None) -> EntryTemplate | None:
    """Return the entry of a tensor that ``is_dense_raw``, whose name breaks no rule; None of others."""
    if not is_dense_raw(spec):
        return None
    digest = None if algorithm is None else digest_of(algorithm, b"")
    place = Placed(_FAR, spec.parts[0].at_most, digest, shard)
    entry = describe(spec, written_as(spec), {DATA: place})
    encoded = cbor.dumps([{"": entry}], sort=True)[3:]  # as deep as it lies in the root
    return EntryTemplate(encoded, [_FAR], digest)
