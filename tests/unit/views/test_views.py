"""What views keep, read, prove, and refuse; that they equal NumPy is shown in ``tests/property``."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot import views
from ingot.artifacts.state_dict import open_bytes, save_bytes
from ingot.codecs.table import CODECS
from ingot.core.bytes import checksums
from ingot.core.numeric.blocks import Blocks
from ingot.errors import FormatError, IngotError, IntegrityError, UsageError
from ingot.model.bytesource import MemorySource
from ingot.model.checkpoint import Checkpoint
from ingot.model.part import Part
from ingot.model.tensor import Array, Tensor
from ingot.testing.codecs import bits, encode_tensor, zstd_part
from ingot.views.transpose import transpose
from ingot.views.units import Units, UnitSelection, interleave, split_units
from tests.support.drafts import draft_head

ROWS, COLS = 2000, 96


class Counting(MemorySource):
    """Counts the bytes that are asked for."""

    read = 0

    def view(self, offset: int, length: int) -> memoryview:
        self.read += length
        return super().view(offset, length)


def counted(tensor: Tensor) -> tuple[Tensor, list[Counting]]:
    sources = {role: Counting(bytes(part.stored())) for role, part in tensor.parts.items()}
    for source in sources.values():
        source.mapped = False
    parts = {role: replace(part, source=sources[role], offset=0) for role, part in tensor.parts.items()}
    return replace(tensor, parts=parts), list(sources.values())


def checkpoint(**tensors: Tensor) -> Checkpoint:
    named = {name: replace(tensor, name=name) for name, tensor in tensors.items()}
    return Checkpoint(named, format="zt", location="<test>")


def encoded(codec: str, shape: tuple[int, ...] = (ROWS, COLS), **options: Any) -> Tensor:
    rng = np.random.default_rng(1)
    values = (rng.normal(size=shape) * (rng.random(shape) < 0.5)).astype(np.float32)
    return encode_tensor(CODECS[codec], values, options, dtype="f32")


@pytest.mark.parametrize(
    ("codec", "options", "kept"),
    [
        ("dense", {}, True),
        ("affine", {"bits": 4, "group": 32}, True),
        ("affine", {"bits": 3, "group": "row"}, True),
        ("affine", {"bits": 8, "group": "tensor"}, True),
        ("palette", {"bits": 4}, True),
        ("palette", {"bits": 3, "group": 20}, False),  # a codebook is that of some rows
        ("float_entropy", {"chunk": 1 << 10}, False),
        ("sparse_csr", {}, False),
    ],
)
def test_rows_are_moved_where_they_lie_in_runs_and_little_is_read(
    codec: str, options: dict[str, Any], kept: bool
) -> None:
    tensor, sources = counted(encoded(codec, **options))
    whole = tensor.numpy()
    view = views.take(checkpoint(w=tensor), {"w": [1500, *range(700, 710), 3]})
    for source in sources:
        source.read = 0
    assert view["w"].shape == (12, COLS)
    assert sum(source.read for source in sources) <= 8 * ROWS  # at most the sizes of rows or chunks
    np.testing.assert_array_equal(view["w"].numpy(), whole[[1500, *range(700, 710), 3]])
    assert sum(source.read for source in sources) <= 0.15 * tensor.nbytes
    assert (view["w"].codec == codec) == kept


def test_a_piece_of_a_mapped_file_without_digests_is_a_view_of_it(tmp_path: Path) -> None:
    ingot.save(tmp_path / "x.safetensors", {"qkv": np.arange(60, dtype=np.float32).reshape(12, 5)})
    with ingot.open(tmp_path / "x.safetensors", io="mmap") as source:
        view = views.split(source, {"qkv": {"q": 4, "k": 8}})
        assert not view["k"].numpy().flags.owndata
        assert np.shares_memory(view["k"].numpy(), source["qkv"].numpy())


def test_packed_experts_are_stacked_and_taken_apart_without_decoding(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = [f"experts.{number}.w" for number in range(4)]
    tensors = {
        name: encode_tensor(CODECS["affine"], rng.normal(size=(8, 32)), {"bits": 4, "group": 16}, dtype="f32")
        for name in names
    }
    source = open_bytes(save_bytes(tensors, format="zt"))
    stacked = views.stack(source, {"experts.w": names})
    assert (stacked["experts.w"].codec, stacked["experts.w"].shape) == ("affine", (4, 8, 32))
    ingot.save(tmp_path / "x.zt", stacked)
    with ingot.open(tmp_path / "x.zt") as back:
        apart = views.unstack(back, {"experts.w": names})
        for name in names:
            assert apart[name].codec == "affine"
            for role, part in source[name].parts.items():
                assert bytes(apart[name].parts[role].view()) == bytes(part.view())


@pytest.mark.parametrize("codec", ["float_entropy", "tca_tbe", "sparse_csr"])
def test_rows_in_no_order_of_what_cannot_be_entered_anywhere_are_decoded_once(codec: str) -> None:
    rng = np.random.default_rng(3)
    values = (rng.normal(size=(512, 64)) * (rng.random((512, 64)) < 0.5)).astype(np.float32)
    dtype = "bf16" if codec == "tca_tbe" else "f32"
    array = encode_tensor(CODECS["dense"], values, {"dtype": dtype}, dtype="f32").numpy()
    tensor, sources = counted(encode_tensor(CODECS[codec], array, dtype=dtype))
    order = rng.permutation(512)
    view = views.permute(checkpoint(w=tensor), {"w": order})
    np.testing.assert_array_equal(view["w"].numpy(), array[order])
    assert sum(source.read for source in sources) <= 4 * tensor.nbytes


def test_compressed_rows_in_no_order_are_decompressed_once() -> None:
    tensor, sources = counted(replace(encoded("dense"), parts={"data": zstd_part(encoded("dense").parts["data"])}))
    order = np.random.default_rng(3).permutation(ROWS)
    view = views.permute(checkpoint(w=tensor), {"w": order})
    np.testing.assert_array_equal(view["w"].numpy(), tensor.numpy()[order])
    assert sum(source.read for source in sources) <= 3 * tensor.nbytes


def damaged(tensor: Tensor, *, large: bool) -> Tensor:
    """Give a dense tensor a digest that its last byte does not fit; of a large part no chunks can be checked."""
    part = tensor.parts["data"]
    data = bytearray(part.view())
    data[-1] ^= 1
    digest = checksums.digest("crc32c", bytes(part.view()))
    wrong = replace(part, source=MemorySource(bytes(data)), offset=0, digest=digest)
    assert (wrong.provable() is None) == large
    return replace(tensor, parts={"data": wrong})


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("scattered", [False, True])
def test_damage_is_found_by_who_reads_all_of_a_view(large: bool, scattered: bool) -> None:
    shape = (2200, 1024) if large else (100, 16)
    source = checkpoint(w=damaged(encode_tensor(CODECS["dense"], np.ones(shape, np.float32), dtype="f32"), large=large))
    order = np.random.default_rng(0).permutation(shape[0]) if scattered else np.arange(shape[0])[1:]
    view = views.take(source, {"w": order})
    with pytest.raises(IntegrityError) as caught:
        view.state_dict()
    assert caught.value.rule == "part.digest-mismatch"
    with pytest.raises(IntegrityError):
        save_bytes(view, format="zt")


def test_views_can_be_copied_and_closed_with_their_files(tmp_path: Path) -> None:
    values = np.arange(48, dtype=np.float32).reshape(6, 8)
    ingot.save(tmp_path / "x.zt", {"w": values, "v": values + 1})
    source = ingot.open(tmp_path / "x.zt")
    with views.rename(views.take(source, {"w": slice(None, None, -1)}), {"w": "reversed"}) as view:
        copy = pickle.loads(pickle.dumps(view))
        np.testing.assert_array_equal(copy["reversed"].numpy(), values[::-1])
        piece = pickle.loads(pickle.dumps(view["reversed"]))
        np.testing.assert_array_equal(piece.numpy(), values[::-1])
        copy.close()
    assert view.views == copy.views
    assert [name for name, _ in view.views] == ["take", "rename"]


def test_importance_stays_with_the_columns_that_it_is_of() -> None:
    tensors = {name: encoded("dense", (4, 3)) for name in ("a", "b", "c")}
    source = views.weigh(checkpoint(**tensors), {"a": np.arange(3.0), "b": np.arange(3.0), "c": np.ones(3)})
    assert source.views[0][0] == "weigh"
    assert set(views.rename(source, {"a": "x", "b": "a"}).importance) == {"x", "a", "c"}
    assert set(views.drop(source, ["a"]).importance) == {"b", "c"}
    assert set(views.take(source, {"a": [1]}).importance) == {"a", "b", "c"}
    assert set(views.split(source, {"a": {"a0": 1, "a1": 3}}).importance) == {"a0", "a1", "b", "c"}
    assert set(views.concatenate(source, {"ab": ["a", "b"]}).importance) == {"ab", "c"}
    assert set(views.stack(source, {"bc": ["b", "c"]}).importance) == {"a"}  # they differ
    assert set(views.unstack(source, {"a": list("wxyz")}).importance) == set("bcwxyz")


def test_a_pruned_matrix_takes_the_bytes_of_what_is_left_and_remembers_what_it_was() -> None:
    source = checkpoint(w=encoded("affine", bits=4, group=32))
    kept = [number % 2 == 0 for number in range(20)]
    rows = views.prune(source, {"w": views.Pruning(0, Blocks.from_flags(ROWS, 100, kept))})["w"]
    assert (rows.codec, rows.params["inner"]) == ("sparse_blocks", "quantized_group")
    assert rows.nbytes < 0.51 * source["w"].nbytes
    assert rows.origin is source["w"]
    back = views.rename(
        views.prune(source, {"w": views.Pruning(1, Blocks.from_flags(COLS, 48, [False, True]))}), {"w": "x"}
    )
    assert back["x"].origin is not None
    assert back["x"].origin.name == "x"
    np.testing.assert_array_equal(back["x"].numpy()[:, 48:], source["w"].numpy()[:, 48:])


MASK = Blocks.from_flags(4, 2, [True, False])
Wrong = Callable[[Checkpoint], Any]


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        (lambda c: views.rename(c, {"nothing": "x"}), "tensor.unknown"),
        (lambda c: views.rename(c, {"a": "b"}), "view.name"),
        (lambda c: views.select(c, ["nothing"]), "tensor.unknown"),
        (lambda c: views.take(c, {"a": [4]}), "view.rows"),
        (lambda c: views.take(c, {"a": [-5]}), "view.rows"),
        (lambda c: views.take(c, {"a": [0.5]}), "view.rows"),
        (lambda c: views.take(c, {"a": [[0]]}), "view.rows"),
        (lambda c: views.take(c, {"a": [True, False, True, True]}), "view.rows"),
        (lambda c: views.take(c, {"scalar": [0]}), "view.rows"),
        (lambda c: views.permute(c, {"a": [0, 1, 2, 2]}), "view.rows"),
        (lambda c: views.permute(c, {"a": [0, 1, 2]}), "view.rows"),
        (lambda c: views.split(c, {"a": {"x": 1, "y": 2}}), "view.rows"),
        (lambda c: views.split(c, {"a": {"x": 5, "y": -1}}), "view.rows"),
        (lambda c: views.split(c, {"a": {"b": 4}}), "view.name"),
        (lambda c: views.unstack(c, {"a": ["x"]}), "view.rows"),
        (lambda c: views.unstack(c, {"a": ["x", "x", "y", "z"]}), "view.name"),
        (lambda c: views.stack(c, {"x": ["a", "half"]}), "view.shape"),
        (lambda c: views.stack(c, {"x": ["a", "wide"]}), "view.shape"),
        (lambda c: views.stack(c, {"x": []}), "view.shape"),
        (lambda c: views.stack(c, {"x": ["a", "a"]}), "view.name"),
        (lambda c: views.stack(c, {"wide": ["a", "b"]}), "view.name"),
        (lambda c: views.concatenate(c, {"x": ["a", "wide"]}), "view.shape"),
        (lambda c: views.concatenate(c, {"x": ["scalar"]}), "view.shape"),
        (lambda c: views.prune(c, {"a": views.Pruning(1, MASK)}), "view.blocks"),
        (lambda c: views.prune(c, {"a": views.Pruning(2, MASK)}), "view.blocks"),
        (lambda c: views.prune(c, {"a": views.Pruning(0, Blocks(4, 2, b"\x07"))}), "view.blocks"),
        (lambda c: views.prune(c, {"scalar": views.Pruning(0, MASK)}), "view.blocks"),
        (lambda c: views.weigh(c, {"a": np.ones(4)}), "convert.importance"),
        (lambda c: views.weigh(c, {"a": np.zeros(3)}), "convert.importance"),
        (lambda c: views.weigh(c, {"a": np.array([1, -1, 1])}), "convert.importance"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_read(wrong: Wrong, rule: str) -> None:
    half = encode_tensor(CODECS["dense"], np.ones((4, 3), np.float16), dtype="f16")
    source = checkpoint(
        a=encoded("dense", (4, 3)), b=encoded("dense", (4, 3)), wide=encoded("dense", (4, 4)), half=half,
        scalar=encoded("dense", ()),
    )  # fmt: skip
    with pytest.raises(UsageError) as caught:
        wrong(source)
    assert caught.value.rule == rule


def test_deltas_have_the_names_and_rows_of_their_base(tmp_path: Path) -> None:
    base: dict[str, Array] = {"w": np.zeros((8, 8), np.float32)}
    ingot.save(tmp_path / "base.zt", base)
    ingot.save(tmp_path / "tuned.zt", {"w": np.eye(8, dtype=np.float32)})
    ingot.diff(tmp_path / "base.zt", tmp_path / "tuned.zt", tmp_path / "d.zt")
    with ingot.open(tmp_path / "d.zt") as delta, pytest.raises(UsageError) as caught:
        views.rename(delta, {"w": "x"})
    assert caught.value.rule == "view.delta"


def test_what_cannot_be_decoded_is_renamed_and_not_cut() -> None:
    part = Part("u8", 4, MemorySource(b"1234"))
    source = checkpoint(odd=Tensor("odd", (4,), "f32", "somebody's", {"data": part}))
    assert bytes(views.rename(source, {"odd": "x"})["x"].parts["data"].view()) == b"1234"
    with pytest.raises(IngotError) as caught:
        views.take(source, {"odd": [1]})["odd"].numpy()
    assert caught.value.rule == "codec.unknown"


def test_attachments_come_and_go_with_their_files(tmp_path: Path) -> None:
    ingot.save(tmp_path / "head.safetensors", draft_head())
    ingot.save(tmp_path / "x.zt", {"w": np.ones(3, np.float32)})
    with ingot.open(tmp_path / "x.zt") as source:
        view = views.attach(source, draft=tmp_path / "head.safetensors")
        assert view.attachments.draft is not None
        assert set(view.attachments.draft) == set(draft_head())
        assert not source.attachments
        copy = pickle.loads(pickle.dumps(views.rename(view, {"w": "x"})))
        assert copy.attachments.draft is not None
        assert bits(copy.attachments.draft["d2t"].numpy()) == bits(draft_head()["d2t"])
        assert copy.identity() == views.rename(view, {"w": "x"}).identity()
        copy.close()
        assert not views.detach(view, ["draft"]).attachments
        assert view.attachments
        os.utime(tmp_path / "head.safetensors", ns=(1, 1))
        with pytest.raises(IntegrityError) as caught:
            view.require_unchanged()
        assert caught.value.rule == "store.changed"
        with pytest.raises(FormatError) as wrong:
            views.attach(source, draft=tmp_path / "x.zt")
        assert wrong.value.rule == "draft.missing"


def test_what_convert_prunes_is_what_the_view_prunes(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    up, down = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight")
    ingot.save(tmp_path / "x.zt", {up: rng.normal(size=(16, 8)), down: rng.normal(size=(8, 16))})
    ingot.convert(tmp_path / "x.zt", tmp_path / "converted.zt", prune=0.5, prune_block=4)
    with ingot.open(tmp_path / "x.zt") as source:
        ingot.save(tmp_path / "viewed.zt", views.prune(source, views.weakest_blocks(source, 0.5, block=4)))
    with ingot.open(tmp_path / "converted.zt") as converted, ingot.open(tmp_path / "viewed.zt") as viewed:
        assert {item.codec for item in viewed.values()} == {"sparse_blocks"}
        for name in (up, down):
            assert viewed[name].params == converted[name].params
            for role, part in converted[name].parts.items():
                assert bytes(viewed[name].parts[role].view()) == bytes(part.view())


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("dense", {}),
        ("affine", {"bits": 3, "group": 32}),
        ("affine", {"bits": 8, "group": "row"}),
        ("scaled_codebook", {"table": "f4_e2m1fn", "group": 32, "scales": "f8_e8m0fnu"}),
        ("scaled_codebook", {"table": "f8_e4m3fn", "group": [8, 32]}),
        ("ggml_blocks", {"type": "q4_0"}),
    ],
)
@pytest.mark.parametrize("mapped", [True, False])
def test_units_are_moved_as_they_are_stored_and_woven_again(codec: str, options: dict[str, Any], mapped: bool) -> None:
    tensor = encoded(codec, (3, 16, 96), **options)
    source = checkpoint(x=tensor if mapped else counted(tensor)[0])
    values = tensor.numpy("f32")
    columns = {f"c{i}": UnitSelection((3, 16, 32), Units(48, 3, i, 1)) for i in range(3)}
    found = split_units(source, {"x": columns})
    for index, name in enumerate(columns):
        assert found[name].codec == codec
        assert np.array_equal(found[name].numpy("f32"), values[..., 32 * index : 32 * index + 32])
    rows = {f"r{i}": UnitSelection((3, 8, 96), Units(3, 16, i, 8, 2)) for i in range(2)}
    found = split_units(source, {"x": rows})
    for index, name in enumerate(rows):
        assert np.array_equal(found[name].numpy("f32"), values[:, index::2])
    whole = interleave(found, {"x": ((3, 16, 96), {name: piece.units for name, piece in rows.items()})})
    assert np.array_equal(whole["x"].numpy("f32"), values)
    assert (whole["x"].codec == codec) == ("group" not in options or options["group"] != [8, 32])


def test_units_that_are_not_there_are_refused() -> None:
    source = checkpoint(x=encoded("dense", (4, 6)))
    for piece in (
        UnitSelection((4, 3), Units(4, 2, 2, 1)),
        UnitSelection((4, 3), Units(4, 4, 0, 1)),
        UnitSelection((4, 4), Units(4, 2, 0, 1)),
    ):
        with pytest.raises(UsageError) as caught:
            split_units(source, {"x": {"y": piece}})
        assert caught.value.rule == "view.shape"
    with pytest.raises(UsageError) as caught:
        interleave(source, {"y": ((4, 12), {"x": Units(4, 2, 0, 1)})})
    assert caught.value.rule == "view.shape"


@pytest.mark.parametrize(
    ("codec", "options", "turned"),
    [
        ("dense", {}, "dense"),
        ("affine", {"bits": 4, "group": 32}, "dense"),
        ("scaled_codebook", {"table": "f4_e2m1fn", "group": 32, "scales": "f8_e8m0fnu"}, "scaled_codebook"),
        ("ggml_blocks", {"type": "mxfp4"}, "scaled_codebook"),
    ],
)
def test_matrices_of_a_stack_are_turned(codec: str, options: dict[str, Any], turned: str) -> None:
    """Codes of which a layout can say that they lie the other way round stay as they are."""
    tensor = encoded(codec, (3, 40, 64), **options)
    found = transpose(checkpoint(x=tensor), {"x": "y"})["y"]
    assert (found.codec, found.shape) == (turned, (3, 64, 40))
    assert np.array_equal(found.numpy("f32"), tensor.numpy("f32").swapaxes(1, 2))
    again = transpose(checkpoint(x=found), {"x": "y"})["y"]
    assert np.array_equal(again.numpy("f32"), tensor.numpy("f32"))
