"""AWQ folders: 4-bit integers for AutoAWQ's gemm and gemv kernels (``spec/interop.md``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from ingot.errors import UnsupportedError
from ingot.formats.packed_folders.base import HUGGING_FACE, Config, Entries, Layer, require_entries
from ingot.formats.packed_folders.columns import (
    QSCALES,
    QWEIGHT,
    QZEROS,
    ColumnPackedFormat,
    DeclaredPacking,
    no_rule_is_asymmetric,
    unsupported,
)
from ingot.formats.packed_folders.gptq_awq_keys import AWQ_KEYS
from ingot.model.artifact import Artifact
from ingot.model.layouts.affine import POINTS, Constant
from ingot.model.layouts.base import Shape
from ingot.model.layouts.packed_ints import AWQ, AWQ_GEMV, PackedIntLayout
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Array

# versions with the same files; they name the kernel that runs the layers
_GEMM = ("gemm", "exllama", "exllamav2", "ipex")
_GEMV = "gemv"
_ACTIVATION_SCALES = ".act.scales"


class AwqFormat(ColumnPackedFormat):
    """A folder of AutoAWQ with 4-bit layers in interleaved 32-bit integers (gemm)."""

    name = "awq"
    summary = "a folder of AutoAWQ: dense tensors, and layers of 4 bits in its words for gemm"
    traits = replace(
        ColumnPackedFormat.traits,
        containers={"gemm": "awq", "gemv": "awq-gemv"},
        word_forms=(AWQ,),
        merges=True,
        dense_key="modules_to_not_convert",
        how_to_quantize="--recipe w4a16, or w4a16-calibrated",
        f16_scales=True,
        group_sizes=(128, 64, 32),
        one_group=True,
    )
    method = "awq"
    keys = AWQ_KEYS
    side_files: ClassVar[Mapping[str, str]] = {"quant_config.json": "awq", "quantize_config.json": "gptq"}
    symmetric_key = "zero_point"
    version: ClassVar[str] = "gemm"

    def claims_config(self, config: Config) -> bool:
        """Return whether ``quantization_config`` names AWQ, but not gemv."""
        return super().claims_config(config) and _version(config[HUGGING_FACE]) != _GEMV

    def layers_of(self, entries: Entries, quantization: Config, stems: Sequence[str]) -> Iterator[Layer]:
        """Yield the packed layer of each name in ``stems``.

        Raises ``FormatError`` ``awq.config``, ``awq.parts``, ``awq.dtype``, ``awq.shape``, ``awq.zero-points``;
        ``UnsupportedError`` ``awq.version``: neither gemm nor gemv, so that the packing is unknown;
        ``awq.activation-scales``.
        """
        version = _version(quantization)
        if version not in (*_GEMM, _GEMV):
            raise unsupported("awq.version", "one version, gemm or gemv", repr(version[:40]))
        bits = self.number(quantization, ("bits", "w_bit"), 4, 4)
        declared = self.parse_declared(quantization, bits, self.group(quantization, ("group_size", "q_group_size")))
        scaled = next((key for key in entries if key.endswith(_ACTIVATION_SCALES)), None)
        if scaled is not None:
            raise UnsupportedError(
                "expected no scales for activations: AutoAWQ divides activations by them, other loaders do not",
                rule="awq.activation-scales",
                where=scaled,
            )
        layers = [self._layer(entries, stem, declared, version) for stem in stems]
        fits = self.all_middle(entries, layers) if self.is_symmetric(quantization) else []
        if not all(fits):
            raise self.contradiction(layers[fits.index(False)])
        yield from layers

    def _layer(self, entries: Entries, stem: str, declared: DeclaredPacking, version: str) -> Layer:
        codes, _, scales = require_entries(entries, stem, (QWEIGHT, QZEROS, QSCALES), "awq.parts").values()
        lines, across = codes.shape if len(codes.shape) == 2 else (0, 0)
        shape = (across * 8, lines)
        group = declared.group
        if version == _GEMV:
            shape = (lines, across * 8)
        elif declared.rules and scales.shape:
            group = self.group_of(declared, stem, lines, scales.shape[0])
        layout = PackedIntLayout(self.traits.word_forms[0], 4, group, POINTS, scales.dtype, scales.dtype)
        return self.build_layer(entries, stem, shape, layout)

    def is_symmetric(self, quantization: Config) -> bool:
        """Return whether ``config.json`` declares that all zero points equal the middle code.

        The result is True if ``zero_point`` is false, or if it is missing and ``sym`` (the key of GPTQModel) is true.
        """
        point = quantization.get("zero_point")
        symmetric = point is False or (point is None and quantization.get("sym") is True)
        return symmetric and no_rule_is_asymmetric(quantization)

    def middle_zeros(self, layout: PackedIntLayout, shape: Shape) -> tuple[Array, Array]:
        """Return a row of packed middle zero points, and a mask of its significant bits.

        The mask excludes gemv's padding after the last group.
        """
        width = layout.zero_shape(shape)[1]
        line = np.full(width, 0x88888888, np.uint32)
        mask = np.full(width, 0xFFFFFFFF, np.uint32)
        if layout.packing == AWQ_GEMV:
            full, remaining = divmod(layout.groups(shape[1]), 8)
            mask[full:] = 0
            mask[full : full + 1] = (1 << 4 * remaining) - 1
        return line, mask

    def constant_zeros(self, layout: PackedIntLayout, shape: Shape) -> Callable[[], bytes]:
        """Return a function that returns packed zero points of 8, padded with 0 after the last group."""
        rows, words = layout.zero_shape(shape)
        if layout.packing == AWQ:
            return lambda: b"\x88" * (4 * rows * words)
        groups = layout.groups(shape[1])
        row = sum(8 << 4 * index for index in range(groups)).to_bytes(4 * words, "little")
        return lambda: row * rows

    def packing_config(self, artifact: Artifact) -> Mapping[str, Any]:
        """Return ``quantization_config`` as AutoAWQ writes it.

        Raises ``UnsupportedError`` ``awq.mixed``: layers with different group sizes, of which AWQ can state only one.
        """
        usual, layouts = self.usual_layout(artifact)
        if usual is None:
            return {}
        groups = {layout.group for layout in layouts.values()}
        if len(groups) > 1:
            raise UnsupportedError(
                f"expected groups of one size, found {', '.join(str(group or 'a row') for group in groups)}: "
                "config.json of AWQ can state only one",
                rule="awq.mixed",
            )
        return {
            HUGGING_FACE: {
                "quant_method": "awq",
                "bits": 4,
                "group_size": usual.group or -1,
                "zero_point": any(not isinstance(layout.zero, Constant) for layout in layouts.values()),
                "version": self.version,
                "modules_to_not_convert": self.dense_layers(artifact) or None,
            }
        }


class AwqGemvFormat(AwqFormat):
    """A folder of AutoAWQ with 4-bit layers packed row by row (gemv)."""

    name = "awq-gemv"
    summary = "a folder of AutoAWQ: dense tensors, and layers of 4 bits in its words for gemv"
    traits = replace(
        AwqFormat.traits,
        word_forms=(AWQ_GEMV,),
        merges=False,
        how_to_quantize="ingot convert MODEL x.zt --recipe int4, then ingot convert x.zt OUT --format awq-gemv",
    )
    version = _GEMV

    def claims_config(self, config: Config) -> bool:
        """Return whether ``quantization_config`` names AWQ with gemv."""
        return ColumnPackedFormat.claims_config(self, config) and _version(config[HUGGING_FACE]) == _GEMV

    def why_layer_unsupported(self, spec: TensorSpec) -> str | None:
        """Return why a layer cannot be written; gemv kernels also require groups of 32, 64 or at least 128 columns."""
        group = PackedIntLayout.from_tensor(spec).group or spec.shape[-1]
        if group < 128 and group not in (32, 64):
            return f"its groups are 32, 64 or at least 128 columns, not {group}"
        return super().why_layer_unsupported(spec)


def _version(quantization: Config) -> str:
    """Return the declared layout; GPTQModel and newer transformers declare it under ``format``."""
    values = (quantization.get(key) for key in ("version", "format", "checkpoint_format"))
    versions = dict.fromkeys(str(value).lower() for value in values if value is not None)
    return " and ".join(versions) or "gemm"
