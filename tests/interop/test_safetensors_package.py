"""Both ways with the package ``safetensors``, the reference implementation."""

from __future__ import annotations

import json
from math import prod

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ingot.numpy
import ingot.torch
from ingot.artifacts.state_dict import open_bytes
from ingot.core.numeric.dtypes import BY_SAFETENSORS, numpy_dtype
from ingot.errors import IngotError
from ingot.formats.base import WriteOptions
from ingot.formats.safetensors.format import SafetensorsFormat
from ingot.model.artifact import Artifact
from ingot.model.spec import PartSpec, TensorSpec
from ingot.runtime.arrays.torch import from_numpy as to_torch
from ingot.runtime.arrays.torch import to_numpy
from ingot.stores.memory import MemoryTarget
from ingot.testing.formats import dense, feed

NUMPY = ("F64", "F32", "F16", "I64", "U64", "I32", "U32", "I16", "U16", "I8", "U8", "BOOL", "C64")
TORCH = tuple(safetensors.torch._TYPES)


def values(spelling: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    row = BY_SAFETENSORS[spelling]
    top = 2 if row.category == "b" else 256
    data = np.random.default_rng(seed).integers(0, top, prod(shape) * row.bits // 8, np.uint8)
    return data.view(numpy_dtype(row.name)).reshape(shape)


def same(left: np.ndarray, right: np.ndarray) -> bool:
    return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())


@pytest.mark.parametrize("spelling", NUMPY)
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 2), (7,)])
def test_numpy_arrays_both_ways(tmp_path, spelling, shape):
    arrays = {"x": values(spelling, shape), "y.z": values(spelling, (5,), 1)}
    theirs, ours = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    safetensors.numpy.save_file(arrays, theirs, {"format": "np"})
    ingot.numpy.save_file(arrays, ours, {"format": "np"})
    assert ours.read_bytes() == theirs.read_bytes()
    for loaded in (
        ingot.numpy.load_file(theirs),
        safetensors.numpy.load_file(ours),
        ingot.numpy.load(ours.read_bytes()),
    ):
        assert sorted(loaded) == sorted(arrays)
        assert all(same(loaded[name], arrays[name]) for name in arrays)


@pytest.mark.parametrize("spelling", TORCH)
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 2)])
def test_torch_tensors_both_ways(tmp_path, spelling, shape):
    target = safetensors.torch._TYPES[spelling]
    tensor = to_torch(values(spelling, shape))
    assert tensor.dtype == target
    theirs, ours = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    safetensors.torch.save_file({"x": tensor}, theirs)
    ingot.torch.save_file({"x": tensor}, ours)
    assert ours.read_bytes() == theirs.read_bytes() == ingot.torch.save({"x": tensor})
    for loaded in (
        ingot.torch.load_file(theirs),
        safetensors.torch.load_file(ours),
        ingot.torch.load(ours.read_bytes()),
    ):
        assert (loaded["x"].dtype, loaded["x"].shape) == (tensor.dtype, tensor.shape)
        assert to_numpy(loaded["x"]).tobytes() == to_numpy(tensor).tobytes()


def test_torch_knows_no_dtype_that_was_not_tried():
    assert set(TORCH) <= set(BY_SAFETENSORS)
    assert {"BF16", "F8_E4M3", "F8_E5M2"} <= set(TORCH)


@pytest.mark.parametrize("spelling", BY_SAFETENSORS)
def test_every_dtype_is_understood_by_the_reference(spelling):
    item = dense("x", (4, 2), BY_SAFETENSORS[spelling].name)
    target = MemoryTarget()
    writer = SafetensorsFormat().writer(target, "x", Artifact([item.spec]), WriteOptions())
    feed(writer, item)
    (name,) = writer.finish()
    ((tensor, info),) = safetensors.deserialize(bytes(target.files[name]))
    assert (tensor, info["dtype"], info["shape"], bytes(info["data"])) == ("x", spelling, [4, 2], item.parts["data"])


def test_the_order_of_all_dtypes_is_theirs():
    """One tensor of each type that the package can write; 8 bytes each, so that nothing but the order differs."""
    spelled = {"F4": "float4_e2m1fn_x2"}
    arrays = {}
    specs = {}
    for index, (spelling, row) in enumerate(sorted(BY_SAFETENSORS.items())):
        data = np.full(8, index, np.uint8) if row.category != "b" else np.zeros(8, np.uint8)
        for name in (row.torch, row.numpy, spelled.get(spelling)):
            try:
                shape = (8,) if spelling == "F4" else (64 // row.bits,)
                spec = safetensors.TensorSpec(dtype=name, shape=shape, data_ptr=data.ctypes.data, data_len=8)
            except (safetensors.SafetensorError, TypeError):
                continue
            arrays[spelling], specs[spelling] = data, spec
            break
    assert len(specs) >= 19
    theirs = safetensors.serialize(specs)
    ours_specs, feeds = [], []
    for spelling, data in arrays.items():
        row = BY_SAFETENSORS[spelling]
        part = PartSpec("data", row.storage, 8, None if row.is_storage else row.name)
        shape = (16,) if spelling == "F4" else (64 // row.bits,)
        ours_specs.append(TensorSpec(spelling, shape, row.name, "dense", (part,)))
        feeds.append(data.tobytes())
    target = MemoryTarget()
    writer = SafetensorsFormat().writer(target, "x", Artifact(ours_specs), WriteOptions())
    for spec, data in zip(ours_specs, feeds, strict=True):
        writer.begin(spec)
        writer.write("data", data)
        writer.end()
    (name,) = writer.finish()
    assert bytes(target.files[name]) == bytes(theirs)


NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=8).filter(lambda name: name != "__metadata__")
ARRAYS = st.dictionaries(
    NAMES,
    st.tuples(st.sampled_from(NUMPY), st.lists(st.integers(0, 3), max_size=3).map(tuple), st.integers(0, 9)),
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(
    ARRAYS,
    st.none()
    | st.tuples(
        st.text(st.characters(exclude_categories=("Cs",)), max_size=5).filter(
            lambda key: key != "delta"
        ),  # Ingot's own
        st.text(st.characters(exclude_categories=("Cs",)), max_size=5),
    ),
)
def test_bytes_are_equal(drawn, pair):
    arrays = {name: values(*case) for name, case in drawn.items()}
    # The package keeps metadata in a hash map, so that two keys come in any order: one key at most here.
    metadata = dict([pair]) if pair else None
    data = safetensors.numpy.save(arrays, metadata)
    assert ingot.numpy.save(arrays, metadata) == data
    with open_bytes(data) as checkpoint:
        assert dict(checkpoint.metadata) == (metadata or {})
        assert sorted(checkpoint) == sorted(arrays)
        assert all(same(checkpoint[name].numpy(), arrays[name]) for name in arrays)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_what_is_accepted_here_is_accepted_there(data):
    """Mutate a header; whatever Ingot still reads, the reference reads as the same tensors."""
    whole = ingot.numpy.save(
        {"a": np.arange(3, dtype=np.float32), "b:c": np.zeros((2, 0), np.int8), "d": np.uint8(1)}, {"k": "v"}
    )
    length = int.from_bytes(whole[:8], "little")
    text = bytearray(whole[8 : 8 + length])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.sampled_from([b"", b" ", b"0", b"1", b"9", b"-", b",", b'"', b":", b"e", b"."])
        )
    blob = len(text).to_bytes(8, "little") + bytes(text) + whole[8 + length :]
    try:
        with open_bytes(blob) as checkpoint:
            found = {
                name: (list(tensor.shape), bytes(tensor.parts["data"].stored())) for name, tensor in checkpoint.items()
            }
    except IngotError:
        return
    reference = {name: (info["shape"], bytes(info["data"])) for name, info in safetensors.deserialize(blob)}
    assert found == reference


def test_shards_are_read_like_one_file(tmp_path):
    arrays = {f"layer.{index}": np.full((10,), index, np.float32) for index in range(7)}
    weight_map = {}
    for number in range(3):
        shard = {name: array for index, (name, array) in enumerate(arrays.items()) if index % 3 == number}
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        safetensors.numpy.save_file(shard, tmp_path / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": 280}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = ingot.numpy.load_file(tmp_path)
    assert all(same(loaded[name], array) for name, array in arrays.items())


def test_the_reference_opens_our_shards(tmp_path):
    items = [dense(f"w{index}", (4, 4), "f32", index) for index in range(5)]
    target = MemoryTarget()
    writer = SafetensorsFormat().writer(
        target,
        "model.safetensors",
        Artifact([item.spec for item in items], {"format": "pt"}),
        WriteOptions(max_shard=130),
    )
    for item in items:
        feed(writer, item)
    *shards, index = writer.finish()
    for name, data in target.files.items():
        (tmp_path / name).write_bytes(data)
    weight_map = json.loads((tmp_path / index).read_text())["weight_map"]
    assert sorted(set(weight_map.values())) == shards
    for item in items:
        with safetensors.safe_open(tmp_path / weight_map[item.spec.name], "np") as file:
            assert file.get_tensor(item.spec.name).tobytes() == item.parts["data"]
            assert file.metadata() == {"format": "pt"}
