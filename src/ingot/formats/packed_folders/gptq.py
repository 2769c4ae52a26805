"""GPTQ folders: integers of 2 to 8 bits as GPTQModel and AutoGPTQ pack them (``spec/interop.md``)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, ClassVar

import numpy as np

from ingot.errors import FormatError, UnsupportedError
from ingot.formats.packed_folders.base import HUGGING_FACE, Config, Entries, Layer, require_entries
from ingot.formats.packed_folders.columns import (
    QSCALES,
    QWEIGHT,
    QZEROS,
    ColumnPackedFormat,
    DeclaredPacking,
    no_rule_is_asymmetric,
    unsupported,
    words_layout,
)
from ingot.formats.packed_folders.gptq_awq_keys import GPTQ_KEYS
from ingot.formats.safetensors.pieces import FileEntry
from ingot.model.artifact import Artifact
from ingot.model.layouts.affine import POINTS, Constant
from ingot.model.layouts.base import Shape
from ingot.model.layouts.dense import DATA
from ingot.model.layouts.packed_ints import GPTQ, GPTQ_PLANES, GPTQ_V1, ORDER, PACKING_FORMS, PLANES, PackedIntLayout
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Array

G_IDX = ".g_idx"
V1 = "gptq"
V2 = "gptq_v2"
PLANAR = "gptq_p"
_FORMATS: Mapping[str, Mapping[int, str]] = {
    V1: dict.fromkeys(PACKING_FORMS[GPTQ_V1].bits, GPTQ_V1),
    V2: dict.fromkeys(PACKING_FORMS[GPTQ].bits, GPTQ),
    PLANAR: dict.fromkeys(PACKING_FORMS[GPTQ].bits, GPTQ) | dict.fromkeys(PLANES, GPTQ_PLANES),
}
"""The packing of layers, by ``checkpoint_format`` and number of bits."""
# Conv1D of transformers stores its matrix transposed, and files do not show which layers are Conv1D.
_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")


class GptqFormat(ColumnPackedFormat):
    """A folder of GPTQModel or AutoGPTQ with codes packed along the inputs as a bit stream."""

    name = "gptq"
    summary = "a folder of GPTQModel or AutoGPTQ: dense tensors, and layers of 2, 3, 4 or 8 bits in its words"
    traits = replace(
        ColumnPackedFormat.traits,
        containers={"stream": "gptq", "planes": "gptq-planes"},
        word_forms=(GPTQ, GPTQ_V1),
        merges=True,
        dense_key="dynamic",
        how_to_quantize="--recipe w4a16, or w4a16-calibrated",
        f16_scales=True,
        group_sizes=(128, 64, 32),
    )
    method = "gptq"
    orders = True
    keys = GPTQ_KEYS
    side_files: ClassVar[Mapping[str, str]] = {"quantize_config.json": "gptq"}
    companions = (*ColumnPackedFormat.companions, G_IDX)
    symmetric_key = "sym"

    def __init__(self, checkpoint_format: str = V1) -> None:
        """Create a format that writes the given ``checkpoint_format``.

        The default is v1, which every reader supports and which stores zero points minus one.
        """
        self._checkpoint_format = checkpoint_format

    def claims_config(self, config: Config) -> bool:
        """Return whether ``quantization_config`` declares GPTQ, but not the format ``gptq_p`` (codes in bit planes)."""
        return super().claims_config(config) and declared_format(config[HUGGING_FACE]) != PLANAR

    def why_layer_unsupported(self, spec: TensorSpec) -> str | None:
        """Return the reason why a tensor cannot be stored as a packed layer; None if it can.

        This format cannot store codes in bit planes; ``GptqPlanesFormat`` can.
        """
        if PackedIntLayout.from_tensor(spec).packing == GPTQ_PLANES:
            return "its codes are packed as a stream; for codes in planes use --container planes"
        return super().why_layer_unsupported(spec)

    def for_artifact(self, artifact: Artifact) -> GptqFormat:
        """Return the format for the layers' zero points: v2 if a layer stores them as in v2, else v1.

        Raises ``UnsupportedError`` ``gptq.mixed`` for zero points of both versions, which a folder cannot combine.
        """
        layouts = [
            PackedIntLayout.from_tensor(spec) for spec in artifact.tensors if spec.codec in self.traits.packed_codecs
        ]
        variants = {layout.packing for layout in layouts if not isinstance(layout.zero, Constant)}
        if len(variants) > 1:
            raise UnsupportedError("expected zero points of v1 or of v2, found both", rule="gptq.mixed")
        return GptqFormat(V2 if GPTQ in variants else V1)

    def layers(self, entries: Entries, config: Config) -> Sequence[Layer]:
        """Return a layer for every ``X.qweight``.

        Raises ``FormatError`` ``gptq.config``, ``gptq.parts``, ``gptq.dtype``, ``gptq.shape``, ``gptq.order``;
        ``UnsupportedError`` ``gptq.format``, ``gptq.bits``, ``gptq.conv1d``.
        """
        layers = super().layers(entries, config)
        if layers and config.get("model_type") in _CONV1D:
            raise unsupported(
                "gptq.conv1d", "layers that are stored [outputs, inputs]", f"model_type {config['model_type']}"
            )
        return layers

    def layers_of(self, entries: Entries, quantization: Config, stems: Sequence[str]) -> Iterator[Layer]:
        """Yield the packed layer of each name in ``stems``.

        If ``dynamic`` has a rule for a layer, its bits and group size follow from the shapes and ``g_idx``.

        In a folder of symmetric codes, every zero point must be the middle code, which v1 and v2 store differently. If
        the zero points are middle codes only when they are read as the undeclared version, that version is used. Then
        ``remarks`` reports it.
        """
        name = declared_format(quantization)
        if name not in _FORMATS:
            raise unsupported("gptq.format", f"a format {', '.join(_FORMATS)}", repr(name[:40]))
        bits = self.number(quantization, ("bits",), 1, 8)
        group = self.group(quantization)
        declared, ordered = self.parse_declared(quantization, bits, group), quantization.get("desc_act") is True
        layers = [self._layer(entries, stem, declared, name, ordered=ordered) for stem in stems]
        if not self.is_symmetric(quantization):
            yield from layers
            return
        fits = self.all_middle(entries, layers)
        alternatives = [alternative for layer in layers if (alternative := _other_zero_points(layer)) is not None]
        if (
            layers
            and not any(fits)
            and len(alternatives) == len(layers)
            and all(self.all_middle(entries, alternatives))
        ):
            yield from alternatives
            return
        if not all(fits):
            raise self.contradiction(layers[fits.index(False)])
        yield from layers

    def _layer(self, entries: Entries, stem: str, declared: DeclaredPacking, format: str, *, ordered: bool) -> Layer:
        _, _, scales = require_entries(entries, stem, (QWEIGHT, QZEROS, QSCALES), "gptq.parts").values()
        order = self._order(entries, stem, scales.shape)
        if order is None and ordered:
            raise FormatError(
                "gptq.parts", f"expected the entry {stem + G_IDX!r}, because config.json has desc_act", where=stem
            )
        rows, cols, bits, group = self.shape_of(entries, stem, declared)
        if order is not None:
            if declared.rules:
                runs = bool((np.diff(order) >= 0).all())
                groups = scales.shape[0] if scales.shape else 0
                group = _first_run(order) if runs else self.group_of(declared, stem, order.size, groups)
            cols = order.size
        layout = PackedIntLayout(_variant(format, bits, stem), bits, group, POINTS, scales.dtype, scales.dtype)
        layer = self.build_layer(entries, stem, (rows, cols), layout)
        return layer if order is None else _with_order(layer, layout, order, stem)

    def is_symmetric(self, quantization: Config) -> bool:
        """Return whether ``sym`` is true and no rule in ``dynamic`` contradicts it."""
        return quantization.get("sym") is True and no_rule_is_asymmetric(quantization)

    def middle_zeros(self, layout: PackedIntLayout, shape: Shape) -> tuple[Array, Array]:
        """Return a row of packed zero points that all equal the middle code, and a mask of the same words.

        In the mask, the bits of zero points are 1, and the bits after the last zero point are 0.
        """
        bits = layout.bits
        rows = shape[0]
        planes = PLANES[bits] if layout.packing == GPTQ_PLANES else ((bits, 0),)
        period = np.frombuffer(_period(layout.point - (layout.packing == GPTQ_V1), planes), "<u4")
        line = np.resize(period, layout.zero_shape(shape)[1])
        mask = np.full(line.size, 0xFFFFFFFF, np.uint32)
        if layout.packing == GPTQ_PLANES:
            mask[rows // 32 * bits :] = 0
        elif rows * bits % 32:
            mask[-1] = (1 << rows * bits % 32) - 1
        return line, mask

    def remarks(self, entries: Entries, config: Config, layers: Sequence[Layer]) -> Sequence[tuple[str, str]]:
        """Return remarks: ``gptq.format`` if two keys declare different formats, ``gptq.zero-points`` if the declared
        version is wrong.
        """
        quantization = self.quantization(config)
        remarks = []
        declared = declared_format(quantization)
        older = quantization.get("checkpoint_format")
        if older is not None and str(older).lower() != declared:
            text = (
                f"format {declared!r} and checkpoint_format {str(older)[:40]!r} differ: Ingot and GPTQModel use format"
            )
            remarks.append(("gptq.format", f"{text}; transformers and vLLM use checkpoint_format"))
        read = {GPTQ_V1: V1, GPTQ: V2}.get(words_layout(layers[0]).packing) if layers else None
        if declared in (V1, V2) and read is not None and read != declared:
            text = (
                f"zero points are stored as in {read}, although config.json states {declared}: because sym is true and "
                "only"
            )
            remarks.append(("gptq.zero-points", f"{text} {read} gives the middle zero point, they are read as {read}"))
        return remarks

    def _order(self, entries: Entries, stem: str, scales: Shape) -> Array | None:
        """Return the checked group of each column from the layer's entry ``g_idx``; None if there is no such entry."""
        entry = entries.get(stem + G_IDX)
        if entry is None:
            return None
        if entry.dtype != "i32" or len(entry.shape) != 1 or not entry.shape[0]:
            raise FormatError(
                "gptq.dtype",
                f"expected i32 in one dimension, found {entry.dtype} {list(entry.shape)}",
                where=entry.name,
            )
        order = entry.parts[DATA].array()
        groups = scales[0] if scales else 0
        if int(order.min()) < 0 or int(order.max()) >= groups:
            raise FormatError(
                "gptq.order",
                f"expected groups from 0 to {groups - 1}, found {int(order.min())} to {int(order.max())}",
                where=entry.name,
            )
        return order

    def constant_zeros(self, layout: PackedIntLayout, shape: Shape) -> Callable[[], bytes]:
        """Return a function that returns the bytes of packed zero points that all equal the middle code."""
        bits = layout.bits
        point = layout.point - (self._checkpoint_format == V1)
        period = _period(point, PLANES[bits] if layout.packing == GPTQ_PLANES else ((bits, 0),))
        count = 4 * prod(layout.zero_shape(shape))

        def rows() -> bytes:
            return (period * (count // len(period) + 1))[:count]

        return rows

    def layer_entries(self, spec: TensorSpec) -> list[FileEntry]:
        """Return the entries of a column-packed layer, and ``X.g_idx``."""
        layout = PackedIntLayout.from_tensor(spec)
        cols = spec.shape[1]
        stem = spec.name.removesuffix(".weight")
        group = layout.group or cols

        def plain() -> bytes:
            return (np.arange(cols) // group).astype("<i4").tobytes()

        g_idx = FileEntry(ORDER, stem + G_IDX, "i32", (cols,), 4 * cols, None if layout.order else plain)
        return [*super().layer_entries(spec), g_idx]

    def packing_config(self, artifact: Artifact) -> Mapping[str, Any]:
        """Return ``quantization_config`` as GPTQModel writes it.

        ``dynamic`` lists dense layers, and layers whose bits or group size differ from the declared ones.
        """
        usual, layouts = self.usual_layout(artifact)
        if usual is None:
            return {}
        dynamic: dict[str, Any] = {f"-:^{re.escape(name)}$": {} for name in self.dense_layers(artifact)}
        for name, layout in layouts.items():
            if (layout.bits, layout.group) != (usual.bits, usual.group):
                dynamic[f"+:^{re.escape(name)}$"] = {"bits": layout.bits, "group_size": layout.group or -1}
        return {
            HUGGING_FACE: {
                "quant_method": "gptq",
                "bits": usual.bits,
                "group_size": usual.group or -1,
                "desc_act": any(layout.order for layout in layouts.values()),
                "sym": all(isinstance(layout.zero, Constant) for layout in layouts.values()),
                "lm_head": "lm_head" in layouts,
                "checkpoint_format": self._checkpoint_format,
                "pack_dtype": "int32",
                **({"dynamic": dynamic} if dynamic else {}),
            }
        }


class GptqPlanesFormat(GptqFormat):
    """A folder of GPTQModel with codes of 3, 5, 6 or 7 bits in planes (``gptq_p``)."""

    name = "gptq-planes"
    summary = (
        "a folder of GPTQModel: dense tensors, and layers of 2 to 8 bits in its words, those of 3, 5, 6, 7 in planes"
    )
    traits = replace(
        GptqFormat.traits,
        word_forms=(GPTQ, GPTQ_PLANES),
        merges=False,
        how_to_quantize="ingot convert MODEL x.zt --recipe int3, then ingot convert x.zt OUT --format gptq-planes",
    )

    def __init__(self) -> None:
        super().__init__(PLANAR)

    def claims_config(self, config: Config) -> bool:
        """Return whether ``quantization_config`` declares GPTQ in the format ``gptq_p`` (codes in bit planes)."""
        return ColumnPackedFormat.claims_config(self, config) and declared_format(config[HUGGING_FACE]) == PLANAR

    def why_layer_unsupported(self, spec: TensorSpec) -> str | None:
        """Return the reason why a tensor cannot be stored as a packed layer; None if it can.

        If readers expect codes with this number of bits in bit planes, codes in a bit stream cannot be stored.
        """
        layout = PackedIntLayout.from_tensor(spec)
        if layout.packing == GPTQ and layout.bits in PLANES:
            return f"its codes of {layout.bits} bits are packed in planes"
        return ColumnPackedFormat.why_layer_unsupported(self, spec)

    def for_artifact(self, artifact: Artifact) -> GptqPlanesFormat:
        """Return this format for all layers, because it stores all zero points without subtracting 1, as v2 does."""
        return self


def declared_format(quantization: Config) -> str:
    """Return the format that ``quantization_config`` declares, in lower case; v1 if it declares none.

    The key ``format`` takes precedence over ``checkpoint_format``, as in GPTQModel.
    """
    values = (quantization.get(key) for key in ("format", "checkpoint_format"))
    value = next((value for value in values if value is not None), V1)
    return value.lower() if isinstance(value, str) else repr(value)


def _other_zero_points(layer: Layer) -> Layer | None:
    """Return the layer with its stored zero points interpreted as in the other version (v1 or v2).

    Returns None for codes in planes, because their zero points have only one version.
    """
    layout = words_layout(layer)
    packing = {GPTQ: GPTQ_V1, GPTQ_V1: GPTQ}.get(layout.packing)
    return None if packing is None else replace(layer, layout=replace(layout, packing=packing))


def _variant(format: str, bits: int, stem: str) -> str:
    variants = _FORMATS[format]
    if bits not in variants:
        raise UnsupportedError(
            f"expected {', '.join(map(str, sorted(variants)))} bits in {format}, found {bits}",
            rule="gptq.bits",
            where=stem,
        )
    return variants[bits]


def _period(point: int, planes: Sequence[tuple[int, int]]) -> bytes:
    """Return 32 packed codes that all equal ``point``; ``planes`` are pairs of a number of bits and the lowest bit."""
    period = b""
    for width, low in planes:
        field = point >> low & (1 << width) - 1
        period += sum(field << width * index for index in range(32)).to_bytes(4 * width, "little")
    return period


def _first_run(order: Array) -> int | None:
    """Return the number of leading columns that have the group of the first column; None if all columns have it."""
    later_columns = np.flatnonzero(order != order[0])
    return int(later_columns[0]) if later_columns.size else None


def _with_order(layer: Layer, layout: PackedIntLayout, order: Array, stem: str) -> Layer:
    """Return the layer with the entry ``g_idx``.

    If every group is a run of as many columns as the layout's group size, it is an extra entry, which no part needs.
    Otherwise it is the part ``order``.
    """
    if np.array_equal(order, np.arange(order.size) // (layout.group or order.size)):
        return replace(layer, extra=(stem + G_IDX,))
    return replace(layer, layout=replace(layout, order=True), parts={**layer.parts, ORDER: stem + G_IDX})
