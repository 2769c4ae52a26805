"""Constants that a program computes, those of nested blocks and in the program itself, and those that are not read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.core.parsing.wire import bytes_field, map_entry, number_field
from ingot.errors import UnsupportedError
from ingot.formats.coreml.expressions import MAX_DEPTH, look_up
from ingot.formats.coreml.mil import parse_model
from ingot.formats.coreml.reader import read_package
from ingot.recipes.choice import Choice
from ingot.recipes.recipe import Recipe, Rule
from ingot.stores.memory import MemoryStore
from tests.support.coreml import MODEL, WEIGHTS, Package, operation, sample

SHAPE = (16, 32)
LUT = (1, 32, 16, 1)
INT8 = Choice("affine", {"bits": 8, "group": "row", "symmetric": True, "scales": "f16"})


def put(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def halves(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("<f2")


def codes(seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 16, SHAPE).astype(np.uint8)


def nibbles(values: np.ndarray) -> bytes:
    flat = values.reshape(-1)
    return bytes(flat[::2] | flat[1::2] << 4)


def scaled_palette(made: Package, name: str, table: str = "") -> np.ndarray:
    """Add a palette with a scale for each column, as coremltools writes it; return its values."""
    lut, scale, index = halves(*LUT), np.abs(halves(1, 32, 1, 1, seed=3)), codes()
    if not table:
        inputs = {
            "data": made.blob("fp16", LUT, lut.tobytes()),
            "scale": made.blob("fp16", scale.shape, scale.tobytes()),
        }
        made.add("constexpr_blockwise_shift_scale", f"{name}_table", ("fp16", LUT), inputs=inputs)
    indices = made.blob("uint4", SHAPE, nibbles(index))
    made.add(
        "constexpr_lut_to_dense", name, ("fp16", SHAPE), inputs={"indices": indices, "lut": table or f"{name}_table"}
    )
    return (lut * scale)[0, np.arange(32)[None, :], index, 0]


def vectors(made: Package, name: str) -> np.ndarray:
    """Add a palette whose entries are eight numbers along the first axis, for which no codec has a layout."""
    lut = halves(1, 1, 16, 8)
    index = codes()[:2]
    inputs: dict[str, bytes | str] = {
        "indices": made.blob("uint4", (2, 32), nibbles(index)),
        "lut": made.blob("fp16", lut.shape, lut.tobytes()),
        "vector_axis": made.now("int32", (), bytes(4)),
    }
    made.add("constexpr_lut_to_dense", name, ("fp16", SHAPE), inputs=inputs)
    return lut[0, 0][index].transpose(0, 2, 1).reshape(SHAPE)


def used(made: Package, *names: str) -> None:
    """Add an operation that takes constants."""
    made.operations.append(operation("add", (("y", "fp16", SHAPE),), inputs={f"x{i}": n for i, n in enumerate(names)}))


def values(path: Path) -> dict[str, np.ndarray]:
    with ingot.open(path) as found:
        return {name: tensor.numpy() for name, tensor in found.items()}


def types(path: Path) -> list[str]:
    return [item.type for item in parse_model((path / MODEL).read_bytes(), "m").operations]


def test_a_palette_with_a_scale_per_channel_is_a_palette(tmp_path: Path) -> None:
    made = Package()
    expected = scaled_palette(made, "w")
    used(made, "w")
    source = put(tmp_path / "a.mlpackage", made.files())
    with ingot.open(source) as found:
        assert found["w"].codec == "palette"
        assert found["w"].numpy().tobytes() == np.ascontiguousarray(expected).tobytes()
    ingot.convert(source, tmp_path / "m.zt")
    ingot.convert(tmp_path / "m.zt", tmp_path / "b.mlpackage", program=source)
    for name, data in made.files().items():
        assert (tmp_path / "b.mlpackage" / name).read_bytes() == data
    plain = Package()
    plain.add("const", "w", ("fp16", SHAPE), {"val": plain.blob("fp16", SHAPE, bytes(1024))})
    used(plain, "w")
    ingot.convert(tmp_path / "m.zt", tmp_path / "c.mlpackage", program=put(tmp_path / "p.mlpackage", plain.files()))
    assert types(tmp_path / "c.mlpackage") == ["constexpr_blockwise_shift_scale", "constexpr_lut_to_dense", "add"]
    assert values(tmp_path / "c.mlpackage")["w"].tobytes() == values(source)["w"].tobytes()


def test_a_palette_that_the_program_computes_otherwise_has_the_computed_entries(tmp_path: Path) -> None:
    made = Package()
    data, index = np.arange(16, dtype=np.int8).reshape(1, 1, 16, 1), codes()
    scale, offset = np.float16([[[[0.3]]]]), np.int8([[[[5]]]])
    inputs: dict[str, bytes | str] = {
        "data": made.blob("int8", data.shape, data.tobytes()),
        "scale": made.now("fp16", scale.shape, scale.tobytes()),
        "offset": made.now("int8", offset.shape, offset.tobytes()),
    }
    made.add("constexpr_blockwise_shift_scale", "t", ("fp16", data.shape), inputs=inputs)
    made.add(
        "constexpr_lut_to_dense",
        "w",
        ("fp16", SHAPE),
        inputs={"indices": made.blob("uint4", SHAPE, nibbles(index)), "lut": "t"},
    )
    used(made, "w")
    source = put(tmp_path / "a.mlpackage", made.files())
    expected = ((data.astype(np.float16) - offset) * scale)[0, 0, :, 0][index]
    with ingot.open(source) as found:
        assert found["w"].codec == "palette"
        np.testing.assert_array_equal(found["w"].numpy(), expected)
    ingot.convert(source, tmp_path / "b.mlpackage")
    for name, data in made.files().items():
        assert (tmp_path / "b.mlpackage" / name).read_bytes() == data
    ingot.convert(source, tmp_path / "c.mlpackage", "decompress")
    assert types(tmp_path / "c.mlpackage") == ["const", "add"]
    np.testing.assert_array_equal(values(tmp_path / "c.mlpackage")["w"], expected)


def test_values_without_a_layout_are_computed_and_kept_as_they_are(tmp_path: Path) -> None:
    made = Package()
    expected = vectors(made, "w")
    used(made, "w")
    source = put(tmp_path / "a.mlpackage", made.files())
    with ingot.open(source) as found:
        assert found["w"].codec == "dense"
        np.testing.assert_array_equal(found["w"].numpy(), expected)
        np.testing.assert_array_equal(found["w"][3:5], expected[3:5])
    assert ingot.convert(source, tmp_path / "b.mlpackage").actions == {"moved": 1}
    for name, data in made.files().items():
        assert (tmp_path / "b.mlpackage" / name).read_bytes() == data
    report = ingot.convert(source, tmp_path / "c.mlpackage", Recipe("int8", (Rule(INT8),)))
    assert report.actions == {"encoded": 1}
    assert types(tmp_path / "c.mlpackage") == ["constexpr_blockwise_shift_scale", "add"]
    assert np.abs(values(tmp_path / "c.mlpackage")["w"] - expected).max() < 0.02
    files = [path for path in (tmp_path / "c.mlpackage").rglob("*") if path.is_file()]
    assert report.size == sum(path.stat().st_size for path in files)


def test_other_values_are_not_written_where_the_program_computes_them(tmp_path: Path) -> None:
    made = Package()
    expected = vectors(made, "w")
    used(made, "w")
    source = put(tmp_path / "a.mlpackage", made.files())
    ingot.save(tmp_path / "same.safetensors", {"w": expected})
    ingot.convert(tmp_path / "same.safetensors", tmp_path / "b.mlpackage", program=source)
    ingot.save(tmp_path / "other.safetensors", {"w": expected + np.float16(1)})
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(tmp_path / "other.safetensors", tmp_path / "c.mlpackage", program=source)
    assert caught.value.rule == "coreml.tensor"


def shared(made: Package) -> None:
    scaled_palette(made, "v")
    scaled_palette(made, "w", "v_table")
    used(made, "v", "w")


def test_a_table_of_two_palettes_belongs_to_both(tmp_path: Path) -> None:
    made = Package()
    shared(made)
    source = put(tmp_path / "a.mlpackage", made.files())
    before = values(source)
    np.testing.assert_array_equal(before["v"], before["w"])
    ingot.convert(source, tmp_path / "b.mlpackage")
    for name, data in made.files().items():
        assert (tmp_path / "b.mlpackage" / name).read_bytes() == data
    # One gets operations of its own: the table stays for the other.
    ingot.convert(source, tmp_path / "c.mlpackage", Recipe("one", (Rule(INT8, match=("v",)),)), allow_requantize=True)
    assert types(tmp_path / "c.mlpackage") == [
        "constexpr_blockwise_shift_scale",
        "constexpr_blockwise_shift_scale",
        "constexpr_lut_to_dense",
        "add",
    ]
    after = values(tmp_path / "c.mlpackage")
    np.testing.assert_array_equal(after["w"], before["w"])
    assert 0 < np.abs(after["v"] - before["v"]).max() < 0.1
    # Both do: nothing uses the table any more.
    ingot.convert(source, tmp_path / "d.mlpackage", "decompress")
    assert types(tmp_path / "d.mlpackage") == ["const", "const", "add"]
    for name, value in values(tmp_path / "d.mlpackage").items():
        np.testing.assert_array_equal(value, before[name])


def test_a_constant_from_which_another_is_computed_stays(tmp_path: Path) -> None:
    """It is used itself, too: a recipe that changed it would change both."""
    made = Package()
    lut, index = halves(1, 1, 16, 1), codes()
    made.add("const", "t", ("fp16", lut.shape), {"val": made.blob("fp16", lut.shape, lut.tobytes())})
    indices = made.blob("uint4", SHAPE, nibbles(index))
    made.add("constexpr_lut_to_dense", "w", ("fp16", SHAPE), inputs={"indices": indices, "lut": "t"})
    used(made, "t", "w")
    source = put(tmp_path / "a.mlpackage", made.files())
    recipe = Recipe("int8", (Rule(Choice("affine", {**INT8.options, "group": "tensor"})),))
    report = ingot.convert(source, tmp_path / "b.mlpackage", recipe, allow_requantize=True)
    assert report.actions == {"moved": 1, "encoded": 1}
    assert ["computes other constants from it" in text for text in report.warnings] == [True]
    after = values(tmp_path / "b.mlpackage")
    np.testing.assert_array_equal(after["t"], lut)
    np.testing.assert_allclose(after["w"], lut[0, 0, :, 0][index], atol=0.02)


def block(made: Package) -> bytes:
    return b"".join(bytes_field(3, item) for item in made.operations)


def conditional(made: Package, *branches: bytes) -> None:
    """Add an operation with blocks, whose operations were added to ``made`` before."""
    made.operations = [operation("cond", (("y", "fp16", SHAPE),)) + b"".join(bytes_field(4, item) for item in branches)]


def test_constants_of_blocks_within_blocks_are_tensors_under_names_of_their_own(tmp_path: Path) -> None:
    made = Package()
    expected, branches = [], []
    table = np.ascontiguousarray(halves(*LUT) * np.abs(halves(1, 32, 1, 1, seed=3)))
    for index in range(2):
        made.operations = []
        values_of = scaled_palette(made, "w", "outer") if index else scaled_palette(made, "w")
        expected.append(values_of)
        made.operations.append(operation("identity", (("z", "fp16", SHAPE),), inputs={"x": "w"}))
        branches.append(block(made) + bytes_field(2, "z"))
    conditional(made, *branches)
    cond = made.operations
    made.operations = []
    made.add("const", "outer", ("fp16", LUT), {"val": made.blob("fp16", LUT, table.tobytes())})
    made.operations += cond
    source = put(tmp_path / "a.mlpackage", made.files())
    before = values(source)
    assert list(before) == ["w", "w~2"]
    for name, values_of in zip(before, expected, strict=True):
        assert before[name].tobytes() == np.ascontiguousarray(values_of).tobytes()
    ingot.convert(source, tmp_path / "b.mlpackage")
    assert (tmp_path / "b.mlpackage" / MODEL).read_bytes() == made.files()[MODEL]
    assert (tmp_path / "b.mlpackage" / WEIGHTS).stat().st_size == (source / WEIGHTS).stat().st_size
    ingot.convert(source, tmp_path / "c.mlpackage", "decompress")
    assert types(tmp_path / "c.mlpackage") == ["cond", "const", "identity", "const", "identity"]
    for name, value in values(tmp_path / "c.mlpackage").items():
        np.testing.assert_array_equal(value, before[name])


def test_small_arrays_in_the_program_are_tensors_and_settings_are_not(tmp_path: Path) -> None:
    made, bias = Package(), np.float16([1, 2, 3])
    made.add("const", "bias", ("fp16", (3,)), {"val": made.now("fp16", (3,), bias.tobytes())})
    made.add("const", "epsilon", ("fp16", ()), {"val": made.now("fp16", (), b"\0<")})
    made.add("const", "axes", ("int32", (2,)), {"val": made.now("int32", (2,), bytes(8))})
    weight = halves(*SHAPE)
    made.add("const", "w", ("fp16", SHAPE), {"val": made.blob("fp16", SHAPE, weight.tobytes())})
    used(made, "bias", "epsilon", "axes", "w")
    source = put(tmp_path / "a.mlpackage", made.files())
    with ingot.open(source) as found:
        assert sorted(found) == ["bias", "w"]
        np.testing.assert_array_equal(found["bias"].numpy(), bias)
    ingot.save(tmp_path / "new.safetensors", {"bias": bias * 2, "w": weight})
    ingot.convert(tmp_path / "new.safetensors", tmp_path / "b.mlpackage", program=source)
    np.testing.assert_array_equal(values(tmp_path / "b.mlpackage")["bias"], bias * 2)
    ingot.save(tmp_path / "less.safetensors", {"w": weight + np.float16(1)})
    ingot.convert(tmp_path / "less.safetensors", tmp_path / "c.mlpackage", program=source)
    np.testing.assert_array_equal(values(tmp_path / "c.mlpackage")["bias"], bias)
    half = Recipe("half", (Rule(Choice("dense", {"dtype": "f32"}), match=("bias",)),))
    report = ingot.convert(source, tmp_path / "d.mlpackage", half)
    assert report.actions == {"moved": 2}
    assert "(kept: coreml has it in f16)" in str(report.report())
    assert not report.warnings


def unknown(made: Package) -> None:
    made.add("constexpr_of_the_future", "w", ("fp16", (16,)), inputs={"x": made.blob("fp16", (16,), bytes(32))})


def short(made: Package) -> None:
    made.add("const", "w", ("uint4", (32,)), {"val": made.blob("uint4", (32,), bytes(16))})


def bare(made: Package) -> None:
    made.add("mul", "m", ("fp16", (16,)), inputs={"x": "x", "y": made.blob("fp16", (16,), bytes(32))})


def bare_inline(made: Package) -> None:
    made.add("mul", "m", ("fp16", (4,)), inputs={"x": "x", "y": made.now("fp16", (4,), bytes(8))})


def in_a_list(made: Package) -> None:
    pair = b"".join(bytes_field(1, bytes_field(2, made.blob("fp16", (16,), bytes(32)))) for _ in range(2))
    made.operations.append(operation("concat", (("m", "fp16", (32,)),)) + map_entry(2, "values", pair))


@pytest.mark.parametrize(
    ("build", "names"),
    [(unknown, ["w"]), (short, ["w"]), (bare, ["m.y"]), (bare_inline, ["m.y"]), (in_a_list, ["blob 64", "blob 192"])],
)
def test_every_array_that_is_no_tensor_is_listed(tmp_path: Path, build, names: list[str]) -> None:
    made = Package()
    build(made)
    catalog = read_package(MemoryStore(made.files()))
    assert not catalog.tensors
    assert list(catalog.unread) == names
    source = put(tmp_path / "a.mlpackage", made.files())
    ingot.convert(source, tmp_path / "b.mlpackage")
    for name, data in made.files().items():
        assert (tmp_path / "b.mlpackage" / name).read_bytes() == data


def test_constants_of_a_specialization_that_does_not_run_are_listed() -> None:
    made = Package()
    made.add("const", "w", ("fp16", (16,)), {"val": made.blob("fp16", (16,), bytes(32))})
    function = bytes_field(2, "CoreML9") + map_entry(3, "CoreML8", made.block())
    model = number_field(1, 9) + bytes_field(502, number_field(1, 1) + map_entry(2, "main", function))
    catalog = read_package(MemoryStore(made.files(model)))
    assert not catalog.tensors
    assert list(catalog.unread) == ["w"]


@pytest.mark.parametrize("length", [MAX_DEPTH - 1, MAX_DEPTH, 200])
def test_long_chains_are_read_or_listed(length: int) -> None:
    made = Package()
    scale = made.now("fp16", (1,), b"\0>")  # 1.5
    name: bytes | str = made.blob("fp16", (16,), np.ones(16, "<f2").tobytes())
    for index in range(length):
        inputs: dict[str, bytes | str] = {"data": name, "scale": scale}
        made.add("constexpr_blockwise_shift_scale", f"w{index}", ("fp16", (16,)), inputs=inputs)
        name = f"w{index}"
    catalog = read_package(MemoryStore(made.files()))
    if length <= MAX_DEPTH:
        (tensor,) = catalog.tensors.values()
        expected = np.float16(1)
        for _ in range(length):
            expected *= np.float16(1.5)
        assert (tensor.parts["data"].array() == expected).all()
    else:
        assert f"w{length - 1}" in catalog.unread


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_entries_lie_along_their_axis(axis: int) -> None:
    rng = np.random.default_rng(5)
    indices, lut = rng.integers(0, 4, (4, 6, 2)), rng.standard_normal((2, 3, 1, 4, 3))
    found = look_up(indices, lut, axis)
    for place in np.ndindex(*indices.shape):
        entry = lut[place[0] // 2, place[1] // 2, 0, indices[place]]
        for number in range(3):
            at = list(place)
            at[axis] = place[axis] * 3 + number
            assert found[tuple(at)] == entry[number]


def test_the_sample_decodes_and_lists_what_is_not_read() -> None:
    catalog = read_package(MemoryStore(sample().files()))
    table = np.frombuffer(bytes(range(32)), "<f2").reshape(2, 8)
    np.testing.assert_array_equal(catalog.tensors["v"].parts["data"].array().reshape(4, 8), table[[1, 0, 1, 0]])
    assert dict(catalog.unread) == {"u": "Ingot has no element type for uint4"}
