"""AWQ folders: 4-bit integers as AutoAWQ's gemm and gemv kernels take them (``spec/interop.md``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ingot.errors import UnsupportedError
from ingot.formats.dialects.base import HUGGING_FACE, Config, Entries, Layer, taken_together
from ingot.formats.dialects.columns import QSCALES, QWEIGHT, QZEROS, ColumnsDialect, unsupported
from ingot.model.artifact import Artifact
from ingot.model.layouts.affine import POINTS, Constant
from ingot.model.layouts.words import AWQ, AWQ_GEMV, WordsLayout

# Other versions of the same files: what kernels do with them when they are loaded.
_GEMM = ("gemm", "exllama", "exllamav2", "ipex")


class AwqFormat(ColumnsDialect):
    """Dense tensors, and layers of 4 bits in words whose codes are interleaved (gemm) or not (gemv)."""

    name = "awq"
    summary = "a folder of AutoAWQ: dense tensors, and layers of 4 bits in its words (gemm, gemv; gemm is written)"
    method = "awq"
    forms = (AWQ,)

    def layers_of(self, entries: Entries, stated: Config, stems: Sequence[str]) -> Iterator[Layer]:
        """Yield the layers.

        Raises ``FormatError`` ``awq.config``, ``awq.parts``, ``awq.dtype``, ``awq.shape``; ``UnsupportedError``
        ``awq.version``: neither gemm nor gemv, whose words are laid out otherwise.
        """
        version = str(stated.get("version", "gemm")).lower()
        if version not in (*_GEMM, "gemv"):
            raise unsupported("awq.version", "version gemm or gemv", repr(version[:40]))
        self.number(stated, ("bits", "w_bit"), 4, 4)
        group = self.group(stated, ("group_size", "q_group_size"))
        for stem in stems:
            codes, _, scales = taken_together(entries, stem, (QWEIGHT, QZEROS, QSCALES), "awq.parts").values()
            lines, across = codes.shape if len(codes.shape) == 2 else (0, 0)
            shape = (across * 8, lines) if version != "gemv" else (lines, across * 8)
            form = AWQ if version != "gemv" else AWQ_GEMV
            layout = WordsLayout(form, 4, group, POINTS, scales.dtype, scales.dtype)
            yield self.checked(entries, stem, shape, layout)

    def same_zeros(self, layout: WordsLayout, count: int) -> Callable[[], bytes]:
        """Zero points of 8."""
        return lambda: b"\x88" * count

    def stated(self, artifact: Artifact) -> Mapping[str, Any]:
        """Return ``quantization_config`` as AutoAWQ writes it.

        Raises ``UnsupportedError`` ``awq.mixed``: layers with groups of several sizes, which it cannot say.
        """
        usual, own = self.usual(artifact)
        if usual is None:
            return {}
        groups = {layout.group for layout in own.values()}
        if len(groups) > 1:
            raise UnsupportedError(
                f"expected groups of one size, found {', '.join(str(group or 'a row') for group in groups)}: "
                "config.json of AWQ states one",
                rule="awq.mixed",
            )
        return {
            HUGGING_FACE: {
                "quant_method": "awq",
                "bits": 4,
                "group_size": usual.group or -1,
                "zero_point": any(not isinstance(layout.zero, Constant) for layout in own.values()),
                "version": "gemm",
                "modules_to_not_convert": self.dense_layers(artifact) or None,
            }
        }
