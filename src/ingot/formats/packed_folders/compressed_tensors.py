"""compressed-tensors folders (llm-compressor, vLLM): ``pack-quantized`` and ``int-quantized`` (``spec/interop.md``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ingot.errors import CodecError, FormatError, UnsupportedError
from ingot.formats.packed_folders.base import HUGGING_FACE, WEIGHT, Config, Entries, Layer, PackingDialect, tied_head
from ingot.formats.packed_folders.compressed_floats import (
    float_kind,
    float_layer,
    float_pieces,
    format_of,
    refuses_floats,
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
from ingot.formats.packed_folders.compressed_settings import KEYS, KV_CACHE, Said, Settings, brief, form_of
from ingot.formats.packed_folders.floats import FP8, config_dtype
from ingot.formats.safetensors.pieces import Piece
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
    Row,
    Whole,
)
from ingot.model.layouts.base import Described
from ingot.model.layouts.packed_words import INTS, PACKED, WordsLayout, words
from ingot.model.layouts.scaled_codebook import ScaledCodebookLayout
from ingot.model.layouts.table import layout_of
from ingot.model.spec import TensorSpec

FLOATS = ("float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized")
INTEGERS = ("pack-quantized", "int-quantized", "naive-quantized", "marlin-24")
FORMATS = (*INTEGERS, "dense", "mixed-precision", *FLOATS)
"""What ``format`` may say; of mixed-precision each group says its own."""
_ORDERS = ("group", "dynamic", True)
METHODS = ("compressed-tensors", "sparseml")


class Kind(NamedTuple):
    """What layers in one group of ``config.json`` share."""

    format: str
    bits: int
    strategy: str
    group: int | None
    block: tuple[int, int] | None = None
    scales: str | None = None
    type: str = "int"
    symmetric: bool = True


class CompressedTensorsFormat(PackingDialect):
    """Dense tensors, integers of 1 to 8 bits in words (pack-quantized) or bytes (int-quantized), and small floats."""

    name = "compressed-tensors"
    summary = "a folder of compressed-tensors: dense tensors, and integers in words or bytes, FP8, NVFP4 and MX formats"
    traits = replace(
        PackingDialect.traits,
        config_keys=(HUGGING_FACE, "compression_config"),
        packed_codecs=(AffineLayout.codec, WordsLayout.codec, ScaledCodebookLayout.codec),
        merges=True,
        dense_key="ignore",
        how_to_quantize="--recipe int4 or --recipe int8",
        group_sizes=(128, 64, 32),
    )
    keys = CONFIG_KEYS
    companions = (SCALE, ZERO_POINT, G_IDX, SHAPE, ".weight_global_scale", MARLIN_SCALE)

    def __init__(self, settings: Settings | None = None) -> None:
        """``settings``: what the source's configuration says of activations, if it is a folder of this format."""
        self._settings = settings

    def for_source(self, config: Config) -> CompressedTensorsFormat:
        """Return the format for weights of a folder with this ``config.json``: integers of 8 bits stay bytes only in
        layers whose inputs are quantized."""
        return CompressedTensorsFormat(Settings(self.quantization(config)) if self.claims_config(config) else None)

    def claims_config(self, config: Config) -> bool:
        """Whether ``quantization_config`` names it, with formats that are read."""
        stated = self.quantization(config)
        if stated.get("quant_method") not in METHODS or "config_groups" not in stated:
            return False
        return all(format in FORMATS for format in _formats(stated))

    def layers(self, entries: Entries, config: Config) -> Sequence[Layer]:
        """Return a layer for every ``X.weight_packed``, and for every ``X.weight`` in bytes with a scale.

        Raises ``FormatError`` ``compressed-tensors.config``, ``.parts``, ``.dtype``, ``.shape``, ``.order``;
        ``UnsupportedError`` ``compressed-tensors.format``: weights in other types.
        """
        stated = self.quantization(config)
        widths = _widths(stated)
        found = [*integer_layers(entries, widths), *_float_layers(entries, stated, config_dtype(config))]
        taken = {key for layer in found for key in (*layer.parts.values(), *layer.also)}
        for key in entries:
            if key.endswith((PACKED_WEIGHT, SCALE)) and key not in taken:
                raise UnsupportedError(
                    "expected integers of 1 to 8 bits with a scale, found another kind of packed weight",
                    rule="compressed-tensors.format",
                    where=key,
                )
        if _all_ordered(stated):
            _require_orders(entries, found)
        return found

    def refuses_layer(self, spec: TensorSpec) -> str | None:
        """Why a tensor cannot be a packed layer; None if it can."""
        try:
            layout = layout_of(spec)
        except CodecError as error:
            return error.message
        if not spec.name.endswith(WEIGHT) or len(spec.shape) != 2 or not spec.size:
            return f"its packed layers are matrices called X{WEIGHT}, found shape {list(spec.shape)}"
        if any(part.encoding != "raw" for part in spec.parts):
            return "its packed layers are uncompressed"
        if isinstance(layout, ScaledCodebookLayout):
            return refuses_floats(spec)
        assert isinstance(layout, AffineLayout | WordsLayout)
        reason = _refuses_words(spec, layout) if isinstance(layout, WordsLayout) else _refuses_rows(spec, layout)
        if reason is None and _kind(layout).format == "int-quantized" and not self._quantizes_inputs(spec, layout):
            return "its integers in bytes are for layers whose inputs are quantized too; weights alone are in words"
        return reason

    def _quantizes_inputs(self, spec: TensorSpec, layout: AffineLayout | WordsLayout) -> bool:
        said = None if self._settings is None else self._settings.of(spec.name.removesuffix(WEIGHT), _form(layout))
        return bool(said and said.get(KEYS[0]))

    def layer_pieces(self, spec: TensorSpec) -> list[Piece]:
        """``X.weight_packed`` and ``X.weight_shape``, or ``X.weight``; with ``X.weight_scale`` and zero points."""
        layout, stem = layout_of(spec), spec.name.removesuffix(WEIGHT)
        if isinstance(layout, ScaledCodebookLayout):
            return float_pieces(spec)
        sizes = {part.role: part.length or 0 for part in spec.parts}
        rows, cols = spec.shape
        if isinstance(layout, WordsLayout):
            code_shape, scale_shape = layout.code_shape(spec.shape), layout.scale_shape(spec.shape)
            packed = layout.form == PACKED
        else:
            assert isinstance(layout, AffineLayout)
            packed = not layout.signed
            code_shape = (rows, words(cols, layout.bits)) if packed else (rows, cols)
            scale_shape = (1,) if layout.per_tensor else (rows, layout.scale_count(spec.shape) // rows)
        dtype, suffix = ("i32", PACKED_WEIGHT) if packed else ("i8", WEIGHT)
        pieces = [
            Piece(CODES, stem + suffix, dtype, code_shape, sizes[CODES]),
            Piece(SCALES, stem + SCALE, layout.scales, scale_shape, sizes[SCALES]),
        ]
        if isinstance(layout, WordsLayout) and ZEROS in sizes:
            pieces.append(Piece(ZEROS, stem + ZERO_POINT, dtype, layout.zero_shape(spec.shape), sizes[ZEROS]))
        if packed:
            content = np.array(spec.shape, "<i8").tobytes()
            pieces.append(Piece("shape", stem + SHAPE, "i64", (2,), 16, lambda: content))
        return pieces

    def stated(self, artifact: Artifact) -> Mapping[str, Any]:
        """Return ``quantization_config`` as compressed-tensors writes it: a group of layers for each kind of them."""
        source = self.source_config(artifact)
        settings = self._kept(artifact, Settings(source))
        groups: dict[tuple[Kind, int], tuple[Said, list[str]]] = {}
        dense = []
        for spec in artifact.tensors:
            name = spec.name.removesuffix(WEIGHT)
            if spec.codec in self.traits.packed_codecs:
                kind, said = _kind(layout_of(spec)), settings.get(spec.name) or {}
                groups.setdefault((kind, id(said) if said else 0), (said, []))[1].append(name)
            elif spec.name.endswith(WEIGHT) and len(spec.shape) == 2 and "embed" not in spec.name:
                dense.append(name)
        if not groups:
            return {}
        dense.extend(tied_head(artifact))
        formats = {kind.format for kind, _ in groups}
        return {
            HUGGING_FACE: {
                "quant_method": "compressed-tensors",
                "format": formats.pop() if len(formats) == 1 else "mixed-precision",
                "quantization_status": "compressed",
                "global_compression_ratio": None,
                "ignore": [*dense, *self._still_ignored(source, artifact, dense)],
                KV_CACHE: source.get(KV_CACHE),
                "config_groups": {
                    f"group_{number}": _group_stated(kind, ["Linear"] if len(groups) == 1 else names, said)
                    for number, ((kind, _), (said, names)) in enumerate(groups.items())
                },
            }
        }

    def _kept(self, artifact: Artifact, settings: Settings) -> dict[str, Said | None]:
        """Return what the source says of activations of those layers that are still of the form which it says it of."""
        found = {}
        for spec in artifact.tensors if any(settings) else ():
            was = artifact.before.get(spec.name)
            if (
                spec.codec in self.traits.packed_codecs
                and was is not None
                and was.codec == spec.codec
                and was.params == spec.params
            ):
                found[spec.name] = settings.of(spec.name.removesuffix(WEIGHT), _form_before(was))
        return found

    def _still_ignored(self, source: Config, artifact: Artifact, dense: Sequence[str]) -> Iterator[str]:
        """Yield what else the source names as not packed, as a tied head is; expressions only while all layers that are
        packed were packed before."""
        stated, was = source.get("ignore"), artifact.before
        packed = [spec.name for spec in artifact.tensors if spec.codec in self.traits.packed_codecs]
        newly = any(name not in was or was[name].codec not in self.traits.packed_codecs for name in packed)
        known = {*dense, *(name.removesuffix(WEIGHT) for name in packed)}
        for name in stated if isinstance(stated, list) else ():
            if isinstance(name, str) and name not in known and not (newly and name.startswith("re:")):
                known.add(name)
                yield name

    def activations(self, config: Config) -> Mapping[str, str]:
        """``input_activations`` and ``output_activations`` of all groups, and ``kv_cache_scheme``."""
        stated = self.quantization(config)
        settings = list(Settings(stated))
        every = {key: sorted({brief(said[key]) for said in settings if key in said}) for key in KEYS}
        found = {key: "; ".join(values) for key, values in every.items() if values}
        return found if stated.get(KV_CACHE) is None else {**found, KV_CACHE: brief(stated[KV_CACHE])}

    def dropped_settings(self, artifact: Artifact, said: Mapping[str, str]) -> Sequence[str]:
        """From its own folders: layers whose weights have another form now, or whose group is not known."""
        source = self.source_config(artifact)
        if not source:
            return super().dropped_settings(artifact, said)
        settings = Settings(source)
        kept = self._kept(artifact, settings)
        cache = {key: value for key, value in said.items() if key == KV_CACHE}
        told = list(super().dropped_settings(artifact, cache))
        lost: dict[str, int] = {}
        for name, was in artifact.before.items() if any(settings) else ():
            if was.codec not in self.traits.packed_codecs or kept.get(name) is not None:
                continue
            own = settings.of(name.removesuffix(WEIGHT), _form_before(was))
            own = {key: "of a group that is not known" for key in KEYS if key in said} if own is None else own
            for key, value in own.items():
                text = f"{key} ({brief(value)})"
                lost[text] = lost.get(text, 0) + 1
        return [*told, *(f"{text} of {count} layers" for text, count in lost.items())]


def _refuses_words(spec: TensorSpec, layout: WordsLayout) -> str | None:
    """Why integers in words are none of its own."""
    if layout.form not in (PACKED, INTS):
        return f"its words are of the form {PACKED}, not {layout.form}"
    if layout.order:
        return "columns of a group lie side by side in it: newer releases and vLLM refuse any other order"
    return _refuses_group(layout.group, spec.shape[1])


def _refuses_group(group: int | None, cols: int) -> str | None:
    return f"its groups divide the columns, found {group} of {cols}" if group and cols % group else None


def _refuses_rows(spec: TensorSpec, layout: AffineLayout) -> str | None:
    """Why integers row by row are none of its own."""
    if layout.packing != ROWS_LSB or layout.zeros or layout.matrix or layout.block:
        return "its codes go row by row, low bits first, and zero points are packed integers"
    uneven = _refuses_group(layout.group_size, spec.shape[1])
    if uneven:
        return uneven
    words_of_rows = spec.shape[1] * layout.bits % 32 == 0 and not layout.per_tensor
    middle = not layout.signed and layout.zero == Constant(1 << (layout.bits - 1))
    if (middle and words_of_rows) or (layout.signed and layout.bits == 8 and layout.zero == NO_ZERO):
        return None
    return "its integers are unsigned with the zero point in the middle, or signed bytes without"


def _groups(stated: Config) -> Config:
    """Return the groups of layers; none where something else stands in their place."""
    groups = stated.get("config_groups")
    return groups if isinstance(groups, dict) else {}


def _formats(stated: Config) -> Iterator[Any]:
    yield stated.get("format", "dense")
    for group in _groups(stated).values():
        if isinstance(group, dict):
            yield group.get("format") or "dense"


def _all_ordered(stated: Config) -> bool:
    """Whether groups of columns are no runs of columns in every group of layers that has groups of columns."""
    weights = [group.get("weights") for group in _groups(stated).values() if isinstance(group, dict)]
    grouped = [kind for kind in weights if isinstance(kind, dict) and form_of(kind)[3] == "group"]
    return bool(grouped) and all(kind.get("actorder") in _ORDERS for kind in grouped)


def _require_orders(entries: Entries, layers: Sequence[Layer]) -> None:
    """Raise ``FormatError`` ``compressed-tensors.parts`` for a layer whose groups are stated to be no runs of columns,
    without the entry that says of which group each column is."""
    for layer in layers:
        layout, key = layer.layout, layer.name.removesuffix(WEIGHT) + G_IDX
        group = layout.group_size if isinstance(layout, AffineLayout) else getattr(layout, "group", None)
        if group is not None and key not in entries:
            raise FormatError(
                "compressed-tensors.parts", f"expected {key!r}, as actorder in config.json says", where=layer.name
            )


def _widths(stated: Config) -> tuple[int, ...]:
    """Return the bits that groups of layers state.

    Raises ``FormatError`` ``compressed-tensors.config``.
    """
    widths = set()
    for name, group in _groups(stated).items():
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


def _float_layers(entries: Entries, stated: Config, dtype: str) -> Iterator[Layer]:
    """Layers of floats: bytes of numbers, or numbers of less bits packed in bytes."""
    floats, named = [], dict[str, list[Config]]()
    for group in _groups(stated).values():
        kind, targets = (group.get("weights"), group.get("targets")) if isinstance(group, dict) else (None, None)
        if not isinstance(kind, dict) or kind.get("type") != "float":
            continue
        floats.append(kind)
        for target in targets if isinstance(targets, list) else ():
            named.setdefault(str(target), []).append(kind)
    for key in entries:
        packed = key.endswith(PACKED_WEIGHT) and entries[key].dtype == "u8"
        if not packed and not (key.endswith(WEIGHT) and entries[key].dtype in FP8):
            continue
        stem = key.removesuffix(PACKED_WEIGHT if packed else WEIGHT)
        yield float_layer(entries, stem, named.get(stem, floats), dtype)


def _kind(layout: Any) -> Kind:
    """Return what layers of one group share."""
    if isinstance(layout, ScaledCodebookLayout):
        return Kind(*float_kind(layout), "float")
    if isinstance(layout, WordsLayout):
        format = "pack-quantized" if layout.form == PACKED else "int-quantized"
        strategy = "channel" if layout.group is None else "group"
        symmetric = isinstance(layout.zero, Constant)
        return Kind(format, layout.bits, strategy, layout.group, symmetric=symmetric)
    grid = layout.grid
    strategy = "tensor" if isinstance(grid, Whole) else "channel" if isinstance(grid, Row) else "group"
    return Kind("int-quantized" if layout.signed else "pack-quantized", layout.bits, strategy, layout.group_size)


def _form_before(was: Described) -> tuple[Any, ...] | None:
    """Return what a group says of the weights of a layer that was read; None where none that is written says it."""
    return _form(layout_of(was))


def _form(layout: Any) -> tuple[Any, ...] | None:
    if isinstance(layout, ScaledCodebookLayout) and format_of(layout) is None:
        return None
    if isinstance(layout, AffineLayout) and not isinstance(layout.grid, Whole | Row | Group):
        return None
    return form_of(_weights_stated(_kind(layout)))


def _weights_stated(kind: Kind) -> dict[str, Any]:
    return {
        "num_bits": kind.bits,
        "type": kind.type,
        "symmetric": kind.symmetric,
        "strategy": kind.strategy,
        "group_size": kind.group,
        "block_structure": None if kind.block is None else list(kind.block),
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
        **({"scale_dtype": kind.scales, "zp_dtype": kind.scales} if kind.scales else {}),
    }


def _group_stated(kind: Kind, targets: Sequence[str], said: Said) -> dict[str, Any]:
    return {
        "targets": list(targets),
        "weights": _weights_stated(kind),
        **{key: said.get(key) for key in KEYS},
        "format": kind.format,
    }
