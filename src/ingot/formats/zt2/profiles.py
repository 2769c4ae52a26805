"""Layout profiles (section 5): which of them are codecs here, under which roles and attributes.

A profile that is not known, or that says what no codec here has, stays as it is: a codec of that id, whose parts can be
listed and moved. What Ingot writes for others is in the profiles of the registry; what these cannot say is in profiles
of its own, ``ingot.CODEC/1``, whose attributes are those of the codec's page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ingot.formats.zt2.manifest import Object
from ingot.formats.zt2.meaning import Meaning, Written
from ingot.formats.zt2.profile_blocks import GGUF, MX, check_gguf, check_mx, read_gguf, read_mx, write_gguf, write_mx
from ingot.formats.zt2.profile_group import QUANT_GROUP, check_group, read_group, write_group
from ingot.formats.zt2.profile_sparse import check_coo, check_csr, read_coo, read_csr, write_csr
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.ggml import GgmlBlocksLayout
from ingot.model.layouts.scaled_codebook import ScaledCodebookLayout
from ingot.model.layouts.sparse import CooLayout, CsrLayout
from ingot.model.spec import TensorSpec

_OWN = re.compile(r"ingot\.(.+)/1", re.DOTALL).fullmatch
# Before an id without namespace and version, which could be that of a codec here.
_NAMELESS = "zt2:"
_NAMESPACED = re.compile(r"[^./]+\..+/[0-9]+", re.DOTALL).fullmatch


class Profile(NamedTuple):
    """A profile of the registry: its metadata rules; what it means here, None where no codec says it; the codec that it
    stores, and what it says of such a tensor, None where it cannot say it."""

    check: Callable[[str, Object], None]
    read: Callable[[Object], Meaning | None]
    codec: str
    write: Callable[[TensorSpec], Written | None]


PROFILES: Mapping[str, Profile] = {
    "zt.sparse_csr/1": Profile(
        check_csr,
        lambda obj: Meaning(CsrLayout.codec, read_csr(obj)),
        CsrLayout.codec,
        lambda spec: Written("zt.sparse_csr/1", write_csr(spec)),
    ),
    "zt.sparse_coo/1": Profile(
        check_coo,
        lambda obj: Meaning(CooLayout.codec, read_coo(obj)),
        CooLayout.codec,
        lambda spec: Written("zt.sparse_coo/1", dict(spec.params)),
    ),
    MX: Profile(check_mx, read_mx, ScaledCodebookLayout.codec, write_mx),
    QUANT_GROUP: Profile(check_group, read_group, AffineLayout.codec, write_group),
}


_GGUF = Profile(check_gguf, read_gguf, GgmlBlocksLayout.codec, write_gguf)


def _profile(layout: str) -> Profile | None:
    return _GGUF if GGUF(layout) else PROFILES.get(layout)


def ways(spec: TensorSpec) -> Iterator[Written]:
    """Yield the ways in which a tensor can be said, the best first; a reader has to find the same tensor in them."""
    if spec.codec == DenseLayout.codec:
        yield Written(DenseLayout.codec, dict(spec.params))
        return
    for profile in (*PROFILES.values(), _GGUF):
        written = profile.write(spec) if profile.codec == spec.codec else None
        if written is not None:
            yield written
    if spec.codec in (CsrLayout.codec, CooLayout.codec):
        return  # what the profiles cannot say of them would have to be another codec
    foreign = _NAMESPACED(spec.codec) is not None or spec.codec.startswith(_NAMELESS)
    layout = spec.codec.removeprefix(_NAMELESS) if foreign else f"ingot.{spec.codec}/1"
    yield Written(layout, dict(spec.params))


def check_profile(where: str, obj: Object) -> None:
    """Check the metadata rules of a profile that is known; raises ``FormatError`` ``zt2.layout``, ``zt2.size``."""
    profile = _profile(obj.layout)
    if profile is not None:
        profile.check(where, obj)


def meaning(obj: Object) -> Meaning:
    """Return what an object is here, whose rules hold."""
    attributes = obj.attributes if isinstance(obj.attributes, dict) else {}
    if obj.layout == DenseLayout.codec:
        return Meaning(DenseLayout.codec, attributes)
    own = _OWN(obj.layout)
    if own is not None:
        return Meaning(own[1], attributes)
    profile = _profile(obj.layout)
    found = None if profile is None else profile.read(obj)
    if found is not None:
        return found
    return Meaning(obj.layout if _NAMESPACED(obj.layout) else f"{_NAMELESS}{obj.layout}", attributes)
