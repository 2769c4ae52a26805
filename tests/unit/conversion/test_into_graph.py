"""Weights of any container in a graph that is given: packed in place of its operators, matched by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.errors import IngotError, UsageError
from ingot.formats.onnx.graph import parse_model
from ingot.recipes.choice import Choice
from ingot.recipes.recipe import Recipe, Rule
from tests.support.onnx import Graph, numbers, sample

UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
EMBEDDING, HEAD = "emb", "lm_head.weight"
Array = np.ndarray[Any, np.dtype[Any]]


def weights(cols: int = 64, rows: int = 32, dtype: type = np.float32) -> dict[str, Array]:
    """Other weights than the sample's, as most containers have them: [outputs, inputs]."""
    shapes = {EMBEDDING: (16, cols), UP: (rows, cols), DOWN: (rows, rows), HEAD: (8, rows)}
    return {name: numbers(shape, 20 + index).astype(dtype) for index, (name, shape) in enumerate(shapes.items())}


def affine(**options: Any) -> Recipe:
    rule = Rule(Choice("affine", {"group": 32, **options}), match=("*up_proj*", "*down_proj*"))
    return Recipe("test", (rule,))


def graph_at(folder: Path, graph: Graph | None = None) -> Path:
    (folder / "graph.onnx").write_bytes((graph or sample()).model())
    return folder / "graph.onnx"


def require_refused(folder: Path, graph: Graph, name: str) -> None:
    """A matrix of which nobody knows the way round does not go into the graph."""
    with pytest.raises(UsageError) as caught:
        ingot.convert(folder / "w.zt", folder / "o.onnx", graph=graph_at(folder, graph))
    assert caught.value.rule == "convert.graph"
    assert name in caught.value.message


def operators(path: Path) -> list[str]:
    return [operator.type for operator in parse_model(path.read_bytes(), "m").main.operators]


def packed(folder: Path, recipe: Recipe, held: Mapping[str, Array], format: str = "zt") -> Path:
    ingot.save(folder / "w.zt", dict(held))
    ingot.convert(folder / "w.zt", folder / "q.zt", recipe=recipe)
    if format == "zt":
        return folder / "q.zt"
    out = folder / ("q.gguf" if format == "gguf" else "q")
    report = ingot.convert(folder / "q.zt", out, format=format, keep_names=True)
    assert {item.action for item in report.tensors if item.name in (UP, DOWN)} <= {"moved", "repacked"}
    return out


@pytest.mark.parametrize(
    ("format", "bits"),
    [
        *((format, bits) for format in ("zt", "gguf", "gptq", "compressed-tensors", "mlx") for bits in (4, 8)),
        ("awq", 4),
    ],
)
def test_integers_of_any_container_take_the_place_of_products(format: str, bits: int, tmp_path: Path) -> None:
    held = weights()
    recipe = affine(bits=bits, scales="f16", signed=False, zero_point=1 << (bits - 1))
    source, graph = packed(tmp_path, recipe, held, format), graph_at(tmp_path)
    out, there = tmp_path / "out.onnx", {UP: f"{UP}_Q{bits}", DOWN: f"onnx::MatMul_7_Q{bits}"}
    report = ingot.convert(source, out, graph=graph)
    actions = {item.name: item.action for item in report.tensors}
    assert [actions[name] for name in there.values()] == ["repacked", "repacked"]
    assert operators(out) == ["Gather", "MatMulNBits", "MatMulNBits", "Reshape", "Gemm"]
    with ingot.open(source) as one, ingot.open(out) as other:
        for name, place in there.items():
            assert other[place].shape == one[name].shape
            assert np.array_equal(other[place].numpy("f32"), one[name].numpy("f32"))
        assert np.array_equal(other[HEAD].numpy(), one[HEAD].numpy("f32"))
        assert np.array_equal(other["shape"].numpy(), [-1, 32])
    # And out again, into a file of the same integers.
    back = ingot.convert(out, tmp_path / "back", format="compressed-tensors")
    assert {item.name: item.action for item in back.tensors if item.source_codec == "affine"} in (
        {UP: "moved", DOWN: "moved"},
        {UP: "repacked", DOWN: "repacked"},
    )


def test_dense_matrices_are_turned_and_widened(tmp_path: Path) -> None:
    held = weights(dtype=np.float16)
    del held[HEAD]
    held["rows.weight"] = np.float16([[1]])
    ingot.save(tmp_path / "w.zt", held)
    graph = sample()
    graph.constant("rows.weight", np.float32([[2]]), "float")
    graph.constant("table", numbers((3, 2)), "float")
    with pytest.raises(UsageError) as caught:
        ingot.convert(tmp_path / "w.zt", tmp_path / "o.onnx", graph=graph_at(tmp_path, graph))
    assert caught.value.rule == "convert.graph"
    assert HEAD in caught.value.message  # a weight of another model
    ingot.save(tmp_path / "w.zt", {**held, HEAD: weights()[HEAD]}, overwrite=True)
    report = ingot.convert(tmp_path / "w.zt", tmp_path / "o.onnx", graph=graph_at(tmp_path, graph))
    assert any("table" in note for note in report.notes)
    with ingot.open(tmp_path / "o.onnx") as made:
        assert made[UP].dtype == "f32"
        assert np.array_equal(made[UP].numpy(), held[UP].T.astype(np.float32))
        assert np.array_equal(made["onnx::MatMul_7"].numpy(), held[DOWN].T.astype(np.float32))
        assert np.array_equal(made["rows.weight"].numpy(), [[1]])
        assert np.array_equal(made["table"].numpy(), numbers((3, 2)))


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    graph = Graph()
    graph.constant("embed_tokens.weight", numbers((16, 64), 1), "float")
    graph.constant("onnx::MatMul_3", numbers((64, 16), 2), "float")
    graph.node("Gather", ["embed_tokens.weight", "x"], ["e"])
    graph.node("MatMul", ["e", "onnx::MatMul_3"], ["y"], name="/lm_head/MatMul")
    ingot.save(tmp_path / "w.zt", {"embed_tokens.weight": numbers((16, 64), 9)})
    ingot.convert(tmp_path / "w.zt", tmp_path / "o.onnx", graph=graph_at(tmp_path, graph))
    with ingot.open(tmp_path / "o.onnx") as made:
        assert np.array_equal(made["embed_tokens.weight"].numpy(), numbers((16, 64), 9))
        assert np.array_equal(made["onnx::MatMul_3"].numpy(), numbers((16, 64), 9).T)


W = "down.weight"
Use = tuple[str, str, str, dict[str, Any]]


@pytest.mark.parametrize(
    ("uses", "fits"),
    [
        ([("Gemm", "x", W, {"transB": 1})], True),
        ([("Gemm", "x", W, {})], False),
        ([("Gemm", "x", W, {"transB": 1}), ("Gemm", "x", W, {})], False),  # both ways
        ([("Transpose", W, "", {}), ("MatMul", "x", "t0", {})], True),
        ([("Transpose", W, "", {"perm": (1, 0)}), ("MatMul", "x", "t0", {})], True),
        ([("Transpose", W, "", {"perm": (0, 1)}), ("MatMul", "x", "t0", {})], False),
        ([("Cast", W, "", {"to": 1}), ("MatMul", "x", "t0", {})], False),
        ([("MatMul", W, "x", {})], True),
        ([("Add", "x", W, {})], True),
        ([("Mul", "scale", W, {}), ("MatMul", "x", "t0", {})], False),  # a matrix of weights, times a constant
        ([("Gather", W, "i", {})], True),
        ([("Gather", W, "i", {}), ("Transpose", W, "", {}), ("MatMul", "x", "t1", {})], True),  # tied
        ([("OfSomebody", "x", W, {})], False),
        ([("Cast", W, "", {}), ("Mul", "t0", "t2", {}), ("Cast", "t1", "", {})], False),  # round and round
    ],
)
def test_square_matrices_go_where_their_operator_takes_them_as_they_lie(
    uses: list[Use], fits: bool, tmp_path: Path
) -> None:
    """[outputs, inputs], as the matrix beside it tells."""
    graph = Graph()
    graph.constant("up.weight", numbers((64, 32), 1), "float")
    graph.constant(W, numbers((32, 32), 2), "float")
    graph.constant("scale", numbers((32,), 3), "float")
    graph.node("MatMul", ["x", "up.weight"], ["u"])
    for index, (type, first, second, attributes) in enumerate(uses):
        graph.node(type, [name for name in (first, second) if name], [f"t{index}"], attributes.items())
    held = {"up.weight": numbers((32, 64), 5), W: numbers((32, 32), 6)}
    ingot.save(tmp_path / "w.zt", held)
    if not fits:
        require_refused(tmp_path, graph, W)
        return
    ingot.convert(tmp_path / "w.zt", tmp_path / "o.onnx", graph=graph_at(tmp_path, graph))
    with ingot.open(tmp_path / "o.onnx") as made:
        assert np.array_equal(made[W].numpy(), held[W])
        assert np.array_equal(made["up.weight"].numpy(), held["up.weight"].T)


@pytest.mark.parametrize(
    ("held", "square", "turned"),
    [
        # As in GPT-2, where other matrices are [inputs, outputs] in the checkpoint too.
        ({"a.weight": (32, 96), "lm_head.weight": (16, 32)}, "b.weight", False),
        ({"lm_head.weight": (16, 32)}, "b.weight", None),
        ({"h.0.a.weight": (32, 96), "proj.weight": (16, 32)}, "h.1.b.weight", False),
        ({"h.0.a.weight": (32, 96)}, "pooler.dense.weight", None),  # of a module outside the layers: nobody knows
        ({"h.0.a.weight": (96, 32)}, "pooler.dense.weight", True),  # all are [outputs, inputs]
        ({"h.0.a.weight": (96, 32), "h.1.c.weight": (32, 96)}, "h.1.b.weight", None),  # one this way, one that
        ({"h.0.a.weight": (96, 32)}, "text_projection", None),  # no array of a module (CLIP)
        ({"visual.proj": (32, 96), "h.0.a.weight": (96, 32)}, "text.proj", False),
    ],
)
def test_square_matrices_lie_as_others_of_their_kind(
    held: dict[str, tuple[int, ...]], square: str, turned: bool | None, tmp_path: Path
) -> None:
    shapes = {**held, square: (32, 32)}
    graph = Graph()
    for name, shape in shapes.items():
        inputs_first = tuple(sorted(shape, key=lambda size: size != 32))
        graph.constant(name, numbers(inputs_first, 1), "float")
        graph.node("MatMul", ["x", name], [f"{name}.y"])
    made = {name: numbers(shape, 7) for name, shape in shapes.items()}
    ingot.save(tmp_path / "w.zt", made)
    if turned is None:
        require_refused(tmp_path, graph, square)
        return
    ingot.convert(tmp_path / "w.zt", tmp_path / "o.onnx", graph=graph_at(tmp_path, graph))
    with ingot.open(tmp_path / "o.onnx") as found:
        assert np.array_equal(found[square].numpy(), made[square].T if turned else made[square])
        for name, shape in held.items():
            assert np.array_equal(found[name].numpy(), made[name] if shape[0] == 32 else made[name].T)


def test_stacks_of_square_matrices_have_a_way_round_too(tmp_path: Path) -> None:
    graph, held = Graph(), {"a.weight": numbers((64, 32), 1), "e.weight": numbers((2, 32, 32), 2)}
    graph.constant("a.weight", numbers((32, 64)), "float")
    graph.constant("e.weight", numbers((2, 32, 32)), "float")
    graph.node("MatMul", ["x", "a.weight"], ["t"])
    graph.node("MatMul", ["x", "e.weight"], ["y"])
    ingot.save(tmp_path / "w.zt", held)
    require_refused(tmp_path, graph, "e.weight")


FP8 = {"table": "f8_e4m3fn"}


@pytest.mark.parametrize(
    ("options", "action"),
    [
        ({"group": [32, 16]}, "repacked"),  # one scale for a block of several rows is repeated
        ({"group": [16, 128]}, "repacked"),  # a block that is wider than the matrix
        ({"group": "row"}, "moved"),
        ({"group": "tensor"}, "moved"),
        ({"group": 32, "scales": "f8_e8m0fnu"}, "repacked"),  # exponents become f32
    ],
)
def test_fp8_moves_whichever_way_round_the_graph_takes_it(options: dict[str, Any], action: str, tmp_path: Path) -> None:
    """Out of it again too, [outputs, inputs], into a folder."""
    graph = Graph()
    graph.constant(UP, numbers((64, 32), 1), "float")
    graph.constant(DOWN, numbers((32, 32), 2), "float")
    graph.node("MatMul", ["x", UP], ["h"])
    graph.node("Gemm", ["h", DOWN], ["y"], [("transB", 1)])
    held = {UP: numbers((32, 64), 5), DOWN: numbers((32, 32), 6)}
    rule = Rule(Choice("scaled_codebook", {**FP8, **options}), match=("*",))
    source = packed(tmp_path, Recipe("test", (rule,)), {name: w.astype(ml_dtypes.bfloat16) for name, w in held.items()})
    report = ingot.convert(source, tmp_path / "o.onnx", graph=graph_at(tmp_path, graph))
    assert report.actions == {action: 2}
    assert operators(tmp_path / "o.onnx") == ["DequantizeLinear", "DequantizeLinear", "MatMul", "Gemm"]
    back = ingot.convert(tmp_path / "o.onnx", tmp_path / "back", format="compressed-tensors")
    assert "decoded" not in back.actions
    with ingot.open(source) as one, ingot.open(tmp_path / "o.onnx") as made, ingot.open(tmp_path / "back") as folder:
        for name in held:
            values = one[name].numpy("f32")
            assert np.array_equal(made[name].numpy("f32"), values.T if name == UP else values)
            assert folder[name].codec == "scaled_codebook"
            assert np.array_equal(folder[name].numpy("f32"), values)


def test_fp8_in_blocks_is_decoded_for_an_old_graph(tmp_path: Path) -> None:
    """Blocks of DequantizeLinear are of opset 21."""
    graph = Graph(opsets={"": 20})
    graph.constant(UP, numbers((64, 32), 1), "float")
    graph.node("MatMul", ["x", UP], ["h"])
    rule = Rule(Choice("scaled_codebook", {**FP8, "group": [16, 16]}), match=("*",))
    source = packed(tmp_path, Recipe("test", (rule,)), {UP: numbers((32, 64), 5)})
    report = ingot.convert(source, tmp_path / "o.onnx", graph=graph_at(tmp_path, graph))
    assert report.actions == {"decoded": 1}
    with ingot.open(source) as one, ingot.open(tmp_path / "o.onnx") as made:
        assert np.array_equal(made[UP].numpy("f32"), one[UP].numpy("f32").T)


def test_what_came_out_of_a_graph_goes_into_it_again(tmp_path: Path) -> None:
    """Under the graph's own names, with its own rows and columns."""
    graph = graph_at(tmp_path)
    ingot.convert(graph, tmp_path / "w.zt")
    ingot.convert(tmp_path / "w.zt", tmp_path / "o.onnx", graph=graph)
    assert (tmp_path / "o.onnx").read_bytes() == graph.read_bytes()
    ingot.convert(graph, tmp_path / "q.onnx", recipe=affine(bits=4))
    ingot.convert(tmp_path / "q.onnx", tmp_path / "q.zt")
    ingot.convert(tmp_path / "q.zt", tmp_path / "p.onnx", graph=graph)
    with ingot.open(tmp_path / "q.onnx") as one, ingot.open(tmp_path / "p.onnx") as other:
        assert list(one) == list(other)
        assert all(np.array_equal(tensor.numpy(), other[name].numpy()) for name, tensor in one.items())


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"more.weight": np.zeros((2, 2), np.float32)}, ["more.weight"]),
        ({HEAD: np.zeros((8, 31), np.float32), UP: np.zeros((3, 4), np.float32)}, [HEAD, UP]),
        ({UP: None}, [DOWN]),  # square, and nothing tells which way round it lies
        ({f"{UP}_Q4": np.zeros((32, 64), np.float32)}, [f"{UP}_Q4"]),
    ],
)
def test_each_mismatch_is_named(change: Mapping[str, Array | None], names: list[str], tmp_path: Path) -> None:
    held = {name: array for name, array in {**weights(), **change}.items() if array is not None}
    ingot.save(tmp_path / "w.zt", held)
    with pytest.raises(IngotError) as caught:
        ingot.convert(tmp_path / "w.zt", tmp_path / "o.onnx", graph=graph_at(tmp_path))
    assert caught.value.rule == "convert.graph"
    assert all(name in caught.value.message for name in names)


def test_only_models_of_onnx_take_and_are_graphs(tmp_path: Path) -> None:
    ingot.save(tmp_path / "w.zt", weights())
    for graph, out, rule in (("w.zt", "o.onnx", "attachments.none"), ("graph.onnx", "o.zt", "convert.attachment")):
        graph_at(tmp_path)
        with pytest.raises(IngotError) as caught:
            ingot.convert(tmp_path / "w.zt", tmp_path / out, graph=tmp_path / graph)
        assert caught.value.rule == rule
