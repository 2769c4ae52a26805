"""Diffs of state dicts, and what a container gets where no strategy is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.errors import IntegrityError, UsageError

deltatensors = pytest.importorskip("deltatensors")

Arrays = dict[str, np.ndarray[Any, Any]]


def weights(seed: int, scale: float = 0.01) -> Arrays:
    rng = np.random.default_rng(7)
    base = {"a": rng.normal(0, 1, (40, 16)), "b.weight": rng.normal(0, 1, (160, 130)), "norm": rng.normal(0, 1, 16)}
    noise = np.random.default_rng(seed)
    return {
        name: (value + (scale * noise.normal(0, 1, value.shape) if seed else 0)).astype(
            ml_dtypes.bfloat16 if name == "norm" else np.float32
        )
        for name, value in base.items()
    }


@pytest.mark.parametrize("out", ["x.zt", "x.wdelta", "x.safetensors"])
def test_state_dicts_give_the_delta_of_their_files(tmp_path: Path, out: str) -> None:
    for name, seed in (("base", 0), ("tuned", 1)):
        ingot.save(tmp_path / f"{name}.safetensors", weights(seed))
    files = tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"
    larger = out == "x.safetensors"  # every element differs
    ingot.diff(*files, tmp_path / f"files-{out}", allow_larger=larger)
    ingot.diff(weights(0), weights(1), tmp_path / out, allow_larger=larger)
    assert (tmp_path / out).read_bytes() == (tmp_path / f"files-{out}").read_bytes()
    with ingot.open(files[0]) as base:
        ingot.diff(base, files[1], tmp_path / out, overwrite=True, allow_larger=larger)
    assert (tmp_path / out).read_bytes() == (tmp_path / f"files-{out}").read_bytes()
    state: dict[str, Any] = weights(0)
    ingot.apply_delta(state, tmp_path / out)
    if out != "x.wdelta":
        assert all(np.array_equal(state[name], value) for name, value in weights(1).items())


def test_torch_state_dicts(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    base = {"w": torch.arange(64, dtype=torch.bfloat16).reshape(8, 8)}
    tuned = {"w": (base["w"].float() * 1.5).bfloat16()}
    ingot.diff(base, tuned, tmp_path / "x.zt")
    ingot.apply_delta(base, tmp_path / "x.zt")
    assert torch.equal(base["w"], tuned["w"])


def test_a_state_dict_cannot_be_resumed_and_a_delta_is_no_state(tmp_path: Path) -> None:
    ingot.diff(weights(0), weights(1), tmp_path / "x.zt")
    with pytest.raises(UsageError) as caught:
        ingot.diff(weights(0), weights(1), tmp_path / "y.zt", resume=True)
    assert caught.value.rule == "delta.resume"
    with ingot.open(tmp_path / "x.zt") as delta, pytest.raises(UsageError) as caught:
        ingot.diff(weights(0), delta, tmp_path / "y.zt")
    assert caught.value.rule == "delta.of-delta"


def test_an_open_checkpoint_that_is_written_to_meanwhile_is_no_base(tmp_path: Path) -> None:
    ingot.save(tmp_path / "base.safetensors", weights(0))
    with ingot.open(tmp_path / "base.safetensors", io="pread") as base:
        with (tmp_path / "base.safetensors").open("ab") as file:
            file.write(b"x")
        with pytest.raises(IntegrityError) as caught:
            ingot.diff(base, weights(1), tmp_path / "x.zt")
    assert caught.value.rule == "store.changed"
    assert not (tmp_path / "x.zt").exists()


def test_each_container_has_a_strategy_of_its_own(tmp_path: Path) -> None:
    for suffix, strategy in (("zt", "exact"), ("wdelta", "int4"), ("safetensors", "sparse-patch")):
        report = ingot.diff(weights(0), weights(1), tmp_path / f"x.{suffix}", allow_larger=suffix == "safetensors")
        assert report.strategy == strategy
    for name, seed in (("base", 0), ("tuned", 1)):
        ingot.save(tmp_path / f"{name}.zt", weights(seed))
    files = [str(tmp_path / name) for name in ("base.zt", "tuned.zt", "y.wdelta")]
    assert run(["diff", *files[:2], "--out", files[2], "--quiet"]) == 0
    assert (tmp_path / "y.wdelta").read_bytes() == (tmp_path / "x.wdelta").read_bytes()


def test_differences_too_small_for_f16_scales_are_kept(tmp_path: Path) -> None:
    """The default of a ``.wdelta`` does not fail on them: they are stored one by one; a named strategy refuses."""
    tiny = {**weights(1), "a": weights(0)["a"] * 0 + np.float32(1e-8)}
    base = {**weights(0), "a": weights(0)["a"] * 0}
    with pytest.raises(ingot.IngotError) as caught:
        ingot.diff(base, tiny, tmp_path / "x.wdelta", "int4")
    assert caught.value.rule == "codec.underflow"
    ingot.diff(base, tiny, tmp_path / "x.wdelta")
    with ingot.open(tmp_path / "x.wdelta") as delta:
        assert {name: tensor.codec for name, tensor in delta.items()} == {
            "a": "delta_sparse",
            "b.weight": "delta_int4",
            "norm": "delta_int4",
        }
    state: dict[str, Any] = dict(base)
    ingot.apply_delta(state, tmp_path / "x.wdelta")
    assert np.array_equal(state["a"], tiny["a"])
    with (tmp_path / "x.wdelta").open("rb") as file:
        _, strategy, tensors = deltatensors.format.read_wdelta(file)
    assert (strategy, tensors["a"]["strategy"]) == ("int4", "sparse")
