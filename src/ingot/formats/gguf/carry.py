"""Rules for tensors in a GGUF file, and the metadata that describe their types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import CodecError
from ingot.formats.gguf.metadata import is_text, with_values
from ingot.formats.gguf.types import BLOCKED, DENSE, FILE_TYPES
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.layouts.ggml import GgmlBlocksLayout
from ingot.model.spec import PartSpec, TensorSpec

MAX_RANK, MAX_NAME = 4, 63
NUMBERS: Mapping[str, int] = {name: number for table in (DENSE, BLOCKED) for number, name in table.items()}
_QUANTIZATION, _FILE_TYPE = "general.quantization_version", "general.file_type"
_QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION


def type_of(spec: TensorSpec) -> str:
    """Return the element type or the block type of a supported tensor."""
    return GgmlBlocksLayout.of(spec).type if spec.codec == GgmlBlocksLayout.codec else spec.dtype


def why_unsupported(spec: TensorSpec) -> str | None:
    """Return why a GGUF file cannot store this tensor, by the rules of llama.cpp's reader; None if it can."""
    size = len(spec.name.encode(errors="replace"))
    if size > MAX_NAME or "\0" in spec.name or not is_text(spec.name):
        return (
            f"expected a name in UTF-8 of at most {MAX_NAME} bytes without NUL, found {size} bytes; rename the tensor "
            "first"
        )
    if len(spec.shape) > MAX_RANK:
        return f"GGUF has at most {MAX_RANK} dimensions, found {len(spec.shape)}"
    if spec.codec == DenseLayout.codec:
        return _why_unsupported_dense(spec)
    if spec.codec != GgmlBlocksLayout.codec:
        return f"GGUF stores dense tensors and ggml's blocks, this tensor is {spec.codec}"
    try:
        layout = GgmlBlocksLayout.of(spec)
    except CodecError as error:
        return error.message
    return _why_unsupported_parts(spec, layout.part_specs(spec.shape))


def _why_unsupported_dense(spec: TensorSpec) -> str | None:
    if spec.dtype not in NUMBERS or spec.dtype not in DTYPES:
        return f"GGUF has no element type {spec.dtype[:80]}; it has {', '.join(DENSE.values())}"
    return _why_unsupported_parts(spec, (PartSpec(DATA, spec.dtype, DTYPES[spec.dtype].nbytes(spec.size)),))


def _why_unsupported_parts(spec: TensorSpec, expected: Sequence[PartSpec]) -> str | None:
    actual = [(part.role, part.dtype, part.type or part.dtype, part.encoding, part.length) for part in spec.parts]
    if actual != [(part.role, part.dtype, part.dtype, "raw", part.length) for part in expected]:
        part = expected[0]
        return (
            f"GGUF stores one uncompressed part {part.role!r} of {part.length} bytes of {part.dtype}, found other parts"
        )
    return None


def describe_types(metadata: Mapping[str, Any], specs: Sequence[TensorSpec]) -> dict[str, Any]:
    """Return metadata (from ``to_gguf_metadata``) with the keys that describe the types of these tensors.

    If there are blocks and ``general.quantization_version`` is missing, it is added. ``general.file_type`` becomes the
    type with the most bytes. An existing ``general.file_type`` stays if one of these tensors has its main type: it then
    names a mixture.
    """
    sizes: Counter[str] = Counter()
    for spec in specs:
        sizes[type_of(spec)] += spec.nbytes or 0
    added: dict[str, tuple[str, Any]] = {}
    if _QUANTIZATION not in metadata and not sizes.keys().isdisjoint(BLOCKED.values()):
        added[_QUANTIZATION] = ("u32", _QUANTIZATION_VERSION)
    file_type = metadata.get(_FILE_TYPE)
    is_valid = isinstance(file_type, int) and FILE_TYPES.get(file_type) in (None, *sizes)
    main = next((type_name for type_name, _ in sizes.most_common() if type_name in FILE_TYPES.values()), None)
    if main is not None and (file_type is None or not is_valid):
        added[_FILE_TYPE] = ("u32", next(number for number, type_name in FILE_TYPES.items() if type_name == main))
    return with_values(metadata, added) if added else dict(metadata)
