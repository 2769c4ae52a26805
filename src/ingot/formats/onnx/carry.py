"""Which constants and operators a graph gets for a tensor, by its name and how it is stored (spec/onnx.md)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ingot.formats.onnx.forms import Form, Versions, dense_form, dequantize_form, nbits_form
from ingot.formats.onnx.graph import Model
from ingot.formats.onnx.sites import LeftError, Site
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.scaled_codebook import ScaledCodebookLayout
from ingot.model.spec import TensorSpec

_ADDED = re.compile(r"(?:(?:_DQ)?_Q[248]|_quantized|_DequantizeLinear_Output|_dequantized)$")
_TURNED_BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class Planned:
    """How one tensor is written: kept as it is (``form`` None), or with other constants and operators.

    ``turned`` tells that its rows are outputs, as ``MatMulNBits`` has them; ``local`` is the name in its graph of its
    values, or of the codes that this operator takes.
    """

    site: Site
    spec: TensorSpec
    form: Form | None
    local: str
    turned: bool = False


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor that a model can have: where, and whether as ``MatMulNBits`` has it.

    ``local`` is its name in its graph. ``others`` are the names under which it has its rows and columns the other way
    round than the graph has them now.
    """

    site: Site
    turned: bool
    local: str
    others: tuple[str, ...] = ()


def original(name: str) -> str:
    """Return the name that a constant had before onnxruntime's quantizers, or Ingot, made codes of it."""
    return _ADDED.sub("", name) or name


def names_of(model: Model, sites: Iterable[Site]) -> dict[str, Named]:
    """Return every name under which a tensor may be written.

    A matrix of ``MatMul``, [inputs, outputs], becomes one of ``MatMulNBits``, [outputs, inputs], under a name of its
    own, and back: so nobody takes one for the other.
    """
    sites, named = list(sites), dict[str, Named]()
    taken = {site.name for site in sites}
    for site in sites:
        others: dict[str, str] = {}
        if site.turned and not site.stays:
            local = original(site.local)
            local = f"{site.local}_dense" if local in model.names else local
            others[site.graph.path + local] = local
        elif site.matmuls and not site.stays:
            others = {f"{site.name}_Q{bits}": f"{site.local}_Q{bits}" for bits in _TURNED_BITS}
        free = {name: local for name, local in others.items() if name not in taken and local not in model.names}
        taken.update(free)
        named[site.name] = Named(site, site.turned, site.local, tuple(free))
        named.update({name: Named(site, not site.turned, local, tuple(free)) for name, local in free.items()})
    return named


def other_name(named: Named, bits: int = 4) -> str | None:
    """Return the name of a tensor with its rows and columns turned; None where the graph has no place for it."""
    if named.site.turned:
        return named.others[0] if named.others else None
    return next((name for name in named.others if name.endswith(f"_Q{bits}")), None)


def plan_tensor(model: Model | None, named: Named, spec: TensorSpec) -> Planned:
    """Return how a graph gets a tensor; raises ``LeftError`` where it cannot."""
    site, turned = named.site, named.turned
    if turned == site.turned and same_storage(site, spec):
        return Planned(site, spec, None, named.local, turned)
    shape = site.shape if turned == site.turned else site.shape[::-1]
    if (spec.shape, spec.dtype) != (shape, site.dtype):
        raise LeftError(f"the graph has {site.dtype} {list(shape)} there, found {spec.dtype} {list(spec.shape)}")
    if site.stays:
        raise LeftError(f"it stays as it is: {site.stays}")
    versions = Versions() if model is None else Versions(model.opset, model.ir_version)
    if turned:
        return Planned(site, spec, nbits_form(spec), named.local, turned)
    return Planned(site, spec, form_of(spec, versions), named.local, turned)


def form_of(spec: TensorSpec, versions: Versions) -> Form:
    """Return constants for a tensor that are there for any operator; raises ``LeftError``."""
    if spec.codec == DenseLayout.codec:
        return dense_form(spec)
    return dequantize_form(spec, versions)


def same_storage(site: Site, spec: TensorSpec) -> bool:
    """Whether a tensor is stored as the graph has it."""
    own = site.spec()
    return (own.shape, own.dtype, own.codec, own.parts, dict(own.params)) == (
        *(spec.shape, spec.dtype, spec.codec, spec.parts),
        dict(spec.params),
    )


def reason_against(spec: TensorSpec) -> str | None:
    """Why no graph can have such a tensor; None if one can."""
    if spec.codec not in (DenseLayout.codec, AffineLayout.codec, ScaledCodebookLayout.codec):
        return f"no operator says what codec {spec.codec} says"
    try:
        form_of(spec, Versions())
    except LeftError as reason:
        if spec.codec != AffineLayout.codec:
            return str(reason)
        try:
            nbits_form(spec)
        except LeftError:
            return str(reason)
    return None
