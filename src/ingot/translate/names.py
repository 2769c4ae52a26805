"""Names of tensors there and here; llama.cpp's are those of the package gguf."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ingot.core.border import require
from ingot.errors import UnsupportedError
from ingot.translate.families import Family

EXTRA = "gguf"
_BLOCK = re.compile(r"blk\.([0-9]{1,6})\.(.+)")
_BIAS = ".bias"
_STACKED = (".weight", ".input_scale", ".scale")
_PARAMETERS = (*_STACKED, _BIAS)


class Expert(NamedTuple):
    """A tensor of one expert: its layer and index, and the name of the tensor that holds those of all experts."""

    layer: int
    number: int
    stacked: str


class Names:
    """The names of one family.

    Parameters
    ----------
    family : Family
    base : str
        Beginning of transformers' names, except of those of a head.
    classifies : bool
        Whether the model has the family's classifier (``Family.classifier``).

    Raises
    ------
    MissingExtraError
        The package gguf is not installed.
    UnsupportedError
        ``architecture.unknown``: the installed one does not know the architecture.
    """

    def __init__(self, family: Family, base: str = "", *, classifies: bool = False) -> None:
        self._family = family
        self._base = base
        self._there = _table(family.arch)
        self._layer = re.compile(rf"{re.escape(family.block)}\.([0-9]{{1,6}})\.(.+)")
        ends = {module: module for module in family.ends if module not in family.classifier}
        ends |= family.classifier if classifies else {}
        self._ends = {module: name for module, key in ends.items() if (name := self._there.get_name(key)) is not None}
        self._here = {name: module for module, name in reversed(self._ends.items())}
        for module in family.layer:
            name = self._there.get_name(f"{family.block}.0.{module}")
            if name is not None:
                self._here.setdefault(name, f"{family.block}.0.{module}")
        self._spelled = {there: here for here, there in family.spelled.items()}

    def layer(self, name: str) -> tuple[int, str] | None:
        """Return the number of the layer that a tensor of transformers' belongs to, and its name there."""
        found = self._layer.fullmatch(name.removeprefix(self._family.base))
        return None if found is None else (int(found[1]), found[2])

    def to_gguf(self, name: str) -> str | None:
        """Return llama.cpp's name of a tensor; None if it has none."""
        layer = self.layer(name)
        if layer is None:
            module, parameter = _split(name.removeprefix(self._family.base))
            return _join(self._ends.get(module) if self._has(module, parameter) else None, parameter)
        number, inner = layer
        module, parameter = _split(self._family.spelled.get(inner, inner))
        if module not in self._family.layer or not self._has(module, parameter):
            return None
        found = self._there.get_name(f"{self._family.block}.0.{module}")
        return _join(found and f"blk.{number}.{found.removeprefix('blk.0.')}", parameter)

    def _has(self, module: str, parameter: str) -> bool:
        """Return whether llama.cpp has a parameter of a module: of biases only some, and it refuses all others."""
        biased = self._family.biased
        return parameter != _BIAS or biased is None or module in biased

    def to_model(self, name: str) -> str | None:
        """Return transformers' name of a tensor; None where it has none."""
        module, parameter = _split(name)
        block = _BLOCK.fullmatch(module)
        if block is None:
            end = self._here.get(module)
            return _join(end and (end if end in self._family.heads else self._base + end), parameter)
        found = self._here.get(f"blk.0.{block[2]}")
        if found is None:
            return None
        inner = found.removeprefix(f"{self._family.block}.0.") + parameter
        return f"{self._base}{self._family.block}.{int(block[1])}.{self._spelled.get(inner, inner)}"

    def expert(self, name: str) -> Expert | None:
        """Return the expert that a tensor belongs to, by transformers' name; None for any other tensor."""
        experts = self._family.experts
        layer = self.layer(name)
        if experts is None or layer is None or not layer[1].startswith(f"{experts.prefix}."):
            return None
        number, _, rest = layer[1].removeprefix(f"{experts.prefix}.").partition(".")
        module, parameter = _split(rest)
        part = experts.modules.get(module)
        if part is None or parameter not in _STACKED or not (number.isascii() and number.isdigit()) or len(number) > 6:
            return None
        return Expert(layer[0], int(number), f"blk.{layer[0]}.ffn_{part}_exps{parameter}")

    def experts(self, name: str, count: int) -> list[str] | None:
        """Return transformers' names of what llama.cpp stacks under a name; None for any other."""
        block = _BLOCK.fullmatch(name)
        experts = self._family.experts
        if experts is None or block is None:
            return None
        stacked, parameter = _split(block[2])
        for module, part in experts.modules.items():
            if stacked == f"ffn_{part}_exps" and parameter in _STACKED:
                start = f"{self._family.block}.{int(block[1])}.{experts.prefix}"
                return [f"{start}.{number}.{module}{parameter}" for number in range(count)]
        return None


def _table(arch: str) -> Any:
    gguf = require("gguf", EXTRA)
    known = next((key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), None)
    if known is None:
        raise UnsupportedError(
            f"expected an architecture that the package gguf knows, found {arch}; a newer one may, or keep the names "
            "(--keep-names)",
            rule="architecture.unknown",
        )

    # The package's table changes itself by what one architecture has of its own: each gets a copy.
    table: Any = gguf.TensorNameMap
    return type("Own", (table,), {"block_mappings_cfg": dict(table.block_mappings_cfg)})(known, 1)


def _split(name: str) -> tuple[str, str]:
    parameter = next((ending for ending in _PARAMETERS if name.endswith(ending)), "")
    return name.removesuffix(parameter), parameter


def _join(module: str | None, parameter: str) -> str | None:
    return module and module + parameter
