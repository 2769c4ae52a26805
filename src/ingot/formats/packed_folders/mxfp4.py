"""MXFP4 folders, the format of gpt-oss: experts of E2M1 floats with powers of two as scales (``spec/interop.md``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ingot.errors import FormatError
from ingot.formats.packed_folders.base import HUGGING_FACE, Config, Entries, Layer, WritablePackedFolderFormat
from ingot.formats.packed_folders.config_keys import Key, irrelevant, used
from ingot.formats.packed_folders.floats import FP4, POWERS, config_dtype, layout_to_write
from ingot.formats.safetensors.pieces import FileEntry
from ingot.model.artifact import Artifact
from ingot.model.layouts.affine import Group
from ingot.model.layouts.scaled_codebook import INDICES, SCALES, ScaledCodebookLayout
from ingot.model.spec import TensorSpec

_BLOCKS = "_blocks"
_SCALES = "_scales"
_DENSE = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")


KEYS: Mapping[str, Key] = {
    "quant_method": used("the dialect"),
    "modules_to_not_convert": irrelevant("which layers are dense; the names of the entries show it"),
    "dequantize": irrelevant("a setting of the program that loads the folder"),
}
"""For each key, whether the reader uses, ignores or refuses the key."""


class Mxfp4Format(WritablePackedFolderFormat):
    """A folder of gpt-oss with experts in MXFP4.

    The stack ``X`` [..., in, out] is stored as ``X_blocks`` (U8 [..., out, in / 32, 16]) and ``X_scales`` (U8 [...,
    out, in / 32]).
    """

    name = "mxfp4"
    summary = "a folder whose experts are MXFP4, as gpt-oss is published"
    traits = replace(
        WritablePackedFolderFormat.traits,
        packed_codecs=(ScaledCodebookLayout.codec,),
        how_to_quantize=(
            'a recipe with codec = "scaled_codebook" and options = { table = "f4_e2m1fn", group = 32, scales = '
            '"f8_e8m0fnu", transposed = true }, for the experts of gpt-oss'
        ),
    )
    keys = KEYS
    companions = (_BLOCKS, _SCALES)

    def claims_config(self, config: Config) -> bool:
        """Return whether ``quant_method`` is mxfp4."""
        quantization = config.get(HUGGING_FACE)
        return isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4"

    def layers(self, entries: Entries, config: Config) -> Sequence[Layer]:
        """Return the packed layers among ``entries``.

        Raises ``FormatError`` ``mxfp4.parts``, ``mxfp4.dtype``, ``mxfp4.shape``.
        """
        dtype = config_dtype(config)
        layers = []
        for key, blocks in entries.items():
            if not key.endswith(_BLOCKS):
                continue
            name = key.removesuffix(_BLOCKS)
            if name + _SCALES not in entries:
                raise FormatError(
                    "mxfp4.parts",
                    f"expected the entry {name + _SCALES!r} of these blocks, but it is missing",
                    where=key,
                )
            scales = entries[name + _SCALES]
            if blocks.dtype != "u8" or scales.dtype not in ("u8", POWERS):
                raise FormatError("mxfp4.dtype", f"expected u8, found {blocks.dtype} and {scales.dtype}", where=key)
            shape = blocks.shape
            if len(shape) < 3 or shape[-1] != 16 or scales.shape != shape[:-1]:
                raise FormatError(
                    "mxfp4.shape",
                    f"expected blocks [..., out, in / 32, 16] and scales [..., out, in / 32], found {list(shape)} and "
                    f"{list(scales.shape)}",
                    where=key,
                )
            full_shape = (*shape[:-3], shape[-2] * 32, shape[-3])
            layers.append(Layer(name, full_shape, _layout(dtype), {INDICES: key, SCALES: name + _SCALES}))
        return layers

    def why_layer_unsupported(self, spec: TensorSpec) -> str | None:
        """Return why a tensor cannot be a stack of experts; None if it can."""
        layout = layout_to_write(spec)
        if isinstance(layout, str):
            return layout
        if layout != _layout(layout.dtype):
            return (
                "its packed tensors are MXFP4 (f4_e2m1fn with a scale f8_e8m0fnu for 32), stored transposed, as in "
                "gpt-oss; for other models use --format compressed-tensors --recipe mxfp4"
            )
        if not spec.size or spec.shape[-2] % 32:
            return f"its groups divide the inputs, found 32 of {spec.shape[-2]}"
        return None

    def layer_entries(self, spec: TensorSpec) -> Sequence[FileEntry]:
        """Return the entries ``X_blocks`` and ``X_scales`` for a tensor ``X``."""
        groups = (*spec.shape[:-2], spec.shape[-1], spec.shape[-2] // 32)
        blocks, scales = ScaledCodebookLayout.from_tensor(spec).part_specs(spec.shape)
        return [
            FileEntry(INDICES, spec.name + _BLOCKS, "u8", (*groups, 16), blocks.length or 0),
            FileEntry(SCALES, spec.name + _SCALES, "u8", groups, scales.length or 0),
        ]

    def packing_config(self, artifact: Artifact) -> Mapping[str, Any]:
        """Return ``quantization_config`` as in gpt-oss."""
        if not any(spec.codec in self.traits.packed_codecs for spec in artifact.tensors):
            return {}
        return {HUGGING_FACE: {"modules_to_not_convert": list(_DENSE), "quant_method": "mxfp4"}}


def _layout(dtype: str) -> ScaledCodebookLayout:
    plain = ScaledCodebookLayout(4, Group(32), dtype, scales=POWERS, values=FP4)
    return replace(plain, transposed=True)
