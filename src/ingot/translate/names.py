"""Translation of tensor names between transformers and llama.cpp, by the tables of the package gguf."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ingot.core.border import require
from ingot.errors import UnsupportedError
from ingot.translate import next_token
from ingot.translate.families import UNSUPPORTED, Family

EXTRA = "gguf"
_BLOCK = re.compile(r"blk\.([0-9]{1,6})\.(.+)")
_BIAS = ".bias"
_STACKED = (".weight", ".input_scale", ".scale")
_PARAMETERS = (*_STACKED, _BIAS)
_PREDICTORS = {gguf_name: name for name, gguf_name in next_token.MODULES.items()}


class Expert(NamedTuple):
    """A tensor of one expert: its layer's index, the expert's index, and llama.cpp's name of the stacked tensor."""

    layer: int
    expert: int
    stacked: str


class Names:
    """The translation of one family's tensor names.

    Parameters
    ----------
    family : Family
    base : str
        Prefix of transformers' names; only the names of a head lack it.
    has_classifier : bool
        Whether the model has the family's classifier (``Family.classifier``).

    Raises
    ------
    MissingExtraError
        The package gguf is not installed.
    UnsupportedError
        ``architecture.unknown``: the installed version does not support the architecture.
    """

    def __init__(self, family: Family, base: str = "", *, has_classifier: bool = False) -> None:
        self._family = family
        self._base = base
        self._gguf_names = _table(family.arch)
        self._layer = re.compile(rf"{re.escape(family.block)}\.([0-9]{{1,6}})\.(.+)")
        ends = {module: module for module in family.ends if module not in family.classifier}
        ends |= family.classifier if has_classifier else {}
        self._ends = {
            module: name for module, key in ends.items() if (name := self._gguf_names.get_name(key)) is not None
        }
        self._modules_by_gguf_name = {name: module for module, name in reversed(self._ends.items())}
        for module in family.layer:
            name = self._gguf_names.get_name(f"{family.block}.0.{module}")
            if name is not None:
                self._modules_by_gguf_name.setdefault(name, f"{family.block}.0.{module}")
        self._named = {gguf_name: model_name for model_name, gguf_name in family.names.items()}

    def layer(self, name: str) -> tuple[int, str] | None:
        """Return the index of a transformers tensor's layer, and the name within the layer; None outside of layers."""
        match = self._layer.fullmatch(name.removeprefix(self._family.base))
        return None if match is None else (int(match[1]), match[2])

    def to_gguf(self, name: str) -> str | None:
        """Return llama.cpp's name for a transformers name; None if llama.cpp has no such tensor."""
        layer = self.layer(name)
        if layer is None:
            outside = name.removeprefix(self._family.base)
            if outside in self._family.names:
                return self._family.names[outside]
            module, parameter = _split(outside)
            return _join(self._ends.get(module) if self._is_supported(module, parameter) else None, parameter)
        index, inner = layer
        if inner in self._family.names:
            return f"blk.{index}.{self._family.names[inner]}"
        module, parameter = _split(inner)
        separate = self._name_outside_of_the_table(module, parameter)
        if separate is not None:
            return f"blk.{index}.{separate}{parameter}"
        if module not in self._family.layer or not self._is_supported(module, parameter):
            return None
        gguf_name = self._gguf_names.get_name(f"{self._family.block}.0.{module}")
        return _join(gguf_name and f"blk.{index}.{gguf_name.removeprefix('blk.0.')}", parameter)

    def _name_outside_of_the_table(self, module: str, parameter: str) -> str | None:
        """Return llama.cpp's name of a module that gguf's table lacks: stacked experts, and layers that predict further
        tokens.
        """
        if self._family.predicts and module in next_token.MODULES:
            return next_token.MODULES[module]
        experts = self._family.experts
        prefix, _, last = module.rpartition(".")
        if experts is None or prefix != experts.prefix or last not in experts.modules or parameter not in _STACKED:
            return None
        return f"ffn_{experts.modules[last]}_exps"

    def _is_supported(self, module: str, parameter: str) -> bool:
        """Return whether llama.cpp has this parameter of a module; it has biases only for certain modules."""
        biased = self._family.biased
        return parameter != _BIAS or biased is None or module in biased

    def to_model(self, name: str) -> str | None:
        """Return transformers' name for a llama.cpp name; None if transformers has no such tensor."""
        named = _BLOCK.fullmatch(name)
        inner = self._named.get(name if named is None else named[2])
        if inner is not None:
            return self._base + inner if named is None else f"{self._base}{self._family.block}.{int(named[1])}.{inner}"
        module, parameter = _split(name)
        block = _BLOCK.fullmatch(module)
        if block is None:
            end = self._modules_by_gguf_name.get(module)
            return _join(end and (end if end in self._family.heads else self._base + end), parameter)
        predictor = _PREDICTORS.get(block[2]) if self._family.predicts else None
        if predictor is not None:
            return f"{self._base}{self._family.block}.{int(block[1])}.{predictor}{parameter}"
        module_name = self._modules_by_gguf_name.get(f"blk.0.{block[2]}")
        if module_name is None:
            return None
        inner = module_name.removeprefix(f"{self._family.block}.0.") + parameter
        return f"{self._base}{self._family.block}.{int(block[1])}.{inner}"

    def expert(self, name: str) -> Expert | None:
        """Return the expert of a tensor with a transformers name; None if the tensor belongs to no expert."""
        experts = self._family.experts
        layer = self.layer(name)
        if experts is None or layer is None or not layer[1].startswith(f"{experts.prefix}."):
            return None
        index, _, tail = layer[1].removeprefix(f"{experts.prefix}.").partition(".")
        module, parameter = _split(tail)
        part = experts.modules.get(module)
        if part is None or parameter not in _STACKED or not (index.isascii() and index.isdigit()) or len(index) > 6:
            return None
        return Expert(layer[0], int(index), f"blk.{layer[0]}.ffn_{part}_exps{parameter}")

    def experts(self, name: str, count: int) -> list[str] | None:
        """Return transformers' names of the ``count`` tensors in llama.cpp's stack ``name``; None if it is no stack."""
        block = _BLOCK.fullmatch(name)
        experts = self._family.experts
        if experts is None or block is None:
            return None
        stacked, parameter = _split(block[2])
        for module, part in experts.modules.items():
            if stacked == f"ffn_{part}_exps" and parameter in _STACKED:
                start = f"{self._family.block}.{int(block[1])}.{experts.prefix}"
                return [f"{start}.{index}.{module}{parameter}" for index in range(count)]
        return None


def _table(arch: str) -> Any:
    gguf = require("gguf", EXTRA)
    arch_id = next((key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), None)
    if arch_id is None:
        raise UnsupportedError(
            f"the installed package gguf does not support the architecture {arch}; upgrade it, or keep the names "
            "(--keep-names)",
            rule=UNSUPPORTED,
        )

    # The package changes the table in place for an architecture, so that each architecture needs a copy.
    table: Any = gguf.TensorNameMap
    return type("ArchitectureNameMap", (table,), {"block_mappings_cfg": dict(table.block_mappings_cfg)})(arch_id, 1)


def _split(name: str) -> tuple[str, str]:
    parameter = next((ending for ending in _PARAMETERS if name.endswith(ending)), "")
    return name.removesuffix(parameter), parameter


def _join(module: str | None, parameter: str) -> str | None:
    return module and module + parameter
