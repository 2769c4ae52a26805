"""What is found out once of tensors that differ in their names alone, of which there may be very many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from ingot.core import cbor
from ingot.core.checksums import digest as digest_of
from ingot.formats.zt.specs import is_plain
from ingot.formats.zt2.specs import Placed, breaks_no_rule, describe, written_as
from ingot.formats.zt2.types import ITEM_BYTES
from ingot.model.layouts.dense import DATA
from ingot.model.spec import TensorSpec

T = TypeVar("T")

_MOST = 256  # kinds that are known at a time
_FAR = 2**63 - 1  # an offset, the first number of an entry that is as large as that


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


class Template(NamedTuple):
    """An entry of the manifest, encoded, but for its tensor's name, where its only part lies, and the part's digest."""

    before: bytes
    between: bytes
    behind: bytes

    def entry(self, name: str, offset: int, digest: str | None) -> bytes:
        """Return the entry of one tensor, its name included."""
        text = b"" if digest is None else digest.encode()
        return b"".join((cbor.dumps(name), self.before, cbor.dumps(offset), self.between, text, self.behind))


def template(spec: TensorSpec, algorithm: str | None, shard: str | None) -> Template | None:
    """Return the entry of a dense tensor of a storage type, in one raw part that breaks no rule; None of others.

    The spec's name breaks none. All digests of an algorithm are equally long.
    """
    if spec.dtype not in ITEM_BYTES or not is_plain(spec):
        return None
    digest = None if algorithm is None else digest_of(algorithm, b"")
    place = Placed(_FAR, spec.parts[0].at_most, digest, shard)
    entry = describe(spec, written_as(spec), {DATA: place})
    encoded = cbor.dumps([{"": entry}], sort=True)[3:]  # as deep as it lies in the root
    before, _, rest = encoded.partition(cbor.dumps(_FAR))
    between, _, behind = (rest, b"", b"") if digest is None else rest.partition(digest.encode())
    return Template(before, between, behind)
