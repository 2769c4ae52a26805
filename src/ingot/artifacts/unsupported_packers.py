"""Detection of weights that another program packed and that Ingot cannot decode.

The ``config.json`` of a folder states the packing (``quantization_config``). In a single file the names and element
types of tensors indicate it, such as ``X.qweight`` next to ``X.qzeros``.
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
class Packer:
    """The tool that packed weights, and the location of the evidence.

    ``name`` is the value of ``quant_method``, or the names of the tools that may have packed the weights.
    """

    name: str
    location: str

    def refusal(self) -> UnsupportedError:
        """Return the error for operations that need decoded values."""
        return UnsupportedError(
            f"expected weights that Ingot can decode, found weights packed by {self.name}; start from the checkpoint "
            "before packing, or undo the packing with the program that packed it",
            rule=RULE,
            where=self.location,
        )

    def note(self) -> str:
        """Return a note for operations that show packed words instead of values."""
        return f"packed by {self.name}: the tensors contain packed words that Ingot does not decode"


@dataclass(frozen=True, slots=True)
class _Sign:
    """The names and dtypes by which a packing is detected.

    A tensor ``X + packed`` has one of ``dtypes``, and for one of ``companions`` there is a tensor ``X + companion``.
    """

    name: str
    packed: str
    dtypes: tuple[str, ...]
    companions: tuple[str, ...]


# The first sign that matches is reported: more specific signs come first.
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


_SUFFICIENT = {
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".W_q": "HQQ",
    "._weight_qdata": "torchao",
    "._data._data": "quanto",
}
"""Endings of names that indicate packed codes without further evidence, and the tools that use them."""
_EVIDENCE = tuple({ending for sign in _SIGNS for ending in sign.companions} | set(_SUFFICIENT))


def packer_of_config(config: Mapping[str, Any], location: str) -> Packer | None:
    """Return the packer that a ``config.json`` states; None if it states none.

    A ``quantization_config`` without ``quant_method`` is that of MLX, which Ingot supports.
    """
    for section in (config, config.get("text_config")):
        if not isinstance(section, Mapping):
            continue
        for key in ("quantization_config", "compression_config"):
            quantization = section.get(key)
            if isinstance(quantization, Mapping) and quantization.get("quant_method"):
                return Packer(f"quant_method {str(quantization['quant_method'])[:80]!r}", location)
    return None


def packer_of_tensors(tensors: Mapping[str, Tensor]) -> Packer | None:
    """Return the packer that the names and element types of tensors indicate; None if they indicate none.

    Element types are read only if the names match, so that the check is fast for many tensors.
    """
    if not any_ends(tensors, _EVIDENCE):
        return None
    names = set(tensors)
    for name in tensors:
        for sign in _SIGNS:
            if not name.endswith(sign.packed):
                continue
            stem = name.removesuffix(sign.packed)
            evidence = next((stem + ending for ending in sign.companions if stem + ending in names), None)
            if evidence is not None and tensors[name].codec == DenseLayout.codec and tensors[name].dtype in sign.dtypes:
                return Packer(sign.name, f"{name}, next to {evidence}")
    for name in tensors if any_ends(tensors, tuple(_SUFFICIENT)) else ():
        ending = next((ending for ending in _SUFFICIENT if name.endswith(ending)), None)
        if ending is not None and tensors[name].codec == DenseLayout.codec and tensors[name].dtype in _BYTES + _WORDS:
            return Packer(_SUFFICIENT[ending], name)
    return None
