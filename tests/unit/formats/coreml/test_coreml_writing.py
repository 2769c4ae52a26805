"""Writing into a program: what changes and what must not."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ingot
from ingot.cli.main import run
from ingot.codecs.table import CODECS
from ingot.conversion.coreml.layer import extract_layer
from ingot.core.parsing.wire import Edits, Node, bytes_field, map_entry, number_field
from ingot.errors import IngotError, UnsupportedError
from ingot.formats.coreml.mil import RULES, parse_model
from ingot.formats.coreml.types import BY_NAME
from ingot.model.layouts.affine import NO_ZERO
from ingot.model.layouts.grid import on_grid, run_axis, scale_dims
from ingot.model.part import memory_part
from ingot.model.tensor import Tensor
from ingot.recipes.choice import Choice
from ingot.recipes.recipe import Recipe, Rule
from tests.support.coreml import MODEL, WEIGHTS, Package, sample

SHAPE = (16, 32)
INT8 = Recipe("int8", (Rule(Choice("affine", {"bits": 8, "group": "row", "symmetric": True, "scales": "f16"})),))
INT4 = Recipe("int4", (Rule(Choice("affine", {"bits": 4, "group": 16, "symmetric": True, "scales": "f16"})),))
LUT4 = Recipe("lut4", (Rule(Choice("palette", {"bits": 4}), min_ndim=2),))
UNKNOWN = bytes_field(77, b"a field of the future") + number_field(78, 5)


def numbers(*shape: int) -> bytes:
    return np.random.default_rng(prod(shape)).standard_normal(shape).astype("<f2").tobytes()


def put(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def two(opset: str = "CoreML8") -> Package:
    made = Package(opset)
    made.add("const", "w", ("fp16", SHAPE), {"val": made.blob("fp16", SHAPE, numbers(*SHAPE))}, extra=UNKNOWN)
    made.add(
        "thing_of_the_future", "y", ("fp16", SHAPE), inputs={"x": "w", "table": made.blob("fp16", (16,), numbers(16))}
    )
    return made


def test_unknown_fields_and_operations_stay_and_their_weights_move_along(tmp_path: Path) -> None:
    source = put(tmp_path / "a.mlpackage", two().files())
    ingot.convert(source, tmp_path / "b.mlpackage", INT8)
    model = (tmp_path / "b.mlpackage" / MODEL).read_bytes()
    assert UNKNOWN in model
    after = parse_model(model, "b")
    assert [item.type for item in after.operations] == ["constexpr_blockwise_shift_scale", "thing_of_the_future"]
    assert after.operations[0].outputs == parse_model(two().model(), "a").operations[0].outputs
    table = after.operations[1].inputs["table"]
    assert table is not None
    assert not isinstance(table, str)
    assert table.blob is not None
    weights = (tmp_path / "b.mlpackage" / WEIGHTS).read_bytes()
    start = int.from_bytes(weights[table.blob.offset + 16 : table.blob.offset + 24], "little")
    assert start == table.blob.offset + 64
    assert weights[start : start + 32] == numbers(16)
    assert weights[:8] == bytes([3, 0, 0, 0, 2, 0, 0, 0])


@pytest.mark.parametrize("opset", ["CoreML6", "CoreML7", "CoreML8", "CoreML9"])
def test_the_form_is_that_of_the_opset_and_back_is_the_same_package(tmp_path: Path, opset: str) -> None:
    source = put(tmp_path / "a.mlpackage", two(opset).files())
    ingot.convert(source, tmp_path / "b.mlpackage", LUT4)
    (first, _) = parse_model((tmp_path / "b.mlpackage" / MODEL).read_bytes(), "b").operations
    assert first.type == "constexpr_lut_to_dense"
    assert ("indices" in first.attributes) == (opset in ("CoreML6", "CoreML7"))
    assert ("indices" in first.inputs) == (opset in ("CoreML8", "CoreML9"))
    ingot.convert(tmp_path / "b.mlpackage", tmp_path / "c.mlpackage", "decompress")
    with ingot.open(tmp_path / "b.mlpackage") as packed, ingot.open(tmp_path / "c.mlpackage") as plain:
        np.testing.assert_array_equal(packed["w"].numpy(), plain["w"].numpy())
    assert parse_model((tmp_path / "c.mlpackage" / MODEL).read_bytes(), "c").operations[0].type == "const"


def test_the_sample_is_the_same_after_a_conversion(tmp_path: Path) -> None:
    source = put(tmp_path / "a.mlpackage", sample().files())
    assert ingot.convert(source, tmp_path / "b.mlpackage").actions == {"moved": 11}
    for name, data in sample().files().items():
        assert (tmp_path / "b.mlpackage" / name).read_bytes() == data
    assert [finding.rule for finding in ingot.verify(tmp_path / "b.mlpackage")] == ["format.no-digests", "open.unread"]
    compared = ingot.compare(source, tmp_path / "b.mlpackage")
    assert all(tensor.same for tensor in compared.tensors)
    assert len(compared.unread) == 2
    assert not compared.same


def functions(*bodies: tuple[str, Package]) -> bytes:
    program = number_field(1, 1) + b"".join(map_entry(2, name, body.function()) for name, body in bodies)
    return number_field(1, 9) + bytes_field(502, program)


def test_functions_that_share_a_blob_share_it_afterwards(tmp_path: Path) -> None:
    made = two()
    source = put(tmp_path / "a.mlpackage", made.files(functions(("main", made), ("other", made))))
    report = ingot.convert(source, tmp_path / "b.mlpackage", INT8)
    with ingot.open(tmp_path / "b.mlpackage") as found:
        assert list(found) == ["main/w", "other/w"]
        places = [part.offset for tensor in found.values() for part in tensor.parts.values()]
        assert places[:2] == places[2:]
    files = [path for path in (tmp_path / "b.mlpackage").rglob("*") if path.is_file()]
    assert report.size == sum(path.stat().st_size for path in files)
    ingot.convert(source, tmp_path / "c.mlpackage")
    assert (tmp_path / "c.mlpackage" / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()


@pytest.mark.parametrize(
    ("recipe", "opset", "rule"),
    [(INT4, "CoreML6", "convert.unsupported"), (INT8, "CoreML5", "convert.unsupported")],
)
def test_what_an_opset_cannot_have_is_refused(tmp_path: Path, recipe: Recipe, opset: str, rule: str) -> None:
    source = put(tmp_path / "a.mlpackage", two(opset).files())
    with pytest.raises(IngotError) as caught:
        ingot.convert(source, tmp_path / "b.mlpackage", recipe)
    assert caught.value.rule == rule
    assert not (tmp_path / "b.mlpackage").exists()


def test_a_package_needs_a_program_with_its_tensors(tmp_path: Path) -> None:
    source = put(tmp_path / "a.mlpackage", two().files())
    ingot.save(tmp_path / "w.safetensors", {"w": np.zeros(SHAPE, np.float16)})
    ingot.save(tmp_path / "v.safetensors", {"v": np.zeros(SHAPE, np.float16)})
    ingot.save(tmp_path / "none.zt", {})
    for name, program, rule in (
        ("w.safetensors", None, "coreml.no-program"),
        ("v.safetensors", source, "convert.unsupported"),
        ("none.zt", source, "coreml.tensor-missing"),
        ("w.safetensors", tmp_path / "w.safetensors", "attachments.none"),
    ):
        with pytest.raises(IngotError) as caught:
            ingot.convert(tmp_path / name, tmp_path / "b.mlpackage", program=program)
        assert caught.value.rule == rule, name
    ingot.convert(tmp_path / "w.safetensors", tmp_path / "b.mlpackage", program=source)
    with ingot.open(tmp_path / "b.mlpackage") as found:
        assert not found["w"].numpy().any()


def test_references_in_unknown_places_keep_a_package_from_being_written(tmp_path: Path) -> None:
    made = two()
    made.operations[0] += bytes_field(79, b"@model_path/weights/weight.bin")
    source = put(tmp_path / "a.mlpackage", made.files())
    with ingot.open(source) as found:
        assert found["w"].numpy().shape == SHAPE
    with pytest.raises(IngotError) as caught:
        ingot.convert(source, tmp_path / "b.mlpackage")
    assert caught.value.rule == "coreml.reference-unknown"


@pytest.mark.parametrize("opset", ["iOS16", "iOS18"])
@pytest.mark.parametrize("shape", [(32, 64), (8, 4, 5), (8, 4, 3, 3)])
def test_a_layer_of_its_own(tmp_path: Path, shape: tuple[int, ...], opset: str) -> None:
    weight = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    ingot.save(tmp_path / "m.zt", {"a.weight": weight, "a.bias": weight.reshape(shape[0], -1)[:, 0].copy()})
    report = extract_layer(tmp_path / "m.zt", "a.weight", tmp_path / "a.mlpackage", opset=opset)
    assert report.rounded
    with ingot.open(tmp_path / "a.mlpackage") as found:
        np.testing.assert_array_equal(found["weight"].numpy(), weight.astype(np.float16))
    ingot.convert(tmp_path / "a.mlpackage", tmp_path / "b.mlpackage", LUT4)
    again = extract_layer(tmp_path / "b.mlpackage", "weight", tmp_path / "c.mlpackage", opset=opset)
    assert (again.codec, again.rounded, again.input, again.output) == ("palette", False, report.input, report.output)


def test_what_makes_no_layer_is_refused(tmp_path: Path) -> None:
    large = np.full((4, 4), 1e6, np.float32)
    ingot.save(
        tmp_path / "m.zt", {"a.weight": large, "b.weight": large[0], "c.weight": large / 1e6, "c.bias": large[0][:3]}
    )
    for name in ("a.weight", "b.weight", "c.weight"):
        with pytest.raises(IngotError) as caught:
            extract_layer(tmp_path / "m.zt", name, tmp_path / "x.mlpackage")
        assert caught.value.rule == "coreml.layer", name


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    pairs = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4))
    return tuple(scales * block for scales, block in pairs), tuple(scales for scales, _ in pairs)


@given(grids(), st.sampled_from(["int8", "uint8", "int4", "uint4"]), st.integers(0, 2**32 - 1))
def test_scales_lie_as_core_ml_spreads_them(
    pair: tuple[tuple[int, ...], tuple[int, ...]], kind: str, seed: int
) -> None:
    shape, dims = pair
    type, rng = BY_NAME[kind], np.random.default_rng(seed)
    low = -(1 << (type.bits - 1)) if type.signed else 0
    codes = rng.integers(low, low + (1 << type.bits), shape)
    scales = rng.standard_normal(dims).astype(np.float32)
    spread = scales
    for axis, size in enumerate(shape):
        spread = np.repeat(spread, size // dims[axis], axis)
    layout = on_grid(shape, dims, (type.bits, type.signed), NO_ZERO, "f32")
    stream = (codes & ((1 << type.bits) - 1)).astype(np.uint8).reshape(-1, 1)
    packed = np.packbits(np.unpackbits(stream, axis=1, count=type.bits, bitorder="little"), bitorder="little")
    parts = {"packed_weight": memory_part(packed, "u8"), "scales": memory_part(scales, "f32")}
    tensor = Tensor("t", shape, "f32", layout.codec, parts, layout.attributes(), CODECS[layout.codec])
    np.testing.assert_array_equal(tensor.numpy(), spread * codes.astype(np.float32))
    back = scale_dims(layout, shape)
    assert back is not None
    assert prod(back) == prod(dims)
    assert run_axis(shape, back) is not None or back == dims


@given(st.lists(st.binary(max_size=200), max_size=5), st.integers(0, 4), st.binary(max_size=300))
def test_an_edit_changes_its_field_alone(fields: list[bytes], chosen: int, new: bytes) -> None:
    inner = b"".join(bytes_field(3, data) for data in fields)
    root = Node.root(bytes_field(1, b"before") + bytes_field(2, inner) + number_field(4, 2**64 - 1), "test", RULES)
    node = root.child(root.select((2,))[2][0])
    found = list(node.fields())
    edits = Edits(root)
    if found:
        field = found[chosen % len(found)]
        edits.replace(node, field.tag, field.end, bytes_field(3, new))
        fields = [new if at == chosen % len(found) else data for at, data in enumerate(fields)]
    expected = b"".join(bytes_field(3, data) for data in fields)
    assert edits.apply() == bytes_field(1, b"before") + bytes_field(2, expected) + number_field(4, 2**64 - 1)


def test_constants_that_were_one_blob_part_where_their_values_differ(tmp_path: Path) -> None:
    made = two()
    source = put(tmp_path / "a.mlpackage", made.files(functions(("main", made), ("other", made))))
    values = np.zeros((2, *SHAPE), np.float16)
    values[1, -1, -1] = 1
    ingot.save(tmp_path / "w.zt", {"main/w": values[0], "other/w": values[1]})
    ingot.convert(tmp_path / "w.zt", tmp_path / "b.mlpackage", program=source)
    with ingot.open(tmp_path / "b.mlpackage") as found:
        np.testing.assert_array_equal(found["main/w"].numpy(), values[0])
        np.testing.assert_array_equal(found["other/w"].numpy(), values[1])


def test_a_model_folder_with_a_manifest_of_its_own_is_no_package(tmp_path: Path) -> None:
    ingot.save(tmp_path / "model.safetensors", {"w": np.zeros(3, np.float32)})
    (tmp_path / "Manifest.json").write_text("{}")
    with ingot.open(tmp_path) as found:
        assert found.format == "safetensors"


def test_the_command_makes_a_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ingot.save(tmp_path / "m.zt", {"a.weight": np.ones((8, 4), np.float16)})
    out = str(tmp_path / "a.mlpackage")
    assert run(["extract", str(tmp_path / "m.zt"), "--layer", "a.weight", "--out", out, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["layer"]
    assert (found["path"], found["input"], found["output"], found["codec"]) == (out, [1, 4], [1, 8], "dense")
    assert run(["extract", str(tmp_path / "m.zt"), "--layer", "a.weight"]) == 2


@pytest.mark.parametrize("opset", ["CoreML6", "CoreML8"])
def test_a_run_that_was_stopped_is_continued_to_the_same_bytes(tmp_path: Path, opset: str) -> None:
    made = Package(opset)
    for index in range(12):
        name = f"layer_{index}_weight"
        made.add("const", name, ("fp16", SHAPE), {"val": made.blob("fp16", SHAPE, numbers(*SHAPE, index + 1)[:1024])})
    source = put(tmp_path / "a.mlpackage", made.files())

    def stop(event: ingot.ProgressEvent) -> None:
        if event.processed > event.total / 2:
            raise KeyboardInterrupt

    out = tmp_path / "b.mlpackage"
    with pytest.raises(KeyboardInterrupt):
        ingot.convert(source, out, LUT4, resume=True, progress=stop, threads=1)
    assert not out.exists()
    report = ingot.convert(source, out, LUT4, resume=True)
    assert 0 < report.resumed < 12
    ingot.convert(source, tmp_path / "c.mlpackage", LUT4)
    for name in ("Manifest.json", MODEL, WEIGHTS):
        assert (out / name).read_bytes() == (tmp_path / "c.mlpackage" / name).read_bytes(), name
    assert {path.name for path in tmp_path.iterdir()} == {"a.mlpackage", "b.mlpackage", "c.mlpackage"}


def test_metadata_that_did_not_reach_the_disk_is_written_again(tmp_path: Path) -> None:
    """A run may be killed between a tensor's record and the small pieces that wait in memory."""
    made = Package()
    for index in range(4):
        made.add(
            "const", f"w{index}", ("fp16", SHAPE), {"val": made.blob("fp16", SHAPE, numbers(*SHAPE, index + 1)[:1024])}
        )
    source, out = put(tmp_path / "a.mlpackage", made.files()), tmp_path / "b.mlpackage"

    def stop(event: ingot.ProgressEvent) -> None:
        if event.processed > event.total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ingot.convert(source, out, LUT4, resume=True, progress=stop, threads=1)
    partial = tmp_path / ".b.mlpackage.ingot-partial"
    records = [json.loads(line) for line in (partial / "journal.jsonl").read_text().splitlines()[1:]]
    data = bytearray((partial / "files" / WEIGHTS).read_bytes())
    for offset in (offset for record in records for offset in record["written"]["offsets"]):
        data[offset : offset + 64] = bytes(64)
    (partial / "files" / WEIGHTS).write_bytes(data)
    assert ingot.convert(source, out, LUT4, resume=True).resumed == len(records) > 0
    ingot.convert(source, tmp_path / "c.mlpackage", LUT4)
    assert (out / WEIGHTS).read_bytes() == (tmp_path / "c.mlpackage" / WEIGHTS).read_bytes()


def test_int8_says_how_a_package_of_f16_takes_it(tmp_path: Path) -> None:
    source = put(tmp_path / "a.mlpackage", two().files())
    wide = Recipe("wide", (Rule(Choice("affine", {"bits": 8, "group": "row", "scales": "f32"})),))
    with pytest.raises(IngotError) as caught:
        ingot.convert(source, tmp_path / "b.mlpackage", wide)
    assert caught.value.rule == "convert.unsupported"
    assert "ane-int8" in str(caught.value)


def test_a_recipe_that_hits_nothing_is_told(tmp_path: Path) -> None:
    source = put(tmp_path / "a.mlpackage", two().files())
    assert len(ingot.convert(source, tmp_path / "b.mlpackage", "palette4").warnings) == 1
    for name, recipe in (("c", LUT4), ("d", None)):
        report = ingot.convert(source, tmp_path / f"{name}.mlpackage", recipe)
        assert not report.warnings
        assert not report.notes


def test_a_file_where_a_package_is_to_be_is_refused_and_stays(tmp_path: Path) -> None:
    source = put(tmp_path / "a.mlpackage", two().files())
    (tmp_path / "b.mlpackage").write_bytes(b"mine")
    with pytest.raises(IngotError) as caught:
        ingot.convert(source, tmp_path / "b.mlpackage")
    assert caught.value.rule == "target.exists"
    assert (tmp_path / "b.mlpackage").read_bytes() == b"mine"


@pytest.mark.parametrize("file", [WEIGHTS, MODEL])
def test_a_file_of_a_package_that_is_a_pointer_is_named(tmp_path: Path, file: str) -> None:
    source = put(tmp_path / "a.mlpackage", two().files())
    (source / file).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n")
    with pytest.raises(UnsupportedError) as caught:
        ingot.open(source)
    assert caught.value.rule == "detect.lfs-pointer"
    assert file in str(caught.value)
