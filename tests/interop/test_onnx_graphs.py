"""Weights of graphs within graphs: what onnx's evaluator, and onnxruntime where it is, compute before and after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.recipes.choice import Choice
from ingot.recipes.recipe import Recipe, Rule

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx.reference.op_run import OpRun  # noqa: E402

FLOAT, BOOL, INT64 = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64
SIZE = 32
INT8 = Choice("affine", {"bits": 8, "group": "row", "symmetric": True, "scales": "source"})
INT4 = Choice("affine", {"bits": 4, "group": 32, "symmetric": True, "scales": "source"})
TENSOR8 = Choice("affine", {"bits": 8, "group": "tensor", "symmetric": True, "scales": "source"})
Feeds = dict[str, np.ndarray]
Case = tuple[Any, list[Feeds], set[str]]


def weight(seed: int, *shape: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape or (SIZE, SIZE)) / 8).astype(np.float32)


def named(name: str, array: np.ndarray) -> Any:
    return numpy_helper.from_array(array, name)


def value(name: str, type: int = FLOAT, shape: Any = (None, SIZE)) -> Any:
    return helper.make_tensor_value_info(name, type, shape)


def node(type: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any) -> Any:
    return helper.make_node(type, inputs, outputs, domain=domain, **attributes)


def graph(nodes: list[Any], inputs: list[Any], outputs: list[Any], constants: Sequence[Any] = (), **more: Any) -> Any:
    return helper.make_graph(nodes, "g", inputs, outputs, constants, **more)


def model(main: Any, functions: Sequence[Any] = ()) -> Any:
    sets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("local", 1)]
    made = helper.make_model(main, opset_imports=sets, functions=functions)
    made.ir_version = 10
    return made


def x() -> np.ndarray:
    return np.random.default_rng(9).standard_normal((3, SIZE)).astype(np.float32)


def branches() -> Case:
    """Two branches whose matrices have the same name, and one that both take from outside."""

    def branch(seed: int, out: str) -> Any:
        nodes = [node("MatMul", ["x", "w"], ["a"]), node("MatMul", ["a", "shared"], [out])]
        return graph(nodes, [], [value(out)], [named("w", weight(seed))])

    chosen = node("If", ["c"], ["y"], then_branch=branch(1, "t"), else_branch=branch(2, "e"))
    main = graph([chosen], [value("x"), value("c", BOOL, [])], [value("y")], [named("shared", weight(3))])
    feeds = [{"x": x(), "c": np.array(flag)} for flag in (True, False)]
    return model(main), feeds, {"shared", "y.then_branch/w", "y.else_branch/w"}


def loop() -> Case:
    """A loop, within it a condition with a matrix of its own, an addition and a table."""
    inner = graph([node("MatMul", ["state", "deep"], ["b"])], [], [value("b")], [named("deep", weight(4))])
    other = graph([node("Add", ["state", "bias"], ["d"])], [], [value("d")], [named("bias", weight(5, SIZE))])
    nodes = [
        node("Identity", ["going"], ["more"]),
        node("Equal", ["index", "zero"], ["first"]),
        node("If", ["first"], ["next"], then_branch=inner, else_branch=other),
    ]
    body = graph(
        nodes,
        [value("index", INT64, []), value("going", BOOL, []), value("state")],
        [value("more", BOOL, []), value("next")],
        [named("zero", np.array(0, np.int64))],
    )
    main = graph(
        [node("Loop", ["count", "", "x"], ["y"], body=body)],
        [value("x")],
        [value("y")],
        [named("count", np.array(3, np.int64))],
    )
    names = {"count", "y.body/zero", "y.body/next.then_branch/deep", "y.body/next.else_branch/bias"}
    return model(main), [{"x": x()}], names


def scan() -> Case:
    body = graph(
        [node("MatMul", ["row", "w"], ["p"]), node("Add", ["state", "p"], ["sum"]), node("Identity", ["sum"], ["out"])],
        [value("state", FLOAT, [1, SIZE]), value("row", FLOAT, [1, SIZE])],
        [value("sum", FLOAT, [1, SIZE]), value("out", FLOAT, [1, SIZE])],
        [named("w", weight(6))],
    )
    main = graph(
        [node("Scan", ["start", "x"], ["last", "y"], body=body, num_scan_inputs=1)],
        [value("x", FLOAT, [3, 1, SIZE])],
        [value("y", FLOAT, [3, 1, SIZE])],
        [named("start", weight(7, 1, SIZE))],
    )
    return model(main), [{"x": x()[:, None, :]}], {"start", "last.body/w"}


def codes() -> Case:
    """Codes of both kinds of operators within branches, their scales outside."""
    rng = np.random.default_rng(8)
    packed = rng.integers(0, 256, (SIZE, 1, 16), np.uint8)

    def dequantized(out: str) -> Any:
        nodes = [node("DequantizeLinear", ["q", "s"], ["w"]), node("MatMul", ["x", "w"], [out])]
        return graph(nodes, [], [value(out)], [named("q", rng.integers(-127, 128, (SIZE, SIZE)).astype(np.int8))])

    attributes = {"K": SIZE, "N": SIZE, "bits": 4, "block_size": 32}
    nbits = node("MatMulNBits", ["x", "b_Q4", "b_scales"], ["e"], "com.microsoft", **attributes)
    constants = [named("b_Q4", packed), named("b_scales", np.abs(weight(9, SIZE, 1)))]
    other = graph([nbits], [], [value("e")], constants)
    chosen = node("If", ["c"], ["y"], then_branch=dequantized("t"), else_branch=other)
    inputs = [value("x"), value("c", BOOL, [])]
    main = graph([chosen], inputs, [value("y")], [named("s", np.float32(0.01))])
    feeds = [{"x": x(), "c": np.array(flag)} for flag in (True, False)]
    return model(main), feeds, {"y.then_branch/w", "y.else_branch/b_Q4"}


def functions() -> Case:
    """A function with a matrix, and a condition within it with another."""
    matrix = node("Constant", [], ["m"], value=named("", weight(10)))
    numbers = node("Constant", [], ["shift"], value_floats=[0.5] * SIZE)
    then = graph([node("MatMul", ["a", "k"], ["t"])], [], [value("t")], [named("k", weight(11))])
    other = graph([node("Identity", ["a"], ["e"])], [], [value("e")])
    nodes = [
        matrix,
        numbers,
        node("MatMul", ["i", "m"], ["p"]),
        node("Add", ["p", "shift"], ["a"]),
        node("If", ["c"], ["o"], then_branch=then, else_branch=other),
    ]
    made = helper.make_function("local", "Layer", ["i", "c"], ["o"], nodes, [helper.make_opsetid("", 21)])
    calls = [node("Layer", ["x", "c"], ["h"], "local"), node("MatMul", ["h", "w"], ["y"])]
    inputs = [value("x"), value("c", BOOL, [])]
    main = graph(calls, inputs, [value("y")], [named("w", weight(12))])
    feeds = [{"x": x(), "c": np.array(flag)} for flag in (True, False)]
    return model(main, [made]), feeds, {"w", "local.Layer/m", "local.Layer/shift", "local.Layer/o.then_branch/k"}


def static() -> Case:
    """A graph as onnxruntime quantizes it: weights of 8 bits, a bias of 32, both with the same operator."""
    rng = np.random.default_rng(13)
    constants = [
        named("w_quantized", rng.integers(-127, 128, (SIZE, SIZE)).astype(np.int8)),
        named("w_scale", np.abs(weight(14, SIZE))),
        named("w_zero_point", np.zeros(SIZE, np.int8)),
        named("b_quantized", rng.integers(-(1 << 20), 1 << 20, SIZE).astype(np.int32)),
        named("b_scale", np.abs(weight(15, SIZE)) / 4096),
        named("b_zero_point", np.zeros(SIZE, np.int32)),
    ]
    nodes = [
        node("DequantizeLinear", ["w_quantized", "w_scale", "w_zero_point"], ["w"], axis=0),
        node("DequantizeLinear", ["b_quantized", "b_scale", "b_zero_point"], ["b"], axis=0),
        node("Gemm", ["x", "w", "b"], ["y"], transB=1),
    ]
    main = graph(nodes, [value("x")], [value("y")], constants)
    return model(main), [{"x": x()}], {"w", "b", "b_quantized", "b_scale", "b_zero_point"}


def shared_scale() -> Case:
    """Two matrices of codes with one scale."""
    rng = np.random.default_rng(16)
    constants = [named(name, rng.integers(-127, 128, (SIZE, SIZE)).astype(np.int8)) for name in ("p", "q")]
    nodes = [node("DequantizeLinear", [name, "s"], [f"{name}_w"]) for name in ("p", "q")]
    nodes += [node("MatMul", ["x", "p_w"], ["h"]), node("MatMul", ["h", "q_w"], ["y"])]
    main = graph(nodes, [value("x")], [value("y")], [*constants, named("s", np.float32(0.01))])
    return model(main), [{"x": x()}], {"p_w", "q_w"}


def sparse() -> Case:
    """Sparse constants of both orders of positions."""
    values, places = weight(17, 5), np.array([3, 40, 41, 500, 1023], np.int64)
    first = helper.make_sparse_tensor(named("w", values), named("", places), [SIZE, SIZE])
    pairs = np.stack(np.divmod(places, SIZE), axis=1)
    second = helper.make_sparse_tensor(named("", values), named("", pairs), [SIZE, SIZE])
    nodes = [
        node("Constant", [], ["v"], sparse_value=second),
        node("MatMul", ["x", "w"], ["a"]),
        node("MatMul", ["x", "v"], ["b"]),
        node("Add", ["a", "b"], ["y"]),
    ]
    return model(graph(nodes, [value("x")], [value("y")], sparse_initializer=[first])), [{"x": x()}], {"w", "v"}


RUN: list[Callable[[], Case]] = [branches, loop, scan, codes, functions, static, shared_scale]
CASES = [*RUN, sparse]  # the evaluator knows no sparse constants
RECIPES = {
    "int8": Recipe("int8", (Rule(INT8, min_ndim=2),)),
    "int4": Recipe("int4", (Rule(INT4, min_ndim=2),)),
    "tensor8": Recipe("tensor8", (Rule(TENSOR8, min_ndim=2),)),
}


class MatMulNBits(OpRun):
    """The operator of onnxruntime, for onnx's evaluator: 4 or 8 bits, without zero points."""

    op_domain = "com.microsoft"

    def _run(self, a: Any, b: Any, scales: Any, *more: Any, **attributes: int) -> Any:
        cols, rows, bits, block = (attributes[key] for key in ("K", "N", "bits", "block_size"))
        packed = b.reshape(rows, -1)
        pairs = packed if bits == 8 else np.stack([packed & 15, packed >> 4], axis=2).reshape(rows, -1)
        values = (pairs.astype(np.float32) - (1 << (bits - 1))) * np.repeat(scales.reshape(rows, -1), block, axis=1)
        return (a @ values[:, :cols].T,)


def outputs(path: Path, feeds: Feeds) -> list[np.ndarray]:
    """Return what onnxruntime computes, if it is installed, else what onnx's evaluator does."""
    try:
        import onnxruntime
    except ModuleNotFoundError:
        return list(ReferenceEvaluator(str(path), new_ops=[MatMulNBits]).run(None, feeds))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return list(onnxruntime.InferenceSession(str(path), options).run(None, feeds))


def computed(path: Path, feeds: list[Feeds]) -> list[np.ndarray]:
    return [array for feed in feeds for array in outputs(path, feed)]


def saved(case: Callable[[], Case], path: Path) -> tuple[list[Feeds], set[str]]:
    made, feeds, names = case()
    onnx.save(made, str(path))
    return feeds, names


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_constant_is_a_tensor(tmp_path: Path, case: Callable[[], Case]) -> None:
    _, names = saved(case, tmp_path / "m.onnx")
    with ingot.open(tmp_path / "m.onnx") as found:
        assert set(found) == names
        arrays = {name: tensor.numpy() for name, tensor in found.items()}
    assert not [item for item in ingot.verify(tmp_path / "m.onnx") if item.rule == "open.unread"]
    ingot.convert(tmp_path / "m.onnx", tmp_path / "m.safetensors", "decompress")
    with ingot.open(tmp_path / "m.safetensors") as found:
        for name, tensor in found.items():
            np.testing.assert_array_equal(tensor.numpy(), arrays[name])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_model_that_is_kept_is_the_same_file(tmp_path: Path, case: Callable[[], Case]) -> None:
    saved(case, tmp_path / "m.onnx")
    assert set(ingot.convert(tmp_path / "m.onnx", tmp_path / "o.onnx").actions) == {"moved"}
    assert (tmp_path / "o.onnx").read_bytes() == (tmp_path / "m.onnx").read_bytes()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_numbers_beside_the_model_are_read_from_there(tmp_path: Path, case: Callable[[], Case]) -> None:
    saved(case, tmp_path / "m.onnx")
    (tmp_path / "beside").mkdir()
    made = onnx.load(str(tmp_path / "m.onnx"))
    settings = {"save_as_external_data": True, "location": "w.bin", "size_threshold": 0, "convert_attribute": True}
    onnx.save(made, str(tmp_path / "beside" / "m.onnx"), **settings)
    with ingot.open(tmp_path / "m.onnx") as one, ingot.open(tmp_path / "beside" / "m.onnx") as other:
        assert list(one) == list(other)
        for name, tensor in one.items():
            np.testing.assert_array_equal(tensor.numpy(), other[name].numpy())
    ingot.convert(tmp_path / "beside" / "m.onnx", tmp_path / "again", format="onnx")
    names = sorted(item.name for item in (tmp_path / "beside").iterdir())
    assert sorted(item.name for item in (tmp_path / "again").iterdir()) == [*names[:0], "model.onnx", *names[1:]]
    ingot.convert(tmp_path / "beside" / "m.onnx", tmp_path / "single.onnx")
    with ingot.open(tmp_path / "m.onnx") as one, ingot.open(tmp_path / "single.onnx") as other:
        for name, tensor in one.items():
            np.testing.assert_array_equal(tensor.numpy(), other[name].numpy())


@pytest.mark.parametrize("case", RUN, ids=lambda case: case.__name__)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_changes_what_operators_can_say(tmp_path: Path, case: Callable[[], Case], recipe: str) -> None:
    feeds, _ = saved(case, tmp_path / "m.onnx")
    if case is codes and recipe == "tensor8":
        pytest.skip("MatMulNBits has no scale for a whole matrix")
    before = computed(tmp_path / "m.onnx", feeds)
    report = ingot.convert(tmp_path / "m.onnx", tmp_path / "o.onnx", RECIPES[recipe], allow_requantize=True)
    onnx.checker.check_model(onnx.load(str(tmp_path / "o.onnx")))
    changed = computed(tmp_path / "o.onnx", feeds)
    # Decoded again it computes the very same, up to sums in another order.
    ingot.convert(tmp_path / "o.onnx", tmp_path / "d.onnx", "decompress")
    onnx.checker.check_model(onnx.load(str(tmp_path / "d.onnx")))
    plain = computed(tmp_path / "d.onnx", feeds)
    for old, new, dense in zip(before, changed, plain, strict=True):
        limit = 0.02 if recipe != "int4" else 0.2
        assert np.abs(old - new).max() <= limit * np.abs(old).max() + 1e-6
        np.testing.assert_allclose(dense, new, rtol=1e-4, atol=1e-4 * np.abs(old).max())
    if case in (branches, loop, scan):
        assert report.actions["encoded"] >= 1
    if case is functions:
        assert "it is in a function of the model" in str(report.report())


@pytest.mark.parametrize("case", RUN, ids=lambda case: case.__name__)
def test_values_that_are_kept_compute_the_same(tmp_path: Path, case: Callable[[], Case]) -> None:
    feeds, _ = saved(case, tmp_path / "m.onnx")
    before = computed(tmp_path / "m.onnx", feeds)
    ingot.convert(tmp_path / "m.onnx", tmp_path / "o.onnx", "decompress")
    for old, new in zip(before, computed(tmp_path / "o.onnx", feeds), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-6)


def test_tensors_take_the_places_of_graphs_within(tmp_path: Path) -> None:
    """The names that they had there, and those without the path of a graph where only one fits."""
    array = weight(20, SIZE, 2 * SIZE)
    then = graph([node("MatMul", ["x", "layers.0.mlp.up_proj.weight"], ["t"])], [], [value("t", shape=None)], [
        named("layers.0.mlp.up_proj.weight", weight(21, SIZE, 2 * SIZE))
    ])  # fmt: skip
    other = graph([node("MatMul", ["x", "v"], ["e"])], [], [value("e", shape=None)], [named("v", array)])
    chosen = node("If", ["c"], ["y"], then_branch=then, else_branch=other)
    main = graph([chosen], [value("x"), value("c", BOOL, [])], [value("y", shape=None)])
    onnx.save(model(main), str(tmp_path / "m.onnx"))
    new = {"layers.0.mlp.up_proj.weight": np.ascontiguousarray(array.T), "y.else_branch/v": array + 1}
    ingot.save(tmp_path / "new.safetensors", new)
    ingot.convert(tmp_path / "new.safetensors", tmp_path / "o.onnx", graph=tmp_path / "m.onnx")
    for flag, expected in ((True, x() @ array), (False, x() @ (array + 1))):
        found = outputs(tmp_path / "o.onnx", {"x": x(), "c": np.array(flag)})[0]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
