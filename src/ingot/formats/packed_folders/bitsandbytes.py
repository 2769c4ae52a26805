"""Folders of bitsandbytes: NF4, FP4 and rows of 8 bits (``spec/interop.md``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import DTYPES, MAX_RANK
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.core.parsing.strictjson import strict_json
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.packed_folders.base import (
    HUGGING_FACE,
    WEIGHT,
    Config,
    Entries,
    Layer,
    WritablePackedFolderFormat,
    require_entries,
)
from ingot.formats.packed_folders.config_keys import Key, irrelevant, repeated, used
from ingot.formats.packed_folders.floats import config_dtype, dense_module_names, existing_entries, layout_to_write
from ingot.formats.safetensors.pieces import FileEntry
from ingot.model.artifact import Artifact
from ingot.model.layouts.affine import ROW
from ingot.model.layouts.dense import DATA
from ingot.model.layouts.scaled_codebook import (
    CODEBOOK,
    DTYPES_OF_VALUES,
    HIGH_FIRST,
    INDICES,
    SCALE_CODEBOOK,
    SCALE_SCALES,
    SCALES,
    TABLES,
    Nested,
    Run,
    ScaledCodebookLayout,
)
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Tensor

_STATE = ".quant_state.bitsandbytes__"
_TYPES = ("nf4", "fp4")
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_MAX_STATE = 1 << 16  # bytes of a state
_FACTOR = float(np.float32(7.874015718698502e-3))  # 1 / 127


KEYS: Mapping[str, Key] = {
    "quant_method": used("the dialect"),
    **repeated(
        irrelevant("bits and table of the codes; each layer's own state says them"),
        "load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit bnb_4bit_quant_type bnb_4bit_use_double_quant",
    ),
    "bnb_4bit_compute_dtype": irrelevant("the type that the loading program computes in"),
    "bnb_4bit_quant_storage": used("the type under which bytes of codes are stored"),
    **repeated(
        irrelevant("a setting of the program that loads the folder"),
        "llm_int8_threshold llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight",
    ),
    "llm_int8_skip_modules": irrelevant("which layers are dense; the entries show it"),
    "modules_to_not_convert": irrelevant("which layers are dense; the entries show it"),
}
"""For each key, whether the reader uses, ignores or refuses the key."""


class BitsandbytesFormat(WritablePackedFolderFormat):
    """A folder of bitsandbytes with layers of 4-bit codes or of 8-bit integers.

    4-bit layers have ``X.weight`` (U8) with ``absmax``, ``quant_map`` and a JSON state; 8-bit layers have ``X.weight``
    (I8) and ``X.SCB``.
    """

    name = "bitsandbytes"
    summary = "a folder of bitsandbytes: NF4 and FP4, doubly quantized too, and rows of 8 bits"
    traits = replace(
        WritablePackedFolderFormat.traits,
        packed_codecs=(ScaledCodebookLayout.codec,),
        dense_key="llm_int8_skip_modules",
        how_to_quantize="--recipe nf4",
    )
    keys = KEYS
    companions = (
        *(".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".SCB", ".weight_format"),
        *(_STATE + name for name in _TYPES),
    )

    def claims_config(self, config: Config) -> bool:
        """Return whether ``quant_method`` is bitsandbytes."""
        quantization = config.get(HUGGING_FACE)
        return isinstance(quantization, Mapping) and quantization.get("quant_method") == "bitsandbytes"

    def layers(self, entries: Entries, config: Config) -> Sequence[Layer]:
        """Return the packed layers among ``entries``.

        Raises ``FormatError`` ``bitsandbytes.parts``, ``.state``, ``.dtype``, ``.shape``.
        """
        layers = []
        for key, entry in entries.items():
            stem = key.removesuffix(WEIGHT)
            if entry.dtype == "i8" and stem + ".SCB" in entries:
                layers.append(_int8(entries, key, stem, config_dtype(config)))
                continue
            states = existing_entries(entries, key, [_STATE + name for name in _TYPES])
            if states:
                layers.append(_four_bits(entries, key, states[0]))
            elif entry.dtype == "u8" and key + ".absmax" in entries:
                raise FormatError(
                    "bitsandbytes.parts",
                    f"expected the entry {key + _STATE}nf4 or fp4 of these codes, but it is missing",
                    where=key,
                )
        return layers

    def require_complete(self, entries: Entries, config: Config, layers: Sequence[Layer]) -> None:
        """Raise ``FormatError`` ``bitsandbytes.parts`` for incomplete layers.

        These include codes without a state that are stored as floats (``bnb_4bit_quant_storage``).
        """
        super().require_complete(entries, config, layers)
        if self.quantization(config).get("bnb_4bit_quant_storage") in (None, "uint8"):
            return
        used = {key for layer in layers for key in layer.parts.values()}
        for key in entries:
            shape = entries[key].shape if key.endswith(WEIGHT) and key not in used else ()
            if len(shape) == 2 and shape[0] > 1 and shape[1] == 1:
                raise FormatError(
                    "bitsandbytes.parts",
                    f"expected the entry {key + _STATE}nf4 or fp4 of these codes, but it is missing; get the folder "
                    "again",
                    where=key,
                )

    def why_layer_unsupported(self, spec: TensorSpec) -> str | None:
        """Return why a tensor cannot be a packed layer; None if it can."""
        layout = layout_to_write(spec)
        if isinstance(layout, str):
            return layout
        if _is_int8(layout):
            is_matrix = spec.name.endswith(WEIGHT) and len(spec.shape) == 2
            return None if is_matrix else f"its rows of 8 bits are matrices X{WEIGHT}"
        expected = ScaledCodebookLayout(4, layout.grid, layout.dtype, values=layout.values, order=HIGH_FIRST)
        if (
            layout != replace(expected, scales=layout.scales, nested=layout.nested)
            or layout.values not in _TYPES
            or not isinstance(layout.grid, Run)
        ):
            return "it is written as nf4 or fp4 in flat runs, high bits first, or as rows of i8 with its own factor"
        if layout.scales != "f32" and layout.nested is None:
            return "its scales are f32, or codes of a table"
        if layout.grid.elements not in _BLOCKS or not spec.name.endswith(WEIGHT) or len(spec.shape) != 2:
            return f"its packed layers are matrices X{WEIGHT} with a scale for {', '.join(map(str, _BLOCKS))} elements"
        return None

    def for_artifact(self, artifact: Artifact) -> BitsandbytesFormat:
        """Return this format.

        Raises ``UnsupportedError`` ``bitsandbytes.mixed`` if there are layers of four bits and of eight bits, which a
        folder cannot combine.
        """
        bits = {
            ScaledCodebookLayout.from_tensor(spec).bits
            for spec in artifact.tensors
            if spec.codec in self.traits.packed_codecs
        }
        if len(bits) > 1:
            raise UnsupportedError(
                "expected only layers of four bits or only layers of eight bits, found both", rule="bitsandbytes.mixed"
            )
        return self

    def layer_entries(self, spec: TensorSpec) -> Sequence[FileEntry]:
        """Return ``X.weight``, ``absmax``, ``quant_map`` and the state; or ``X.weight`` and ``X.SCB``."""
        layout = ScaledCodebookLayout.from_tensor(spec)
        sizes = {part.role: part.length or 0 for part in layout.part_specs(spec.shape)}
        if _is_int8(layout):
            stem = spec.name.removesuffix(WEIGHT)
            rows = spec.shape[0]
            return [
                FileEntry(INDICES, spec.name, "i8", spec.shape, sizes[INDICES]),
                FileEntry(SCALES, stem + ".SCB", "f32", (rows,), sizes[SCALES]),
                FileEntry("format", stem + ".weight_format", "u8", (), 1, lambda: b"\0"),
            ]
        assert isinstance(layout.grid, Run)
        assert layout.values
        state: dict[str, Any] = {
            "quant_type": layout.values,
            "blocksize": layout.grid.elements,
            "dtype": DTYPES[layout.dtype].torch,
            "shape": list(spec.shape),
        }
        nested = layout.nested
        scales = "f32"
        nested_entries = []
        if nested is not None:
            scales = "u8"
            outer = sizes[SCALE_SCALES]
            nested_entries = [
                FileEntry(SCALE_SCALES, spec.name + ".nested_absmax", "f32", (outer // 4,), outer),
                FileEntry(SCALE_CODEBOOK, spec.name + ".nested_quant_map", "f32", (256,), sizes[SCALE_CODEBOOK]),
            ]
            state |= {
                "nested_blocksize": nested.run,
                "nested_dtype": "float32",
                "nested_offset": nested.offset,
            }
        text, table = json.dumps(state).encode(), _table(layout.values)
        count = sizes[SCALES] // DTYPES[scales].nbytes(1)
        return [
            FileEntry(INDICES, spec.name, "u8", (sizes[INDICES], 1), sizes[INDICES]),
            FileEntry(SCALES, spec.name + ".absmax", scales, (count,), sizes[SCALES]),
            *nested_entries,
            FileEntry("table", spec.name + ".quant_map", "f32", (16,), len(table), lambda: table),
            FileEntry("state", spec.name + _STATE + layout.values, "u8", (len(text),), len(text), lambda: text),
        ]

    def packing_config(self, artifact: Artifact) -> Mapping[str, Any]:
        """Return ``quantization_config`` as transformers writes it."""
        layouts = [
            ScaledCodebookLayout.from_tensor(spec)
            for spec in artifact.tensors
            if spec.codec in self.traits.packed_codecs
        ]
        if not layouts:
            return {}
        four = [layout for layout in layouts if layout.bits == 4]
        first = (four or layouts)[0]
        keys = {
            "quant_method": "bitsandbytes",
            "load_in_4bit": bool(four),
            "load_in_8bit": not four,
            "bnb_4bit_quant_type": first.values if four else "fp4",
            "bnb_4bit_compute_dtype": DTYPES[first.dtype].torch,
            "bnb_4bit_use_double_quant": first.nested is not None,
            "bnb_4bit_quant_storage": "uint8",
        }
        dense = dense_module_names(artifact, self.traits.packed_codecs)
        return {HUGGING_FACE: {**keys, "llm_int8_skip_modules": dense}}


def _is_int8(layout: ScaledCodebookLayout) -> bool:
    return layout == ScaledCodebookLayout(8, ROW, layout.dtype, values="i8", factor=_FACTOR)


def _int8(entries: Entries, key: str, stem: str, dtype: str) -> Layer:
    shape = entries[key].shape
    scales = entries[stem + ".SCB"]
    if len(shape) != 2 or scales.dtype != "f32" or scales.shape != shape[:1]:
        raise FormatError(
            "bitsandbytes.shape",
            f"expected SCB in f32 for each row of {list(shape)}, found {list(scales.shape)}",
            where=key,
        )
    layout = ScaledCodebookLayout(8, ROW, dtype, values="i8", factor=_FACTOR)
    extra = existing_entries(entries, stem, (".weight_format", ".CB", ".SCBt"))
    for entry in extra:
        content = bytes(entries[entry].parts[DATA].view()) if entry.endswith("format") else b""
        if content.strip(b"\0"):
            raise UnsupportedError("expected weights in rows (weight_format 0)", rule="bitsandbytes.state", where=entry)
    return Layer(key, shape, layout, {INDICES: key, SCALES: stem + ".SCB"}, extra)


def _four_bits(entries: Entries, key: str, state_key: str) -> Layer:
    state = _state(entries[state_key])
    shape = _shape(state, state_key)
    dtype = _dtype(state, state_key)
    run = _positive_size(state, "blocksize", state_key)
    nested = "nested_blocksize" in state
    suffixes = [".absmax", ".quant_map", *((".nested_absmax", ".nested_quant_map") if nested else ())]
    parts = require_entries(entries, key, suffixes, "bitsandbytes.parts")
    dtypes = {".absmax": "u8" if nested else "f32"}
    for suffix, part in parts.items():
        if part.dtype != dtypes.get(suffix, "f32"):
            raise FormatError(
                "bitsandbytes.dtype", f"expected {dtypes.get(suffix, 'f32')}, found {part.dtype}", where=key + suffix
            )
    roles = {INDICES: key, CODEBOOK: key + ".quant_map", SCALES: key + ".absmax"}
    if nested:
        roles |= {SCALE_CODEBOOK: key + ".nested_quant_map", SCALE_SCALES: key + ".nested_absmax"}
    if entries[key].parts[DATA].length != -(-int(np.prod(shape, dtype=object)) // 2):
        raise FormatError(
            "bitsandbytes.shape",
            f"expected two codes a byte for {list(shape)}, found {list(entries[key].shape)}",
            where=key,
        )
    values = _table_name(parts[".quant_map"])
    extra = [state_key]
    if values:
        extra.append(roles.pop(CODEBOOK))
    layout = ScaledCodebookLayout(
        bits=4,
        values=values,
        grid=Run(run),
        dtype=dtype,
        scales="u8" if nested else "f32",
        order=HIGH_FIRST,
        nested=Nested(_positive_size(state, "nested_blocksize", state_key), _offset(state, state_key))
        if nested
        else None,
    )
    return Layer(key, shape, layout, roles, extra)


def _table_name(table: Tensor) -> str | None:
    """Return the name of the table with the same bytes; None for another table."""
    stored = bytes(table.parts[DATA].view()) if table.size == 16 else b""
    return next((name for name in _TYPES if stored == _table(name)), None)


def _table(name: str) -> bytes:
    return np.array(TABLES[name], "<f4").tobytes()


def _state(tensor: Tensor) -> Mapping[str, Any]:
    part = tensor.parts[DATA]
    if tensor.dtype != "u8" or part.length > _MAX_STATE:
        raise FormatError("bitsandbytes.state", f"expected JSON of at most {_MAX_STATE} bytes", where=tensor.name)
    return strict_json(bytes(part.view()), "bitsandbytes.state", "bitsandbytes.state", tensor.name)


def _shape(state: Mapping[str, Any], location: str) -> tuple[int, ...]:
    shape = state.get("shape")
    if not isinstance(shape, list) or not 1 <= len(shape) <= MAX_RANK:
        raise FormatError("bitsandbytes.state", f"expected a shape, found {str(shape)[:80]!r}", where=location)
    return tuple(_size(size, location) for size in shape)


def _positive_size(state: Mapping[str, Any], key: str, location: str) -> int:
    return _size(state.get(key), location, minimum=1)


def _size(size: object, location: str, minimum: int = 0) -> int:
    if not isinstance(size, int) or isinstance(size, bool) or not minimum <= size < 2**48:
        raise FormatError("bitsandbytes.state", f"expected a size, found {str(size)[:80]!r}", where=location)
    return size


def _offset(state: Mapping[str, Any], location: str) -> float:
    offset = state.get("nested_offset", 0.0)
    if not isinstance(offset, int | float) or isinstance(offset, bool) or not abs(offset) < 1e38:
        raise FormatError(
            "bitsandbytes.state", f"expected a finite nested_offset, found {str(offset)[:80]!r}", where=location
        )
    if state.get("nested_dtype", "float32") != "float32":
        raise FormatError("bitsandbytes.state", "expected nested_dtype float32", where=location)
    return float(np.float32(offset))


def _dtype(state: Mapping[str, Any], location: str) -> str:
    try:
        name = resolve_dtype(str(state.get("dtype"))[:40]).name
    except UnsupportedError:
        name = ""
    if name not in DTYPES_OF_VALUES:
        raise FormatError(
            "bitsandbytes.state",
            f"expected dtype float32, float16 or bfloat16, found {str(state.get('dtype'))[:40]!r}",
            where=location,
        )
    return name
