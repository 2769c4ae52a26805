"""The codecs there are, by id. Adding one is a module, a line here, a spec page, and a test class on ``CodecSuite``."""

from __future__ import annotations

from ingot.codecs.base import Codec
from ingot.core.registry import Registry


class CodecTable(Registry):
    """Codec ids to codecs. Codecs hold no state, so one object of each class serves every tensor and thread."""

    def __init__(self, entries: tuple[tuple[str, str], ...]) -> None:
        super().__init__("codec", entries)
        self._codecs: dict[str, Codec] = {}

    def __getitem__(self, name: str) -> Codec:
        if name not in self._codecs:
            self._codecs[name] = super().__getitem__(name)()
        return self._codecs[name]

    def get_or_refuse(self, name: str) -> Codec:
        codec: Codec = super().get_or_refuse(name)
        return codec


CODECS = CodecTable(
    (
        ("dense", "ingot.codecs.dense:DenseCodec"),
        ("quantized_group", "ingot.codecs.affine:AffineCodec"),
        ("sparse_csr", "ingot.codecs.sparse:CsrCodec"),
        ("sparse_coo", "ingot.codecs.sparse:CooCodec"),
    )
)
