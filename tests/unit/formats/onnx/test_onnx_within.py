"""Constants of graphs within the graph, of functions and of attributes; what is not read; what is written again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.artifacts.open import with_decoders
from ingot.core.parsing.wire import bytes_field, number_field
from ingot.errors import IngotError, UnsupportedError
from ingot.formats.base import Catalog
from ingot.formats.onnx.format import OnnxFormat
from ingot.formats.onnx.graph import INITIALIZERS, MICROSOFT, SPARSE, parse_model
from ingot.formats.onnx.graph import Graph as ReadGraph
from ingot.model.tensor import Tensor
from ingot.recipes.choice import Choice
from ingot.recipes.recipe import Recipe, Rule
from ingot.stores.memory import MemoryStore
from tests.support.onnx import (
    Graph,
    floats_attribute,
    function,
    graph_attribute,
    numbers,
    tensor,
    tensor_attribute,
    within,
)

INT8 = Recipe("int8", (Rule(Choice("affine", {"bits": 8, "group": "row", "scales": "source"}), min_ndim=2),))
WHOLE8 = Recipe("whole", (Rule(Choice("affine", {"bits": 8, "group": "tensor", "scales": "source"}), min_ndim=2),))


def catalog(model: bytes) -> Catalog:
    return OnnxFormat().read(MemoryStore({"m.onnx": model}), "m.onnx")


def read(model: bytes) -> dict[str, Tensor]:
    return dict(with_decoders(catalog(model).tensors))


def operators(model: bytes) -> list[tuple[str, list[str]]]:
    """Path and types of operators of every graph."""
    return [(graph.path, [item.type for item in graph.operators]) for graph in parse_model(model, "m").graphs]


def test_names_begin_with_the_path_of_their_graph() -> None:
    found = read(within().model())
    assert list(found) == [
        *("shared", "count", "half", "k.table", "y.coefficients", "few"),
        *("h.then_branch/w", "h.then_branch/v", "h.then_branch/a.body/deep", "h.else_branch/w"),
    ]
    np.testing.assert_array_equal(found["h.then_branch/a.body/deep"].numpy(), numbers((32, 32), 1))
    np.testing.assert_array_equal(found["h.else_branch/w"].numpy(), numbers((32, 32), 3))
    codes = np.arange(1024).reshape(32, 32).astype(np.int8).astype(np.float32)
    np.testing.assert_array_equal(found["h.then_branch/v"].numpy(), codes * np.float32(0.01))
    np.testing.assert_array_equal(found["half"].numpy(), np.float32([0.5, 1.5]))
    np.testing.assert_array_equal(found["y.coefficients"].numpy(), np.float32([1, 2, 3]))
    few = np.zeros((4, 16), np.float32)
    few[0, 1], few[2, 1] = 2, 3
    np.testing.assert_array_equal(found["few"].numpy(), few)
    assert not catalog(within().model()).unread


@pytest.mark.parametrize("packed", [True, False])
def test_floats_of_attributes_are_read_in_both_encodings(packed: bool) -> None:
    graph = Graph()
    graph.node("Constant", [], ["c"], more=[floats_attribute("value_floats", [1.5, -2.0, 0.25], packed=packed)])
    graph.node("Constant", [], ["d"], [("value_int", -3)])
    graph.node("Constant", [], ["e"], [("value_ints", [1, -1])])
    found = read(graph.model())
    np.testing.assert_array_equal(found["c"].numpy(), np.float32([1.5, -2.0, 0.25]))
    assert found["d"].parts["data"].array().tolist() == [-3]
    assert found["e"].parts["data"].array().tolist() == [1, -1]


def test_a_list_of_floats_is_a_setting_of_operators_of_onnx() -> None:
    graph = Graph()
    graph.node("Upsample", ["x"], ["y"], more=[floats_attribute("scales", [1.0, 2.0])])
    graph.node("ConstantOfShape", ["y"], ["z"], more=[tensor_attribute("value", tensor("", "float", (1,), bytes(4)))])
    assert not read(graph.model())
    assert not catalog(graph.model()).unread


def test_functions_hold_constants() -> None:
    body = Graph()
    body.node("Constant", [], ["m"], more=[tensor_attribute("value", tensor("", "float", (2,), bytes(8)))])
    body.node("Add", ["i", "m"], ["o"])
    main = Graph()
    main.constant("m", numbers((2,)), "float")
    main.node("Layer", ["x"], ["y"], domain="local")
    model = main.model(function("Layer", "local", ["i"], ["o"], body))
    assert list(read(model)) == ["m", "local.Layer/m"]


def test_names_that_are_taken_are_numbered() -> None:
    inner = Graph(inputs=(), outputs=("t",))
    inner.constant("w", numbers((2, 2), 1), "float")
    main = Graph()
    main.constant("y.body/w", numbers((2, 2), 2), "float")
    main.constant("y.body/w~2", numbers((2, 2), 3), "float")
    main.node("Loop", ["y.body/w", "", "x"], ["y"], more=[graph_attribute("body", inner)])
    assert list(read(main.model())) == ["y.body/w", "y.body/w~2", "y.body/w~3"]


def test_a_name_within_hides_the_one_outside() -> None:
    inner = Graph(inputs=("w",), outputs=("t",))
    inner.node("MatMul", ["x", "w"], ["t"])
    main = Graph()
    main.constant("w", numbers((4, 4)), "float")
    main.node("Loop", ["n", "", "x"], ["y"], more=[graph_attribute("body", inner)])
    graphs = parse_model(main.model(), "m").graphs
    assert graphs[0].uses.keys() == {"n", "x"}
    assert [item.type for item, _ in graphs[1].uses["w"]] == ["MatMul"]


def text() -> Graph:
    graph = Graph()
    graph.fields.append(bytes_field(INITIALIZERS, number_field(2, 8) + bytes_field(8, "words") + bytes_field(6, b"a")))
    inner = Graph(inputs=(), outputs=("t",))
    inner.node("Constant", [], ["label"], more=[bytes_field(1, "value_string") + bytes_field(4, b"b")])
    graph.node("Loop", ["n", "", "x"], ["y"], more=[graph_attribute("body", inner)])
    return graph


def compiled() -> Graph:
    graph = Graph()
    context = bytes_field(1, "ep_cache_context") + bytes_field(4, b"\0\1")
    graph.node("EPContext", ["x"], ["y"], domain=MICROSOFT, more=[context])
    return graph


def dynamic() -> Graph:
    inner = Graph(inputs=(), outputs=("t",))
    inner.raw("w", "int8", (4, 4), bytes(16))
    inner.node("MatMulInteger", ["x", "w"], ["t"])
    graph = Graph()
    graph.node("Loop", ["n", "", "x"], ["y"], more=[graph_attribute("body", inner)])
    return graph


def sparse_text() -> Graph:
    graph = Graph()
    values = number_field(1, 1) + number_field(2, 8) + bytes_field(8, "s") + bytes_field(6, b"a")
    places = tensor("", "int64", (1,), bytes(8))
    graph.fields.append(bytes_field(SPARSE, bytes_field(1, values) + bytes_field(2, places) + number_field(3, 4)))
    return graph


def integers(rows: int = 6, cols: int = 4, *, columns: bool = False) -> tuple[Graph, np.ndarray]:
    """Return a product as dynamic quantization by onnxruntime has it, and the values of its matrix."""
    rng, graph = np.random.default_rng(1), Graph()
    codes = rng.integers(0, 256, (rows, cols)).astype(np.uint8)
    shape = (cols,) if columns else ()
    scale = rng.random(shape).astype(np.float32) if columns else np.array(0.25, np.float32)
    zero = rng.integers(100, 140, shape).astype(np.uint8) if columns else np.array(128, np.uint8)
    graph.constant("w_quantized", codes, "uint8")
    graph.constant("w_scale", scale, "float")
    graph.constant("w_zero_point", zero, "uint8")
    graph.node("DynamicQuantizeLinear", ["x"], ["x_q", "x_scale", "x_zero"])
    graph.node("MatMulInteger", ["x_q", "w_quantized", "x_zero", "w_zero_point"], ["p"])
    graph.node("Cast", ["p"], ["f"], [("to", 1)])
    graph.node("Mul", ["x_scale", "w_scale"], ["s"])
    graph.node("Mul", ["f", "s"], ["y"])
    return graph, (codes.astype(np.float32) - zero) * scale


@pytest.mark.parametrize("columns", [False, True])
def test_codes_of_dynamic_quantization_have_the_scale_after_their_product(tmp_path: Path, columns: bool) -> None:
    graph, expected = integers(columns=columns)
    assert not catalog(graph.model()).unread
    (tensor_of,) = read(graph.model()).values()
    assert (tensor_of.name, tensor_of.codec) == ("w_quantized", "affine")
    np.testing.assert_allclose(tensor_of.numpy(), expected, rtol=1e-6)
    (tmp_path / "m.onnx").write_bytes(graph.model())
    report = ingot.convert(tmp_path / "m.onnx", tmp_path / "o.onnx", "decompress")
    assert report.actions == {"moved": 1}
    assert "MatMulInteger computes with its integers" in str(report.report())
    assert (tmp_path / "o.onnx").read_bytes() == graph.model()


def test_codes_of_integer_operators_have_the_scales_of_these(tmp_path: Path) -> None:
    rng, graph = np.random.default_rng(2), Graph()
    kernel, matrix = (rng.integers(-127, 128, shape).astype(np.int8) for shape in ((3, 2, 2, 2), (4, 5)))
    bias = rng.integers(-(1 << 20), 1 << 20, 3).astype(np.int32)
    arrays = {"ks": rng.random(3).astype(np.float32), "bs": rng.random(5).astype(np.float32)}
    for name in ("xs", "ys", "as", "cs"):
        arrays[name] = np.array(rng.random(), np.float32)
    for name, array in arrays.items():
        graph.constant(name, array, "float")
    for name, array, kind in (("k", kernel, "int8"), ("b", matrix, "int8"), ("kb", bias, "int32")):
        graph.constant(name, array, kind)
    for name, size in (("xz", 1), ("yz", 1), ("az", 1), ("cz", 1)):
        graph.constant(name, np.zeros(size, np.int8).reshape(()), "int8")
    graph.constant("kz", np.zeros(3, np.int8), "int8")
    graph.constant("bz", np.arange(5, dtype=np.int8), "int8")
    graph.node("QLinearConv", ["x", "xs", "xz", "k", "ks", "kz", "ys", "yz", "kb"], ["c"])
    graph.node("QLinearMatMul", ["a", "as", "az", "b", "bs", "bz", "cs", "cz"], ["y"])
    found = read(graph.model())
    assert not catalog(graph.model()).unread
    np.testing.assert_allclose(found["k"].numpy(), kernel * arrays["ks"][:, None, None, None], rtol=1e-6)
    np.testing.assert_allclose(found["b"].numpy(), (matrix - np.arange(5.0)) * arrays["bs"], rtol=1e-6)
    np.testing.assert_allclose(found["kb"].numpy(), bias * (arrays["ks"] * arrays["xs"]), rtol=1e-6)
    (tmp_path / "m.onnx").write_bytes(graph.model())
    ingot.convert(tmp_path / "m.onnx", tmp_path / "o.onnx")
    assert (tmp_path / "o.onnx").read_bytes() == graph.model()


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (text, ["words", "y.body/label"]),
        (compiled, ["y"]),
        (dynamic, ["y.body/w"]),
        (sparse_text, ["s"]),
    ],
)
def test_what_is_not_read_is_listed_and_stays(tmp_path: Path, build: Callable[[], Graph], names: list[str]) -> None:
    model = build().model()
    found = catalog(model)
    assert list(found.unread) == names
    (tmp_path / "m.onnx").write_bytes(model)
    assert "could not be read" not in str(ingot.convert(tmp_path / "m.onnx", tmp_path / "o.onnx").report())
    assert (tmp_path / "o.onnx").read_bytes() == model
    with pytest.raises(IngotError) as caught:
        ingot.convert(tmp_path / "m.onnx", tmp_path / "o.zt")
    assert caught.value.rule == "account.lost"


def test_a_model_that_is_kept_is_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(within().model())
    assert ingot.convert(tmp_path / "m.onnx", tmp_path / "o.onnx").actions == {"moved": 10}
    assert (tmp_path / "o.onnx").read_bytes() == within().model()


def test_matrices_within_become_codes_and_dense_again(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(within().model())
    report = ingot.convert(tmp_path / "m.onnx", tmp_path / "o.onnx", INT8, allow_requantize=True)
    assert report.actions["encoded"] == 5
    changed = (tmp_path / "o.onnx").read_bytes()
    assert dict(operators(changed)) == {
        "": ["If", "Constant", "Lookup", "LinearRegressor"],
        "h.then_branch/": ["MatMulNBits", "MatMulNBits", "Loop"],
        "h.then_branch/a.body/": ["MatMulNBits", "MatMulNBits"],
        "h.else_branch/": ["MatMulNBits"],
    }
    with ingot.open(tmp_path / "o.onnx") as found:
        assert {name for name in found if name.endswith("_Q8")} == {
            *("shared_Q8", "h.then_branch/w_Q8", "h.then_branch/v_Q8", "h.else_branch/w_Q8"),
            "h.then_branch/a.body/deep_Q8",
        }
        np.testing.assert_allclose(found["h.else_branch/w_Q8"].numpy(), numbers((32, 32), 3).T, atol=0.01)
    # The scale that lay outside is gone: nothing takes it any more.
    assert "scale" not in parse_model(changed, "m").main.constants
    ingot.convert(tmp_path / "o.onnx", tmp_path / "d.onnx", "decompress")
    assert dict(operators((tmp_path / "d.onnx").read_bytes()))["h.then_branch/"] == ["MatMul", "MatMul", "Loop"]


def test_other_constants_within_get_dequantizelinear_in_their_graph(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(within().model())
    ingot.convert(tmp_path / "m.onnx", tmp_path / "o.onnx", WHOLE8, allow_requantize=True)
    assert dict(operators((tmp_path / "o.onnx").read_bytes())) == {
        "": ["DequantizeLinear", "If", "Constant", "Lookup", "LinearRegressor"],
        "h.then_branch/": ["DequantizeLinear", "DequantizeLinear", "MatMul", "MatMul", "Loop"],
        "h.then_branch/a.body/": ["DequantizeLinear", "MatMul", "MatMul"],
        "h.else_branch/": ["DequantizeLinear", "MatMul"],
    }
    with ingot.open(tmp_path / "m.onnx") as before, ingot.open(tmp_path / "o.onnx") as after:
        assert sorted(before) == sorted(after)
        for name, tensor_of in before.items():
            values = tensor_of.numpy()
            np.testing.assert_allclose(after[name].numpy(), values, atol=np.abs(values).max() / 100)


def test_what_has_to_stay_is_named_in_the_report(tmp_path: Path) -> None:
    main = Graph()
    main.node("Constant", [], ["w"], more=[tensor_attribute("value", tensor("", "float", (32, 32), bytes(4096)))])
    main.node("MatMul", ["x", "w"], ["y"])
    (tmp_path / "m.onnx").write_bytes(main.model())
    report = ingot.convert(tmp_path / "m.onnx", tmp_path / "o.onnx", INT8)
    assert report.actions == {"moved": 1}
    assert "it is in an attribute of an operator" in str(report.report())
    (warning,) = report.warnings
    assert warning.startswith("1 tensor stays unchanged")
    assert warning.endswith(": w")
    assert (tmp_path / "o.onnx").read_bytes() == main.model()
    with pytest.raises(IngotError) as caught:
        ingot.convert(tmp_path / "m.onnx", tmp_path / "p.onnx", INT8, strict_recipe=True)
    assert caught.value.rule == "convert.idle"
    assert not ingot.convert(tmp_path / "m.onnx", tmp_path / "q.onnx", "decompress").warnings  # it is dense already


def test_codes_outside_of_the_graph_of_their_operator_stay(tmp_path: Path) -> None:
    inner = Graph(inputs=(), outputs=("t",))
    inner.node("DequantizeLinear", ["q", "s"], ["w"])
    inner.node("MatMul", ["x", "w"], ["t"])
    main = Graph(inputs=("x", "flag"))
    main.constant("q", np.ones((32, 32), np.int8), "int8")
    main.constant("s", np.float32(0.5), "float")
    branches = [graph_attribute(key, inner) for key in ("then_branch", "else_branch")]
    main.node("If", ["flag"], ["y"], more=branches)
    (tmp_path / "m.onnx").write_bytes(main.model())
    with ingot.open(tmp_path / "m.onnx") as found:
        assert list(found) == ["y.then_branch/w"]
        assert (found["y.then_branch/w"].numpy() == 0.5).all()
    report = ingot.convert(tmp_path / "m.onnx", tmp_path / "o.onnx", "decompress")
    assert report.actions == {"moved": 1}
    assert (tmp_path / "o.onnx").read_bytes() == main.model()


def test_two_tensors_with_one_scale_are_written(tmp_path: Path) -> None:
    main = Graph()
    main.constant("s", np.float32(0.5), "float")
    for name in ("p", "q"):
        main.constant(name, np.full((32, 32), len(name), np.int8), "int8")
        main.node("DequantizeLinear", [name, "s"], [f"{name}_w"])
        main.node("MatMul", ["x", f"{name}_w"], [f"{name}_y"])
    (tmp_path / "m.onnx").write_bytes(main.model())
    ingot.convert(tmp_path / "m.onnx", tmp_path / "o.onnx")
    assert (tmp_path / "o.onnx").read_bytes() == main.model()
    one = Recipe("one", (Rule(Choice("dense"), match=("p_w",)),))
    ingot.convert(tmp_path / "m.onnx", tmp_path / "o.onnx", one, overwrite=True)
    with ingot.open(tmp_path / "o.onnx") as found:
        assert [(name, item.codec) for name, item in found.items()] == [("p_w", "dense"), ("q_w", "affine")]
        assert (found["q_w"].numpy() == 0.5).all()


def test_values_that_a_model_computes_are_compared(tmp_path: Path) -> None:
    main = Graph()
    main.constant("b_quantized", np.arange(4, dtype="<i4"), "int32")
    main.constant("b_scale", np.float32([1, 2, 3, 4]), "float")
    main.node("DequantizeLinear", ["b_quantized", "b_scale"], ["b"], [("axis", 0)])
    main.node("Add", ["x", "b"], ["y"])
    (tmp_path / "m.onnx").write_bytes(main.model())
    with ingot.open(tmp_path / "m.onnx") as found:
        arrays = {name: item.numpy() for name, item in found.items() if name != "b_quantized"}
        np.testing.assert_array_equal(arrays["b"], np.float32([0, 2, 6, 12]))
    codes = {"b_quantized": np.arange(4, dtype=np.int32)}
    ingot.save(tmp_path / "same.safetensors", {**arrays, **codes})
    ingot.convert(tmp_path / "same.safetensors", tmp_path / "o.onnx", graph=tmp_path / "m.onnx")
    assert (tmp_path / "o.onnx").read_bytes() == main.model()
    ingot.save(tmp_path / "other.safetensors", {**arrays, **codes, "b": arrays["b"] + 1})
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(tmp_path / "other.safetensors", tmp_path / "p.onnx", graph=tmp_path / "m.onnx")
    assert caught.value.rule == "onnx.unsupported"


def test_graphs_within_graphs_end() -> None:
    graph = Graph(inputs=(), outputs=("t",))
    for _ in range(40):
        around = Graph(inputs=(), outputs=("t",))
        around.node("Loop", ["n"], ["t"], more=[graph_attribute("body", graph)])
        graph = around
    with pytest.raises(IngotError) as caught:
        read(graph.model())
    assert caught.value.rule == "onnx.depth"


def test_verify_tells_of_names_once(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(within().model())
    found = [item.rule for item in ingot.verify(tmp_path / "m.onnx")]
    assert found.count("onnx.inner-graphs") == 1
    assert "inner graphs" in str(ingot.convert(tmp_path / "m.onnx", tmp_path / "m.zt").report())


def test_a_training_graph_binds_constants() -> None:
    step = Graph(inputs=(), outputs=("n",))
    step.constant("rate", np.float32(0.1), "float")
    step.node("Mul", ["w", "rate"], ["n"])
    binding = bytes_field(1, "w") + bytes_field(2, "n")
    main = Graph()
    main.constant("w", numbers((32, 32)), "float")
    main.node("MatMul", ["x", "w"], ["y"])
    model = main.model(bytes_field(20, bytes_field(2, step.graph()) + bytes_field(4, binding)))
    assert list(read(model)) == ["w", "training_info.0.algorithm/rate"]
    graph: ReadGraph = parse_model(model, "m").main
    assert "w" in graph.fixed
