"""ONNX models to tensors: constants however they are stored, and codes by what their operators say."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.artifacts.open import with_decoders
from ingot.core.parsing import wire
from ingot.core.parsing.wire import bytes_field, number_field, varint
from ingot.errors import IngotError
from ingot.formats.onnx.format import OnnxFormat
from ingot.formats.onnx.graph import INITIALIZERS, MICROSOFT
from ingot.formats.onnx.types import TYPES
from ingot.model.layouts.affine import AffineLayout
from ingot.stores.local import LocalStore
from ingot.stores.memory import MemoryStore
from tests.support.onnx import Graph, numbers, outside, packed, sample, tensor
from tests.support.stores import CountingStore


def read(graph: Graph | bytes, **files: bytes) -> dict[str, ingot.Tensor]:
    data = graph if isinstance(graph, bytes) else graph.model()
    catalog = OnnxFormat().read(MemoryStore({"m.onnx": data, **files}), "m.onnx")
    return dict(with_decoders(catalog.tensors))


def test_every_element_type_opens_as_it_is_stored() -> None:
    graph = Graph()
    for type in TYPES:
        graph.raw(type.name, type.name, (3, 2), bytes(range(type.nbytes(6))))
    tensors = read(graph)
    for type in TYPES:
        assert tensors[type.name].dtype == type.dtype
        assert bytes(tensors[type.name].parts["data"].stored()) == bytes(range(type.nbytes(6)))


def test_numbers_in_the_fields_of_their_types_are_the_same_numbers() -> None:
    def packed(number: int, values: list[int]) -> bytes:
        return bytes_field(number, b"".join(varint(value % (1 << 64)) for value in values))

    floats = np.array([1.5, -2, 3e-9], "<f4")
    fields = {
        "f": tensor("f", "float", (3,), None, bytes_field(4, floats.tobytes())),
        "g": tensor("g", "float", (2,), None, b"\x25" + floats[:1].tobytes() + b"\x25" + floats[1:2].tobytes()),
        "i": tensor("i", "int8", (3,), None, packed(5, [-1, 127, -128])),
        "h": tensor("h", "float16", (2,), None, packed(5, [0x3C00, 0xC000])),
        "u": tensor("u", "uint4", (3,), None, packed(5, [0x21, 0x03])),
        "l": tensor("l", "int64", (2,), None, number_field(7, -5) + number_field(7, 1 << 40)),
        "b": tensor("b", "bool", (2,), None, packed(5, [1, 0])),
        "d": tensor("d", "double", (1,), None, bytes_field(10, np.array([0.1]).tobytes())),
        "v": tensor("v", "uint64", (1,), None, packed(11, [2**64 - 1])),
    }
    graph = Graph(fields=[bytes_field(INITIALIZERS, item) for item in fields.values()])
    found = read(graph)
    assert found["f"].numpy().tolist() == floats.tolist()
    assert found["g"].numpy().tolist() == floats[:2].tolist()
    assert found["i"].numpy().tolist() == [-1, 127, -128]
    assert found["h"].numpy().tolist() == [1, -2]
    assert bytes(found["u"].parts["data"].stored()) == b"\x21\x03"
    assert found["l"].numpy().tolist() == [-5, 1 << 40]
    assert found["b"].numpy().tolist() == [True, False]
    assert found["d"].numpy().tolist() == [0.1]
    assert found["v"].numpy().tolist() == [2**64 - 1]


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_numbers_beside_the_model(tmp_path: Path, io: str) -> None:
    values = numbers((3, 4))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "w.bin").write_bytes(bytes(64) + values.tobytes())
    item = outside("w", "float", (3, 4), "./data/w.bin", 64, 48)
    (tmp_path / "m.onnx").write_bytes(Graph(fields=[bytes_field(INITIALIZERS, item)]).model())
    with ingot.open(tmp_path / "m.onnx", io=io) as found:
        assert np.array_equal(found["w"].numpy(), values)


def test_the_value_of_an_operator_is_a_constant_too() -> None:
    graph = Graph()
    value = number_field(20, 4) + bytes_field(1, "value") + bytes_field(5, tensor("", "float", (2,), bytes(8)))
    graph.fields.append(bytes_field(1, bytes_field(2, "c") + bytes_field(4, "Constant") + bytes_field(5, value)))
    assert read(graph)["c"].shape == (2,)


def test_a_matrix_of_matmul_has_the_shape_that_the_model_states() -> None:
    tensors = read(sample())
    assert np.array_equal(tensors["model.layers.0.mlp.up_proj.weight"].numpy(), numbers((64, 32), 2))


def test_recipes_know_a_matrix_without_a_name_by_its_operator(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(sample().model())
    with ingot.open(tmp_path / "m.onnx") as found:
        assert found.aliases == {"onnx::MatMul_7": "model.layers.0.mlp.down_proj.weight"}


QUANTIZED = {  # codes' type, their shape, scales' shape, attributes
    "tensor": ("int8", (6, 8), (), ()),
    "tensor of one": ("uint8", (6, 8), (1,), ()),
    "axis 0": ("int8", (6, 8), (6,), (("axis", 0),)),
    "axis 1": ("uint8", (6, 8), (8,), ()),
    "axis -1": ("int4", (6, 8), (8,), (("axis", -1),)),
    "conv": ("int8", (4, 3, 2, 2), (4,), (("axis", 0),)),
    "blocks of rows": ("uint4", (6, 8), (3, 8), (("axis", 0), ("block_size", 2))),
    "blocks of columns": ("int4", (6, 8), (6, 2), (("axis", 1), ("block_size", 4))),
    "odd": ("uint4", (3, 5), (3, 1), (("axis", 1), ("block_size", 5))),
    "stack": ("int4", (2, 4, 6), (2, 2, 6), (("axis", 1), ("block_size", 2))),
}


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("case", QUANTIZED)
def test_codes_are_what_dequantizelinear_makes_of_them(case: str, zeros: bool) -> None:
    kind, shape, scale_shape, attributes = QUANTIZED[case]
    random, signed, bits = np.random.default_rng(3), kind.startswith("int"), 4 if "4" in kind else 8
    low = -(1 << bits - 1) if signed else 0

    def integers(shape: tuple[int, ...]) -> tuple[np.ndarray, bytes]:
        codes = random.integers(low, low + (1 << bits), shape)
        flat = (codes.reshape(-1) & ((1 << bits) - 1)).astype(np.uint8)
        if bits == 8:
            return codes, flat.tobytes()
        flat = np.append(flat, np.zeros(flat.size % 2, np.uint8))
        return codes, (flat[::2] | flat[1::2] << 4).tobytes()

    graph = Graph({"": 21})
    codes, data = integers(shape)
    scales, points = random.random(scale_shape, np.float32), np.zeros(scale_shape, int)
    graph.raw("w", kind, shape, data)
    graph.raw("s", "float", scale_shape, scales.tobytes())
    inputs = ["w", "s"]
    if zeros:
        points, data = integers(scale_shape)
        graph.raw("z", kind, scale_shape, data)
        inputs.append("z")
    graph.node("DequantizeLinear", inputs, ["values"], attributes)
    graph.node("MatMul", ["x", "values"], ["y"])
    tensors = read(graph)
    assert list(tensors) == ["values"]

    def spread(array: np.ndarray) -> np.ndarray:
        named = dict(attributes)
        axis = named.get("axis", 1) % len(shape)
        if "block_size" in named:
            return np.repeat(array, named["block_size"], axis)
        return (
            array.reshape(1)
            if array.size == 1
            else array.reshape([-1 if at == axis else 1 for at in range(len(shape))])
        )

    expected = ((codes - spread(points)).astype(np.float32)) * spread(scales)
    assert np.array_equal(tensors["values"].numpy(), expected)


@pytest.mark.parametrize(("bits", "cols", "block"), [(4, 64, 32), (4, 50, 16), (8, 48, 32), (2, 64, 64), (4, 33, 32)])
@pytest.mark.parametrize("zeros", [False, True])
def test_codes_are_what_matmulnbits_multiplies_with(bits: int, cols: int, block: int, zeros: bool) -> None:
    rows, groups = 5, -(-cols // block)
    found = read(packed(rows, cols, bits, block, zeros=zeros))
    assert list(found) == ["w_Q4"]
    tensor = found["w_Q4"]
    assert tensor.shape == (rows, cols)
    assert isinstance(tensor.layout, AffineLayout)
    raw = {
        name: np.frombuffer(bytes(read(_alone(rows, cols, bits, block))[name].parts["data"].stored()), dtype)
        for name, dtype in (("w_Q4", np.uint8), ("w_scales", "<f4"), ("w_zero_points", np.uint8))
    }

    def unpack(data: np.ndarray, count: int) -> np.ndarray:
        ones = np.unpackbits(data.reshape(rows, -1), axis=1, bitorder="little").reshape(rows, -1, bits)
        return (ones << np.arange(bits)).sum(axis=2)[:, :count].astype(np.float32)

    codes = unpack(raw["w_Q4"], groups * block)
    points = unpack(raw["w_zero_points"], groups) if zeros else np.full((rows, groups), 1 << bits - 1, np.float32)
    scales = raw["w_scales"].reshape(rows, groups)
    expected = (codes - np.repeat(points, block, 1)) * np.repeat(scales, block, 1)
    assert np.array_equal(tensor.numpy(), expected[:, :cols])


def _alone(rows: int, cols: int, bits: int, block: int) -> bytes:
    """The same constants, used by no operator."""
    graph = packed(rows, cols, bits, block, zeros=True)
    graph.fields.pop()
    return graph.model()


@pytest.mark.parametrize("kind", ["float8e4m3fn", "float8e5m2"])
@pytest.mark.parametrize(
    ("scales", "attributes"), [((), ()), ((4,), (("axis", 0),)), ((3,), ()), ((2, 3), (("axis", 0), ("block_size", 2)))]
)
def test_small_floats(kind: str, scales: tuple[int, ...], attributes: tuple[tuple[str, int], ...]) -> None:
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    small = values.astype(ml_dtypes.float8_e4m3fn if "e4m3" in kind else ml_dtypes.float8_e5m2)
    factors = (np.arange(int(np.prod(scales)), dtype=np.float32) + 1).reshape(scales)
    graph = Graph()
    graph.raw("w", kind, (4, 3), small.tobytes())
    graph.raw("s", "float", scales, factors.tobytes())
    graph.node("DequantizeLinear", ["w", "s"], ["v"], attributes)
    graph.node("MatMul", ["x", "v"], ["y"])
    wide = factors if factors.ndim < 2 else np.repeat(factors, 2, 0)
    wide = wide.reshape(-1, 1) if scales == (4,) else wide
    tensor = read(graph)["v"]
    assert tensor.codec == "scaled_codebook"
    assert np.array_equal(tensor.numpy(), small.astype(np.float32) * wide)


def left(graph: Graph) -> list[str]:
    catalog = OnnxFormat().read(MemoryStore({"m.onnx": graph.model()}), "m.onnx")
    assert not catalog.remarks
    return [f"{name}: {reason}" for name, reason in catalog.unread.items()]


def test_codes_that_no_codec_says_stay_as_they_are_and_verify_tells() -> None:
    ordered = packed()
    ordered.fields.pop()
    ordered.constant("order", np.zeros(48, "<i4"), "int32")
    attributes = [("K", 48), ("N", 8), ("bits", 4), ("block_size", 32)]
    ordered.node("MatMulNBits", ["x", "w_Q4", "w_scales", "", "order"], ["y"], attributes, MICROSOFT)
    assert "w_Q4" in left(ordered)[0]
    integer = Graph()
    integer.raw("w", "int8", (4, 4), bytes(16))
    integer.node("MatMulInteger", ["x", "w"], ["y"])
    assert "MatMulInteger" in left(integer)[0]
    assert read(integer)["w"].dtype == "i8"
    assert left(sample()) == []


def coded(shape: tuple[int, ...], scales: tuple[int, ...], *attributes: tuple[str, int]) -> Graph:
    """A graph with codes ``q`` and one operator that makes ``w`` of them."""
    graph = Graph()
    graph.constant("q", np.arange(np.prod(shape, dtype=int), dtype="i1").reshape(shape), "int8")
    graph.constant("s", np.arange(1, np.prod(scales, dtype=int) + 1, dtype="<f4").reshape(scales), "float")
    graph.node("DequantizeLinear", ["q", "s"], ["w"], attributes)
    return graph


def test_codes_that_are_read_along_two_axes_are_values_of_both() -> None:
    graph = coded((2, 2), (2,), ("axis", 0))
    graph.node("DequantizeLinear", ["q", "s"], ["v"])  # along axis 1, which is the default
    assert left(graph) == []
    found = read(graph)
    assert sorted(found) == ["q", "s", "v", "w"]
    np.testing.assert_array_equal(found["w"].numpy(), np.float32([[0, 1], [4, 6]]))
    np.testing.assert_array_equal(found["v"].numpy(), np.float32([[0, 2], [2, 6]]))


def test_codes_whose_values_have_the_name_of_others_stay_as_they_are() -> None:
    graph = coded((2, 2), ())
    graph.constant("p", np.arange(4, 8, dtype="i1").reshape(2, 2), "int8")
    graph.node("DequantizeLinear", ["p", "s"], ["w"])
    assert "p" in left(graph)[0]
    assert sorted(read(graph)) == ["p", "w"]


@pytest.mark.parametrize(
    ("shape", "scales", "attributes"),
    [
        ((0, 4), (0,), (("axis", 0),)),
        ((4, 0), (4,), (("axis", 0),)),
        ((4, 0), (4, 0), (("axis", 1), ("block_size", 2))),
    ],
)
def test_no_codes_are_no_values(
    shape: tuple[int, ...], scales: tuple[int, ...], attributes: tuple[tuple[str, int], ...]
) -> None:
    graph = coded(shape, scales, *attributes)
    assert left(graph) == []
    assert read(graph)["q"].numpy().shape == read(graph)["w"].numpy().shape == shape


@pytest.mark.parametrize(
    ("kind", "fields", "rule"),
    [
        pytest.param("float", number_field(4, 63) + bytes_field(4, bytes(8)), "onnx.wire", id="a varint as f32"),
        pytest.param("float", bytes_field(4, bytes(3)) + bytes_field(4, bytes(5)), "onnx.wire", id="cut f32"),
        pytest.param("double", 4 * (varint(10 << 3 | 5) + bytes(4)), "onnx.wire", id="f32 as f64"),
        pytest.param("uint8", varint(5 << 3 | 5) + b"\x80\x80\x01\x02", "onnx.wire", id="fixed32 as varints"),
        pytest.param("uint8", number_field(5, 256) + number_field(5, 1), "onnx.data", id="nine bits"),
        pytest.param("int8", number_field(5, -129) + number_field(5, 1), "onnx.data", id="nine bits and a sign"),
    ],
)
def test_numbers_that_are_encoded_as_others_are_refused(kind: str, fields: bytes, rule: str) -> None:
    graph = Graph(fields=[bytes_field(INITIALIZERS, tensor("w", kind, (2,), None, fields))])
    with pytest.raises(IngotError) as caught:
        read(graph)["w"].numpy()
    assert caught.value.rule == rule


def test_a_place_in_more_entries_than_are_looked_at_is_refused() -> None:
    entries = b"".join(bytes_field(13, bytes_field(1, f"key{number}")) for number in range(14))
    item = outside("w", "float", (2,), "w.bin", 0, 8) + entries + bytes_field(13, bytes_field(1, "offset"))
    with pytest.raises(IngotError) as caught:
        read(Graph(fields=[bytes_field(INITIALIZERS, item)]), **{"w.bin": bytes(8)})
    assert caught.value.rule == "onnx.external-entry"


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(8))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "w.bin").symlink_to(tmp_path / "secret")
    item = outside("w", "float", (2,), "w.bin", 0, 8)
    (folder / "m.onnx").write_bytes(Graph(fields=[bytes_field(INITIALIZERS, item)]).model())
    with pytest.raises(IngotError) as caught:
        ingot.open(folder / "m.onnx")
    assert caught.value.rule == "onnx.external-link"


def test_only_what_lies_around_weights_is_read(tmp_path: Path) -> None:
    graph = sample()
    graph.raw("large", "uint8", (1 << 22,), bytes(1 << 22))
    (tmp_path / "m.onnx").write_bytes(graph.model())
    store = CountingStore(LocalStore(tmp_path, io="pread"))
    OnnxFormat().read(store, "m.onnx")
    assert store.nbytes < 1 << 20


def test_a_message_of_more_fields_than_anybody_writes_is_refused_before_it_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "_MAX_FIELDS", 1000)
    with pytest.raises(IngotError) as caught:
        read(sample().model() + number_field(99, 1) * 2000)
    assert caught.value.rule == "onnx.wire"
