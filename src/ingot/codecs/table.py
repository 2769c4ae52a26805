"""The codecs there are, by id. Adding one is a module, a line here, a spec page, and a test class on ``CodecSuite``."""

from __future__ import annotations

from ingot.codecs.base import Codec
from ingot.core.registry import Instances

CODECS: Instances[Codec] = Instances(
    "codec",
    (
        ("dense", "ingot.codecs.dense:DenseCodec"),
        ("quantized_group", "ingot.codecs.affine:AffineCodec"),
        ("palette", "ingot.codecs.palette:PaletteCodec"),
        ("float_entropy", "ingot.codecs.float_entropy:EntropyCodec"),
        ("tca_tbe", "ingot.codecs.tca_tbe:TcaCodec"),
        ("sparse_csr", "ingot.codecs.sparse_csr:CsrCodec"),
        ("sparse_coo", "ingot.codecs.sparse_coo:CooCodec"),
        ("astc", "ingot.codecs.astc:AstcCodec"),
        ("sparse_mask", "ingot.codecs.sparse_mask:MaskCodec"),
        ("sparse_blocks", "ingot.codecs.sparse_blocks:BlocksCodec"),
        ("low_rank", "ingot.codecs.low_rank:LowRankCodec"),
        ("with_outliers", "ingot.codecs.with_outliers:OutlierCodec"),
        ("delta_exact", "ingot.codecs.delta_exact:ExactCodec"),
        ("sparse_patch", "ingot.codecs.sparse_patch:SparsePatchCodec"),
        ("delta_sparse", "ingot.codecs.delta_sparse:DeltaSparse"),
        ("delta_sign", "ingot.codecs.delta_sign:DeltaSign"),
        ("delta_int4", "ingot.codecs.delta_int4:DeltaInt4"),
    ),
)
