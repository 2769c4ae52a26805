"""Conversions that repack: the target wants the same integers in another layout, and no value goes through floats."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.cli.output import render
from ingot.codecs.affine.codec import AffineCodec
from ingot.codecs.affine.repack import AffineRepack
from ingot.codecs.table import CODECS
from ingot.conversion.run import prepare
from ingot.core.runtime.progress import ProgressEvent
from ingot.engine import resources as cost
from ingot.errors import IntegrityError, UsageError
from ingot.model.bytesource import MemorySource
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor
from ingot.recipes.load import parse_recipe
from ingot.testing.codecs import encode_tensor, repacks, zstd_part

AFFINE = AffineCodec()


class StopHereError(Exception):
    """Raised from the progress callback where a test wants the run to end."""


def affine(*shape: int, seed: int = 0, **options: Any) -> Tensor:
    array = (np.random.default_rng(seed).standard_normal(shape) * 0.05).astype(np.float32)
    return encode_tensor(AFFINE, array, options, dtype="f32")


def words(rows: int, cols: int, zeros: Array | None) -> Tensor:
    """A tensor in zTensor's own attributes: eight codes of 4 bits in an i32, groups of 32."""
    rng = np.random.default_rng(1)
    parts = {
        "packed_weight": memory_part(rng.integers(-(2**31), 2**31, (rows, -(-cols // 8)), np.int32), "i32"),
        "scales": memory_part(rng.normal(0.1, 0.01, (rows, -(-cols // 32))).astype(np.float16), "f16"),
    }
    if zeros is not None:
        parts["zeros"] = memory_part(np.resize(zeros, (rows, -(-cols // 32))).astype(np.float16), "f16")
    params = {"bits": 4, "group_size": 32, "packing": "8_per_i32"}
    return Tensor("words", (rows, cols), "f16", "affine", parts, params, AFFINE)


def mixed() -> dict[str, Tensor]:
    """What lies in checkpoints that nobody quantized for a ``.squizd``."""
    unsigned = {"symmetric": False, "signed": False}
    return {
        "moved": affine(40, 64, bits=4, group=32),
        "zeros2": affine(40, 96, bits=2, group=32, **unsigned),
        "zeros4": affine(40, 96, bits=4, group="row", **unsigned),
        "tensor2": affine(40, 96, bits=2, group="tensor", **unsigned),
        "three": affine(40, 96, bits=3, group=32),
        "odd rows": affine(37, 61, bits=4, group="row"),
        "cut": affine(40, 112, bits=4, group=32, **unsigned),
        "ragged": affine(37, 61, bits=4, group=16),
        "ragged2": affine(37, 61, bits=2, group=16, **unsigned),
        "mirrored": affine(40, 64, bits=4, group=32, bit_order="msb"),
        "stacked": affine(3, 5, 33, bits=2, group=8, **unsigned),
        "empty": affine(0, 33, bits=2, group=8, **unsigned),
        "words": words(24, 61, np.arange(16)),
        "plain words": words(24, 64, None),
        "squeezed": _compressed(affine(40, 64, bits=4, group=32)),
    }


RAGGED = ("ragged", "ragged2", "stacked", "words")
"""Groups that divide no row, and cannot be cut into groups that do: a block of the SQUIZD document states none."""


def _compressed(tensor: Tensor) -> Tensor:
    return replace(tensor, parts={role: zstd_part(part) for role, part in tensor.parts.items()})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    ingot.save(tmp_path / "source.zt", mixed())
    return tmp_path / "source.zt"


def actions(report: Any) -> dict[str, str]:
    return {item.name: item.action for item in report.tensors}


def test_integers_stay_and_only_what_no_block_can_hold_is_decoded(source: Path, tmp_path: Path) -> None:
    report = ingot.convert(source, tmp_path / "out.squizd")
    other = {"moved": "moved", "three": "decoded", **dict.fromkeys(RAGGED, "decoded")}
    assert actions(report) == {name: other.get(name, "repacked") for name in mixed()}
    assert report.exact
    assert not any(item.error for item in report.tensors)
    assert ingot.compare(source, tmp_path / "out.squizd").same
    assert not [finding for finding in ingot.verify(tmp_path / "out.squizd") if finding.level == "error"]
    with ingot.open(source) as before, ingot.open(tmp_path / "out.squizd") as after:
        for name, tensor in after.items():
            dtype = tensor.dtype if name in RAGGED else "f32"  # decoded values are rounded to the tensor's own type
            assert tensor.numpy(dtype).tobytes() == before[name].numpy(dtype).tobytes(), name
            assert tensor.dtype == before[name].dtype
        assert after["odd rows"].params["packing"] == "flat_lsb"
        assert after["cut"].params["group_size"] == 16
        assert after["plain words"].params["signed"] is True
        assert after["plain words"].parts["zeros"].array().min() == -8


def test_the_summary_counts_them(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    render(ingot.convert(source, tmp_path / "out.squizd").report())
    told = capsys.readouterr().out
    assert "9 repacked" in told
    assert "5 decoded" in told


def test_there_and_back(source: Path, tmp_path: Path) -> None:
    ingot.convert(source, tmp_path / "out.squizd")
    report = ingot.convert(tmp_path / "out.squizd", tmp_path / "back.zt")
    assert set(actions(report).values()) == {"moved"}
    assert ingot.compare(source, tmp_path / "back.zt").same


def test_bytes_depend_on_no_threads_or_chunks(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ingot.convert(source, tmp_path / "one.squizd", threads=1)
    for size in (1, 777, 3000):
        monkeypatch.setattr(cost, "REPACK_BYTES", size)
        ingot.convert(source, tmp_path / "many.squizd", threads=5, overwrite=True)
        assert (tmp_path / "many.squizd").read_bytes() == (tmp_path / "one.squizd").read_bytes()


@pytest.mark.parametrize("fraction", [0.3, 0.6, 0.9])
def test_an_interrupted_run_goes_on(source: Path, tmp_path: Path, fraction: float) -> None:
    def stop(event: ProgressEvent) -> None:
        if event.processed > fraction * event.total:
            raise StopHereError

    ingot.convert(source, tmp_path / "whole.squizd")
    with pytest.raises(StopHereError):
        ingot.convert(source, tmp_path / "out.squizd", resume=True, progress=stop)
    report = ingot.convert(source, tmp_path / "out.squizd", resume=True)
    assert report.resumed > 0
    assert "repacked" in report.actions
    assert (tmp_path / "out.squizd").read_bytes() == (tmp_path / "whole.squizd").read_bytes()


def test_progress_counts_every_byte(source: Path, tmp_path: Path) -> None:
    events: list[ProgressEvent] = []
    ingot.convert(source, tmp_path / "out.squizd", progress=events.append)
    assert events[-1].processed == events[-1].total
    assert all(a.processed <= b.processed for a, b in pairwise(events))


@pytest.mark.parametrize("role", ["packed_weight", "scales", "zeros"])
def test_damage_is_noticed(source: Path, tmp_path: Path, role: str) -> None:
    with ingot.open(source) as checkpoint:
        offset = checkpoint["zeros2"].parts[role].offset
    data = bytearray(source.read_bytes())
    data[offset] ^= 1
    source.write_bytes(data)
    with pytest.raises(IntegrityError) as caught:
        ingot.convert(source, tmp_path / "out.squizd")
    assert caught.value.rule == "part.digest-mismatch"
    assert not (tmp_path / "out.squizd").exists()


@pytest.mark.parametrize(
    ("zero", "action", "stored"),
    [
        (7.0, "repacked", "f16"),
        (7.3, "repacked", "f16"),
        (0.3, "repacked", "f32"),  # -7.7 has more bits than f16
        (6e-8, "decoded", "f32"),  # and this less 8 more than f32
        (np.inf, "decoded", "f32"),
        (np.nan, "decoded", "f32"),
    ],
)
def test_zero_points_move_exactly_or_the_tensor_is_decoded(
    tmp_path: Path, zero: float, action: str, stored: str
) -> None:
    tensor = words(8, 64, np.array([zero, 3.0]))
    ingot.save(tmp_path / "in.zt", {"words": tensor, "other": words(8, 64, np.arange(16))})
    report = ingot.convert(tmp_path / "in.zt", tmp_path / "out.squizd")
    assert actions(report) == {"words": action, "other": "repacked"}
    with ingot.open(tmp_path / "out.squizd") as checkpoint:
        if action == "repacked":
            assert {part.dtype for part in checkpoint["words"].parts.values()} == {"u8", stored}
        assert checkpoint["words"].numpy().tobytes() == tensor.numpy().tobytes()


@pytest.mark.parametrize(("suffix", "asked"), [("squizd", True), ("zt", False), ("safetensors", False)])
def test_zero_points_are_read_only_where_they_decide(
    source: Path, tmp_path: Path, suffix: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A format that takes a tensor as it is, or in no layout, needs no look at zero points."""
    names: set[str] = set()
    why_not = AffineRepack.why_not
    monkeypatch.setattr(AffineRepack, "why_not", lambda found: names.add(found.tensor.name) or why_not(found))
    with prepare(source, tmp_path / f"out.{suffix}", None, None):
        pass
    assert names == (set(mixed()) - {"moved", "three", *RAGGED} if asked else set())


def test_zero_points_that_changed_after_planning_are_refused() -> None:
    tensor = words(8, 64, np.arange(16))
    (repack, *_) = [repack for repack in repacks(AFFINE, tensor) if repack.layout.signed]
    assert repack.exact
    data = np.full((8, 2), 0.3, np.float16)
    tensor.parts["zeros"].source = MemorySource(data.data.cast("B"))
    with pytest.raises(IntegrityError) as caught:
        repack.reader().read(8)
    assert caught.value.rule == "store.changed"


def test_what_is_left_of_a_pruned_matrix_is_re_laid(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = {"up": (128, 48), "gate": (128, 48), "down": (48, 128)}
    weights = {
        f"model.layers.{layer}.mlp.{name}_proj.weight": rng.standard_normal(shape).astype(np.float32)
        for layer in range(2)
        for name, shape in shapes.items()
    }
    ingot.save(tmp_path / "in.safetensors", weights)
    rule = "[[rules]]\ncodec = 'affine'\noptions = { bits = 4, group = 16, symmetric = false }"
    ingot.convert(
        tmp_path / "in.safetensors", tmp_path / "in.zt", parse_recipe(rule, location="test"), prune=0.25, prune_block=16
    )
    report = ingot.convert(tmp_path / "in.zt", tmp_path / "out.squizd", prune_compact=True)
    assert set(actions(report).values()) == {"repacked"}
    assert {item.codec for item in report.tensors} == {"sparse_blocks"}
    assert report.sparsity == 0.25
    assert ingot.compare(tmp_path / "in.zt", tmp_path / "out.squizd").same


def test_the_smallest_form_may_be_that_of_the_stored_integers(tmp_path: Path) -> None:
    ingot.save(tmp_path / "in.zt", {"words": words(24, 64, np.arange(16))})
    recipe = "[[rules]]\npick = 'smallest'\ncandidates = [{ codec = 'tca_tbe' }, { codec = 'dense' }]"
    report = ingot.convert(tmp_path / "in.zt", tmp_path / "out.squizd", parse_recipe(recipe, location="test"))
    assert actions(report) == {"words": "repacked"}


def test_a_dry_run_tells_the_exact_size(source: Path, tmp_path: Path) -> None:
    with prepare(source, tmp_path / "out.squizd", None, None) as prepared:
        size, exact = prepared.plan.size, prepared.plan.size_exact
    ingot.convert(source, tmp_path / "out.squizd")
    assert exact
    assert (tmp_path / "out.squizd").stat().st_size == size


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("q4_0", 'bits = 4, group = 32, signed = false, zero_point = 8, scales = "f16"'),
        ("q8_0", 'bits = 8, group = 32, scales = "f16"'),
        ("q4_k", 'bits = 4, group = 32, symmetric = false, signed = false, zero_kind = "offset", scales = "f32"'),
        ("q6_k", 'bits = 6, group = 16, signed = false, zero_point = 32, scales = "f32"'),
    ],
)
def test_a_recipe_that_asks_for_a_block_s_integers_repacks_them(tmp_path: Path, kind: str, options: str) -> None:
    """Into .zt too, which could hold the blocks; other integers would be quantized again, and that is refused."""
    values = (np.random.default_rng(4).standard_normal((4, 256)) * 0.05).astype(np.float32)
    blocks = replace(encode_tensor(CODECS["ggml_blocks"], values, {"type": kind}, dtype="f32"), name="w")
    ingot.save(tmp_path / "blocks.zt", {"w": blocks})

    def recipe(options: str) -> Path:
        rule = f'[[rules]]\nlabel = "all"\nmatch = ["w"]\ncodec = "affine"\noptions = {{ {options} }}\n'
        (tmp_path / "recipe.toml").write_text(f'name = "one"\ndescription = "one"\n{rule}')
        return tmp_path / "recipe.toml"

    (told,) = ingot.convert(tmp_path / "blocks.zt", tmp_path / "a.zt", recipe(options)).tensors
    assert (told.action, told.exact, told.codec) == ("repacked", True, "affine")
    with ingot.open(tmp_path / "a.zt") as checkpoint:
        assert np.array_equal(checkpoint["w"].numpy(), blocks.numpy())
    with pytest.raises(UsageError) as caught:
        ingot.convert(tmp_path / "blocks.zt", tmp_path / "b.zt", recipe(options.replace("group = ", "group = 1")))
    assert caught.value.rule == "convert.requantize"
