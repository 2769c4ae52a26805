"""``ingot.open`` and ``ingot.save``: what is found, what is refused, what survives."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.core.numeric.dtypes import DTYPES, numpy_dtype
from ingot.errors import IngotError, IntegrityError, UnsupportedError, UsageError


def test_open_is_a_mapping_and_a_context_manager(model: Path, weights: dict[str, np.ndarray]) -> None:
    with ingot.open(model) as checkpoint:
        assert set(checkpoint) == set(weights)
        assert len(checkpoint) == len(weights)
        assert checkpoint.format == "safetensors"
        assert checkpoint.metadata == {"format": "pt"}
        assert set(checkpoint.companions) == {"config.json", "tokenizer.json"}
        name = "model.layers.0.mlp.up_proj.weight"
        assert checkpoint[name] is checkpoint[name]
        assert checkpoint[name].dtype == "bf16"
        assert checkpoint[name].nbytes == weights[name].nbytes
        assert checkpoint[name].numpy().tobytes() == weights[name].tobytes()
        assert "absent" not in checkpoint
        with pytest.raises(KeyError):
            checkpoint["absent"]


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("suffix", ["zt", "safetensors"])
def test_arrays_are_read_only_views_of_the_mapping_and_outlive_it(
    tmp_path: Path, weights: dict[str, np.ndarray], io: str, suffix: str
) -> None:
    ingot.save(tmp_path / f"a.{suffix}", weights)
    with ingot.open(tmp_path / f"a.{suffix}", io=io) as checkpoint:
        assert checkpoint.io == io
        array = checkpoint["lm_head.weight"].numpy()
        again = checkpoint["lm_head.weight"].numpy()
        assert np.shares_memory(array, again) == (io == "mmap")
    assert not array.flags.writeable
    assert array.tobytes() == weights["lm_head.weight"].tobytes()


def test_state_dict_decodes_into_arrays_that_are_given(model: Path) -> None:
    with ingot.open(model) as checkpoint:
        first = checkpoint.state_dict(dtype="f32")
        wanted = {name: array.tobytes() for name, array in first.items()}
        given = {name: np.full(array.shape, 7, array.dtype) for name, array in first.items() if array.ndim > 1}
        again = checkpoint.state_dict(dtype="f32", out=given)
        assert given
        assert all(again[name] is array for name, array in given.items())
        assert {name: array.tobytes() for name, array in again.items()} == wanted
        for wrong in ({"absent": np.zeros(1, np.float32)}, {"model.norm.weight": np.zeros(1, np.float32)}):
            with pytest.raises(UsageError):
                checkpoint.state_dict(dtype="f32", out=wrong)
        with pytest.raises(UsageError):
            checkpoint.state_dict("pt", out=given)


def test_only_a_whole_plain_array_is_decoded_into(model: Path) -> None:
    with ingot.open(model) as checkpoint:
        tensor = checkpoint["model.layers.0.mlp.up_proj.weight"]
        rows, cols = tensor.shape
        locked = np.zeros(tensor.shape, np.float32)
        locked.flags.writeable = False
        for out in (
            np.zeros((rows, 2 * cols), np.float32)[:, ::2],
            np.zeros((cols, rows), np.float32).T,
            np.zeros(4 * rows * cols + 1, np.uint8)[1:].view(np.float32).reshape(rows, cols),
            np.zeros((rows, cols + 1), np.float32),
            np.zeros((rows, cols), ">f4"),
            locked,
        ):
            with pytest.raises(UsageError) as caught:
                tensor.numpy(out=out)
            assert caught.value.rule == "tensor.out"
            assert not out.any()
        with pytest.raises(UsageError) as caught:
            tensor.numpy("bf16", out=np.zeros(tensor.shape, np.float32))
        assert caught.value.rule == "tensor.out"


def test_state_dict_by_names_and_dtype(model: Path) -> None:
    with ingot.open(model) as checkpoint:
        chosen = checkpoint.state_dict(dtype="f32", names=["model.norm.weight"])
        assert list(chosen) == ["model.norm.weight"]
        assert chosen["model.norm.weight"].dtype == np.float32
        with pytest.raises(UsageError) as caught:
            checkpoint.state_dict(names=["absent"])
        assert caught.value.rule == "tensor.unknown"
        with pytest.raises(UsageError):
            checkpoint.state_dict(framework="abacus")


def test_layers_come_in_the_order_of_a_forward_pass(model: Path, weights: dict[str, np.ndarray]) -> None:
    with ingot.open(model) as checkpoint:
        groups = list(checkpoint.layers())
    assert [layer for layer, _ in groups] == [None, 0, 1, 2, None]
    assert list(groups[0][1]) == ["model.embed_tokens.weight"]
    assert set(groups[-1][1]) == {"model.norm.weight", "lm_head.weight"}
    assert {name for _, group in groups for name in group} == set(weights)


@pytest.mark.parametrize("suffix", ["zt", "safetensors"])
def test_every_dtype_survives(tmp_path: Path, suffix: str) -> None:
    tensors = {}
    for name, row in DTYPES.items():
        if row.bits >= 8 and (suffix == "zt" or row.safetensors):
            raw = np.random.default_rng(0).integers(0, 2 if name == "bool" else 256, 12 * row.bits // 8, np.uint8)
            tensors[name] = raw.view(numpy_dtype(name)).reshape(3, 4)
    ingot.save(tmp_path / f"all.{suffix}", tensors)
    with ingot.open(tmp_path / f"all.{suffix}") as checkpoint:
        for name, value in tensors.items():
            assert checkpoint[name].dtype == name
            assert checkpoint[name].numpy().tobytes() == value.tobytes()


def test_strided_and_big_endian_arrays_are_stored_by_value(tmp_path: Path) -> None:
    strided = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::3]
    swapped = np.arange(5, dtype=">i4")
    ingot.save(tmp_path / "a.zt", {"strided": strided, "swapped": swapped, "transposed": strided.T})
    with ingot.open(tmp_path / "a.zt") as checkpoint:
        assert np.array_equal(checkpoint["strided"].numpy(), strided)
        assert np.array_equal(checkpoint["transposed"].numpy(), strided.T)
        assert np.array_equal(checkpoint["swapped"].numpy(), swapped)


def test_tensors_of_another_checkpoint_move_as_stored(model: Path, tmp_path: Path) -> None:
    ingot.convert(model, tmp_path / "int4.zt", "int4")
    with ingot.open(tmp_path / "int4.zt") as checkpoint:
        ingot.save(tmp_path / "copy.zt", dict(checkpoint), checkpoint.metadata)
    assert (tmp_path / "copy.zt").read_bytes() == (tmp_path / "int4.zt").read_bytes()


def test_saving_over_the_file_one_reads_from(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    path = tmp_path / "a.zt"
    ingot.save(path, weights)
    with ingot.open(path) as checkpoint:
        kept = {name: tensor for name, tensor in checkpoint.items() if "norm" in name}
        ingot.save(path, kept)
        assert checkpoint["lm_head.weight"].numpy().tobytes() == weights["lm_head.weight"].tobytes()
    with ingot.open(path) as checkpoint:
        assert set(checkpoint) == set(kept)


def test_a_masked_array_is_refused_because_its_mask_would_be_lost(tmp_path: Path) -> None:
    masked = np.ma.masked_array(np.arange(4.0), mask=[True, False, False, False])
    with pytest.raises(UsageError) as caught:
        ingot.save(tmp_path / "a.zt", {"w": masked})
    assert caught.value.rule == "save.masked"
    assert not (tmp_path / "a.zt").exists()
    ingot.save(tmp_path / "a.zt", {"w": masked.filled(7.0)})
    assert ingot.open(tmp_path / "a.zt")["w"].numpy().tolist() == [7.0, 1.0, 2.0, 3.0]


def test_what_cannot_be_saved_leaves_the_old_file(tmp_path: Path) -> None:
    ingot.save(tmp_path / "a.safetensors", {"x": np.ones(3, np.float32)})
    before = (tmp_path / "a.safetensors").read_bytes()
    with pytest.raises(IngotError):
        ingot.save(tmp_path / "a.safetensors", {"x": np.array(["text"])})
    with pytest.raises(UnsupportedError) as caught:
        ingot.save(tmp_path / "a.safetensors", {"x": np.ones(3, np.complex128)})
    assert caught.value.rule == "save.unsupported"
    assert (tmp_path / "a.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors"]


def test_sub_byte_arrays_are_refused_rather_than_stored_wrongly(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError):
        ingot.save(tmp_path / "a.zt", {"x": np.zeros(4, ml_dtypes.float4_e2m1fn)})


def test_folders_without_one_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        ingot.open(tmp_path)
    ingot.save(tmp_path / "a.zt", {"x": np.ones(3, np.float32)})
    ingot.save(tmp_path / "b.zt", {"x": np.ones(3, np.float32)})
    with pytest.raises(UsageError):
        ingot.open(tmp_path)
    with pytest.raises(UsageError) as caught:
        ingot.open(tmp_path / "a.zt", io="carrier pigeon")
    assert caught.value.rule == "open.io"


@pytest.mark.parametrize("suffix", ["zt", "safetensors"])
def test_a_file_that_shrinks_while_open_is_an_error_and_no_crash(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    ingot.save(path, {"x": np.ones((100, 100), np.float32)})
    for io in ("mmap", "pread"):
        ingot.save(path, {"x": np.ones((100, 100), np.float32)})
        with ingot.open(path, io=io) as checkpoint:
            with path.open("r+b") as file:
                file.truncate(500)
            with pytest.raises(IntegrityError) as caught:
                checkpoint["x"].numpy()
            assert caught.value.rule in ("store.shrank", "store.short-read")


def test_digests_are_checked_unless_turned_off(tmp_path: Path) -> None:
    ingot.save(tmp_path / "a.zt", {"x": np.ones(100, np.float32)})
    data = bytearray((tmp_path / "a.zt").read_bytes())
    data[64] ^= 1
    (tmp_path / "a.zt").write_bytes(data)
    with ingot.open(tmp_path / "a.zt") as checkpoint, pytest.raises(IntegrityError) as caught:
        checkpoint["x"].numpy()
    assert caught.value.rule == "part.digest-mismatch"
    with ingot.open(tmp_path / "a.zt", verify=False) as checkpoint:
        assert checkpoint["x"].numpy()[0] != 1


def test_a_folder_that_holds_something_is_not_replaced_unasked(model: Path) -> None:
    with pytest.raises(UsageError) as caught:
        ingot.save(model, {"x": np.ones(3, np.float32)})
    assert caught.value.rule == "target.exists"
    assert (model / "tokenizer.json").exists()
    ingot.save(model, {"x": np.ones(3, np.float32)}, overwrite=True)
    assert sorted(path.name for path in model.iterdir()) == ["model.zt"]


def test_embedding_norm_comes_before_the_layers_and_head_bias_after(tmp_path: Path) -> None:
    one = np.ones(2, np.float32)
    order = ["embeddings.LayerNorm.weight", "encoder.layer.0.output.dense.weight", "lm_head.bias", "norm.weight"]
    ingot.save(tmp_path / "a.zt", dict.fromkeys(order, one))
    with ingot.open(tmp_path / "a.zt") as checkpoint:
        groups = [(layer, list(group)) for layer, group in checkpoint.layers()]
    assert groups == [(None, order[:1]), (0, order[1:2]), (None, order[2:])]
