"""Weights that another program has packed: their words are no weights, and Ingot has no decoder for them yet.

A folder says so in ``config.json`` (``quantization_config``); a file alone by the names and element types of its
tensors, such as ``X.qweight`` beside ``X.qzeros``. Layouts: the packages named in the table, each as it saves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.errors import UnsupportedError
from ingot.model.layouts.dense import DenseLayout
from ingot.model.tensor import Tensor
from ingot.naming.names import any_ends

RULE = "model.quantized"

_WORDS = ("i8", "u8", "i16", "i32", "u32", "i64")
_BYTES = ("i8", "u8", "f8_e4m3fn", "f8_e5m2", "f8_e4m3fnuz", "f8_e5m2fnuz", "f4_e2m1fn")


@dataclass(frozen=True, slots=True)
class Dialect:
    """Who packed the weights (``quant_method``, or names of programs), and where that was seen."""

    name: str
    where: str

    def refusal(self) -> UnsupportedError:
        """Return the error for whoever wants values."""
        return UnsupportedError(
            f"expected weights that Ingot decodes, found those of {self.name}, whose packed words are no weights; "
            "start from the checkpoint it was made of, or undo the packing with the program that made it",
            rule=RULE,
            where=self.where,
        )

    def note(self) -> str:
        """Return what to tell where words are shown and not values."""
        return f"packed by {self.name}: what is stored under the names of weights are words that Ingot does not decode"


@dataclass(frozen=True, slots=True)
class _Sign:
    """A tensor ``X + packed`` of one of the element types, beside ``X + other`` for one of the others."""

    name: str
    packed: str
    dtypes: tuple[str, ...]
    others: tuple[str, ...]


# The first sign that fits is told: what says more of who packed comes first.
_SIGNS = (
    _Sign("GPTQ or AWQ", ".qweight", _WORDS, (".qzeros", ".scales")),
    _Sign("compressed-tensors", ".weight_packed", _WORDS, (".weight_scale",)),
    _Sign("HQQ", ".W_q", _WORDS, (".scale", ".zero")),
    _Sign("torchao", "._weight_qdata", _BYTES, ("._weight_scale",)),
    _Sign("quanto", "._data._data", _BYTES, ("._scale",)),
    _Sign("quanto", "._data", _BYTES, ("._scale",)),
    _Sign("AQLM", ".codes", _WORDS, (".codebooks",)),
    _Sign("VPTQ", ".indices", _WORDS, (".centroids", ".centroids.weight")),
    _Sign("QuIP#", ".Qidxs", _WORDS, (".SU", ".SV")),
    _Sign("EXL3", ".trellis", _WORDS, (".suh", ".svh")),
    _Sign("EXL2", ".q_weight", _WORDS, (".q_scale",)),
    _Sign("MXFP4 (gpt-oss)", "_blocks", ("u8",), ("_scales",)),
    _Sign("bitsandbytes", ".weight", ("u8", "i8"), (".weight.absmax", ".weight.quant_map", ".SCB", ".weight.SCB")),
    _Sign("FP8 with a scale per block", ".weight", _BYTES, (".weight_scale_inv",)),
    _Sign("NVFP4 (ModelOpt)", ".weight", _BYTES, (".weight_scale_2",)),
    _Sign(
        "compressed-tensors, ModelOpt or FP8", ".weight", _BYTES, (".weight_scale", ".scale_weight", ".weight_scales")
    ),
    _Sign("MLX (open the folder with its config.json)", ".weight", ("u32",), (".scales",)),
    _Sign("a program that keeps scales beside 8 bits", ".weight", _BYTES, (".scale", ".scales")),
)


_ALONE = {
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".W_q": "HQQ",
    "._weight_qdata": "torchao",
    "._data._data": "quanto",
}
"""Ends of names that only packed codes have, whatever lies beside them."""
_OTHERS = tuple({other for sign in _SIGNS for other in sign.others} | set(_ALONE))


def of_config(config: Mapping[str, Any], where: str) -> Dialect | None:
    """Return the dialect that a ``config.json`` names; None if it names none.

    ``quantization_config`` without ``quant_method`` is MLX's, which its format reads.
    """
    for holder in (config, config.get("text_config")):
        if not isinstance(holder, Mapping):
            continue
        for key in ("quantization_config", "compression_config"):
            stated = holder.get(key)
            if isinstance(stated, Mapping) and stated.get("quant_method"):
                return Dialect(f"quant_method {str(stated['quant_method'])[:80]!r}", where)
    return None


def of_tensors(tensors: Mapping[str, Tensor]) -> Dialect | None:
    """Return the dialect that the tensors' names and element types show; None if they show none.

    Asks for an element type only where two names fit, so that it is quick on any number of tensors.
    """
    if not any_ends(tensors, _OTHERS):
        return None
    names = set(tensors)
    for name in tensors:
        for sign in _SIGNS:
            if not name.endswith(sign.packed):
                continue
            stem = name.removesuffix(sign.packed)
            other = next((stem + ending for ending in sign.others if stem + ending in names), None)
            if other is not None and tensors[name].codec == DenseLayout.codec and tensors[name].dtype in sign.dtypes:
                return Dialect(sign.name, f"{name}, beside {other}")
    for name in tensors if any_ends(tensors, tuple(_ALONE)) else ():
        ending = next((ending for ending in _ALONE if name.endswith(ending)), None)
        if ending is not None and tensors[name].codec == DenseLayout.codec and tensors[name].dtype in _BYTES + _WORDS:
            return Dialect(_ALONE[ending], name)
    return None
