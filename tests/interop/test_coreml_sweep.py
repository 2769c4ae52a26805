"""Every way in which coremltools compresses a layer, alone and joined: what it writes is read to its own values."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"
GROUPS: list[dict[str, Any]] = [
    {"granularity": "per_tensor"},
    {"granularity": "per_grouped_channel", "group_size": 8, "channel_axis": 0},
    {"granularity": "per_grouped_channel", "group_size": 8, "channel_axis": 1},
]
BLOCKS: list[dict[str, Any]] = [
    {"granularity": "per_tensor"},
    {"granularity": "per_channel"},
    {"granularity": "per_block", "block_size": 8},
]
Step = tuple[str, dict[str, Any]]


def palettes() -> Iterator[Step]:
    for nbits, group in itertools.product((1, 2, 3, 4, 6, 8), GROUPS):
        yield "palette", {"mode": "kmeans", "nbits": nbits, **group}
    for mode, group, scaled in itertools.product(("kmeans", "uniform"), GROUPS, (True, False)):
        yield "palette", {"mode": mode, "nbits": 4, "enable_per_channel_scale": scaled, **group}
    for size, group in itertools.product((2, 3, 4, 8), GROUPS):
        yield "palette", {"mode": "kmeans", "nbits": 2, "cluster_dim": size, **group}


def integers() -> Iterator[Step]:
    modes, kinds = ("linear", "linear_symmetric"), ("int8", "uint8", "int4", "uint4")
    for mode, kind, block in itertools.product(modes, kinds, BLOCKS):
        yield "integers", {"mode": mode, "dtype": kind, **block}


def prunings() -> Iterator[Step]:
    yield "magnitude", {"target_sparsity": 0.6}
    yield "magnitude", {"n_m_ratio": (2, 4)}
    yield "magnitude", {"target_sparsity": 0.5, "block_size": 2}
    yield "threshold", {"threshold": 0.5}


def some_palettes() -> list[Step]:
    scaled = {"enable_per_channel_scale": True}
    options: list[dict[str, Any]] = [*GROUPS, *({**group, **scaled} for group in GROUPS), {"cluster_dim": 2}]
    return [("palette", {"mode": "kmeans", "nbits": 4, **option}) for option in options]


def ways() -> list[tuple[Step, ...]]:
    """Every configuration alone, every pair in both orders, and pruned palettes of integers."""
    first: Step = ("magnitude", {"target_sparsity": 0.6})
    pairs = [
        *itertools.product(some_palettes(), integers()),
        *((first, one) for one in (*some_palettes(), *integers())),
    ]
    found = [(one,) for one in (*palettes(), *integers(), *prunings())]
    found += [order for pair in pairs for order in (pair, pair[::-1])]
    tables = [("integers", {"mode": mode, "dtype": "int8", **BLOCKS[0]}) for mode in ("linear", "linear_symmetric")]
    return [*found, *((first, one, table) for one in some_palettes() for table in tables)]


class Tools:
    """coremltools, without its warnings."""

    def __init__(self) -> None:
        pytest.importorskip("coremltools")
        pytest.importorskip("sklearn")
        import coremltools as ct
        from coremltools.converters.mil import Builder
        from coremltools.converters.mil.frontend.milproto import load
        from coremltools.converters.mil.mil import types

        self.ct, self.mb, self.load, self.types, self.cto = ct, Builder, load, types, ct.optimize.coreml

    def model(self, kind: str, target: str, dtype: Any) -> Any:
        ct, mb, opset = self.ct, self.mb, getattr(self.ct.target, target)
        rng, half = np.random.default_rng(1), dtype == np.float16
        shape = (1, 32) if kind == "linear" else (1, 16, 6, 6)
        weight = rng.standard_normal((24, 32) if kind == "linear" else (24, 16, 3, 3)).astype(dtype)
        spec = mb.TensorSpec(shape, dtype=self.types.fp16 if half else self.types.fp32)

        @mb.program(input_specs=[spec], opset_version=opset)
        def program(x: Any) -> Any:
            return getattr(mb, kind)(x=x, weight=weight, bias=np.ones(24, dtype))

        precision = ct.precision.FLOAT16 if half else ct.precision.FLOAT32
        return ct.convert(
            program, source="milinternal", convert_to="mlprogram", minimum_deployment_target=opset,
            compute_precision=precision, skip_model_load=True,
        )  # fmt: skip

    def compressed(self, model: Any, steps: tuple[Step, ...]) -> Any:
        """Return a compressed model; None where coremltools does not do this."""
        makers = {
            "palette": (self.cto.palettize_weights, self.cto.OpPalettizerConfig),
            "integers": (self.cto.linear_quantize_weights, self.cto.OpLinearQuantizerConfig),
            "magnitude": (self.cto.prune_weights, self.cto.OpMagnitudePrunerConfig),
            "threshold": (self.cto.prune_weights, self.cto.OpThresholdPrunerConfig),
        }
        try:
            for index, (kind, options) in enumerate(steps):
                function, config = makers[kind]
                chosen = self.cto.OptimizationConfig(global_config=config(weight_threshold=0, **options))
                model = function(model, config=chosen, **({"joint_compression": True} if index else {}))
        except Exception:  # whatever it raises: refusals, and faults of its own
            return None
        return model

    def values(self, path: Path) -> list[np.ndarray]:
        """Return what the layer takes, as coremltools decompresses it."""
        model = self.cto.decompress_weights(self.ct.models.MLModel(str(path), skip_model_load=True))
        version = model._spec.specificationVersion
        program = self.load.load(model._spec, specification_version=version, file_weights_dir=model.weights_dir)
        layers = [item for item in program.functions["main"].operations if item.op_type in ("linear", "conv")]
        return [np.array(item.inputs[key].val) for item in layers for key in ("weight", "bias")]


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize(("target", "dtype"), [("iOS18", np.float16), ("iOS18", np.float32), ("iOS16", np.float16)])
def test_every_way_to_compress_a_layer_is_read(tmp_path: Path, kind: str, target: str, dtype: Any) -> None:
    logging.disable(logging.WARNING)
    counts: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tools = Tools()
        base = tools.model(kind, target, dtype)
        for number, steps in enumerate(ways()):
            model = tools.compressed(base, steps)
            if model is None:
                counts["refused"] += 1
                continue
            path = tmp_path / f"{number}.mlpackage"
            model.save(str(path))
            expected = tools.values(path)
            with ingot.open(path) as found:
                arrays = [tensor.numpy() for tensor in found.values()]
                counts.update(tensor.codec for tensor in found.values() if len(tensor.shape) > 1)
            assert not [item for item in ingot.verify(path) if item.rule == "open.unread"], steps
            for array in expected:
                same = [item for item in arrays if (item.shape, item.dtype) == (array.shape, array.dtype)]
                assert any(item.tobytes() == array.tobytes() for item in same), steps
            ingot.convert(path, tmp_path / f"{number}-again.mlpackage")
            for file in (MODEL, WEIGHTS):
                again = tmp_path / f"{number}-again.mlpackage" / file
                assert again.read_bytes() == (path / file).read_bytes(), steps
    logging.disable(logging.NOTSET)
    assert counts["refused"] < len(ways())
    if target == "iOS18":
        assert counts["palette"] > 100
        assert {"affine", "sparse_mask", "dense"} <= counts.keys()
