"""Pieces of tensors: what NumPy gives of the whole, from the bytes that are needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ingot
from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.errors import UsageError
from ingot.model.bytesource import MemorySource
from ingot.model.reading.slices import selection_of
from ingot.model.tensor import Tensor
from ingot.testing.codecs import encode_tensor

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def keys(size: int) -> Any:
    ends = st.none() | st.integers(-size - 2, size + 2)
    slices = st.builds(slice, ends, ends, st.sampled_from([None, 1, 2, -1, -3]))
    return slices | st.integers(-size, size - 1) if size else slices


@given(st.data(), SHAPES, st.booleans())
def test_a_piece_holds_what_numpy_selects(data: st.DataObject, shape: tuple[int, ...], elementwise: bool) -> None:
    count = data.draw(st.integers(0, len(shape)))
    index: tuple[Any, ...] = tuple(data.draw(keys(size)) for size in shape[:count])
    if data.draw(st.booleans()):
        index = (*index, ...)
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    piece = selection_of(shape, index, elementwise=elementwise)
    run = values.reshape(-1)[piece.start : piece.start + int(np.prod(piece.shape, dtype=int))]
    found = run.reshape(piece.shape)[piece.inner]
    np.testing.assert_array_equal(found, values[index])
    if shape and not elementwise:
        assert piece.shape[-1] == shape[-1]


@pytest.mark.parametrize("index", [None, "a", 1.5, True, (0, 0, 0), 3, -4, (0, 9), (..., ...), [0]])
def test_other_indices_are_refused(index: Any) -> None:
    with pytest.raises(UsageError) as caught:
        selection_of((3, 4), index, elementwise=False)
    assert caught.value.rule == "tensor.index"


class Counting:
    """Bytes that are read, as from a file: what lies in memory may be lent whole."""

    mapped = True

    def __init__(self, data: bytes) -> None:
        self._source, self.read = MemorySource(data), 0
        self.name, self.size = self._source.name, self._source.size

    def view(self, offset: int, length: int) -> memoryview:
        self.read += length
        return self._source.view(offset, length)

    def readinto(self, offset: int, out: memoryview) -> None:
        self.read += out.nbytes
        self._source.readinto(offset, out)

    def changed(self) -> bool:
        return False

    def close(self) -> None:
        pass


def counted(tensor: Tensor) -> tuple[Tensor, list[Counting]]:
    sources = {role: Counting(bytes(part.view())) for role, part in tensor.parts.items()}
    parts = {role: replace(part, source=sources[role], offset=0) for role, part in tensor.parts.items()}
    return replace(tensor, parts=parts), list(sources.values())


@pytest.mark.parametrize(
    ("codec", "options", "most"),
    [
        ("dense", {}, 0.01),
        ("affine", {"bits": 4, "group": 32}, 0.01),
        ("affine", {"bits": 3, "group": "row"}, 0.01),
        ("affine", {"bits": 8, "group": "tensor"}, 0.01),
        ("palette", {"bits": 4}, 0.01),
        ("palette", {"bits": 3, "group": 20}, 0.08),  # codebooks are read whole
        ("float_entropy", {"chunk": 1 << 10}, 0.03),  # and the sizes of all chunks
        ("sparse_csr", {}, 0.01),
        ("palette", {"bits": 4, "vector": 2}, 0.01),
        ("sparse_mask", {}, 0.06),  # and the mask of what comes before
        ("sparse_mask", {"row_alignment": 64}, 0.08),
        ("sparse_mask", {"inner": "palette"}, 0.56),  # and a run of 2**17 elements
        ("sparse_mask", {"inner": "affine", "options": {"bits": 3, "group": "row", "symmetric": True}}, 0.56),
        ("sparse_blocks", {"block": 8, "mask": b"\x55\xaa" * 15 + b"\xff\x01"}, 0.02),
        ("sparse_blocks", {"axis": 1, "block": 8, "mask": b"\x55\x05", "inner": "affine"}, 0.02),
        ("with_outliers", {"inner": "affine", "count": 3}, 0.01),
        ("with_outliers", {"inner": "palette", "count": 3}, 0.01),
        ("low_rank", {"rank": 8}, 0.06),  # and the right factor
        ("tca_tbe", {}, 0.06),  # a band of 64 rows, and the counts of those before
        ("astc", {}, 0.35),  # a band of some hundred rows
        ("delta_int4", {}, 0.15),  # and the positions of outliers
        ("delta_sign", {}, 0.01),
        ("delta_sparse", {}, 0.68),  # and the positions
    ],
)
def test_ten_rows_of_two_thousand_read_little(codec: str, options: dict[str, Any], most: float) -> None:
    rng = np.random.default_rng(1)
    values = (rng.normal(size=(2000, 96)) * (rng.random((2000, 96)) < 0.5)).astype(np.float32)
    dtype = "bf16" if codec == "tca_tbe" else "f32"
    values = values.astype(numpy_dtype(dtype))
    tensor, sources = counted(encode_tensor(CODECS[codec], values, options, dtype=dtype))
    whole = tensor.numpy()
    for source in sources:
        source.read = 0
    np.testing.assert_array_equal(tensor[1500:1510, 5:], whole[1500:1510, 5:])
    assert 0 < sum(source.read for source in sources) <= most * tensor.nbytes


def test_pieces_of_a_file_as_safetensors_has_them(tmp_path: Path) -> None:
    values = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    ingot.save(tmp_path / "x.safetensors", {"w": values, "s": np.float32(3)})
    with ingot.open(tmp_path / "x.safetensors", io="pread") as checkpoint:
        piece = checkpoint.get_slice("w")
        assert (piece.get_shape(), piece.get_dtype()) == ([3, 4, 5], "F32")
        np.testing.assert_array_equal(piece[1:, ::2, -1], values[1:, ::2, -1])
        assert checkpoint["s"][()] == 3
        with pytest.raises(UsageError) as caught:
            checkpoint.get_slice("nothing")
    assert caught.value.rule == "tensor.unknown"
