"""The table of codecs by id. To add a codec, write a module, a line here, a spec page and a test class.

Plugins add codecs as entry points of the group ``ingot.codecs``.
"""

from __future__ import annotations

from ingot.codecs.base import Codec
from ingot.core.registry import Instances
from ingot.model.layouts.sparse import BlocksLayout
from ingot.model.tensor import Tensor

# codecs whose layouts other codecs and formats handle specially
FLOAT_ENTROPY = "float_entropy"
LOW_RANK = "low_rank"
WITH_OUTLIERS = "with_outliers"
DELTA_EXACT = "delta_exact"
DELTA_ROWS = "delta_rows"

CODECS: Instances[Codec] = Instances(
    "codec",
    (
        ("dense", "ingot.codecs.dense.codec:DenseCodec"),
        ("affine", "ingot.codecs.affine.codec:AffineCodec"),
        ("affine_words", "ingot.codecs.affine.words:WordsCodec"),
        ("palette", "ingot.codecs.palette.codec:PaletteCodec"),
        ("scaled_codebook", "ingot.codecs.scaled_codebook.codec:ScaledCodebookCodec"),
        ("trellis", "ingot.codecs.trellis.codec:TrellisCodec"),
        ("ggml_blocks", "ingot.codecs.blocks.codec:BlocksCodec"),
        (FLOAT_ENTROPY, "ingot.codecs.lossless.float_entropy:EntropyCodec"),
        ("tca_tbe", "ingot.codecs.lossless.tca_tbe:TcaCodec"),
        ("sparse_csr", "ingot.codecs.sparse.csr:CsrCodec"),
        ("sparse_coo", "ingot.codecs.sparse.coo:CooCodec"),
        ("astc", "ingot.codecs.texture.astc:AstcCodec"),
        ("sparse_mask", "ingot.codecs.sparse.mask:MaskCodec"),
        ("sparse_blocks", "ingot.codecs.sparse.blocks:BlocksCodec"),
        (LOW_RANK, "ingot.codecs.wrap.low_rank:LowRankCodec"),
        ("with_low_rank", "ingot.codecs.wrap.with_low_rank:CorrectedCodec"),
        (WITH_OUTLIERS, "ingot.codecs.wrap.with_outliers:OutlierCodec"),
        (DELTA_EXACT, "ingot.codecs.delta.exact:ExactCodec"),
        (DELTA_ROWS, "ingot.codecs.delta.rows:RowsCodec"),
        ("sparse_patch", "ingot.codecs.delta.sparse_patch:SparsePatchCodec"),
        ("delta_sparse", "ingot.codecs.delta.sparse:DeltaSparse"),
        ("delta_sign", "ingot.codecs.delta.sign:DeltaSign"),
        ("delta_int4", "ingot.codecs.delta.int4:DeltaInt4"),
    ),
    group="ingot.codecs",
    contract=Codec,
    identifier="id",
)


def stored_exactly(tensor: Tensor) -> bool:
    """Return whether a tensor is stored losslessly; blocks that pruning dropped do not count."""
    codec = BlocksLayout.from_tensor(tensor).inner.codec if tensor.codec == BlocksLayout.codec else tensor.codec
    return CODECS[codec].lossless
