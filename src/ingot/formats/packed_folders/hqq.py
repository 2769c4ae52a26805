"""HQQ folders: layers of 1 to 8 bits whose settings are stored as tensors (``spec/interop.md``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.packed_folders.base import (
    HUGGING_FACE,
    WEIGHT,
    Config,
    Entries,
    Layer,
    PackedFolderFormat,
    require_entries,
)
from ingot.formats.packed_folders.config_keys import ANY, Key, irrelevant, used
from ingot.formats.packed_folders.floats import dtype_from_torch
from ingot.model.layouts.affine import CODES, POINTS, SCALES, ZEROS
from ingot.model.layouts.dense import DATA
from ingot.model.layouts.packed_ints import HQQ, HQQ_COLUMNS, PackedIntLayout
from ingot.model.store import Store
from ingot.model.tensor import Tensor

_CODES = ".W_q"
_SCALE = ".scale"
_ZERO = ".zero"
_SHAPE = ".shape"
_PACKING = ".packing"
_AXIS = ".axis"
_GROUP = ".group_size"
_DTYPE = ".compute_dtype"
_NEEDED = (_CODES, _SCALE, _ZERO, _SHAPE, _PACKING, _AXIS)
_NESTED = (".quant_scale", ".quant_zero")
_SETTINGS = (
    *(_SHAPE, _PACKING, _AXIS, _GROUP, _DTYPE, ".nbits", ".view_as_float", ".unpack_view_dtype", *_NESTED),
    *(".offload_meta", ".encoded_state_dict", ".stores_quant_config", ".channel_wise", ".optimize", ".round_zero"),
)
_BITS = {"8bit_u8": 8, "4bit_u8": 4, "3bit_32": 3, "2bit_u8": 2, "1bit_u8": 1}
_SCALES = ("f16", "bf16", "f32")
_MAX_NUMBERS = 64  # maximum numbers of a setting
_HEAD = 1 << 16
_SIGNS = ((b'.W_q"',), (b'.nbits"', b'.axis"'))


KEYS: Mapping[str, Key] = {
    "quant_method": used("the dialect"),
    "quant_config": irrelevant(
        "bits, groups and axis; each layer's own settings say them", {ANY: irrelevant("one of them")}
    ),
    "dynamic_config": irrelevant("layers that differ; each layer's own settings say how"),
    "skip_modules": irrelevant("which layers are dense; the entries show it"),
    "nbits": irrelevant("each layer's own settings say it"),
    "group_size": irrelevant("each layer's own settings say it"),
    "axis": irrelevant("each layer's own settings say it"),
    "view_as_float": irrelevant("each layer's own settings say it"),
}
"""For each key, whether the reader uses, ignores or refuses the key."""


class HqqFormat(PackedFolderFormat):
    """A folder of HQQ: each layer has ``X.W_q``, ``X.scale`` and ``X.zero``, and a tensor for every setting."""

    name = "hqq"
    summary = (
        "a folder of HQQ: dense tensors, and layers of 1, 2, 3, 4 or 8 bits in groups of rows or columns; read only"
    )

    keys = KEYS
    companions = (_CODES, _ZERO, _PACKING, _AXIS, ".nbits", *_NESTED)

    def claims_config(self, config: Config) -> bool:
        """Return whether ``quant_method`` is hqq or missing: files of the package hqq have no configuration."""
        quantization = config.get(HUGGING_FACE)
        return quantization is None or (isinstance(quantization, Mapping) and quantization.get("quant_method") == "hqq")

    def confirms(self, store: Store) -> bool:
        """Return whether the configuration names HQQ or, without a configuration, whether a header has HQQ's names."""
        config = self.read_config(store)
        name = self.entry(store.names())
        if name is None or not self.claims_config(config):
            return False
        # only the beginning of a remote file is read, as each read is a request; it has the first layer's settings
        head = b"" if HUGGING_FACE in config else store.head(name, _HEAD)
        return HUGGING_FACE in config or any(all(key in head for key in sign) for sign in _SIGNS)

    def layers(self, entries: Entries, config: Config) -> Sequence[Layer]:
        """Return a layer for every ``X.W_q``.

        Raises ``FormatError`` ``hqq.parts``, ``hqq.dtype``, ``hqq.shape``; ``UnsupportedError`` ``hqq.axis``: groups
        that do not divide the rows or columns; ``hqq.packing``: another packing of codes, or quantized scales.
        """
        return [_layer(entries, key.removesuffix(_CODES)) for key in entries if key.endswith(_CODES)]


def _layer(entries: Entries, stem: str) -> Layer:
    required = require_entries(entries, stem, _NEEDED, "hqq.parts")
    codes = required[_CODES]
    scale = required[_SCALE]
    zero = required[_ZERO]
    packing = _text(required[_PACKING])
    if packing not in _BITS or any(map(_flag, (entries.get(stem + key) for key in _NESTED))):
        raise UnsupportedError(
            f"expected codes packed as {', '.join(_BITS)} with scales that are not quantized, found {packing!r}",
            rule="hqq.packing",
            where=stem,
        )
    shape = tuple(_numbers(required[_SHAPE]))
    bits = _BITS[packing]
    if len(shape) != 2 or not 0 < prod(shape) < 2**62 or min(shape) < 1:
        raise FormatError("hqq.shape", f"expected a matrix, found shape {list(shape)}", where=stem + _SHAPE)
    rows, cols = shape
    axis = _numbers(required[_AXIS])
    variant, full_group = (HQQ_COLUMNS, rows) if axis == [0] else (HQQ, cols)
    group = _numbers(entries[stem + _GROUP])[0] if stem + _GROUP in entries else full_group
    # Groups of columns are strided over the full matrix, and may exceed its number of rows.
    if axis not in ([0], [1]) or group < 1 or (rows * cols if variant == HQQ_COLUMNS else cols) % group:
        raise UnsupportedError(
            f"expected groups that divide {rows} x {cols}, found groups of {group} on axis {axis}",
            rule="hqq.axis",
            where=stem,
        )
    if scale.dtype not in _SCALES or zero.dtype != scale.dtype:
        raise FormatError(
            "hqq.dtype",
            f"expected scales and zero points of {', '.join(_SCALES)}, found {scale.dtype} and {zero.dtype}",
            where=stem,
        )
    dtype_text = _text(entries[stem + _DTYPE]) if stem + _DTYPE in entries else ""
    layout = PackedIntLayout(
        variant,
        bits,
        None if group == full_group else group,
        POINTS,
        dtype_from_torch(dtype_text) or scale.dtype,
        scale.dtype,
    )
    keys = {CODES: codes, SCALES: scale, ZEROS: zero}
    for spec in layout.part_specs((rows, cols)):
        stored = keys[spec.role]
        if stored.size * DTYPES[stored.dtype].bits != 8 * (spec.length or 0):
            raise FormatError(
                "hqq.shape",
                f"expected {spec.length} bytes for {bits} bits in groups of {group} of {list(shape)}, found "
                f"{stored.dtype} {list(stored.shape)}",
                where=stored.name,
            )
    extra = [stem + key for key in _SETTINGS if stem + key in entries]
    return Layer(stem + WEIGHT, (rows, cols), layout, {role: stored.name for role, stored in keys.items()}, extra)


def _numbers(setting: Tensor) -> list[int]:
    """Return the integers in ``setting``, a tensor that stores a setting; raise ``FormatError`` ``hqq.dtype``."""
    if setting.dtype not in ("u8", "i8", "i32", "i64", "bool") or not 0 < setting.size <= _MAX_NUMBERS:
        raise FormatError(
            "hqq.dtype",
            f"expected a setting of 1 to {_MAX_NUMBERS} integers, found {setting.dtype} {list(setting.shape)}",
            where=setting.name,
        )
    return [int(number) for number in setting.parts[DATA].array().reshape(-1)]


def _text(setting: Tensor) -> str:
    """Return a setting that is text, one number per byte; U+FFFD replaces numbers that are not ASCII."""
    return "".join(chr(number) if 0 <= number < 128 else "\ufffd" for number in _numbers(setting))


def _flag(setting: Tensor | None) -> bool:
    return setting is not None and _numbers(setting) != [0]
