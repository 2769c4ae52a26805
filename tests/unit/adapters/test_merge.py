"""``ingot merge``: reports, containers, quantized bases, refusals that leave nothing behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.core.numeric.dtypes import cast
from ingot.errors import IngotError
from tests.support.adapters import DOWN, Q, base_folder, lora, peft_folder, values

BIG = "model.layers.0.mlp.up_proj"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return base_folder(tmp_path / "base", dtype="bf16")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return peft_folder(tmp_path / "adapter", {**lora(), **lora(DOWN, cols=40)})


def large_base(path: Path, recipe: str | None = None) -> Path:
    """Write a base with one matrix that recipes quantize."""
    dense = base_folder(path.parent / f"{path.name}-dense", config={"model_type": "unknown-family"})
    ingot.save(dense / "model.safetensors", {f"{BIG}.weight": cast(values(256, 512) * np.float32(0.02), "bf16")})
    if recipe is None:
        return dense
    ingot.convert(dense, path.with_suffix(".zt"), recipe)
    return path.with_suffix(".zt")


def large_adapter(path: Path, size: float) -> Path:
    factors = lora(BIG, rows=256, cols=512)
    factors[f"{BIG}.lora_B.weight"] *= np.float32(size)
    return peft_folder(path, factors)


def test_the_result_is_a_folder_like_the_base(base: Path, adapter: Path, tmp_path: Path) -> None:
    report = ingot.merge(base, adapter, tmp_path / "out")
    assert report.changed == 2
    assert report.adapters[0].ranks == [4]
    assert report.conversion.format == "safetensors"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"
    wide = cast(cast(values(16, 16), "bf16"), "f32")
    exact = wide + (values(16, 4, seed=1) @ values(4, 16, seed=1)) * np.float32(2)
    with ingot.open(tmp_path / "out") as out:
        assert out[f"{Q}.weight"].dtype == "bf16"
        assert np.array_equal(out[f"{Q}.weight"].numpy().view(np.uint16), cast(exact, "bf16").view(np.uint16))
    assert not [finding for finding in ingot.verify(tmp_path / "out") if finding.level == "error"]


def test_error_and_share_are_those_of_the_stored_values(base: Path, adapter: Path, tmp_path: Path) -> None:
    report = ingot.merge(base, [f"{adapter}:0.5"], tmp_path / "out.zt")
    change = exact = error = component = 0.0
    with ingot.open(base) as old, ingot.open(tmp_path / "out.zt") as new:
        for name, cols in ((Q, 16), (DOWN, 40)):
            before = old[f"{name}.weight"].numpy("f32").astype(np.float64)
            delta = (values(16, 4, seed=1) @ values(4, cols, seed=1)).astype(np.float64)
            stored = new[f"{name}.weight"].numpy("f32").astype(np.float64)
            change += float((delta * delta).sum())
            component += float((delta * (stored - before)).sum())
            error += float(np.square(stored - before - delta).sum())
            exact += float(np.square(before + delta).sum())
    assert report.survived == pytest.approx(component / change, abs=1e-6)
    assert report.error == pytest.approx(np.sqrt(error / exact), rel=1e-3)


@pytest.mark.parametrize(("size", "low", "high"), [(1e-4, 0.0, 0.2), (0.05, 0.9, 1.1)])
def test_small_changes_of_a_quantized_base_do_not_survive(tmp_path: Path, size: float, low: float, high: float) -> None:
    base = large_base(tmp_path / "base", "mlx-4bit")
    report = ingot.merge(base, large_adapter(tmp_path / "a", size), tmp_path / "out.zt")
    assert report.survived is not None
    assert low <= report.survived <= high
    with ingot.open(base) as old, ingot.open(tmp_path / "out.zt") as new:
        first, second = old[f"{BIG}.weight"], new[f"{BIG}.weight"]
        assert (first.codec, first.dtype, dict(first.params)) == (second.codec, second.dtype, dict(second.params))


def test_a_recipe_rounds_the_exact_merge_once(tmp_path: Path) -> None:
    base = large_base(tmp_path / "base")
    adapter = large_adapter(tmp_path / "a", 0.01)
    ingot.merge(base, adapter, tmp_path / "out.zt", recipe="int4")
    with ingot.open(base) as opened:
        wide = opened[f"{BIG}.weight"].numpy("f32")
    factors = lora(BIG, rows=256, cols=512)
    low = factors[f"{BIG}.lora_B.weight"] * np.float32(0.01)
    exact = wide + (low @ factors[f"{BIG}.lora_A.weight"]) * np.float32(2)
    ingot.save(tmp_path / "wide.safetensors", {f"{BIG}.weight": exact})
    ingot.convert(tmp_path / "wide.safetensors", tmp_path / "wide.zt", "int4")
    with ingot.open(tmp_path / "out.zt") as out, ingot.open(tmp_path / "wide.zt") as expected:
        merged, direct = out[f"{BIG}.weight"], expected[f"{BIG}.weight"]
        assert merged.dtype == "bf16"
        assert np.array_equal(merged.parts["packed_weight"].array(), direct.parts["packed_weight"].array())


@pytest.mark.parametrize(
    ("tensors", "rule"),
    [
        (lora("model.layers.9.mlp.up_proj"), "adapter.base"),
        (lora(rows=32), "adapter.shape"),
        (
            {f"{Q}.lora_A.weight": values(4, 16) * np.float32(np.nan), f"{Q}.lora_B.weight": values(16, 4)},
            "adapter.values",
        ),
        ({**lora(), f"{Q}.lora_A.weight": values(3, 16)}, "adapter.rank"),
    ],
)
def test_a_refused_adapter_leaves_nothing_and_exits_with_1(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tensors: dict[str, Any], rule: str
) -> None:
    adapter = peft_folder(tmp_path / "bad", tensors)
    with pytest.raises(IngotError) as error:
        ingot.merge(base, adapter, tmp_path / "out")
    assert error.value.rule == rule
    assert run(["merge", str(base), str(adapter), "-o", str(tmp_path / "out"), "-q"]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(lines) == 1
    assert rule in lines[0]
    assert not list(tmp_path.glob("out*"))


def test_a_truncated_adapter_leaves_nothing(base: Path, adapter: Path, tmp_path: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(IngotError):
        ingot.merge(base, adapter, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_a_model_is_no_adapter_and_an_adapter_no_base(base: Path, adapter: Path, tmp_path: Path) -> None:
    for first, second in ((base, base), (adapter, adapter)):
        with pytest.raises(IngotError):
            ingot.merge(first, second, tmp_path / "out")


def test_a_resumed_merge_has_the_same_bytes(base: Path, adapter: Path, tmp_path: Path) -> None:
    ingot.merge(base, adapter, tmp_path / "once.zt")
    seen = []

    def stop(event: Any) -> None:
        seen.append(event)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ingot.merge(base, adapter, tmp_path / "twice.zt", resume=True, progress=stop)
    ingot.merge(base, adapter, tmp_path / "twice.zt", resume=True)
    assert (tmp_path / "once.zt").read_bytes() == (tmp_path / "twice.zt").read_bytes()


def test_patch_merges_adapters(base: Path, adapter: Path, tmp_path: Path) -> None:
    assert run(["patch", str(base), str(adapter), "-o", str(tmp_path / "patched.zt"), "-q"]) == 0
    ingot.merge(base, adapter, tmp_path / "merged.zt")
    assert (tmp_path / "patched.zt").read_bytes() == (tmp_path / "merged.zt").read_bytes()


def test_verify_compares_an_adapter_with_its_base(base: Path, adapter: Path, tmp_path: Path) -> None:
    assert not [item for item in ingot.verify(adapter, base=base) if item.level == "error"]
    other = peft_folder(tmp_path / "other", lora(rows=24))
    assert [item.rule for item in ingot.verify(other, base=base) if item.level == "error"] == ["adapter.shape"]
    assert run(["verify", str(other), "--base", str(base), "-q"]) == 1
    with pytest.raises(IngotError, match="expected an adapter"):
        ingot.verify(base, base=base)


def test_verify_finds_damage_in_an_adapter(tmp_path: Path) -> None:
    tensors = lora()
    tensors[f"{Q}.lora_B.weight"][3, 1] = np.inf
    rules = [item.rule for item in ingot.verify(peft_folder(tmp_path / "a", tensors)) if item.level == "error"]
    assert rules == ["adapter.values"]
    missing = {f"{Q}.lora_A.weight": values(4, 16)}
    rules = [item.rule for item in ingot.verify(peft_folder(tmp_path / "b", missing)) if item.level == "error"]
    assert rules == ["adapter.tensors"]
