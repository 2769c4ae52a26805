"""Conversions of many small tensors: plan, report, bytes, damage, order and resuming."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ingot
import ingot.numpy
from ingot.conversion.placement import plan_without_rule
from ingot.conversion.run import prepare
from ingot.core.numeric.dtypes import file_bytes
from ingot.engine.steps import Move
from ingot.errors import IngotError, IntegrityError
from ingot.formats.zt.writer import ZtWriter
from ingot.stores.local import LocalTarget


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Matrices of three kinds in turn, some empty ones, and a scalar."""
    rng = np.random.default_rng(0)
    arrays = {f"layers.{i}.{kind}": rng.random(shape).astype(dtype) for i in range(40) for kind, shape, dtype in KINDS}
    path = tmp_path / "many.safetensors"
    save_file({**arrays, "scalar": np.array(3, np.float32), "none": np.zeros((0, 4), np.float16)}, path)
    return path


KINDS = (("weight", (4, 4), np.float16), ("scale", (4,), np.float32), ("bias", (4,), np.float16))


@pytest.mark.parametrize("first", ["many.safetensors", "many.zt"])
def test_steps_are_those_of_each_tensor_alone(source: Path, tmp_path: Path, first: str) -> None:
    ingot.convert(source, tmp_path / "many.zt")
    with prepare(tmp_path / first, tmp_path / "out.zt") as prepared, ingot.open(tmp_path / first) as checkpoint:
        steps = prepared.plan.steps
        assert [step.tensor.name for step in steps] == list(checkpoint) == [spec.name for spec in prepared.plan.specs]
        for step, spec, tensor in zip(steps, prepared.plan.specs, checkpoint.values(), strict=True):
            alone = plan_without_rule(tensor, prepared.plan.format)
            assert isinstance(step, Move)
            assert step.spec == spec == alone.spec
            assert (step.action, step.rule, step.exact) == (alone.action, alone.rule, alone.exact)
            assert step.tensor.parts["data"].offset == tensor.parts["data"].offset


def test_the_report_tells_of_each(source: Path, tmp_path: Path) -> None:
    report, arrays = ingot.convert(source, tmp_path / "out.zt"), load_file(source)
    assert {item.name: (item.shape, item.nbytes, item.source_nbytes) for item in report.tensors} == {
        name: (array.shape, array.nbytes, array.nbytes) for name, array in arrays.items()
    }
    assert report.tensors[4] == replace(report.tensors[1], name=report.tensors[4].name)
    assert report.source_nbytes == sum(array.nbytes for array in arrays.values())


@pytest.mark.parametrize("digest", ["crc32c", "sha256", None])
def test_the_bytes_are_those_of_a_writer_that_gets_them_in_pieces(
    source: Path, tmp_path: Path, digest: str | None
) -> None:
    ingot.convert(source, tmp_path / "out.zt", digest=digest)
    with ingot.open(tmp_path / "out.zt") as checkpoint:
        specs = [tensor.spec() for tensor in checkpoint.values()]
        writer = ZtWriter(LocalTarget(tmp_path).create("pieces.zt"), specs, digest=digest)
        for spec, tensor in zip(specs, checkpoint.values(), strict=True):
            data = file_bytes(tensor.numpy())
            writer.begin(spec)
            for start in range(0, data.nbytes, 6):
                writer.write("data", data[start : start + 6])
            writer.end()
        writer.finish()
    assert (tmp_path / "out.zt").read_bytes() == (tmp_path / "pieces.zt").read_bytes()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("ram", [None, "8GiB"])
def test_a_damaged_tensor_among_many_is_told(source: Path, tmp_path: Path, ram: str | None, threads: int) -> None:
    damaged = tmp_path / "damaged.zt"
    ingot.convert(source, damaged)
    with ingot.open(damaged) as checkpoint:
        offset = checkpoint["layers.17.scale"].parts["data"].offset
    data = bytearray(damaged.read_bytes())
    data[offset] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(IntegrityError) as caught:
        ingot.convert(damaged, tmp_path / "out.zt", max_ram=ram, threads=threads)
    assert caught.value.rule == "part.digest-mismatch"
    assert "layers.17.scale" in str(caught.value)
    assert not (tmp_path / "out.zt").exists()


def test_small_tensors_between_large_ones_keep_their_order(tmp_path: Path) -> None:
    arrays = {f"t{i}": np.full((300, 100) if i % 5 == 0 else (i % 3 + 1, 8), i, np.float32) for i in range(60)}
    save_file(arrays, tmp_path / "in.safetensors")
    ingot.convert(tmp_path / "in.safetensors", tmp_path / "out.zt", threads=2)
    with ingot.open(tmp_path / "out.zt") as checkpoint, ingot.open(tmp_path / "in.safetensors") as before:
        assert list(checkpoint) == list(before)
        for name, array in arrays.items():
            np.testing.assert_array_equal(checkpoint[name].numpy(), array)


def test_a_run_that_was_stopped_among_them_goes_on(source: Path, tmp_path: Path) -> None:
    seen = 0

    def stop(event: object) -> None:
        nonlocal seen
        seen += 1
        if seen == 120:
            raise IngotError("stop", rule="test.stop")

    whole, out = tmp_path / "whole.zt", tmp_path / "out.zt"
    ingot.convert(source, whole)
    with pytest.raises(IngotError):
        ingot.convert(source, out, resume=True, progress=stop)
    report = ingot.convert(source, out, resume=True)
    assert report.resumed > 10
    again = ingot.convert(source, whole, overwrite=True)
    assert [item.name for item in report.tensors] == [item.name for item in again.tensors]
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("digest", ["crc32c", "sha256", None])
def test_squizd_is_as_large_as_planned_and_loads_equal(source: Path, tmp_path: Path, digest: str | None) -> None:
    names = ["lm_head.weight", "ä.weight", *(f"model.layers.{i}.w" for i in (3, 30, 299)), "embed.weight"]
    arrays = {**load_file(source), **{name: np.ones((3, 4), np.float32) for name in names}}
    ingot.save(tmp_path / "more.safetensors", arrays)
    with prepare(tmp_path / "more.safetensors", tmp_path / "out.squizd", digest=digest) as prepared:
        planned = prepared.plan.size
    ingot.convert(tmp_path / "more.safetensors", tmp_path / "out.squizd", digest=digest)
    assert (tmp_path / "out.squizd").stat().st_size == planned
    assert {name: array.tobytes() for name, array in ingot.numpy.load_file(tmp_path / "out.squizd").items()} == {
        name: array.tobytes() for name, array in arrays.items()
    }
