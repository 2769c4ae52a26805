"""Folders of NVIDIA's ModelOpt: NVFP4, FP8 and INT4 (``spec/interop.md``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from ingot.errors import CodecError, FormatError, UnsupportedError
from ingot.formats.packed_folders.base import HUGGING_FACE, WEIGHT, Config, Entries, Layer, WritablePackedFolderFormat
from ingot.formats.packed_folders.compressed_keys import GROUP
from ingot.formats.packed_folders.compressed_settings import summarize
from ingot.formats.packed_folders.config_keys import ANY, Key, irrelevant, refused, used
from ingot.formats.packed_folders.floats import (
    FP4,
    FP8,
    config_dtype,
    dense_module_names,
    fp4_layer,
    fp8_layer,
    layout_to_write,
)
from ingot.formats.safetensors.pieces import FileEntry
from ingot.model.artifact import Artifact
from ingot.model.layouts.affine import CODES, PER_TENSOR, Constant, Group
from ingot.model.layouts.packed_ints import FACTORS, MODELOPT, PackedIntLayout
from ingot.model.layouts.scaled_codebook import (
    DTYPES_OF_VALUES,
    INDICES,
    MULTIPLY,
    SCALES,
    SECOND,
    ScaledCodebookLayout,
)
from ingot.model.spec import TensorSpec

_SCALE = "_scale"
_SECOND = "_scale_2"
_FACTORS = ".pre_quant_scale"
_INT4 = "W4A16_AWQ"
_SIDE_FILE = "hf_quant_config.json"
_KV_CACHE = ("kv_cache_quant_algo", "kv_cache_scheme")
_ALGORITHM = "quant_algo"
_LAYER_ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "FP8", _INT4)
_ALGORITHMS = (*_LAYER_ALGORITHMS, "MIXED_PRECISION")


_LAYER: Mapping[str, Key] = {
    _ALGORITHM: refused("weights of this layer are packed otherwise", *_LAYER_ALGORITHMS),
    "group_size": used("columns of a group; shapes show it"),
    "has_zero_point": refused("integers have zero points"),
    "pre_quant_scale": used("whether inputs are multiplied by something; the entries show it"),
    "awq_block_size": used("columns of a group; shapes show it"),
}
KEYS: Mapping[str, Key] = {
    "quant_method": used("the dialect"),
    _ALGORITHM: used("how weights are packed"),
    "producer": irrelevant("the writing program"),
    "ignore": irrelevant("which layers are dense; the types of the entries show it"),
    "exclude_modules": irrelevant("which layers are dense; the types of the entries show it"),
    "group_size": used("columns of a group; shapes show it"),
    "has_zero_point": refused("integers have zero points"),
    "pre_quant_scale": used("whether inputs are multiplied by something; the entries show it"),
    "quantized_layers": used("layers that differ", {ANY: used("one layer", _LAYER)}),
    "config_groups": used(
        "how inputs are quantized",
        {
            ANY: used(
                "one group",
                {
                    **GROUP,
                    "has_zero_point": refused("integers have zero points"),
                    "pre_quant_scale": used("whether inputs are multiplied by something; the entries show it"),
                },
            )
        },
    ),
    "kv_cache_quant_algo": used("how keys and values are quantized"),
    "kv_cache_scheme": used("how keys and values are quantized"),
    "rotation": refused("inputs of layers are multiplied by a rotation while the model runs"),
    "lora_rank": refused("a product of two small matrices is added to each layer"),
}
"""For each key, whether the reader uses, ignores or refuses the key."""


class ModelOptFormat(WritablePackedFolderFormat):
    """A folder of ModelOpt with layers in NVFP4, FP8 or 4-bit integers.

    Each layer has ``X.weight`` (U8 or F8_E4M3) and ``X.weight_scale``. NVFP4 layers also have ``X.weight_scale_2``.
    Integer layers may have ``X.pre_quant_scale``, by which inputs are multiplied.
    """

    name = "modelopt"
    summary = "a folder of NVIDIA's ModelOpt: dense tensors, NVFP4, FP8 and integers of 4 bits"
    traits = replace(
        WritablePackedFolderFormat.traits,
        packed_codecs=(ScaledCodebookLayout.codec, PackedIntLayout.codec),
        merges=True,
        dense_key="ignore",
        how_to_quantize=(
            'a recipe with codec = "scaled_codebook" and options = { table = "f4_e2m1fn", group = 16, scales = '
            '"f8_e4m3fn", second = "multiply" } (NVFP4) or { table = "f8_e4m3fn", group = "tensor" } (FP8)'
        ),
        group_sizes=(128, 64, 32),
    )
    keys = KEYS
    side_files: ClassVar[Mapping[str, str]] = {_SIDE_FILE: "modelopt"}
    companions = ("weight" + _SCALE, "weight" + _SECOND)

    def claims_config(self, config: Config) -> bool:
        """Return whether ``quant_method`` is modelopt."""
        quantization = config.get(HUGGING_FACE)
        return isinstance(quantization, Mapping) and quantization.get("quant_method") in ("modelopt", "modelopt_fp4")

    def from_side_file(self, contents: dict[str, Any]) -> dict[str, Any]:
        """Return ``quantization`` of the side file, merged with its other keys; raise ``FormatError``
        ``modelopt.config``.
        """
        inner = contents.pop("quantization", None)
        if not isinstance(inner, dict):
            raise FormatError("modelopt.config", "expected an object under 'quantization'", where=_SIDE_FILE)
        return {**contents, **inner}

    def layers(self, entries: Entries, config: Config) -> Sequence[Layer]:
        """Return the packed layers among ``entries``.

        Raises ``FormatError`` ``modelopt.parts``, ``modelopt.dtype``, ``modelopt.shape``; ``UnsupportedError``
        ``modelopt.algorithm`` for another packing, ``modelopt.pre-quant-scale`` for factors of inputs in layers without
        integers.
        """
        algorithm = config[HUGGING_FACE].get(_ALGORITHM)
        if algorithm is not None and str(algorithm).upper() not in _ALGORITHMS:
            raise UnsupportedError(
                f"expected quant_algo {', '.join(_ALGORITHMS)}, found {str(algorithm)[:80]!r}",
                rule="modelopt.algorithm",
            )
        dtype = config_dtype(config)
        layers = []
        for key, entry in entries.items():
            packed = entry.dtype == "u8" and key.endswith(WEIGHT)
            if not packed and entry.dtype not in FP8:
                continue
            if entry.dtype in FP8 and key.endswith(_SCALE):
                continue
            scale = entries.get(key + _SCALE)
            integers = packed and scale is not None and scale.dtype in DTYPES_OF_VALUES and key + _SECOND not in entries
            if scale is None or (packed and not integers and key + _SECOND not in entries):
                raise FormatError(
                    "modelopt.parts",
                    f"expected the entry {key + _SCALE!r} of this weight, but it is missing",
                    where=key,
                )
            if integers:
                layers.append(_integers(entries, key, dtype))
            elif packed:
                keys = {INDICES: key, SCALES: key + _SCALE, SECOND: key + _SECOND}
                layers.append(fp4_layer(entries, keys, self.name, dtype, MULTIPLY, key, 16))
            else:
                layers.append(fp8_layer(entries, key, key + _SCALE, self.name, dtype))
        used = {key for layer in layers for key in layer.parts.values()}
        stray = next((key for key in entries if key.endswith(_FACTORS) and key not in used), None)
        if stray is not None:
            raise UnsupportedError(
                "expected factors of inputs only for layers of 4-bit integers, found them for another layer",
                rule="modelopt.pre-quant-scale",
                where=stray,
            )
        return layers

    def why_layer_unsupported(self, spec: TensorSpec) -> str | None:
        """Return why a tensor cannot be a matrix of NVFP4, FP8 or integers; None if it can."""
        if spec.codec == PackedIntLayout.codec:
            return _why_integers_unsupported(spec)
        layout = layout_to_write(spec)
        if isinstance(layout, str):
            return layout
        if layout not in (_nvfp4(layout.dtype), _fp8(layout.dtype)):
            return "its packed layers are NVFP4, whose scales are multiplied by a second scale, and FP8 with one scale"
        if not spec.name.endswith(WEIGHT) or len(spec.shape) != 2 or not spec.size:
            return f"its packed layers are matrices with names X{WEIGHT}, found shape {list(spec.shape)}"
        if isinstance(layout.grid, Group) and spec.shape[1] % layout.grid.columns:
            return f"its groups divide the columns, found {layout.grid.columns} of {spec.shape[1]}"
        return None

    def layer_entries(self, spec: TensorSpec) -> Sequence[FileEntry]:
        """Return ``X.weight`` and ``X.weight_scale``; also ``X.weight_scale_2`` (NVFP4), ``X.pre_quant_scale``
        (integers)."""
        if spec.codec == PackedIntLayout.codec:
            return _integer_entries(spec)
        layout, (rows, cols) = ScaledCodebookLayout.from_tensor(spec), spec.shape
        if layout == _fp8(layout.dtype):
            return [
                FileEntry(INDICES, spec.name, "f8_e4m3fn", spec.shape, rows * cols),
                FileEntry(SCALES, spec.name + _SCALE, "f32", (), 4),
            ]
        return [
            FileEntry(INDICES, spec.name, "u8", (rows, cols // 2), rows * cols // 2),
            FileEntry(SCALES, spec.name + _SCALE, "f8_e4m3fn", (rows, cols // 16), rows * cols // 16),
            FileEntry(SECOND, spec.name + _SECOND, "f32", (), 4),
        ]

    def packing_config(self, artifact: Artifact) -> Mapping[str, Any]:
        """Return ``quantization_config`` as ModelOpt writes it.

        Without scales of activations, only the weights are declared to be quantized.
        """
        activations = any(spec.name.endswith(".input_scale") for spec in artifact.tensors)
        packed = [spec for spec in artifact.tensors if spec.codec in self.traits.packed_codecs]
        layers = {spec.name.removesuffix(WEIGHT): _layer_config(spec, activations=activations) for spec in packed}
        if not layers:
            return {}
        source = self.source_config(artifact)
        integers = [PackedIntLayout.from_tensor(spec) for spec in packed if spec.codec == PackedIntLayout.codec]
        algorithms = {layer["quant_algo"] for layer in layers.values()}
        groups = {layer["group_size"] for layer in layers.values() if "group_size" in layer}
        mixed = len(algorithms) > 1 or len(groups) > 1
        return {
            HUGGING_FACE: {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION" if mixed else algorithms.pop(),
                "producer": {"name": "modelopt"},
                "ignore": dense_module_names(artifact, self.traits.packed_codecs),
                **({"group_size": groups.pop()} if len(groups) == 1 else {}),
                **({"has_zero_point": False} if integers else {}),
                **({"pre_quant_scale": any(layout.factors for layout in integers)} if integers else {}),
                **({"quantized_layers": layers} if mixed and integers else {}),
                **{key: source[key] for key in _KV_CACHE if source.get(key) is not None},
            }
        }

    def activations(self, config: Config) -> Mapping[str, str]:
        """Return the settings of keys and values, and ``quant_algo`` if it quantizes inputs."""
        quantization = config.get(HUGGING_FACE)
        keys = quantization if isinstance(quantization, Mapping) else {}
        inputs = {_ALGORITHM: algorithm} if (algorithm := keys.get(_ALGORITHM)) in ("NVFP4", "FP8") else {}
        return inputs | {key: summarize(keys[key]) for key in _KV_CACHE if keys.get(key) is not None}


def _layer_config(spec: TensorSpec, *, activations: bool) -> dict[str, Any]:
    if spec.codec == PackedIntLayout.codec:
        return {"quant_algo": _INT4, "group_size": PackedIntLayout.from_tensor(spec).group or spec.shape[1]}
    if ScaledCodebookLayout.from_tensor(spec).bits == 8:
        return {"quant_algo": "FP8"}
    return {"quant_algo": "NVFP4" if activations else "W4A16_NVFP4", "group_size": 16}


def _integers(entries: Entries, key: str, dtype: str) -> Layer:
    """Return the layer of a matrix of signed 4-bit integers, two rows per byte."""
    codes = entries[key]
    scale = entries[key + _SCALE]
    rows, cols = (2 * codes.shape[0], codes.shape[1]) if len(codes.shape) == 2 else (0, 0)
    groups = scale.shape[1] if len(scale.shape) == 2 else 0
    if not rows or not cols or not groups or scale.shape[0] != rows or cols % groups:
        raise FormatError(
            "modelopt.shape",
            f"expected two rows in a byte, and scales for groups of each row, found shapes {list(codes.shape)} and "
            f"{list(scale.shape)}",
            where=key,
        )
    parts = {CODES: key, SCALES: key + _SCALE}
    factors = entries.get(key.removesuffix(WEIGHT) + _FACTORS)
    if factors is not None:
        if factors.dtype not in DTYPES_OF_VALUES or factors.shape != (cols,):
            raise FormatError(
                "modelopt.shape",
                f"expected {cols} factors of inputs, found {factors.dtype} {list(factors.shape)}",
                where=factors.name,
            )
        dtype, parts[FACTORS] = factors.dtype, factors.name
    group = None if groups == 1 else cols // groups
    layout = PackedIntLayout(MODELOPT, 4, group, Constant(0), dtype, scale.dtype, factors=factors is not None)
    return Layer(key, (rows, cols), layout, parts)


def _why_integers_unsupported(spec: TensorSpec) -> str | None:
    try:
        layout = PackedIntLayout.from_tensor(spec)
    except CodecError as error:
        return error.message
    if layout.packing != MODELOPT:
        return f"its integers are packed as {MODELOPT}, found {layout.packing}"
    rows, cols = spec.shape
    if layout.group and cols % layout.group:
        return f"its groups divide the columns, found {layout.group} of {cols}"
    if not spec.name.endswith(WEIGHT) or not spec.size or rows % 2:
        return (
            f"its packed layers are matrices with names X{WEIGHT} and an even number of rows, found shape "
            f"{list(spec.shape)}"
        )
    return "its packed layers are uncompressed" if any(part.encoding != "raw" for part in spec.parts) else None


def _integer_entries(spec: TensorSpec) -> Sequence[FileEntry]:
    layout = PackedIntLayout.from_tensor(spec)
    cols = spec.shape[1]
    sizes = {part.role: part.length or 0 for part in spec.parts}
    entries = [
        FileEntry(CODES, spec.name, "u8", layout.code_shape(spec.shape), sizes[CODES]),
        FileEntry(SCALES, spec.name + _SCALE, layout.scales, layout.scale_shape(spec.shape), sizes[SCALES]),
    ]
    if layout.factors:
        name = spec.name.removesuffix(WEIGHT) + _FACTORS
        entries.append(FileEntry(FACTORS, name, layout.dtype, (cols,), sizes[FACTORS]))
    return entries


def _nvfp4(dtype: str) -> ScaledCodebookLayout:
    return ScaledCodebookLayout(4, Group(16), dtype, scales="f8_e4m3fn", values=FP4, second=MULTIPLY)


def _fp8(dtype: str) -> ScaledCodebookLayout:
    return ScaledCodebookLayout(8, PER_TENSOR, dtype, values="f8_e4m3fn")
