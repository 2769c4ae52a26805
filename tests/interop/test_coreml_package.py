"""Packages against coremltools: what it writes is read to the values it decompresses to, and the other way round."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.conversion.coreml.layer import extract_layer
from ingot.formats.coreml.mil import parse_model
from ingot.recipes.choice import Choice
from ingot.recipes.recipe import Recipe, Rule

SHAPE = (8, 16)
MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"
FILES = ("Manifest.json", MODEL, WEIGHTS)


class Oracle:
    """coremltools, without its warnings."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import coremltools
            from coremltools.converters.mil import Builder
            from coremltools.converters.mil.frontend.milproto import load
            from coremltools.converters.mil.mil import types

            self.ct, self.mb, self.types, self.load = coremltools, Builder, types, load.load

    def save(
        self, path: Path, opset: str, constants: dict[str, Callable[[], Any]], shape: tuple[int, ...] = SHAPE
    ) -> None:
        """Write a program that adds each constant to its input, one after the other."""
        target = getattr(self.ct.target, opset)
        mb = self.mb
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")

            @mb.program(input_specs=[mb.TensorSpec(shape, dtype=self.types.fp16)], opset_version=target)
            def program(x: Any) -> Any:
                for name, make in constants.items():
                    x = mb.add(x=x, y=make(), name=f"add_{name}")
                return x

            made = self.ct.convert(
                program,
                source="milinternal",
                convert_to="mlprogram",
                minimum_deployment_target=target,
                skip_model_load=True,
                pass_pipeline=self.ct.PassPipeline.EMPTY,
            )
            made.save(str(path))

    def optimized(self, source: Path, path: Path, *steps: tuple[str, Any]) -> None:
        """Save ``source`` after passes of ``coremltools.optimize``."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            coreml = self.ct.optimize.coreml
            model = self.ct.models.MLModel(str(source), skip_model_load=True)
            for index, (name, config) in enumerate(steps):
                joint = {"joint_compression": True} if index else {}
                chosen = coreml.OptimizationConfig(global_config=config)
                model = getattr(coreml, name)(model, config=chosen, **joint)
            model.save(str(path))

    def dense(self, path: Path) -> tuple[Any, Any]:
        """Open a package, let coremltools decompress it; return model and program."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = self.ct.models.MLModel(str(path), skip_model_load=True)
            dense = self.ct.optimize.coreml.decompress_weights(model)
            version = dense._spec.specificationVersion
            program = self.load(dense._spec, specification_version=version, file_weights_dir=dense.weights_dir)
            return dense, program

    def values(self, path: Path) -> dict[str, np.ndarray]:
        """What each ``add`` adds, decompressed by coremltools."""
        operations = self.dense(path)[1].functions["main"].operations
        return {op.name.removeprefix("add_"): np.array(op.y.val) for op in operations if op.op_type == "add"}


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    pytest.importorskip("coremltools")
    return Oracle()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("coreml")


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def codes(seed: int, low: int, high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, shape)


def ios16(oracle: Oracle) -> dict[str, Callable[[], Any]]:
    mb, made = oracle.mb, {}
    for kind, low, high in (("int8", -128, 128), ("uint8", 0, 256)):
        for axis, length in ((0, 8), (1, 16), (1, 0)):
            for zero in ("none", "one", "each"):
                size = (length,) if length else ()
                points = {"none": np.zeros(()), "one": np.full((), 7), "each": codes(3, max(low, -9), 9, *size)}[zero]

                def affine(
                    kind: str = kind,
                    low: int = low,
                    high: int = high,
                    axis: int = axis,
                    size: Any = size,
                    points: Any = points,
                ) -> Any:
                    return mb.constexpr_affine_dequantize(
                        quantized_data=codes(1, low, high, *SHAPE).astype(kind),
                        zero_point=np.dtype(kind).type(points) if points.shape == () else points.astype(kind),
                        scale=np.float16(0.037) if size == () else np.abs(numbers(2, *size)),
                        axis=np.int32(axis),
                    )

                made[f"{kind}_{axis}_{length}_{zero}"] = affine
    for bits in (1, 2, 4, 6, 8):

        def lut(bits: int = bits) -> Any:
            return mb.constexpr_lut_to_dense(
                indices=codes(4, 0, 256, 8 * 16 * bits // 8).astype(np.uint8),
                lut=numbers(bits, 1 << bits),
                shape=np.array(SHAPE, np.uint32),
            )

        made[f"lut_{bits}"] = lut

    def sparse() -> Any:
        mask = codes(5, 0, 256, 16).astype(np.uint8)
        kept = int(np.unpackbits(mask).sum())
        return mb.constexpr_sparse_to_dense(nonzero_data=numbers(6, kept), mask=mask, shape=np.array(SHAPE, np.uint32))

    made["sparse"] = sparse
    made["dense"] = lambda: mb.const(val=numbers(7, *SHAPE))
    return made


def ios18(oracle: Oracle) -> dict[str, Callable[[], Any]]:
    mb, types, made = oracle.mb, oracle.types, {}

    def sub_byte(kind: str, values: np.ndarray) -> np.ndarray:
        return values.astype(types.nptype_from_builtin(types.string_to_builtin(kind)))

    for kind, low, high in (("int4", -8, 8), ("uint4", 0, 16), ("int8", -128, 128), ("uint8", 0, 256)):
        for scales in ((1, 1), (8, 1), (8, 4), (1, 16), (2, 4), (4, 1)):
            for zero in (False, True):

                def blockwise(
                    kind: str = kind, low: int = low, high: int = high, scales: Any = scales, zero: bool = zero
                ) -> Any:
                    extra = {"offset": sub_byte(kind, codes(3, max(low, -7), 8, *scales))} if zero else {}
                    return mb.constexpr_blockwise_shift_scale(
                        data=sub_byte(kind, codes(1, low, high, *SHAPE)), scale=np.abs(numbers(2, *scales)), **extra
                    )

                made[f"{kind}_{scales[0]}_{scales[1]}_{zero}"] = blockwise
    for bits in (1, 2, 3, 4, 6, 8):
        for groups in ((1, 1), (4, 1), (1, 2), (2, 2)):
            for vector, axis in ((1, 0), (2, 0), (2, 1), (4, 1)):

                def lut(bits: int = bits, groups: Any = groups, vector: int = vector, axis: int = axis) -> Any:
                    shape = [8, 16]
                    shape[axis] //= vector
                    return mb.constexpr_lut_to_dense(
                        indices=sub_byte(f"uint{bits}", codes(4, 0, 1 << bits, *shape)),
                        lut=numbers(5, *groups, 1 << bits, vector),
                        **({"vector_axis": np.int32(axis)} if vector > 1 else {}),
                    )

                made[f"lut_{bits}_{groups[0]}_{groups[1]}_{vector}_{axis}"] = lut

    def sparse() -> Any:
        mask = codes(6, 0, 2, *SHAPE)
        return mb.constexpr_sparse_to_dense(nonzero_data=numbers(7, int(mask.sum())), mask=sub_byte("uint1", mask))

    made["sparse"] = sparse
    made["dense"] = lambda: mb.const(val=numbers(8, *SHAPE))
    return made


def added(path: Path) -> dict[str, str]:
    """What each ``add`` adds: its own name to the constant's."""
    program = parse_model((path / MODEL).read_bytes(), str(path))
    return {
        operation.outputs[0].name.removeprefix("add_"): str(operation.inputs["y"])
        for operation in program.operations
        if operation.type == "add"
    }


def check(oracle: Oracle, path: Path) -> int:
    """Compare every constant bit by bit; return how many there are."""
    expected = oracle.values(path)
    with ingot.open(path) as found:
        names = added(path)
        assert set(found) == set(names.values())
        assert names.keys() == expected.keys()
        for case, name in names.items():
            values = found[name].numpy()
            assert values.dtype == expected[case].dtype, case
            np.testing.assert_array_equal(values.view(np.uint16), expected[case].view(np.uint16), err_msg=case)
        return len(found)


@pytest.fixture(scope="module")
def packages(oracle: Oracle, folder: Path) -> dict[str, Path]:
    made = {}
    for opset, constants in (("iOS16", ios16(oracle)), ("iOS18", ios18(oracle))):
        made[opset] = folder / f"{opset}.mlpackage"
        oracle.save(made[opset], opset, constants)
        dense = {
            "w": lambda: oracle.mb.const(val=numbers(9, 64, 64)),
            "b": lambda: oracle.mb.const(val=numbers(8, 64, 64)),
        }
        made[f"dense-{opset}"] = folder / f"dense-{opset}.mlpackage"
        oracle.save(made[f"dense-{opset}"], opset, dense, (64, 64))
    return made


@pytest.mark.parametrize(("opset", "count"), [("iOS16", 25), ("iOS18", 146)])
def test_every_operation_is_read_to_the_values_that_coremltools_gives(
    oracle: Oracle, packages: dict[str, Path], opset: str, count: int
) -> None:
    assert check(oracle, packages[opset]) == count


@pytest.mark.parametrize("opset", ["iOS16", "iOS18"])
def test_a_package_that_is_kept_is_the_same_package(packages: dict[str, Path], tmp_path: Path, opset: str) -> None:
    report = ingot.convert(packages[opset], tmp_path / "kept.mlpackage")
    assert set(report.actions) == {"moved"}
    for name in FILES:
        assert (tmp_path / "kept.mlpackage" / name).read_bytes() == (packages[opset] / name).read_bytes(), name


@pytest.mark.parametrize("opset", ["iOS16", "iOS18"])
def test_a_package_through_zt_is_the_same_package(packages: dict[str, Path], tmp_path: Path, opset: str) -> None:
    moved = ingot.convert(packages[opset], tmp_path / "model.zt")
    assert set(moved.actions) == {"moved"}
    ingot.convert(tmp_path / "model.zt", tmp_path / "back.mlpackage", program=packages[opset])
    for name in FILES:
        assert (tmp_path / "back.mlpackage" / name).read_bytes() == (packages[opset] / name).read_bytes(), name


def by(codec: str, **options: Any) -> Recipe:
    """A recipe of one rule."""
    return Recipe("test", (Rule(Choice(codec, options)),))


def affine(bits: int, group: int | str, **options: Any) -> dict[str, Any]:
    return {"bits": bits, "group": group, "symmetric": True, "scales": "f16", **options}


UNSIGNED = {"symmetric": False, "signed": False}
IOS16 = {
    "int8-row": by("affine", **affine(8, "row")),
    "int8-tensor": by("affine", **affine(8, "tensor")),
    "uint8-row": by("affine", **affine(8, "row", **UNSIGNED)),
    **{f"lut{bits}": by("palette", bits=bits) for bits in (1, 2, 4, 6, 8)},
    "sparse": by("sparse_mask", sparsity=0.63),
}
IOS18 = {
    **IOS16,
    "int4-group": by("affine", **affine(4, 32)),
    "uint4-group": by("affine", **affine(4, 16, **UNSIGNED)),
    "int8-group": by("affine", **affine(8, 16, symmetric=False)),
    "lut3": by("palette", bits=3),
    "lut4-groups": by("palette", bits=4, group=16),
    "lut4-columns": by("palette", bits=4, group=16, axis=1),
    "lut4-vectors": by("palette", bits=4, vector=2),
    "lut4-int8": by("palette", bits=4, group=16, entries="i8"),
    "sparse-lut4": by("sparse_mask", sparsity=0.5, inner="palette", options={"bits": 4, "group": 16}),
    "sparse-int8-lut": by("sparse_mask", sparsity=0.5, inner="palette", options={"bits": 4, "entries": "i8"}),
    "sparse-int8": by("sparse_mask", sparsity=0.5, inner="affine", options=affine(8, "row")),
    "sparse-int4": by("sparse_mask", sparsity=0.5, inner="affine", options=affine(4, 32)),
}


@pytest.mark.parametrize(
    ("opset", "case"), [*(("iOS16", case) for case in IOS16), *(("iOS18", case) for case in IOS18)]
)
def test_what_is_compressed_here_opens_in_coremltools_with_the_same_values(
    oracle: Oracle, packages: dict[str, Path], tmp_path: Path, opset: str, case: str
) -> None:
    source, target = packages[f"dense-{opset}"], tmp_path / "out.mlpackage"
    report = ingot.convert(source, target, IOS18[case])
    assert report.actions == {"encoded": 2}
    assert check(oracle, target) == 2
    sizes = [path.stat().st_size for path in target.rglob("*") if path.is_file()]
    assert sum(sizes) == report.size
    again = ingot.convert(target, tmp_path / "again.mlpackage")
    assert again.actions == {"moved": 2}
    for name in FILES:
        assert (tmp_path / "again.mlpackage" / name).read_bytes() == (target / name).read_bytes(), name
    ingot.convert(target, tmp_path / "plain.mlpackage", "decompress")
    with ingot.open(target) as packed, ingot.open(tmp_path / "plain.mlpackage") as plain:
        for name in packed:
            assert plain[name].codec == "dense"
            np.testing.assert_array_equal(plain[name].numpy(), packed[name].numpy())
    assert check(oracle, tmp_path / "plain.mlpackage") == 2


@pytest.mark.parametrize("opset", ["iOS16", "iOS18"])
@pytest.mark.parametrize("shape", [(32, 64), (8, 4, 3, 3)])
def test_a_layer_made_here_opens_in_coremltools(
    oracle: Oracle, tmp_path: Path, opset: str, shape: tuple[int, ...]
) -> None:
    ingot.save(tmp_path / "m.safetensors", {"a.weight": numbers(1, *shape), "a.bias": numbers(2, shape[0])})
    report = extract_layer(tmp_path / "m.safetensors", "a.weight", tmp_path / "a.mlpackage", opset=opset)
    ingot.convert(tmp_path / "a.mlpackage", tmp_path / "b.mlpackage", by("palette", bits=4))
    model, program = oracle.dense(tmp_path / "b.mlpackage")
    given, made = model._spec.description.input[0], model._spec.description.output[0]
    assert tuple(given.type.multiArrayType.shape) == report.input
    assert tuple(made.type.multiArrayType.shape) == report.output
    (layer,) = (op for op in program.functions["main"].operations if op.op_type in ("linear", "conv"))
    assert tuple(layer.outputs[0].shape) == report.output
    with ingot.open(tmp_path / "b.mlpackage") as found:
        np.testing.assert_array_equal(found["weight"].numpy(), layer.weight.val)
        np.testing.assert_array_equal(found["bias"].numpy(), layer.bias.val)


def test_what_coremltools_optimizes_is_read_and_restored(
    oracle: Oracle, packages: dict[str, Path], tmp_path: Path
) -> None:
    coreml, source = oracle.ct.optimize.coreml, packages["dense-iOS18"]
    lut = coreml.OpPalettizerConfig(nbits=4, mode="uniform", granularity="per_grouped_channel", group_size=16)
    sparse = coreml.OpMagnitudePrunerConfig(target_sparsity=0.5)
    int8 = coreml.OpLinearQuantizerConfig(mode="linear", dtype="int8")
    table8 = coreml.OpLinearQuantizerConfig(mode="linear_symmetric", dtype="int8", granularity="per_tensor")
    ways = {
        "sparse-lut": (("prune_weights", sparse), ("palettize_weights", lut)),
        "sparse-int8": (("prune_weights", sparse), ("linear_quantize_weights", int8)),
        "int8-lut": (("palettize_weights", lut), ("linear_quantize_weights", table8)),
    }
    for name, steps in ways.items():
        target = tmp_path / f"{name}.mlpackage"
        oracle.optimized(source, target, *steps)
        assert check(oracle, target) == 2, name
        ingot.convert(target, tmp_path / f"{name}-again.mlpackage")
        for file in FILES:
            assert (tmp_path / f"{name}-again.mlpackage" / file).read_bytes() == (target / file).read_bytes(), name


def test_a_package_is_compared_with_its_compressed_copies(tmp_path: Path) -> None:
    """coremltools renames what it compresses; a joint compression renames once or twice."""
    oracle, rng = Oracle(), np.random.default_rng(3)
    mb, ct, optimize = oracle.mb, oracle.ct, pytest.importorskip("coremltools.optimize.coreml")
    weights = [rng.standard_normal(shape).astype(np.float16) for shape in ((64, 48), (32, 64))]

    @mb.program(input_specs=[mb.TensorSpec((1, 48), dtype=oracle.types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Any) -> Any:
        for weight in weights:
            x = mb.linear(x=x, weight=weight, bias=np.ones(len(weight), np.float16))
        return x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dense = ct.convert(
            program, source="milinternal", convert_to="mlprogram", minimum_deployment_target=ct.target.iOS18,
            skip_model_load=True,
        )  # fmt: skip

        def settings(**kind: Any) -> Any:
            return optimize.OptimizationConfig(global_config=kind["of"])

        palette = settings(of=optimize.OpPalettizerConfig(nbits=4, mode="uniform", weight_threshold=10))
        int8 = settings(of=optimize.OpLinearQuantizerConfig(weight_threshold=10))
        zeros = settings(of=optimize.OpMagnitudePrunerConfig(target_sparsity=0.5, weight_threshold=10))
        pruned = optimize.prune_weights(dense, zeros)
        made = {
            "dense": dense,
            "palette": optimize.palettize_weights(dense, palette),
            "int8": optimize.linear_quantize_weights(dense, int8),
            "sparse": pruned,
            "joint": optimize.palettize_weights(pruned, palette, joint_compression=True),
        }
        for name, model in made.items():
            model.save(str(tmp_path / f"{name}.mlpackage"))
    for name in ("palette", "int8", "sparse", "joint"):
        for pair in (("dense", name), (name, "dense")):
            report = ingot.compare(*(tmp_path / f"{item}.mlpackage" for item in pair))
            assert sorted(item.status for item in report.tensors) == ["differs", "differs", "identical", "identical"]
            assert report.scored
            assert report.total.cosine > 0.9
