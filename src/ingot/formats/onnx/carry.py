"""The constants and operators of a graph for a tensor, from the tensor's name and storage (spec/onnx.md)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ingot.formats.onnx.forms import StorageForm, Versions, dense_form, dequantize_form, nbits_form
from ingot.formats.onnx.graph import Model
from ingot.formats.onnx.sites import LeftError, Site
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.scaled_codebook import ScaledCodebookLayout
from ingot.model.spec import TensorSpec

_ADDED = re.compile(r"(?:(?:_DQ)?_Q[248]|_quantized|_DequantizeLinear_Output|_dequantized)$")
_PACKED_BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan for writing a tensor into a graph.

    If ``storage`` is None, the tensor's constants and operators do not change; otherwise new ones replace them.
    ``transposed`` is true if rows are outputs, as ``MatMulNBits`` requires. ``local`` is the name in the graph of the
    tensor's values, or of the codes for ``MatMulNBits``.
    """

    site: Site
    spec: TensorSpec
    storage: StorageForm | None
    local: str
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Named:
    """A name under which a tensor may be written, with its site and the orientation that the name implies.

    ``transposed`` is true for the orientation of ``MatMulNBits``. ``local`` is the name in the tensor's graph.
    ``alternatives`` are names for the other orientation.
    """

    site: Site
    transposed: bool
    local: str
    alternatives: tuple[str, ...] = ()


def original_name(name: str) -> str:
    """Return the name that a constant had before onnxruntime's quantizers or Ingot replaced it by codes."""
    return _ADDED.sub("", name) or name


def names_of(model: Model, sites: Iterable[Site]) -> dict[str, Named]:
    """Return every name under which a tensor may be written.

    A matrix of ``MatMul``, [inputs, outputs], can become a matrix of ``MatMulNBits``, [outputs, inputs], and back. The
    orientations have different names, so that they cannot be confused.
    """
    sites = list(sites)
    named = dict[str, Named]()
    used = {site.name for site in sites}
    for site in sites:
        local_names: dict[str, str] = {}
        if site.transposed and not site.stays:
            local = original_name(site.local)
            local = f"{site.local}_dense" if local in model.names else local
            local_names[site.graph.path + local] = local
        elif site.matmuls and not site.stays:
            local_names = {f"{site.name}_Q{bits}": f"{site.local}_Q{bits}" for bits in _PACKED_BITS}
        free = {name: local for name, local in local_names.items() if name not in used and local not in model.names}
        used.update(free)
        named[site.name] = Named(site, site.transposed, site.local, tuple(free))
        named.update({name: Named(site, not site.transposed, local, tuple(free)) for name, local in free.items()})
    return named


def other_name(named: Named, bits: int = 4) -> str | None:
    """Return the tensor's name in the other orientation; None if the graph cannot contain it.

    ``bits`` are the bits of the codes for ``MatMulNBits``.
    """
    if named.site.transposed:
        return named.alternatives[0] if named.alternatives else None
    return next((name for name in named.alternatives if name.endswith(f"_Q{bits}")), None)


def plan_tensor(model: Model | None, named: Named, spec: TensorSpec) -> Planned:
    """Return the plan for a tensor in a graph; raises ``LeftError`` if the graph cannot contain it."""
    site = named.site
    transposed = named.transposed
    if transposed == site.transposed and same_storage(site, spec):
        return Planned(site, spec, None, named.local, transposed)
    shape = site.shape if transposed == site.transposed else site.shape[::-1]
    if (spec.shape, spec.dtype) != (shape, site.dtype):
        raise LeftError(
            f"the graph has {site.dtype} {list(shape)} under this name, found {spec.dtype} {list(spec.shape)}"
        )
    if site.stays:
        raise LeftError(f"it cannot be changed: {site.stays}")
    versions = Versions() if model is None else Versions(model.opset, model.ir_version)
    if transposed:
        return Planned(site, spec, nbits_form(spec), named.local, transposed)
    return Planned(site, spec, storage_form(spec, versions), named.local, transposed)


def storage_form(spec: TensorSpec, versions: Versions) -> StorageForm:
    """Return the storage of a tensor whose values any operator can use, not only ``MatMul``; raises ``LeftError``."""
    if spec.codec == DenseLayout.codec:
        return dense_form(spec)
    return dequantize_form(spec, versions)


def same_storage(site: Site, spec: TensorSpec) -> bool:
    """Return whether a tensor is stored as in the graph."""
    present = site.spec()
    return (present.shape, present.dtype, present.codec, present.parts, dict(present.params)) == (
        *(spec.shape, spec.dtype, spec.codec, spec.parts),
        dict(spec.params),
    )


def why_unsupported(spec: TensorSpec) -> str | None:
    """Return why no graph can contain the tensor; None if one can."""
    if spec.codec not in (DenseLayout.codec, AffineLayout.codec, ScaledCodebookLayout.codec):
        return f"no operator of ONNX can express codec {spec.codec}"
    try:
        storage_form(spec, Versions())
    except LeftError as reason:
        if spec.codec != AffineLayout.codec:
            return str(reason)
        try:
            nbits_form(spec)
        except LeftError:
            return str(reason)
    return None
