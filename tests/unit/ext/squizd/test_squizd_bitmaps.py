"""``TCAW`` blocks as section 5.2 of the SQUIZD document has them: read from files of others, and written on request."""

from __future__ import annotations

import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.errors import IngotError, UnsupportedError
from tests.support.squizd import Edit, squizd
from tests.support.squizd_document import EAGLE_FLAG, TCA_FLAG, Array, document, npcl, tcaw
from tests.support.squizd_items import bitmap

RECIPE = """
[[rules]]
dtypes = ["bf16"]
min_ndim = 2
codec = "sparse_mask"
options = { row_alignment = 64 }
"""


def words(rows: int, cols: int, *, zeros: float = 0.0, seed: int = 0) -> Array:
    """Weights as bf16 words, some of them 0, the last of a row never."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(rows, cols)) * (rng.random((rows, cols)) >= zeros)
    values[:, -1] = 1
    return np.asarray(values.astype(ml_dtypes.bfloat16).view(np.uint16))


def write(tmp_path: Path, *layers: list[bytes], flags: int = TCA_FLAG) -> Path:
    (tmp_path / "a.squizd").write_bytes(document(layers, flags))
    return tmp_path / "a.squizd"


def stored(path: Path) -> dict[str, Array]:
    with ingot.open(path) as checkpoint:
        assert {tensor.dtype for tensor in checkpoint.values()} <= {"bf16", "f32"}
        return {name: tensor.numpy().view(f"u{tensor.numpy().itemsize}") for name, tensor in checkpoint.items()}


def rule_of(path: Path) -> str:
    with pytest.raises(IngotError) as caught:
        ingot.open(path)
    return str(caught.value.rule)


def test_blocks_of_the_document_are_read(tmp_path: Path) -> None:
    """Several in a layer, beside others, dense and sparse; NaN, infinities and -0 keep their bits."""
    odd = words(3, 128, zeros=0.5)
    odd[0, :6] = 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0x0001, 0x0000
    norm = np.array([1, 2, 3], np.float32)
    matrices = [words(5, 64), words(7, 192, zeros=0.9, seed=1), odd, words(1, 64, seed=2), words(130, 64, zeros=0.5)]
    path = write(
        tmp_path, [tcaw(matrices[0]), tcaw(matrices[1]), npcl(norm), tcaw(odd)], [tcaw(one) for one in matrices[3:]]
    )
    found = stored(path)
    matrices.insert(2, norm.view(np.uint32))
    assert len(found) == len(matrices)
    for values, wanted in zip(found.values(), matrices, strict=True):
        assert np.array_equal(values, wanted)
    assert {item.rule for item in ingot.verify(path, strict=True) if item.level == "error"} == {"codec.non-finite"}
    ingot.convert(path, tmp_path / "b.zt")
    again = stored(tmp_path / "b.zt").values()
    assert all(np.array_equal(one, other) for one, other in zip(again, matrices, strict=True))


def test_a_bitmap_that_could_be_our_header_is_read(tmp_path: Path) -> None:
    """Bits only where our version has 1 and behind our 64 bytes: an empty matrix of ours, if it were one."""
    matrix = np.zeros((2, 256), np.uint16)
    matrix[0, 0], matrix[1, 255] = 0x3F80, 0xBF80
    assert np.array_equal(*stored(write(tmp_path, [tcaw(matrix)])).values(), matrix)


def test_a_bitmap_in_a_draft_head_is_read(tmp_path: Path) -> None:
    """Behind its last block ends the section, or a scale table begins; other files have no such block there."""
    matrix = words(4, 64)
    data = document([[npcl(np.ones(3, np.float32))]], EAGLE_FLAG, draft=(tcaw(matrix), 1, 4))
    (tmp_path / "a.squizd").write_bytes(data)
    with ingot.open(tmp_path / "a.squizd") as checkpoint:
        assert checkpoint.attachments.draft is not None
        (tensor,) = checkpoint.attachments.draft.values()
        assert np.array_equal(tensor.numpy().view(np.uint16), matrix)


def test_columns_that_nothing_tells_are_not_guessed(tmp_path: Path) -> None:
    """A last word that no row uses up may be padding; two widths may end at a block."""
    for cols in (60, 65, 127):
        assert rule_of(write(tmp_path, [tcaw(words(3, cols))])) == "squizd.tca-ambiguous"
    matrix = words(3, 64)
    matrix[:, 63] = 0
    assert rule_of(write(tmp_path, [tcaw(matrix)])) == "squizd.tca-ambiguous"
    # One row: a word of one bit and its value before another block, or two words and the values of both.
    second = b"\x80\x3fNPCL\0\0"
    values = 2 * (1 + int.from_bytes(second, "little").bit_count())
    data = b"TCAW" + struct.pack("<IIQ", 1, 64, 1) + second + bytes(values)
    assert rule_of(write(tmp_path, [data])) == "squizd.tca-ambiguous"


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("squizd.tca-bitmap", lambda data: data[:-2]),
        ("squizd.tca-bitmap", lambda data: data + b"\x80\x3f"),
        ("squizd.tca-bitmap", lambda data: data[:12] + bytes([data[12] ^ 1]) + data[13:]),
        ("squizd.tca-bitmap", lambda data: data[:4] + struct.pack("<I", 2**32 - 1) + data[8:]),
        ("squizd.tca-bitmap", lambda data: data[:4] + struct.pack("<I", 0) + data[8:]),
        ("squizd.tca-bitmap", lambda data: data[:12]),
        ("squizd.tca-header", lambda data: data[:8] + struct.pack("<I", 32) + data[12:]),
        ("squizd.tca-header", lambda data: data[:8] + struct.pack("<I", 2**32 - 1) + data[12:]),
        ("squizd.block-out-of-bounds", lambda data: data[:11]),
    ],
)
def test_bitmaps_that_fit_nothing_are_refused(tmp_path: Path, rule: str, change: Edit) -> None:
    assert rule_of(write(tmp_path, [change(tcaw(words(5, 64, zeros=0.5)))])) == rule


def test_many_blocks_cannot_make_a_reader_search_for_ever(tmp_path: Path) -> None:
    """Each of twenty thousand blocks could be as wide as the rest of the layer."""
    block = b"TCAW" + struct.pack("<II", 1, 64) + struct.pack("<Q", 1 << 63) + b"\x80\x3f"
    assert rule_of(write(tmp_path, [block * 20_000])) == "squizd.tca-ambiguous"


def test_a_directory_tells_the_columns_and_is_held_against_the_block(tmp_path: Path) -> None:
    path, matrix = tmp_path / "a.squizd", words(3, 70, zeros=0.5)
    count = int(np.count_nonzero(matrix))
    path.write_bytes(squizd([bitmap("t", matrix)]).data)
    assert np.array_equal(stored(path)["t"], matrix)
    for rule, changes in (
        ("squizd.block-out-of-bounds", {"nnz": count + 1}),
        ("squizd.directory-conflict", {"nnz": 10**6}),
        ("squizd.directory-conflict", {"nnz": None}),
        ("squizd.directory-conflict", {"row_alignment": 32}),
        ("squizd.directory-conflict", {"inner": {"codec": "affine", "params": {}}}),
    ):
        path.write_bytes(squizd([bitmap("t", matrix, **changes)]).data)
        assert rule_of(path) == rule
    path.write_bytes(squizd([bitmap("t", matrix, nnz=count - 1)]).data)
    with ingot.open(path, verify=False) as checkpoint, pytest.raises(IngotError) as caught:
        checkpoint["t"].numpy()
    assert caught.value.rule == "sparse_mask.popcount"


def test_written_on_request_as_the_document_has_it(tmp_path: Path) -> None:
    """The option asks for it; the bytes are those of a writer of the document alone, and come back with every bit."""
    matrices = {"model.layers.0.a": words(5, 64, zeros=0.5), "model.layers.0.b": words(3, 70, seed=1)}
    ingot.save(tmp_path / "a.safetensors", {name: one.view(ml_dtypes.bfloat16) for name, one in matrices.items()})
    (tmp_path / "recipe.toml").write_text(RECIPE)
    report = ingot.convert(tmp_path / "a.safetensors", tmp_path / "b.squizd", tmp_path / "recipe.toml")
    assert report.exact
    data = (tmp_path / "b.squizd").read_bytes()
    _, offset, length, _, _ = struct.unpack_from("<IQQQI", data, 256)
    assert data[offset : offset + length] == b"".join(tcaw(one) for one in matrices.values())
    assert struct.unpack_from("<I", data, 6) == (TCA_FLAG,)
    found = stored(tmp_path / "b.squizd")
    assert list(found) == list(matrices)
    assert all(np.array_equal(found[name], matrices[name]) for name in matrices)
    assert not ingot.verify(tmp_path / "b.squizd", strict=True)
    ingot.convert(tmp_path / "b.squizd", tmp_path / "c.squizd")
    assert (tmp_path / "c.squizd").read_bytes() == data


def test_without_the_request_our_own_blocks_are_written(tmp_path: Path) -> None:
    ingot.save(tmp_path / "a.safetensors", {"w": words(64, 64).view(ml_dtypes.bfloat16)})
    ingot.convert(tmp_path / "a.safetensors", tmp_path / "b.squizd", "tca-tbe")
    with ingot.open(tmp_path / "b.squizd") as checkpoint:
        assert checkpoint["w"].codec == "tca_tbe"
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("row_alignment = 64", ""))
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(tmp_path / "a.safetensors", tmp_path / "c.squizd", tmp_path / "recipe.toml")
    assert "row_alignment" in caught.value.message
