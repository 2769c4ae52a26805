"""GGUF as a ``Format``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.formats.base import PROMPT, Catalog, Format, FormatTraits, Made, WriteOptions
from ingot.formats.gguf.carry import refusal
from ingot.formats.gguf.header import MAGIC
from ingot.formats.gguf.metadata import carried
from ingot.formats.gguf.reader import SUFFIX, read, split_name
from ingot.formats.gguf.writer import GgufWriter, files_of
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Target
from ingot.model.spec import TensorSpec
from ingot.model.store import Store

_MODEL = ("general.architecture", "tokenizer.ggml.model")
"""Keys without which llama.cpp runs nothing."""
_WIDE = ("position_embd.weight", "token_types.weight")


class GgufFormat(Format):
    """The files of llama.cpp: tensors in blocks, all metadata and the tokenizer in one file or a split."""

    name = "gguf"
    suffixes: tuple[str, ...] = (SUFFIX,)
    summary = "llama.cpp's files, one or a split, with all types of blocks and all metadata"
    traits = FormatTraits(
        shards=True,
        shards_on_request=True,
    )

    def claims(self, name: str, head: bytes) -> bool:
        """By the suffix, or by the first four bytes."""
        return name.lower().endswith(SUFFIX) or head.startswith(MAGIC)

    def entry(self, names: Sequence[str]) -> str | None:
        """``model.gguf``, or the only file that has the suffix; of one split its first file that is there."""
        matching = sorted(name for name in names if name.lower().endswith(SUFFIX) and not name.startswith("."))
        if f"model{SUFFIX}" in matching:
            return f"model{SUFFIX}"
        artifacts = {(split[0], split[2]) if (split := split_name(name)) else name for name in matching}
        return matching[0] if len(artifacts) == 1 else None

    def refuses(self, spec: TensorSpec) -> str | None:
        """Why llama.cpp could not read the tensor from a file; None if it could."""
        return refusal(spec)

    def required_dtype(self, name: str, shape: tuple[int, ...]) -> str | None:
        """f32 for vectors, biases, the matrices that choose experts and BERT's embeddings of positions and types.

        llama.cpp ends where it is to compute with others.
        """
        return "f32" if len(shape) <= 1 or ".ffn_gate_inp" in name or name in _WIDE or name.endswith(".bias") else None

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Validate the header of the file, and of all files of its split; there are no digests."""
        return read(store, name)

    def metadata(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Each value with a type, as ``ingot.gguf`` says or that of its kind; raises ``gguf.metadata``."""
        return carried(values)

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        """Exact bytes of all files, padding included."""
        return sum(file.size for file, _ in files_of(self.file_name("model"), artifact, options))

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> GgufWriter:
        """Start writing; raises ``UnsupportedError`` for what ``refuses`` names."""
        return GgufWriter(target, name, artifact, options)

    def commands(self, made: Made) -> Sequence[Sequence[str]]:
        """llama.cpp's, where the metadata describe a model and its tokenizer."""
        return [("llama-cli", "-m", made.first, "-p", PROMPT)] if all(key in made.metadata for key in _MODEL) else []
