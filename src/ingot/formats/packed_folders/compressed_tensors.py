"""compressed-tensors folders (llm-compressor, vLLM): ``pack-quantized`` and ``int-quantized`` (``spec/interop.md``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ingot.errors import CodecError, FormatError, UnsupportedError
from ingot.formats.packed_folders.base import (
    HUGGING_FACE,
    WEIGHT,
    Config,
    Entries,
    Layer,
    WritablePackedFolderFormat,
    tied_head,
)
from ingot.formats.packed_folders.compressed_floats import (
    float_entries,
    float_group,
    float_layer,
    format_of,
    why_floats_unsupported,
)
from ingot.formats.packed_folders.compressed_integers import (
    G_IDX,
    MARLIN_SCALE,
    PACKED_WEIGHT,
    SCALE,
    SHAPE,
    ZERO_POINT,
    integer_layers,
)
from ingot.formats.packed_folders.compressed_keys import KEYS as CONFIG_KEYS
from ingot.formats.packed_folders.compressed_settings import (
    KEYS,
    KV_CACHE,
    QUANTIZED_INPUTS,
    ActivationSettings,
    Settings,
    needs_input_scales,
    summarize,
    weight_settings,
)
from ingot.formats.packed_folders.floats import FP8, config_dtype
from ingot.formats.safetensors.pieces import FileEntry
from ingot.model.artifact import Artifact
from ingot.model.layouts.affine import (
    CODES,
    NO_ZERO,
    ROWS_LSB,
    SCALES,
    ZEROS,
    AffineLayout,
    Constant,
    Group,
    PerTensor,
    Row,
)
from ingot.model.layouts.base import LayoutSource
from ingot.model.layouts.packed_ints import INTS, PACKED, PackedIntLayout, word_count
from ingot.model.layouts.scaled_codebook import ScaledCodebookLayout
from ingot.model.layouts.table import layout_of
from ingot.model.spec import TensorSpec
from ingot.naming.names import INPUT_SCALE

FLOATS = ("float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized")
INTEGERS = ("pack-quantized", "int-quantized", "naive-quantized", "marlin-24")
FORMATS = (*INTEGERS, "dense", "mixed-precision", *FLOATS)
"""Values of ``format``; with mixed-precision, each group states its own format."""
_ORDERS = ("group", "dynamic", True)
METHODS = ("compressed-tensors", "sparseml")


class LayerGroup(NamedTuple):
    """The settings of weights in a group of ``config.json`` for layers of integers or floats."""

    format: str
    bits: int
    strategy: str
    group: int | None
    block: tuple[int, int] | None = None
    scales: str | None = None
    type: str = "int"
    symmetric: bool = True


class CompressedTensorsFormat(WritablePackedFolderFormat):
    """A folder of compressed-tensors: integers of 1 to 8 bits, and small floats.

    Integers are packed in words (pack-quantized) or stored in bytes (int-quantized).
    """

    name = "compressed-tensors"
    summary = "a folder of compressed-tensors: dense tensors, and integers in words or bytes, FP8, NVFP4 and MX formats"
    traits = replace(
        WritablePackedFolderFormat.traits,
        config_keys=(HUGGING_FACE, "compression_config"),
        packed_codecs=(AffineLayout.codec, PackedIntLayout.codec, ScaledCodebookLayout.codec),
        merges=True,
        dense_key="ignore",
        how_to_quantize="--recipe w4a16, w8a8 or fp8",
        group_sizes=(128, 64, 32),
        one_group_preferred=True,  # transformers applies the settings of one group to all dense layers
    )
    keys = CONFIG_KEYS
    companions = (SCALE, ZERO_POINT, G_IDX, SHAPE, ".weight_global_scale", MARLIN_SCALE)

    def __init__(self, settings: Settings | None = None, activations: str | None = None) -> None:
        """Create the format; ``settings`` are activation settings of a source in this format.

        ``activations`` is the scheme for layers that have no settings from the source (``Recipe.activations``).
        """
        self._settings = settings
        self._activations = activations

    def for_source(self, config: Config) -> CompressedTensorsFormat:
        """Return the format for the weights of a folder with this ``config.json``.

        8-bit integers stay bytes only in layers whose inputs are quantized.
        """
        return CompressedTensorsFormat(Settings(self.quantization(config)) if self.claims_config(config) else None)

    def for_activations(self, scheme: str) -> CompressedTensorsFormat:
        """Return the format whose new layers quantize their inputs by this scheme."""
        return CompressedTensorsFormat(self._settings, scheme)

    def for_artifact(self, artifact: Artifact) -> CompressedTensorsFormat:
        """Return this format.

        Raises ``UnsupportedError`` ``recipe.activations`` if no layer has weights for the recipe's scheme.
        """
        packed = [spec for spec in artifact.tensors if spec.codec in self.traits.packed_codecs]
        if self._activations is not None and not any(self._inputs(_layer_group(layout_of(spec))) for spec in packed):
            raise UnsupportedError(
                f"no layer fits the recipe's activations ({self._activations}); int8 and fp8 need weights of the same "
                "type in 8 bits, with one scale for each row or for the matrix; nvfp4 needs weights in NVFP4",
                rule="recipe.activations",
            )
        if self._activations is not None and needs_input_scales(self._activations):
            _require_input_scales(
                artifact, {spec.name for spec in packed if self._inputs(_layer_group(layout_of(spec)))}
            )
        return self

    def _inputs(self, group: LayerGroup) -> ActivationSettings:
        """Return the activation settings of new layers in a group; empty if inputs are not quantized."""
        formats = {"int8": "int-quantized", "fp8": "float-quantized", "nvfp4": "nvfp4-pack-quantized"}
        if self._activations is None or group.format != formats[self._activations]:
            return {}
        fits = needs_input_scales(self._activations) or (group.bits == 8 and group.strategy in ("channel", "tensor"))
        return QUANTIZED_INPUTS[self._activations] if fits else {}

    def claims_config(self, config: Config) -> bool:
        """Return whether ``quantization_config`` names compressed-tensors, and only formats that Ingot reads."""
        quantization = self.quantization(config)
        if quantization.get("quant_method") not in METHODS or "config_groups" not in quantization:
            return False
        return all(format in FORMATS for format in _formats(quantization))

    def layers(self, entries: Entries, config: Config) -> Sequence[Layer]:
        """Return a layer for every ``X.weight_packed``, and for every ``X.weight`` of bytes with a scale.

        Raises ``FormatError`` ``compressed-tensors.config``, ``.parts``, ``.dtype``, ``.shape``, ``.order``;
        ``UnsupportedError`` ``compressed-tensors.format``: weights of other types.
        """
        quantization = self.quantization(config)
        widths = _widths(quantization)
        layers = [*integer_layers(entries, widths), *_float_layers(entries, quantization, config_dtype(config))]
        used = {key for layer in layers for key in (*layer.parts.values(), *layer.extra)}
        for key in entries:
            if key.endswith((PACKED_WEIGHT, SCALE)) and key not in used:
                raise UnsupportedError(
                    "expected integers of 1 to 8 bits with a scale, found another type of packed weight",
                    rule="compressed-tensors.format",
                    where=key,
                )
        if _all_ordered(quantization):
            _require_orders(entries, layers)
        return layers

    def why_layer_unsupported(self, spec: TensorSpec) -> str | None:
        """Return why a tensor cannot be a packed layer; None if it can."""
        try:
            layout = layout_of(spec)
        except CodecError as error:
            return error.message
        if not spec.name.endswith(WEIGHT) or len(spec.shape) != 2 or not spec.size:
            return f"its packed layers are matrices with names X{WEIGHT}, found shape {list(spec.shape)}"
        if any(part.encoding != "raw" for part in spec.parts):
            return "its packed layers are uncompressed"
        if isinstance(layout, ScaledCodebookLayout):
            return why_floats_unsupported(spec)
        assert isinstance(layout, AffineLayout | PackedIntLayout)
        reason = (
            _why_words_unsupported(spec, layout)
            if isinstance(layout, PackedIntLayout)
            else _why_rows_unsupported(spec, layout)
        )
        if (
            reason is None
            and _layer_group(layout).format == "int-quantized"
            and not self._quantizes_inputs(spec, layout)
        ):
            return "its int-quantized layers (bytes) need quantized inputs; other layers are packed in words"
        return reason

    def _quantizes_inputs(self, spec: TensorSpec, layout: AffineLayout | PackedIntLayout) -> bool:
        if self._inputs(_layer_group(layout)):
            return True
        settings = (
            None
            if self._settings is None
            else self._settings.for_layer(spec.name.removesuffix(WEIGHT), _weight_settings(layout))
        )
        return bool(settings and settings.get(KEYS[0]))

    def layer_entries(self, spec: TensorSpec) -> list[FileEntry]:
        """Return the entries of a packed layer ``X``.

        They are ``X.weight_packed`` and ``X.weight_shape`` for codes in words, or ``X.weight`` for codes in bytes; then
        ``X.weight_scale`` and, if there are zero points, ``X.weight_zero_point``.
        """
        layout = layout_of(spec)
        stem = spec.name.removesuffix(WEIGHT)
        if isinstance(layout, ScaledCodebookLayout):
            return float_entries(spec)
        sizes = {part.role: part.length or 0 for part in spec.parts}
        rows, cols = spec.shape
        if isinstance(layout, PackedIntLayout):
            code_shape = layout.code_shape(spec.shape)
            scale_shape = layout.scale_shape(spec.shape)
            packed = layout.packing == PACKED
        else:
            assert isinstance(layout, AffineLayout)
            packed = not layout.signed
            code_shape = (rows, word_count(cols, layout.bits)) if packed else (rows, cols)
            scale_shape = (1,) if layout.per_tensor else (rows, layout.scale_count(spec.shape) // rows)
        dtype, suffix = ("i32", PACKED_WEIGHT) if packed else ("i8", WEIGHT)
        entries = [
            FileEntry(CODES, stem + suffix, dtype, code_shape, sizes[CODES]),
            FileEntry(SCALES, stem + SCALE, layout.scales, scale_shape, sizes[SCALES]),
        ]
        if isinstance(layout, PackedIntLayout) and ZEROS in sizes:
            entries.append(FileEntry(ZEROS, stem + ZERO_POINT, dtype, layout.zero_shape(spec.shape), sizes[ZEROS]))
        if packed:
            content = np.array(spec.shape, "<i8").tobytes()
            entries.append(FileEntry("shape", stem + SHAPE, "i64", (2,), 16, lambda: content))
        return entries

    def packing_config(self, artifact: Artifact) -> Mapping[str, Any]:
        """Return ``quantization_config`` for compressed-tensors, with one group per type of layer."""
        source = self.source_config(artifact)
        settings = self._preserved_settings(artifact, Settings(source))
        groups: dict[tuple[LayerGroup, int], tuple[ActivationSettings, list[str]]] = {}
        dense = []
        for spec in artifact.tensors:
            name = spec.name.removesuffix(WEIGHT)
            if spec.codec in self.traits.packed_codecs:
                group = _layer_group(layout_of(spec))
                layer_settings = settings.get(spec.name) or self._inputs(group)
                groups.setdefault((group, id(layer_settings) if layer_settings else 0), (layer_settings, []))[1].append(
                    name
                )
            elif spec.name.endswith(WEIGHT) and len(spec.shape) == 2 and "embed" not in spec.name:
                dense.append(name)
        if not groups:
            return {}
        dense.extend(tied_head(artifact))
        formats = {group.format for group, _ in groups}
        return {
            HUGGING_FACE: {
                "quant_method": "compressed-tensors",
                "format": formats.pop() if len(formats) == 1 else "mixed-precision",
                "quantization_status": "compressed",
                "global_compression_ratio": None,
                "ignore": [*dense, *self._still_ignored(source, artifact, dense)],
                KV_CACHE: source.get(KV_CACHE),
                "config_groups": {
                    f"group_{index}": _group_config(group, ["Linear"] if len(groups) == 1 else names, layer_settings)
                    for index, ((group, _), (layer_settings, names)) in enumerate(groups.items())
                },
            }
        }

    def _preserved_settings(self, artifact: Artifact, settings: Settings) -> dict[str, ActivationSettings | None]:
        """Return, by tensor name, how layers quantize activations, if the conversion did not change their weights."""
        preserved = {}
        for spec in artifact.tensors if any(settings) else ():
            before = artifact.before.get(spec.name)
            if (
                spec.codec in self.traits.packed_codecs
                and before is not None
                and before.codec == spec.codec
                and before.params == spec.params
            ):
                preserved[spec.name] = settings.for_layer(
                    spec.name.removesuffix(WEIGHT), _weight_settings_before(before)
                )
        return preserved

    def _still_ignored(self, source: Config, artifact: Artifact, dense: Sequence[str]) -> Iterator[str]:
        """Yield the names in the source's ``ignore`` that must stay, because their modules are still not packed.

        Regular expressions stay only if all packed layers were packed before.
        """
        ignored = source.get("ignore")
        before = artifact.before
        packed = [spec.name for spec in artifact.tensors if spec.codec in self.traits.packed_codecs]
        newly = any(name not in before or before[name].codec not in self.traits.packed_codecs for name in packed)
        seen = {*dense, *(name.removesuffix(WEIGHT) for name in packed)}
        for name in ignored if isinstance(ignored, list) else ():
            if isinstance(name, str) and name not in seen and not (newly and name.startswith("re:")):
                seen.add(name)
                yield name

    def activations(self, config: Config) -> Mapping[str, str]:
        """Return ``input_activations`` and ``output_activations`` of all groups, and ``kv_cache_scheme``."""
        quantization = self.quantization(config)
        settings = list(Settings(quantization))
        texts = {key: sorted({summarize(item[key]) for item in settings if key in item}) for key in KEYS}
        result = {key: "; ".join(values) for key, values in texts.items() if values}
        return result if quantization.get(KV_CACHE) is None else {**result, KV_CACHE: summarize(quantization[KV_CACHE])}

    def dropped_settings(self, artifact: Artifact, stated_settings: Mapping[str, str]) -> Sequence[str]:
        """Return the source's settings that the written artifact does not state.

        If the source has this format, they are the settings of layers whose weights changed or whose group is unknown.
        """
        source = self.source_config(artifact)
        if not source:
            return super().dropped_settings(artifact, stated_settings)
        settings = Settings(source)
        preserved = self._preserved_settings(artifact, settings)
        cache = {key: value for key, value in stated_settings.items() if key == KV_CACHE}
        dropped = list(super().dropped_settings(artifact, cache))
        counts: dict[str, int] = {}
        for name, before in artifact.before.items() if any(settings) else ():
            if before.codec not in self.traits.packed_codecs or preserved.get(name) is not None:
                continue
            values = settings.for_layer(name.removesuffix(WEIGHT), _weight_settings_before(before))
            values = (
                {key: "of an unknown group" for key in KEYS if key in stated_settings} if values is None else values
            )
            for key, value in values.items():
                text = f"{key} ({summarize(value)})"
                counts[text] = counts.get(text, 0) + 1
        return [*dropped, *(f"{text} of {count} layers" for text, count in counts.items())]


def _require_input_scales(artifact: Artifact, packed: Set[str]) -> None:
    """Raise ``UnsupportedError`` ``recipe.activations`` unless exactly the packed layers have an input scale."""
    stored = {
        spec.name.removesuffix(INPUT_SCALE) + WEIGHT for spec in artifact.tensors if spec.name.endswith(INPUT_SCALE)
    }
    missing = sorted(packed - stored)
    if missing:
        raise UnsupportedError(
            f"the inputs of {missing[0]} have no scale, which calibration determines; add a quantizer to its rule",
            rule="recipe.activations",
        )
    surplus = sorted(stored - packed)
    if surplus:
        raise UnsupportedError(
            f"the inputs of {surplus[0]} have a scale, but its weights stay dense, as other parts of the matrix that "
            "vLLM merges do; keep all parts dense by a rule with keep = true",
            rule="recipe.activations",
        )


def _why_words_unsupported(spec: TensorSpec, layout: PackedIntLayout) -> str | None:
    """Return why integers packed in words are not supported; None if they are."""
    if layout.packing not in (PACKED, INTS):
        return f"its integers are packed as {PACKED}, found {layout.packing}"
    if layout.order:
        return "its groups are runs of consecutive columns: newer releases and vLLM refuse any other order"
    return _why_group_unsupported(layout.group, spec.shape[1])


def _why_group_unsupported(group: int | None, cols: int) -> str | None:
    return f"its groups divide the columns, found {group} of {cols}" if group and cols % group else None


def _why_rows_unsupported(spec: TensorSpec, layout: AffineLayout) -> str | None:
    """Return why integers stored row by row are not supported; None if they are."""
    if layout.packing != ROWS_LSB or layout.zeros or layout.matrix or layout.block:
        return "its codes are packed row by row, low bits first, and zero points are packed integers"
    uneven = _why_group_unsupported(layout.group_size, spec.shape[1])
    if uneven:
        return uneven
    words_of_rows = spec.shape[1] * layout.bits % 32 == 0 and not layout.per_tensor
    middle = not layout.signed and layout.zero == Constant(1 << (layout.bits - 1))
    if (middle and words_of_rows) or (layout.signed and layout.bits == 8 and layout.zero == NO_ZERO):
        return None
    return "its integers are unsigned with the zero point in the middle, or signed bytes without"


def _groups(quantization: Config) -> Config:
    """Return the groups of layers under ``config_groups``; empty if that value is missing or not an object."""
    groups = quantization.get("config_groups")
    return groups if isinstance(groups, dict) else {}


def _formats(quantization: Config) -> Iterator[Any]:
    yield quantization.get("format", "dense")
    for group in _groups(quantization).values():
        if isinstance(group, dict):
            yield group.get("format") or "dense"


def _all_ordered(quantization: Config) -> bool:
    """Return whether every group of ``config.json`` with scales per group of columns declares ``actorder``.

    If so, the columns of a group need not be adjacent.
    """
    weights = [group.get("weights") for group in _groups(quantization).values() if isinstance(group, dict)]
    grouped = [item for item in weights if isinstance(item, dict) and weight_settings(item)[3] == "group"]
    return bool(grouped) and all(item.get("actorder") in _ORDERS for item in grouped)


def _require_orders(entries: Entries, layers: Sequence[Layer]) -> None:
    """Raise ``FormatError`` ``compressed-tensors.parts`` if a layer lacks the entry that assigns columns to groups.

    Called if the configuration declares groups of columns that need not be adjacent.
    """
    for layer in layers:
        layout = layer.layout
        key = layer.name.removesuffix(WEIGHT) + G_IDX
        group = layout.group_size if isinstance(layout, AffineLayout) else getattr(layout, "group", None)
        if group is not None and key not in entries:
            raise FormatError(
                "compressed-tensors.parts",
                f"expected the entry {key!r}, because config.json has actorder",
                where=layer.name,
            )


def _widths(quantization: Config) -> tuple[int, ...]:
    """Return the bits that groups declare.

    Raises ``FormatError`` ``compressed-tensors.config``.
    """
    widths = set()
    for name, group in _groups(quantization).items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        bits = weights.get("num_bits", 8)
        if type(bits) is not int or not 1 <= bits <= 8:
            raise FormatError(
                "compressed-tensors.config",
                f"expected num_bits from 1 to 8, found {str(bits)[:40]}",
                where=str(name)[:80],
            )
        widths.add(bits)
    return tuple(sorted(widths))


def _float_layers(entries: Entries, quantization: Config, dtype: str) -> Iterator[Layer]:
    """Yield the layers of floats, which take one byte each, or are smaller and packed in bytes."""
    floats = []
    by_target = dict[str, list[Config]]()
    for group in _groups(quantization).values():
        weights, targets = (group.get("weights"), group.get("targets")) if isinstance(group, dict) else (None, None)
        if not isinstance(weights, dict) or weights.get("type") != "float":
            continue
        floats.append(weights)
        for target in targets if isinstance(targets, list) else ():
            by_target.setdefault(str(target), []).append(weights)
    for key in entries:
        packed = key.endswith(PACKED_WEIGHT) and entries[key].dtype == "u8"
        if not packed and not (key.endswith(WEIGHT) and entries[key].dtype in FP8):
            continue
        stem = key.removesuffix(PACKED_WEIGHT if packed else WEIGHT)
        yield float_layer(entries, stem, by_target.get(stem, floats), dtype)


def _layer_group(layout: Any) -> LayerGroup:
    """Return the group settings for layers with this layout."""
    if isinstance(layout, ScaledCodebookLayout):
        return LayerGroup(*float_group(layout), "float")
    if isinstance(layout, PackedIntLayout):
        format = "pack-quantized" if layout.packing == PACKED else "int-quantized"
        strategy = "channel" if layout.group is None else "group"
        is_symmetric = isinstance(layout.zero, Constant)
        return LayerGroup(format, layout.bits, strategy, layout.group, symmetric=is_symmetric)
    grid = layout.grid
    strategy = "tensor" if isinstance(grid, PerTensor) else "channel" if isinstance(grid, Row) else "group"
    return LayerGroup("int-quantized" if layout.signed else "pack-quantized", layout.bits, strategy, layout.group_size)


def _weight_settings_before(before: LayoutSource) -> tuple[Any, ...] | None:
    """Return the ``weight_settings`` of a layer in the source; None if no group that Ingot writes has them."""
    return _weight_settings(layout_of(before))


def _weight_settings(layout: Any) -> tuple[Any, ...] | None:
    if isinstance(layout, ScaledCodebookLayout) and format_of(layout) is None:
        return None
    if isinstance(layout, AffineLayout) and not isinstance(layout.grid, PerTensor | Row | Group):
        return None
    return weight_settings(_weights_config(_layer_group(layout)))


def _weights_config(group: LayerGroup) -> dict[str, Any]:
    return {
        "num_bits": group.bits,
        "type": group.type,
        "symmetric": group.symmetric,
        "strategy": group.strategy,
        "group_size": group.group,
        "block_structure": None if group.block is None else list(group.block),
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
        **({"scale_dtype": group.scales, "zp_dtype": group.scales} if group.scales else {}),
    }


def _group_config(group: LayerGroup, targets: Sequence[str], settings: ActivationSettings) -> dict[str, Any]:
    return {
        "targets": list(targets),
        "weights": _weights_config(group),
        **{key: settings.get(key) for key in KEYS},
        "format": group.format,
    }
