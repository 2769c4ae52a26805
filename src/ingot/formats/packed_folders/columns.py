"""The base class of GPTQ and AWQ folders, which store a matrix ``X.weight`` in three entries.

The entries are ``X.qweight``, ``X.qzeros`` and ``X.scales``; their last dimension is the outputs of the matrix.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

import numpy as np

from ingot.errors import FormatError, IngotError, UnsupportedError
from ingot.formats.packed_folders.base import HUGGING_FACE, WEIGHT, Config, Entries, Layer, WritablePackedFolderFormat
from ingot.formats.safetensors.pieces import FileEntry
from ingot.model.artifact import Artifact
from ingot.model.layouts.affine import CODES, SCALES, ZEROS, Constant
from ingot.model.layouts.base import Shape
from ingot.model.layouts.dense import DATA
from ingot.model.layouts.packed_ints import PACKING_FORMS, PackedIntLayout
from ingot.model.reading.ranges import is_remote
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Array
from ingot.naming.names import layer_of, role_of

QWEIGHT = ".qweight"
QZEROS = ".qzeros"
QSCALES = ".scales"
SCALE_DTYPES = ("f16", "bf16", "f32")
WRITTEN_SCALES = ("f16", "bf16")
_PATTERN = frozenset("*+?^$()[]{}|\\")
"""Special characters of regular expressions, which do not occur in names of layers."""
_SAMPLE = 1 << 12
"""Bytes of a layer's zero points that are compared when a folder is opened; ``verify`` compares all."""
_DISTANT = 16
"""Number of layers whose zero points are compared when a remote folder is opened."""


@dataclass(frozen=True, slots=True)
class DeclaredPacking:
    """The packing of layers that ``config.json`` declares.

    Parameters
    ----------
    bits : int
    group : int or None
        Columns of a group; None for a complete row.
    rules : mapping
        Settings of layers that differ from ``bits`` and ``group``, by name or pattern.
    """

    bits: int
    group: int | None
    rules: Mapping[str, Config]

    def group_sizes(self, stem: str) -> list[object]:
        """Return the group sizes that the layer ``stem`` may have, as values of ``group_size``.

        If a rule has the layer's name, only the rule's size is possible. Otherwise the layer may have the usual size,
        or the size of any rule with a pattern, because patterns are not evaluated.
        """
        names = (stem, f"+:{stem}", f"^{re.escape(stem)}$", f"+:^{re.escape(stem)}$")
        rule = next((self.rules[name] for name in names if name in self.rules), None)
        if rule is not None:
            return [rule.get("group_size", self.group)]
        patterns = [rule for name, rule in self.rules.items() if not _PATTERN.isdisjoint(name)]
        return [self.group, *(rule.get("group_size", self.group) for rule in patterns)]


class ColumnPackedFormat(WritablePackedFolderFormat):
    """A folder that stores each matrix ``X.weight`` as ``X.qweight``, ``X.qzeros`` and ``X.scales``."""

    traits = replace(
        WritablePackedFolderFormat.traits,
        packed_codecs=(PackedIntLayout.codec,),
    )
    method: ClassVar[str]  # value of ``quant_method`` and first part of the rules
    orders: ClassVar[bool] = False  # whether a file can assign each column to a group
    companions: ClassVar[tuple[str, ...]] = (QWEIGHT, QZEROS, QSCALES)
    symmetric_key: ClassVar[str]  # key of config.json that states whether all zero points equal the middle code

    @property
    def rules(self) -> str:
        """The first part of the error rules: the program's name, which all variants of its format use."""
        return self.method

    def claims_config(self, config: Config) -> bool:
        """Return whether ``quantization_config`` names this program."""
        quantization = config.get(HUGGING_FACE)
        return isinstance(quantization, dict) and quantization.get("quant_method") == self.method

    def layers(self, entries: Entries, config: Config) -> Sequence[Layer]:
        """Return a layer for every ``X.qweight``."""
        stems = [key.removesuffix(QWEIGHT) for key in entries if key.endswith(QWEIGHT)]
        return list(self.layers_of(entries, self.quantization(config), stems))

    @abstractmethod
    def layers_of(self, entries: Entries, quantization: Config, stems: Sequence[str]) -> Iterator[Layer]:
        """Yield the layers whose names are in ``stems``."""

    def number(self, quantization: Config, keys: Sequence[str], low: int, high: int) -> int:
        """Return the integer, from ``low`` to ``high``, under the first existing key of ``keys``.

        Raises ``FormatError`` ``<method>.config``.
        """
        value = next((quantization[key] for key in keys if key in quantization), None)
        if type(value) is not int or not low <= value <= high:
            raise FormatError(
                f"{self.method}.config",
                f"expected {keys[0]} from {low} to {high}, found {str(value)[:40]}",
                where=f"config.json: {HUGGING_FACE}",
            )
        return value

    def group(self, quantization: Config, keys: Sequence[str] = ("group_size",)) -> int | None:
        """Return the declared number of columns of a group; None for a complete row (-1).

        Raises ``FormatError`` ``<method>.config``.
        """
        size = self.number(quantization, keys, -1, 2**31 - 1)
        if size == 0:
            raise FormatError(
                f"{self.method}.config", "expected group_size -1 or at least 1, found 0", where=HUGGING_FACE
            )
        return None if size < 0 else size

    def parse_declared(self, quantization: Config, bits: int, group: int | None) -> DeclaredPacking:
        """Return the declared packing, with the rules in ``dynamic`` for layers with other settings."""
        return DeclaredPacking(bits, group, rules_of(quantization))

    def group_of(self, declared: DeclaredPacking, stem: str, cols: int, groups: int) -> int | None:
        """Return the number of columns of a group in the layer ``stem``; None if a row is one group.

        A row has ``cols`` columns in ``groups`` groups. The result is the declared size that gives this number of
        groups. If no declared size does, it is the size that divides the columns evenly.

        Raises ``FormatError`` ``<method>.shape``: several declared sizes result in this number.
        """
        if groups <= 1:
            return None
        sizes = {size for size in declared.group_sizes(stem) if isinstance(size, int) and size > 0}
        fits = [size for size in sizes if -(-cols // size) == groups]
        if len(fits) > 1:
            text = f"expected one size of groups, found {sorted(fits)} for {groups} groups"
            raise FormatError(f"{self.method}.shape", text, where=stem)
        if fits:
            return fits[0]
        return None if cols % groups else max(cols // groups, 1)

    def shape_of(self, entries: Entries, stem: str, declared: DeclaredPacking) -> tuple[int, int, int, int | None]:
        """Return rows, columns, bits and group size of a layer whose codes are packed along the inputs.

        If the configuration has rules for layers with other settings, bits and group size follow from the entries'
        shapes.
        """
        codes, zeros, scales = (entries[stem + suffix].shape for suffix in (QWEIGHT, QZEROS, QSCALES))
        lines, rows = codes if len(codes) == 2 else (0, 0)
        bits = declared.bits
        group = declared.group
        if declared.rules and len(zeros) == len(scales) == 2 and rows and 32 * zeros[1] % rows == 0:
            bits = min(max(32 * zeros[1] // rows, 1), 8)
        cols = lines * 32 // bits
        if declared.rules and len(scales) == 2:
            group = self.group_of(declared, stem, cols, scales[0])
        return rows, cols, bits, group

    def all_middle(self, entries: Entries, layers: Sequence[Layer]) -> list[bool]:
        """Return, for each layer that is read, whether its first zero points equal the middle code.

        In a remote folder only the first ``_DISTANT`` layers are read, because each read is a request.
        """
        distant = any(is_remote(entries[layer.parts[ZEROS]].parts[DATA].source) for layer in layers)
        return [self.has_middle_zeros(entries, layer) for layer in (layers[:_DISTANT] if distant else layers)]

    @abstractmethod
    def is_symmetric(self, quantization: Config) -> bool:
        """Return whether the configuration declares that all zero points equal the middle code."""

    @abstractmethod
    def middle_zeros(self, layout: PackedIntLayout, shape: Shape) -> tuple[Array, Array]:
        """Return one row of packed middle zero points, u32, and a mask of its significant bits."""

    def has_middle_zeros(self, entries: Entries, layer: Layer, limit: int = _SAMPLE) -> bool:
        """Return whether all zero points in the first ``limit`` bytes of a layer equal the middle code."""
        part = entries[layer.parts[ZEROS]].parts[DATA]
        line, mask = self.middle_zeros(words_layout(layer), layer.shape)
        stored = np.empty(min(part.nbytes, limit) // 4 * 4, np.uint8)
        part.readinto(0, stored.data)
        packed = stored.view("<u4")
        if not line.size:
            return True
        return not ((packed ^ np.resize(line, packed.size)) & np.resize(mask, packed.size)).any()

    def contradiction(self, layer: Layer) -> FormatError:
        """Return the error for a layer whose zero points contradict a declaration of symmetric codes."""
        return FormatError(
            f"{self.method}.zero-points",
            f"expected zero points that are all {words_layout(layer).point}, as {self.symmetric_key} in config.json "
            f"states, found others: some programs use them, others do not; correct {self.symmetric_key}, or get the "
            "folder again",
            where=layer.parts[ZEROS],
        )

    def check_layers(self, entries: Entries, config: Config, layers: Sequence[Layer]) -> Iterator[IngotError]:
        """Yield an error for each layer whose zero points contradict a declaration of symmetric codes."""
        for layer in layers if self.is_symmetric(self.quantization(config)) else ():
            if not self.has_middle_zeros(entries, layer, entries[layer.parts[ZEROS]].parts[DATA].nbytes):
                yield self.contradiction(layer)

    def build_layer(self, entries: Entries, stem: str, shape: tuple[int, int], layout: PackedIntLayout) -> Layer:
        """Check the entries of a layer against the types and shapes of ``layout``, and return the layer.

        Raises ``FormatError`` ``<method>.dtype``, ``<method>.shape``.
        """
        expected = {
            QWEIGHT: (CODES, ("i32",), layout.code_shape(shape)),
            QZEROS: (ZEROS, ("i32",), layout.zero_shape(shape)),
            QSCALES: (SCALES, SCALE_DTYPES, layout.scale_shape(shape)),
        }
        for suffix, (_, dtypes, size) in expected.items():
            entry = entries[stem + suffix]
            if entry.dtype not in dtypes:
                raise FormatError(
                    f"{self.method}.dtype", f"expected {', '.join(dtypes)}, found {entry.dtype}", where=stem + suffix
                )
            if entry.shape != size:
                raise FormatError(
                    f"{self.method}.shape",
                    f"expected shape {list(size)} for {layout.bits} bits in groups of "
                    f"{layout.group or 'whole rows'} of a matrix {list(shape)}, found {list(entry.shape)}",
                    where=stem + suffix,
                )
        parts = {role: stem + suffix for suffix, (role, _, _) in expected.items()}
        ordered = {role: parts[role] for role in (CODES, SCALES, ZEROS)}
        return Layer(stem + WEIGHT, shape, layout, ordered)

    def why_layer_unsupported(self, spec: TensorSpec) -> str | None:
        """Return why a tensor cannot be a packed layer; None if it can."""
        layout = PackedIntLayout.from_tensor(spec)
        shape = spec.shape
        zero_point = layout.zero.point if isinstance(layout.zero, Constant) else layout.point
        widths = sorted({bits for variant in self.traits.word_forms for bits in PACKING_FORMS[variant].bits})
        reasons = (
            (not spec.name.endswith(WEIGHT), f"its packed layers have names X{WEIGHT}, found {spec.name!r}"),
            (layout.bits not in widths, f"its integers have {', '.join(map(str, widths))} bits, found {layout.bits}"),
            (
                layout.packing not in self.traits.word_forms,
                f"its integers are packed as {' or '.join(self.traits.word_forms)}, found {layout.packing}",
            ),
            (zero_point != layout.point, f"its constant zero point is {layout.point}, found {zero_point}"),
            (layout.order and not self.orders, "its groups are runs of consecutive columns"),
            (
                layout.scales not in WRITTEN_SCALES,
                f"its scales are {' or '.join(WRITTEN_SCALES)}, found {layout.scales}",
            ),
            (any(part.encoding != "raw" for part in spec.parts), "its packed layers are uncompressed"),
            (bool(shape[0] % 32 or shape[1] % 32), f"its rows and columns are multiples of 32, found {list(shape)}"),
            (
                bool(shape[1] % (layout.group or 1)),
                f"its groups divide the columns, found {layout.group} of {shape[1]}",
            ),
        )
        return next((reason for applies, reason in reasons if applies), None)

    def layer_entries(self, spec: TensorSpec) -> list[FileEntry]:
        """Return ``X.qweight``, ``X.qzeros`` and ``X.scales``; constant zero points are generated."""
        layout, stem, shape = PackedIntLayout.from_tensor(spec), spec.name.removesuffix(WEIGHT), spec.shape
        sizes = {part.role: part.length or 0 for part in layout.part_specs(shape)}
        zeros = layout.zero_shape(shape)
        entries = [
            FileEntry(CODES, stem + QWEIGHT, "i32", layout.code_shape(shape), sizes[CODES]),
            FileEntry(SCALES, stem + QSCALES, layout.scales, layout.scale_shape(shape), sizes[SCALES]),
        ]
        count = 4 * prod(zeros)
        content = self.constant_zeros(layout, shape) if ZEROS not in sizes else None
        return [*entries, FileEntry(ZEROS, stem + QZEROS, "i32", zeros, count, content)]

    @abstractmethod
    def constant_zeros(self, layout: PackedIntLayout, shape: Shape) -> Callable[[], bytes]:
        """Return a function that returns the packed middle zero points of a matrix with ``shape``."""

    def dense_layers(self, artifact: Artifact) -> list[str]:
        """Return the dense modules that loaders would expect to be packed unless they are listed."""
        return [
            spec.name.removesuffix(WEIGHT)
            for spec in artifact.tensors
            if spec.codec not in self.traits.packed_codecs
            and spec.name.endswith(WEIGHT)
            and len(spec.shape) == 2
            and layer_of(spec.name) is not None
            and role_of(spec.name) not in ("embedding", "norm")
        ]

    def usual_layout(self, artifact: Artifact) -> tuple[PackedIntLayout | None, Mapping[str, PackedIntLayout]]:
        """Return the most frequent layout of packed layers, and the layouts by module name.

        The most frequent layout is None if no layer is packed.
        """
        layouts = {
            spec.name.removesuffix(WEIGHT): PackedIntLayout.from_tensor(spec)
            for spec in artifact.tensors
            if spec.codec in self.traits.packed_codecs
        }
        if not layouts:
            return None, layouts
        grids = Counter((layout.bits, layout.group) for layout in layouts.values())
        grid = grids.most_common(1)[0][0]
        return next(layout for layout in layouts.values() if (layout.bits, layout.group) == grid), layouts


def rules_of(quantization: Config) -> Mapping[str, Config]:
    """Return the rules in ``dynamic``, which are for layers with other settings, by name or pattern."""
    dynamic = quantization.get("dynamic")
    rules = dynamic.items() if isinstance(dynamic, Mapping) else ()
    return {name: rule for name, rule in rules if isinstance(rule, Mapping)}


def no_rule_is_asymmetric(quantization: Config) -> bool:
    """Return whether no rule in ``dynamic`` sets ``sym`` to false, so that zero points are middle codes."""
    return all(rule.get("sym") in (None, True) for rule in rules_of(quantization).values())


def words_layout(layer: Layer) -> PackedIntLayout:
    """Return the layout of a layer of packed integers."""
    assert isinstance(layer.layout, PackedIntLayout)
    return layer.layout


def unsupported(rule: str, expected: str, value: str) -> UnsupportedError:
    """Return the error for a setting of ``config.json`` that Ingot does not support."""
    return UnsupportedError(f"expected {expected}, found {value}", rule=rule, where=f"config.json: {HUGGING_FACE}")
