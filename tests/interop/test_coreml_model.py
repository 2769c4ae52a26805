"""Whole models as ML programs: coremltools loads them, and what its program says gives the model's own scores."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.conversion.coreml.model import extract_model
from ingot.demo.llama import Llama
from ingot.naming.config import LlamaConfig
from ingot.recipes.choice import Choice
from ingot.recipes.recipe import Recipe, Rule

BASE = Path(__file__).parents[3] / "shared" / "models" / "base"
CONTEXT = 24
Array = np.ndarray[Any, np.dtype[Any]]


def softmax(x: Array, axis: Any) -> Array:
    shifted = np.exp(x - x.max(axis=int(axis), keepdims=True))
    return shifted / shifted.sum(axis=int(axis), keepdims=True)


def layer_norm(x: Array, axes: Array, epsilon: Any) -> Array:
    along = tuple(int(axis) for axis in axes)
    mean, spread = x.mean(axis=along, keepdims=True), x.var(axis=along, keepdims=True)
    return (x - mean) / np.sqrt(spread + np.float32(epsilon))


def matmul(x: Array, y: Array, transpose_x: Any, transpose_y: Any) -> Array:
    return (x.swapaxes(-1, -2) if transpose_x else x) @ (y.swapaxes(-1, -2) if transpose_y else y)


# What each operation of MIL says, in float32; every result is then rounded to the type that the program states.
MEANING: dict[str, Callable[..., Any]] = {
    "gather": lambda x, indices, axis, **_: np.take(x, indices, axis=int(axis)),
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "greater_equal": lambda x, y: x >= y,
    "select": lambda cond, a, b: np.where(cond, a, b),  # noqa: PLW0108 - called with names
    "cast": lambda x, dtype: x.astype({"fp16": np.float16}[str(dtype)]),
    "linear": lambda x, weight, **_: x @ weight.T,
    "silu": lambda x: x * (0.5 + 0.5 * np.tanh(0.5 * x)),
    "softmax": softmax,
    "layer_norm": layer_norm,
    "matmul": matmul,
    "concat": lambda values, axis, interleave: np.concatenate(values, axis=int(axis)),
    "split": lambda x, num_splits, axis, **_: np.split(x, int(num_splits), axis=int(axis)),
    "reshape": lambda x, shape: x.reshape(shape),
    "transpose": lambda x, perm: x.transpose(perm),
}


def program_of(path: Path) -> Any:
    """Load a package with coremltools, which infers all shapes and types anew, and decompress its constants."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import coremltools
        from coremltools.converters.mil.frontend.milproto import load

        model = coremltools.models.MLModel(str(path), skip_model_load=True)
        dense = coremltools.optimize.coreml.decompress_weights(model)
        version = dense._spec.specificationVersion
        return load.load(dense._spec, specification_version=version, file_weights_dir=dense.weights_dir)


def scores(program: Any, tokens: Array) -> Array:
    """Run a program in NumPy, operation by operation."""
    function = program.functions["main"]
    known: dict[str, Any] = {"input_ids": tokens}

    def value(item: Any) -> Any:
        if isinstance(item, (list, tuple)):
            return [value(inner) for inner in item]
        if item.name in known:
            return known[item.name]
        return item.val

    for op in function.operations:
        if op.op_type == "const":
            continue
        inputs = {key: value(item) for key, item in op.inputs.items() if item is not None}
        wide = {key: _wide(item) for key, item in inputs.items()}
        given = MEANING[op.op_type](**wide)
        for output, array in zip(op.outputs, given if isinstance(given, list) else [given], strict=True):
            assert tuple(output.shape) == array.shape, (op.name, output.shape, array.shape)
            known[output.name] = array.astype(np.float16) if array.dtype.kind == "f" else array
    return np.asarray(known["logits"])


def _wide(item: Any) -> Any:
    if isinstance(item, list):
        return [_wide(inner) for inner in item]
    is_half = isinstance(item, (np.ndarray, np.generic)) and item.dtype == np.float16
    return item.astype(np.float32) if is_half else item


def reference(path: Path, config: Path, tokens: Array) -> Array:
    with ingot.open(path) as checkpoint:
        weights = {name: checkpoint[name].numpy() for name in checkpoint}
    return Llama(json.loads(config.read_text()), weights).logits(tokens)


def close(found: Array, expected: Array) -> None:
    """Scores in fp16 against float32: noise of a hundredth of their spread, and nearly always the same best token."""
    error = np.sqrt(np.mean((found.astype(np.float64) - expected) ** 2) / np.var(expected))
    assert error < 0.01, error
    assert (found.argmax(-1) == expected.argmax(-1)).mean() > 0.9


@pytest.fixture(scope="module")
def tokens() -> Array:
    pytest.importorskip("coremltools")
    return np.random.default_rng(3).integers(0, 4096, (1, CONTEXT)).astype(np.int32)


SMALL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
}


@pytest.mark.parametrize(("opset", "tied"), [("iOS16", False), ("iOS18", True)])
def test_a_small_model_as_a_program_gives_its_scores(tokens: Array, tmp_path: Path, opset: str, tied: bool) -> None:
    config = {**SMALL, "tie_word_embeddings": tied}
    rng = np.random.default_rng(11)
    shapes = LlamaConfig.from_mapping(config).shapes()
    weights = {name: rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    weights |= {name: 2 * np.ones(shape, np.float32) for name, shape in shapes.items() if name.endswith("norm.weight")}
    folder = tmp_path / "model"
    ingot.save(f"{folder}/", weights, format="safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    extract_model(folder, tmp_path / "m.mlpackage", opset=opset, context=CONTEXT)
    small = tokens % config["vocab_size"]
    close(scores(program_of(tmp_path / "m.mlpackage"), small), reference(folder, folder / "config.json", small))


@pytest.mark.models
@pytest.mark.slow
@pytest.mark.parametrize("opset", ["iOS16", "iOS18"])
def test_a_model_as_a_program_gives_the_scores_of_the_model(tokens: Array, tmp_path: Path, opset: str) -> None:
    report = extract_model(BASE, tmp_path / "m.mlpackage", opset=opset, context=CONTEXT)
    assert {item.codec for item in report.tensors} == {"dense"}
    expected = reference(BASE, BASE / "config.json", tokens)
    close(scores(program_of(tmp_path / "m.mlpackage"), tokens), expected)


@pytest.mark.models
@pytest.mark.slow
def test_a_compressed_model_keeps_its_layouts_and_their_values(tokens: Array, tmp_path: Path) -> None:
    """Palettes of f16, made in the checkpoint before: the program has them as they are, and their values."""
    recipe = Recipe(
        "p8",
        (
            Rule(Choice("palette", {"bits": 8}), "p8", roles=("attention", "mlp")),
            Rule(Choice("dense", {"dtype": "f16"}), "f16"),
        ),
    )
    ingot.convert(BASE, tmp_path / "f16", "f16", format="safetensors")
    ingot.convert(tmp_path / "f16", tmp_path / "p8", recipe)
    report = extract_model(tmp_path / "p8", tmp_path / "m.mlpackage", opset="iOS16", context=CONTEXT)
    assert [item.codec for item in report.tensors].count("palette") == 42
    assert all(item.action == "moved" for item in report.tensors)
    program = program_of(tmp_path / "m.mlpackage")
    constants = {
        op.outputs[0].name: op.outputs[0].val for op in program.functions["main"].operations if op.op_type == "const"
    }
    with ingot.open(tmp_path / "p8") as source, ingot.open(tmp_path / "m.mlpackage") as package:
        assert set(package) - {name.replace(".", "_") for name in source} == {"rope_cos", "rope_sin"}
        for name in source:
            wanted = source[name].numpy()
            np.testing.assert_array_equal(package[name.replace(".", "_")].numpy(), wanted)
            np.testing.assert_array_equal(constants[name.replace(".", "_")], wanted)
    close(scores(program, tokens), reference(tmp_path / "p8", tmp_path / "p8" / "config.json", tokens))
