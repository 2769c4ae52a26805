"""Make the golden files that the packages onnx and onnxruntime wrote: tests/golden/onnx/peers.

    python -m venv peers && peers/bin/pip install onnx==1.23.2 onnxruntime==1.32.0 onnx_ir
    peers/bin/python tests/golden/make_onnx_peers.py [FOLDER]

Needs no Ingot. ``X.onnx`` is a model, ``X.json`` what onnxruntime makes of its weights, as bytes of f32 in hex: a
product with the identity is a matrix as the operator multiplies with it, and zeros that are added change nothing.
Models in ``../written``, which Ingot made of these, are checked by onnx and told of in the same way.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantFormat, QuantType, matmul_nbits_quantizer, quantize_static
from onnxruntime.quantization.calibrate import CalibrationDataReader

FOLDER = Path(__file__).parent / "onnx" / "peers"
ROWS, COLS = 24, 48


def dense(opset: int = 21, kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """Return a model that multiplies with one matrix."""
    values = (np.random.default_rng(7).standard_normal((COLS, ROWS)) * 0.1).astype(np.float32)
    weight = numpy_helper.from_array(values.astype(helper.tensor_dtype_to_np_dtype(kind)), "w")
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "/layers.0/mlp/up_proj/MatMul")
    shapes = (
        [helper.make_tensor_value_info("x", kind, ["n", COLS])],
        [helper.make_tensor_value_info("y", kind, ["n", ROWS])],
    )
    graph = helper.make_graph([node], "g", *shapes, [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def weights(model: onnx.ModelProto) -> np.ndarray:
    """Return the matrix that a model multiplies with, [inputs, outputs]."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = (
        onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    )  # else activations are rounded
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    kind = np.float16 if "16" in session.get_inputs()[0].type else np.float32
    return session.run(None, {"x": np.eye(COLS, dtype=kind)})[0].astype(np.float32)


def nbits(bits: int, block: int, *, symmetric: bool, form: QuantFormat) -> onnx.ModelProto:
    """Return the model as onnxruntime's quantizer of matrices writes it."""
    config = matmul_nbits_quantizer.DefaultWeightOnlyQuantConfig(
        block_size=block, is_symmetric=symmetric, quant_format=form, bits=bits
    )
    quantizer = matmul_nbits_quantizer.MatMulNBitsQuantizer(dense(), algo_config=config)
    quantizer.process()
    return quantizer.model.model


class Samples(CalibrationDataReader):
    """A few inputs."""

    def __init__(self) -> None:
        self.left = [{"x": np.eye(COLS, dtype=np.float32)}]

    def get_next(self) -> dict[str, np.ndarray] | None:
        return self.left.pop() if self.left else None


def static(folder: Path, *, per_channel: bool) -> onnx.ModelProto:
    """Return the model as ``quantize_static`` writes it, without what it does to activations."""
    source, out = folder / "source.tmp", folder / "out.tmp"
    onnx.save(dense(), source)
    quantize_static(
        source, out, Samples(), quant_format=QuantFormat.QDQ, per_channel=per_channel, weight_type=QuantType.QInt8
    )
    model = onnx.load(out)
    source.unlink()
    out.unlink()
    kept = [node for node in model.graph.node if node.op_type == "MatMul" or "w" in node.input[0].split("_")]
    product = next(node for node in kept if node.op_type == "MatMul")
    product.input[0], product.output[0] = "x", "y"
    used = {name for node in kept for name in node.input}
    constants = [item for item in model.graph.initializer if item.name in used]
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.extend(kept)
    model.graph.initializer.extend(constants)
    return model


def small_floats() -> onnx.ModelProto:
    """Return a model with a matrix of FP8 and a scale for each column."""
    model, random = dense(), np.random.default_rng(8)
    del model.graph.initializer[:]
    codes = random.standard_normal((COLS, ROWS)).astype(np.float32)
    model.graph.initializer.append(helper.make_tensor("w_8", TensorProto.FLOAT8E4M3FN, (COLS, ROWS), codes.reshape(-1)))
    model.graph.initializer.append(numpy_helper.from_array(random.random(ROWS, np.float32), "w_scale"))
    model.graph.node.insert(0, helper.make_node("DequantizeLinear", ["w_8", "w_scale"], ["w"], axis=1))
    return model


def models(folder: Path) -> dict[str, onnx.ModelProto]:
    """Return every model by its name."""
    operator, qdq = QuantFormat.QOperator, QuantFormat.QDQ
    return {
        "dense": dense(),
        "dense-f16": dense(kind=TensorProto.FLOAT16),
        "nbits-4-32": nbits(4, 32, symmetric=True, form=operator),
        "nbits-4-16-zeros": nbits(4, 16, symmetric=False, form=operator),
        "nbits-8-32-zeros": nbits(8, 32, symmetric=False, form=operator),
        "qdq-4-16": nbits(4, 16, symmetric=True, form=qdq),
        "qdq-4-16-zeros": nbits(4, 16, symmetric=False, form=qdq),
        "static-tensor": static(folder, per_channel=False),
        "static-channel": static(folder, per_channel=True),
        "fp8": small_floats(),
    }


def tell(path: Path, model: onnx.ModelProto) -> None:
    """Write what onnxruntime multiplies with."""
    matrix = weights(model)
    told = {"shape": matrix.shape, "f32": matrix.astype("<f4").tobytes().hex()}
    path.write_text(json.dumps(told) + "\n")


def main() -> None:
    """Write models and what they multiply with."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, model in models(folder).items():
        (folder / f"{name}.onnx").write_bytes(model.SerializeToString(deterministic=True))
        tell(folder / f"{name}.json", model)
    for path in sorted((folder.parent / "written").glob("*.onnx")):
        model = onnx.load(path)
        onnx.checker.check_model(model)
        tell(path.with_suffix(".json"), model)
    (folder / "beside.onnx_data").unlink(missing_ok=True)  # onnx appends
    onnx.save(
        dense(), folder / "beside.onnx", save_as_external_data=True, location="beside.onnx_data", size_threshold=0
    )


if __name__ == "__main__":
    main()
