"""Names of tensors there and here; llama.cpp's are those of the package gguf."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ingot.core.extras import require
from ingot.errors import UnsupportedError
from ingot.ops.architectures.families import Family

EXTRA = "gguf"
_LAYER = re.compile(r"model\.layers\.([0-9]{1,6})\.(.+)")
_BLOCK = re.compile(r"blk\.([0-9]{1,6})\.(.+)")
_PARAMETERS = (".weight", ".bias", ".input_scale", ".scale")


class Expert(NamedTuple):
    """One expert's matrix: its layer and number, and the name of the tensor that holds those of all experts."""

    layer: int
    number: int
    stacked: str


class Names:
    """The names of one family.

    Raises
    ------
    MissingExtraError
        The package gguf is not installed.
    UnsupportedError
        ``architecture.unknown``: the installed one does not know the architecture.
    """

    def __init__(self, family: Family) -> None:
        self._family = family
        self._there = _table(family.arch)
        self._here: dict[str, str] = {}
        for module in (*family.ends, *(f"model.layers.0.{module}" for module in family.layer)):
            name = self._there.get_name(module)
            if name is not None:
                self._here.setdefault(name, module)

    def to_gguf(self, name: str) -> str | None:
        """Return llama.cpp's name of a tensor; None where it has none."""
        module, parameter = _split(name)
        layer = _LAYER.fullmatch(module)
        if layer is None:
            return _join(self._there.get_name(module) if module in self._family.ends else None, parameter)
        if layer[2] not in self._family.layer:
            return None
        found = self._there.get_name(f"model.layers.0.{layer[2]}")
        return _join(found and f"blk.{int(layer[1])}.{found.removeprefix('blk.0.')}", parameter)

    def to_model(self, name: str) -> str | None:
        """Return transformers' name of a tensor; None where it has none."""
        module, parameter = _split(name)
        block = _BLOCK.fullmatch(module)
        if block is None:
            return _join(self._here.get(module), parameter)
        found = self._here.get(f"blk.0.{block[2]}")
        return _join(found and f"model.layers.{int(block[1])}.{found.removeprefix('model.layers.0.')}", parameter)

    def expert(self, name: str) -> Expert | None:
        """Return which expert's a tensor is, by transformers' name; None for any other."""
        experts, layer = self._family.experts, _LAYER.fullmatch(name)
        if experts is None or layer is None or not layer[2].startswith(f"{experts.prefix}."):
            return None
        number, _, rest = layer[2].removeprefix(f"{experts.prefix}.").partition(".")
        part = experts.modules.get(rest.removesuffix(".weight"))
        if (
            part is None
            or not rest.endswith(".weight")
            or not (number.isascii() and number.isdigit())
            or len(number) > 6
        ):
            return None
        return Expert(int(layer[1]), int(number), f"blk.{int(layer[1])}.ffn_{part}_exps.weight")

    def experts(self, name: str, count: int) -> list[str] | None:
        """Return transformers' names of what llama.cpp stacks under a name; None for any other."""
        block, experts = _BLOCK.fullmatch(name), self._family.experts
        if experts is None or block is None:
            return None
        for module, part in experts.modules.items():
            if block[2] == f"ffn_{part}_exps.weight":
                start = f"model.layers.{int(block[1])}.{experts.prefix}"
                return [f"{start}.{number}.{module}.weight" for number in range(count)]
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
