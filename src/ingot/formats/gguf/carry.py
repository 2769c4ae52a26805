"""Which tensors a GGUF file can carry, and what its metadata say of their types."""

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
    """Return the element type or the type of block of a tensor that is not refused."""
    return GgmlBlocksLayout.of(spec).type if spec.codec == GgmlBlocksLayout.codec else spec.dtype


def refusal(spec: TensorSpec) -> str | None:
    """Why a GGUF file cannot hold this tensor, by the rules of llama.cpp's reader; None if it can."""
    size = len(spec.name.encode(errors="replace"))
    if size > MAX_NAME or "\0" in spec.name or not is_text(spec.name):
        return f"GGUF names tensors in UTF-8 of at most {MAX_NAME} bytes without NUL, found {size}; rename it first"
    if len(spec.shape) > MAX_RANK:
        return f"GGUF has at most {MAX_RANK} dimensions, found {len(spec.shape)}"
    if spec.codec == DenseLayout.codec:
        return _refuses_dense(spec)
    if spec.codec != GgmlBlocksLayout.codec:
        return f"GGUF holds dense tensors and ggml's blocks, this one is {spec.codec}"
    try:
        layout = GgmlBlocksLayout.of(spec)
    except CodecError as error:
        return error.message
    return _refuses_parts(spec, layout.part_specs(spec.shape))


def _refuses_dense(spec: TensorSpec) -> str | None:
    if spec.dtype not in NUMBERS or spec.dtype not in DTYPES:
        return f"GGUF has no element type {spec.dtype[:80]}; it has {', '.join(DENSE.values())}"
    return _refuses_parts(spec, (PartSpec(DATA, spec.dtype, DTYPES[spec.dtype].nbytes(spec.size)),))


def _refuses_parts(spec: TensorSpec, wanted: Sequence[PartSpec]) -> str | None:
    found = [(part.role, part.dtype, part.type or part.dtype, part.encoding, part.length) for part in spec.parts]
    if found != [(part.role, part.dtype, part.dtype, "raw", part.length) for part in wanted]:
        part = wanted[0]
        return f"GGUF holds one uncompressed part {part.role!r} of {part.length} bytes of {part.dtype}, found others"
    return None


def described(metadata: Mapping[str, Any], specs: Sequence[TensorSpec]) -> dict[str, Any]:
    """Return metadata (as ``carried`` makes them) that tell of these tensors' types.

    ``general.quantization_version`` is added where there are blocks and none is stated; ``general.file_type`` names
    the type that most bytes have, unless what is stated is a mixture in which one of these tensors' types is the main
    one.
    """
    sizes: Counter[str] = Counter()
    for spec in specs:
        sizes[type_of(spec)] += spec.nbytes or 0
    more: dict[str, tuple[str, Any]] = {}
    if _QUANTIZATION not in metadata and not sizes.keys().isdisjoint(BLOCKED.values()):
        more[_QUANTIZATION] = ("u32", _QUANTIZATION_VERSION)
    stated = metadata.get(_FILE_TYPE)
    known = isinstance(stated, int) and FILE_TYPES.get(stated) in (None, *sizes)
    main = next((kind for kind, _ in sizes.most_common() if kind in FILE_TYPES.values()), None)
    if main is not None and (stated is None or not known):
        more[_FILE_TYPE] = ("u32", next(number for number, kind in FILE_TYPES.items() if kind == main))
    return with_values(metadata, more) if more else dict(metadata)
