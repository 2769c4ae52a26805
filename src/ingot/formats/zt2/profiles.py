"""Layout profiles (section 5) and the corresponding codecs, roles and attributes.

If a profile is unknown or no codec can express it, its id becomes the codec, and parts can be listed and moved. For
other programs, Ingot writes profiles of the registry. Layouts that these cannot express are written in profiles of
Ingot, ``ingot.CODEC/1``, with the attributes on the codec's page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ingot.formats.zt2.manifest import Object
from ingot.formats.zt2.meaning import StoredForm, WrittenForm
from ingot.formats.zt2.profile_blocks import GGUF, MX, check_gguf, check_mx, read_gguf, read_mx, write_gguf, write_mx
from ingot.formats.zt2.profile_group import QUANT_GROUP, check_group, read_group, write_group
from ingot.formats.zt2.profile_sparse import check_coo, check_csr, read_coo, read_csr, write_csr
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.ggml import GgmlBlocksLayout
from ingot.model.layouts.scaled_codebook import ScaledCodebookLayout
from ingot.model.layouts.sparse import CooLayout, CsrLayout
from ingot.model.spec import TensorSpec

_INGOT_PROFILE = re.compile(r"ingot\.(.+)/1", re.DOTALL).fullmatch
# Prefix of an id without namespace and version, which could equal the id of a codec.
_NAMELESS = "zt2:"
_NAMESPACED = re.compile(r"[^./]+\..+/[0-9]+", re.DOTALL).fullmatch


class Profile(NamedTuple):
    """A profile of the registry: its metadata rules, and its conversion from and to the forms of a codec.

    ``read`` returns None if no codec can express the object. ``write`` returns None if the profile cannot express the
    tensor; ``codec`` is the only codec that it accepts.
    """

    check: Callable[[str, Object], None]
    read: Callable[[Object], StoredForm | None]
    codec: str
    write: Callable[[TensorSpec], WrittenForm | None]


PROFILES: Mapping[str, Profile] = {
    "zt.sparse_csr/1": Profile(
        check_csr,
        lambda obj: StoredForm(CsrLayout.codec, read_csr(obj)),
        CsrLayout.codec,
        lambda spec: WrittenForm("zt.sparse_csr/1", write_csr(spec)),
    ),
    "zt.sparse_coo/1": Profile(
        check_coo,
        lambda obj: StoredForm(CooLayout.codec, read_coo(obj)),
        CooLayout.codec,
        lambda spec: WrittenForm("zt.sparse_coo/1", dict(spec.params)),
    ),
    MX: Profile(check_mx, read_mx, ScaledCodebookLayout.codec, write_mx),
    QUANT_GROUP: Profile(check_group, read_group, AffineLayout.codec, write_group),
}


_GGUF = Profile(check_gguf, read_gguf, GgmlBlocksLayout.codec, write_gguf)


def _profile(layout: str) -> Profile | None:
    return _GGUF if GGUF(layout) else PROFILES.get(layout)


def written_forms(spec: TensorSpec) -> Iterator[WrittenForm]:
    """Yield the forms in which a tensor can be written, the best first; a reader must read the same tensor from
    them."""
    if spec.codec == DenseLayout.codec:
        yield WrittenForm(DenseLayout.codec, dict(spec.params))
        return
    for profile in (*PROFILES.values(), _GGUF):
        written = profile.write(spec) if profile.codec == spec.codec else None
        if written is not None:
            yield written
    if spec.codec in (CsrLayout.codec, CooLayout.codec):
        return  # tensors that these profiles cannot express would need another codec
    foreign = _NAMESPACED(spec.codec) is not None or spec.codec.startswith(_NAMELESS)
    layout = spec.codec.removeprefix(_NAMELESS) if foreign else f"ingot.{spec.codec}/1"
    yield WrittenForm(layout, dict(spec.params))


def check_profile(location: str, obj: Object) -> None:
    """Check the metadata rules of a known profile; raises ``FormatError`` ``zt2.layout``, ``zt2.size``."""
    profile = _profile(obj.layout)
    if profile is not None:
        profile.check(location, obj)


def stored_form(obj: Object) -> StoredForm:
    """Return the description of a valid object as a codec of Ingot."""
    attributes = obj.attributes if isinstance(obj.attributes, dict) else {}
    if obj.layout == DenseLayout.codec:
        return StoredForm(DenseLayout.codec, attributes)
    ingot_codec = _INGOT_PROFILE(obj.layout)
    if ingot_codec is not None:
        return StoredForm(ingot_codec[1], attributes)
    profile = _profile(obj.layout)
    stored = None if profile is None else profile.read(obj)
    if stored is not None:
        return stored
    return StoredForm(obj.layout if _NAMESPACED(obj.layout) else f"{_NAMELESS}{obj.layout}", attributes)
