"""What GPTQ and AWQ folders share: ``X.qweight``, ``X.qzeros`` and ``X.scales``, outputs along the last dimension."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import ClassVar

from ingot.core.names import layer_of, role_of
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.dialects.base import HUGGING_FACE, WEIGHT, Config, Entries, Layer, PackingDialect
from ingot.formats.safetensors.pieces import Piece
from ingot.model.artifact import Artifact
from ingot.model.layouts.affine import CODES, SCALES, ZEROS, Constant
from ingot.model.layouts.base import Shape
from ingot.model.layouts.words import FORMS, WordsLayout
from ingot.model.spec import TensorSpec

QWEIGHT, QZEROS, QSCALES = ".qweight", ".qzeros", ".scales"
SCALE_DTYPES = ("f16", "bf16", "f32")
WRITTEN_SCALES = ("f16", "bf16")


class ColumnsDialect(PackingDialect):
    """A folder in which ``X.qweight``, ``X.qzeros`` and ``X.scales`` are the matrix ``X.weight``."""

    codecs = (WordsLayout.codec,)
    forms: ClassVar[tuple[str, ...]]
    method: ClassVar[str]  # in ``quant_method``, and before the dot of rules
    orders: ClassVar[bool] = False  # whether a file can say of which group each column is

    @property
    def rules(self) -> str:
        """What rules of refusals begin with: the program's name, whichever of its forms this is."""
        return self.method

    def claims_config(self, config: Config) -> bool:
        """Whether ``quantization_config`` names this program."""
        stated = config.get(HUGGING_FACE)
        return isinstance(stated, dict) and stated.get("quant_method") == self.method

    def layers(self, entries: Entries, config: Config) -> Sequence[Layer]:
        """Return a layer for every ``X.qweight``."""
        stems = [key.removesuffix(QWEIGHT) for key in entries if key.endswith(QWEIGHT)]
        return list(self.layers_of(entries, config[HUGGING_FACE], stems))

    @abstractmethod
    def layers_of(self, entries: Entries, stated: Config, stems: Sequence[str]) -> Iterator[Layer]:
        """Yield the layers called so."""

    def number(self, stated: Config, keys: Sequence[str], low: int, high: int) -> int:
        """Return a whole number that the configuration states under the first of ``keys`` that it has.

        Raises ``FormatError`` ``<method>.config``.
        """
        value = next((stated[key] for key in keys if key in stated), None)
        if type(value) is not int or not low <= value <= high:
            raise FormatError(
                f"{self.method}.config",
                f"expected {keys[0]} from {low} to {high}, found {str(value)[:40]}",
                where=f"config.json: {HUGGING_FACE}",
            )
        return value

    def group(self, stated: Config, keys: Sequence[str] = ("group_size",)) -> int | None:
        """Return the columns of a group, None for a whole row (-1); raises ``FormatError`` ``<method>.config``."""
        size = self.number(stated, keys, -1, 2**31 - 1)
        if size == 0:
            raise FormatError(
                f"{self.method}.config", "expected group_size -1 or at least 1, found 0", where=HUGGING_FACE
            )
        return None if size < 0 else size

    def checked(self, entries: Entries, stem: str, shape: tuple[int, int], layout: WordsLayout) -> Layer:
        """Return the layer if its entries have the types and shapes of ``layout``.

        Raises ``FormatError`` ``<method>.dtype``, ``<method>.shape``.
        """
        wanted = {
            QWEIGHT: (CODES, ("i32",), layout.code_shape(shape)),
            QZEROS: (ZEROS, ("i32",), layout.zero_shape(shape)),
            QSCALES: (SCALES, SCALE_DTYPES, layout.scale_shape(shape)),
        }
        for suffix, (_, dtypes, size) in wanted.items():
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
        parts = {role: stem + suffix for suffix, (role, _, _) in wanted.items()}
        ordered = {role: parts[role] for role in (CODES, SCALES, ZEROS)}
        return Layer(stem + WEIGHT, shape, layout, ordered)

    def refuses_layer(self, spec: TensorSpec) -> str | None:
        """Why a tensor cannot be a packed layer; None if it can."""
        layout, shape = WordsLayout.of(spec), spec.shape
        same = layout.zero.point if isinstance(layout.zero, Constant) else layout.point
        known = sorted({bits for form in self.forms for bits in FORMS[form].bits})
        reasons = (
            (not spec.name.endswith(WEIGHT), f"its packed layers are called X{WEIGHT}, found {spec.name!r}"),
            (layout.bits not in known, f"its integers have {', '.join(map(str, known))} bits, these {layout.bits}"),
            (layout.form not in self.forms, f"its words are of the form {' or '.join(self.forms)}, not {layout.form}"),
            (same != layout.point, f"its one zero point for all codes is {layout.point}, found {same}"),
            (layout.order and not self.orders, "columns of a group lie side by side in it"),
            (layout.scales not in WRITTEN_SCALES, f"its scales are {' or '.join(WRITTEN_SCALES)}, not {layout.scales}"),
            (any(part.encoding != "raw" for part in spec.parts), "its packed layers are uncompressed"),
            (bool(shape[0] % 32 or shape[1] % 32), f"its rows and columns come in 32s, found {list(shape)}"),
            (bool(shape[1] % (layout.group or 1)), f"its groups divide the columns, {layout.group} not {shape[1]}"),
        )
        return next((reason for wrong, reason in reasons if wrong), None)

    def layer_pieces(self, spec: TensorSpec) -> list[Piece]:
        """``X.qweight``, ``X.qzeros``, ``X.scales``; zero points that are all the same are made here."""
        layout, stem, shape = WordsLayout.of(spec), spec.name.removesuffix(WEIGHT), spec.shape
        sizes = {part.role: part.length or 0 for part in layout.part_specs(shape)}
        zeros = layout.zero_shape(shape)
        pieces = [
            Piece(CODES, stem + QWEIGHT, "i32", layout.code_shape(shape), sizes[CODES]),
            Piece(SCALES, stem + QSCALES, layout.scales, layout.scale_shape(shape), sizes[SCALES]),
        ]
        count = 4 * prod(zeros)
        content = self.same_zeros(layout, shape) if ZEROS not in sizes else None
        return [*pieces, Piece(ZEROS, stem + QZEROS, "i32", zeros, count, content)]

    @abstractmethod
    def same_zeros(self, layout: WordsLayout, shape: Shape) -> Callable[[], bytes]:
        """Return what makes the zero points of a matrix of ``shape`` that are all the middle one."""

    def dense_layers(self, artifact: Artifact) -> list[str]:
        """Return the modules whose matrices are left dense and which loaders would look for packed."""
        return [
            spec.name.removesuffix(WEIGHT)
            for spec in artifact.tensors
            if spec.codec not in self.codecs
            and spec.name.endswith(WEIGHT)
            and len(spec.shape) == 2
            and layer_of(spec.name) is not None
            and role_of(spec.name) not in ("embedding", "norm")
        ]

    def usual(self, artifact: Artifact) -> tuple[WordsLayout | None, Mapping[str, WordsLayout]]:
        """Return the most frequent layout of the packed layers, and each layer's own."""
        own = {
            spec.name.removesuffix(WEIGHT): WordsLayout.of(spec)
            for spec in artifact.tensors
            if spec.codec in self.codecs
        }
        if not own:
            return None, own
        grids = Counter((layout.bits, layout.group) for layout in own.values())
        grid = grids.most_common(1)[0][0]
        return next(layout for layout in own.values() if (layout.bits, layout.group) == grid), own


def unsupported(rule: str, expected: str, found: str) -> UnsupportedError:
    """Return the refusal of what a dialect's program has and Ingot does not read."""
    return UnsupportedError(f"expected {expected}, found {found}", rule=rule, where=f"config.json: {HUGGING_FACE}")
