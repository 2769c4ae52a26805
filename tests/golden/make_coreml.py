"""Make the golden packages of Core ML with coremltools: tests/golden/coreml.

    python tests/golden/make_coreml.py [FOLDER]

Each package holds weights that coremltools 9.0 compresses in operations that feed one another. ``expected.json`` lists
for each the arrays that its own decompression gives to linear layers and convolutions: shape, type and SHA-256.
The identifiers in ``Manifest.json`` are random: everything else is the same at every run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "coreml"
LAYERS = ("linear", "conv")
SHAPE = (16, 32)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import coremltools as ct
    import coremltools.optimize.coreml as cto
    from coremltools.converters.mil import Builder
    from coremltools.converters.mil.frontend.milproto import load
    from coremltools.converters.mil.mil import types

mb = Builder
Step = tuple[Any, Any]


def weights(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def converted(program: Any, target: Any) -> Any:
    return ct.convert(
        program, source="milinternal", convert_to="mlprogram", minimum_deployment_target=target, skip_model_load=True
    )


def linear(rows: int = SHAPE[0], target: Any = None) -> Any:
    """Return a model of one linear layer."""
    target = target or ct.target.iOS18

    @mb.program(input_specs=[mb.TensorSpec((1, SHAPE[1]), dtype=types.fp16)], opset_version=target)
    def program(x: Any) -> Any:
        return mb.linear(x=x, weight=weights(1, rows, SHAPE[1]), bias=weights(2, rows))

    return converted(program, target)


def convolution() -> Any:
    """Return a model of one convolution."""

    @mb.program(input_specs=[mb.TensorSpec((1, 8, 6, 6), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Any) -> Any:
        return mb.conv(x=x, weight=weights(3, 16, 8, 3, 3), bias=weights(4, 16))

    return converted(program, ct.target.iOS18)


def nested() -> Any:
    """Return a model with layers in the branches of a condition and in a loop."""
    specs = [mb.TensorSpec((1, 16), dtype=types.fp16), mb.TensorSpec((1,), dtype=types.fp16)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(x: Any, c: Any) -> Any:
        def layer(seed: int, value: Any) -> Any:
            return mb.linear(x=value, weight=weights(seed, 16, 16), bias=weights(seed + 1, 16))

        chosen = mb.squeeze(x=mb.greater(x=c, y=np.float16(0)), axes=[0])
        y = mb.cond(pred=chosen, _true_fn=lambda: layer(5, x), _false_fn=lambda: layer(7, x))

        def body(step: Any, value: Any) -> Any:
            return mb.add(x=step, y=np.float16(1)), layer(9, value)

        def goes_on(step: Any, value: Any) -> Any:
            return mb.squeeze(x=mb.less(x=step, y=np.full((1,), 3, np.float16)), axes=[0])

        return mb.while_loop(_cond=goes_on, _body=body, loop_vars=(np.zeros(1, np.float16), y))[1]

    return converted(program, ct.target.iOS18)


def cast() -> Any:
    """Return a model of iOS 16 whose weight is stored in fp16 and used in fp32."""

    @mb.program(input_specs=[mb.TensorSpec((1, SHAPE[1]))], opset_version=ct.target.iOS16)
    def program(x: Any) -> Any:
        weight = mb.constexpr_cast(source_val=weights(1, *SHAPE), output_dtype="fp32")
        return mb.linear(x=x, weight=weight, bias=np.ones(SHAPE[0], np.float32))

    target = ct.target.iOS16
    return ct.convert(
        program, source="milinternal", convert_to="mlprogram", minimum_deployment_target=target, skip_model_load=True,
        compute_precision=ct.precision.FLOAT32, pass_pipeline=ct.PassPipeline.EMPTY,
    )  # fmt: skip


def palette(**options: Any) -> Step:
    config = cto.OpPalettizerConfig(**{"mode": "kmeans", "nbits": 4, "weight_threshold": 0, **options})
    return cto.palettize_weights, config


def integers(**options: Any) -> Step:
    return cto.linear_quantize_weights, cto.OpLinearQuantizerConfig(weight_threshold=0, **options)


def pruned() -> Step:
    return cto.prune_weights, cto.OpMagnitudePrunerConfig(target_sparsity=0.5, weight_threshold=0)


def compressed(model: Any, *steps: Step) -> Any:
    for index, (function, config) in enumerate(steps):
        joint = {"joint_compression": True} if index else {}
        model = function(model, config=cto.OptimizationConfig(global_config=config), **joint)
    return model


def packages() -> Iterator[tuple[str, Any]]:
    """Yield names and models."""
    grouped = {"granularity": "per_grouped_channel", "group_size": 8}
    per_tensor = {"granularity": "per_tensor"}
    yield "scaled", compressed(linear(), palette(enable_per_channel_scale=True))
    yield "scaled-groups", compressed(linear(), palette(enable_per_channel_scale=True, **grouped))
    yield "scaled-columns", compressed(linear(), palette(enable_per_channel_scale=True, channel_axis=1, **grouped))
    yield "scaled-convolution", compressed(convolution(), palette(enable_per_channel_scale=True, **grouped))
    yield "palette-int8", compressed(linear(), palette(), integers(mode="linear", dtype="int8", **per_tensor))
    yield "palette-int4", compressed(linear(), palette(**grouped), integers(dtype="int4", **per_tensor))
    yield "uint8-palette", compressed(linear(), integers(mode="linear", dtype="uint8"), palette(nbits=2))
    yield (
        "sparse-palette-int8",
        compressed(linear(), pruned(), palette(), integers(mode="linear", dtype="int8", **per_tensor)),
    )
    yield "vectors-of-8", compressed(linear(), palette(cluster_dim=8, nbits=2))
    yield "vectors-int8", compressed(linear(), palette(cluster_dim=2), integers(dtype="int8", **per_tensor))
    yield "nested", compressed(nested(), palette(enable_per_channel_scale=True))
    yield "small-bias", compressed(linear(4), integers(dtype="int8"))
    yield "cast", cast()


def expected(path: Path) -> list[list[Any]]:
    """Return shape, type and digest of the arrays that layers take, as coremltools decompresses them."""
    model = cto.decompress_weights(ct.models.MLModel(str(path), skip_model_load=True))
    version = model._spec.specificationVersion
    program = load.load(model._spec, specification_version=version, file_weights_dir=model.weights_dir)
    found = []

    def look(block: Any) -> None:
        for item in block.operations:
            for inner in item.blocks:
                look(inner)
            if item.op_type in LAYERS:
                found.extend(np.array(item.inputs[key].val) for key in ("weight", "bias"))

    for function in program.functions.values():
        look(function)
    return sorted(
        [list(array.shape), array.dtype.name, hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()]
        for array in found
    )


def main(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        table = {}
        for name, model in packages():
            model.save(str(folder / f"{name}.mlpackage"))
            table[name] = expected(folder / f"{name}.mlpackage")
        (folder / "expected.json").write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
