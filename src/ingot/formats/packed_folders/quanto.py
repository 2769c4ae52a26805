"""Folders of optimum-quanto: bytes with a scale per row, and integers of 2 and 4 bits (``spec/interop.md``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from ingot.errors import FormatError, UnsupportedError
from ingot.formats.packed_folders.base import HUGGING_FACE, Config, Entries, Layer, PackedFolderFormat, require_entries
from ingot.formats.packed_folders.compressed_settings import summarize
from ingot.formats.packed_folders.config_keys import Key, irrelevant, used
from ingot.formats.packed_folders.floats import FP8, fp8_layer
from ingot.model.layouts.affine import CODES, NO_ZERO, POINTS, ROW, ROWS_LSB, SCALES, ZEROS, AffineLayout
from ingot.model.layouts.dense import DATA
from ingot.model.layouts.packed_ints import PACKING_FORMS, QUANTO, PackedIntLayout
from ingot.model.store import Store
from ingot.model.tensor import Tensor

MAP = "quanto_qmap.json"
_DATA = "._data"
_PACKED = "._data._data"
_SCALE = "._scale"
_SHIFT = "._shift"
# keys of config.json for the inputs of a Linear; files contain groups, but not their number per row
_INPUTS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("hidden_size",)),
    "down_proj": ("intermediate_size",),
    "o_proj": ("num_attention_heads", "head_dim"),
}
_SCALES = ("f16", "bf16", "f32")
_ACTIVATIONS = (".input_scale", ".output_scale")


KEYS: Mapping[str, Key] = {
    "quant_method": used("the dialect"),
    "weights": irrelevant("the type of the codes; the entries show it"),
    "activations": used("how inputs are quantized"),
    "modules_to_not_convert": irrelevant("which layers are dense; the entries show it"),
}
"""For each key, whether the reader uses, ignores or refuses the key."""


class QuantoFormat(PackedFolderFormat):
    """A folder of quanto with layers of integers or FP8.

    ``X.weight._data`` contains I8 or FP8, and ``X.weight._data._data`` packed codes of 2 or 4 bits. ``X.weight._scale``
    has a scale per row.
    """

    name = "quanto"
    summary = "a folder of optimum-quanto: dense tensors, and matrices of int8, FP8 and 2 and 4 bits; read only"

    keys = KEYS
    companions = (_DATA, _PACKED, _SCALE, _SHIFT)

    def claims_config(self, config: Config) -> bool:
        """Return whether ``quant_method`` is quanto.

        Folders that the package wrote have ``quanto_qmap.json`` instead.
        """
        quantization = config.get(HUGGING_FACE)
        return isinstance(quantization, Mapping) and quantization.get("quant_method") == "quanto"

    def read_config(self, store: Store) -> dict[str, object]:
        """Return the folder's ``config.json``; if ``quanto_qmap.json`` exists, ``quant_method`` is quanto."""
        config = super().read_config(store)
        return {**config, HUGGING_FACE: {"quant_method": "quanto"}} if store.exists(MAP) else config

    def layers(self, entries: Entries, config: Config) -> Sequence[Layer]:
        """Return the packed layers among ``entries``.

        Raises ``FormatError`` ``quanto.parts``, ``quanto.dtype``, ``quanto.shape``; ``UnsupportedError``
        ``quanto.type``: codes of less than a byte of a matrix of unknown shape, or with integer zero points.
        """
        layers = []
        for key in entries:
            if key.endswith(_PACKED):
                layers.append(_packed(entries, key.removesuffix(_PACKED), config))
            elif key.endswith(_DATA):
                layers.append(_layer(entries, key.removesuffix(_DATA)))
        return layers

    def activations(self, config: Config) -> Mapping[str, str]:
        """Return the setting ``activations`` of the config; empty if activations are not quantized."""
        setting = self.quantization(config).get("activations")
        return {} if setting is None else {"activations": summarize(setting)}


def _layer(entries: Entries, name: str) -> Layer:
    codes = entries[name + _DATA]
    scale = entries.get(name + _SCALE)
    if scale is None:
        raise FormatError(
            "quanto.parts", f"expected the entry {name + _SCALE!r} of this weight, but it is missing", where=name
        )
    extra = _activations(entries, name)
    if codes.dtype in FP8:
        return replace(fp8_layer(entries, name + _DATA, name + _SCALE, "quanto", scale.dtype), name=name, extra=extra)
    if codes.dtype != "i8" or scale.dtype not in _SCALES:
        raise FormatError("quanto.dtype", f"expected i8 or FP8, found {codes.dtype} and {scale.dtype}", where=name)
    if len(codes.shape) != 2 or scale.shape != (codes.shape[0], 1) or not prod(codes.shape):
        raise FormatError(
            "quanto.shape",
            f"expected a matrix and a scale for each row, found {list(codes.shape)} and {list(scale.shape)}",
            where=name,
        )
    layout = AffineLayout(8, ROW, ROWS_LSB, True, NO_ZERO, scale.dtype, scale.dtype)
    return Layer(name, codes.shape, layout, {CODES: codes.name, SCALES: scale.name}, extra)


def _packed(entries: Entries, name: str, config: Config) -> Layer:
    codes, scale, shift = require_entries(entries, name, (_PACKED, _SCALE, _SHIFT), "quanto.parts").values()
    if codes.dtype != "u8" or scale.dtype not in _SCALES:
        raise FormatError("quanto.dtype", f"expected u8 and floats, found {codes.dtype} and {scale.dtype}", where=name)
    count = scale.shape[0] if len(scale.shape) == 2 and scale.shape[1] == 1 else 0
    lines, group = codes.shape if len(codes.shape) == 2 else (0, 0)
    widths = [bits for bits in PACKING_FORMS[QUANTO].bits if lines == -(-count * bits // 8)]
    if not count or not group or not widths or shift.shape != scale.shape:
        raise FormatError(
            "quanto.shape",
            f"expected groups as rows, with a scale and a shift for each, found {list(codes.shape)}, "
            f"{list(scale.shape)} and "
            f"{list(shift.shape)}",
            where=name,
        )
    cols = _columns(entries, name, config, count * group)
    if cols is None or cols % group or shift.dtype != scale.dtype or len(widths) > 1:
        raise UnsupportedError(
            f"expected groups of a matrix whose shape a bias or config.json defines, with shifts of {scale.dtype}, "
            "found "
            f"{count} groups of {group} and shifts of {shift.dtype}",
            rule="quanto.type",
            where=name,
        )
    layout = PackedIntLayout(QUANTO, widths[0], None if group == cols else group, POINTS, scale.dtype, scale.dtype)
    parts = {CODES: codes.name, SCALES: scale.name, ZEROS: shift.name}
    return Layer(name, (count * group // cols, cols), layout, parts, _activations(entries, name))


def _columns(entries: Entries, name: str, config: Config, size: int) -> int | None:
    """Return the number of columns of the matrix ``name``, which has ``size`` values but no stored shape.

    Return None if it follows neither from the matrix's bias nor from the configuration.

    In a multimodal model, several configs (``text_config``, ``vision_config``) may state the sizes of modules with this
    name. The result is None if they disagree.
    """
    module = name.rpartition(".")[0]
    bias = entries.get(f"{module}.bias")
    if bias is not None and bias.size and size % bias.size == 0:
        return size // bias.size
    keys = _INPUTS.get(module.rpartition(".")[2], ())
    parts = [config, *(value for value in config.values() if isinstance(value, Mapping))]
    candidates = {cols for part in parts if (cols := _size_from_config(part, keys)) is not None and size % cols == 0}
    return candidates.pop() if len(candidates) == 1 else None


def _size_from_config(config: Config, keys: Sequence[str]) -> int | None:
    """Return the product of the sizes under ``keys`` in ``config``; None if one is missing."""
    sizes = [config.get(key) for key in keys]
    if keys[-1:] == ("head_dim",) and sizes[-1] is None:
        sizes = [config.get("hidden_size")]
    valid = [item for item in sizes if type(item) is int and 0 < item < 2**31]
    return prod(valid) if sizes and len(valid) == len(sizes) else None


def _activations(entries: Entries, name: str) -> tuple[str, ...]:
    """Return the names of a module's activation scales whose value is 1; these have no effect.

    quanto writes such scales for modules whose activations are not quantized.
    """
    module = name.rpartition(".")[0]
    return tuple(key for ending in _ACTIVATIONS if (key := module + ending) in entries and _is_one(entries[key]))


def _is_one(scale: Tensor) -> bool:
    """Return whether a scale of activations is the constant 1."""
    return scale.size == 1 and scale.dtype in _SCALES and bool((scale.parts[DATA].array().astype("f4") == 1).all())
