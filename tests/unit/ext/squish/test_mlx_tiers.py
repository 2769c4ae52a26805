"""ingot.mlx.load_model on Squish directories: what each tier computes, and what the first load builds."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.core.runtime.memory import anonymous_rss
from ingot.errors import IngotError
from ingot.ext.squish.tiers.build import build
from ingot.ext.squish.tiers.choose import choose
from ingot.ext.squish.tiers.status import status

mx = pytest.importorskip("mlx.core")
utils = pytest.importorskip("mlx_lm.utils")

from ingot.mlx import load_model  # noqa: E402
from tests.support.paths import DEMO_DATA as DEMO  # noqa: E402

IDS = mx.array([[1, 2, 3, 50, 77, 40, 9]])


def logits(model: Any) -> np.ndarray[Any, Any]:
    return np.array(model(IDS).astype(mx.float32))


def states(folder: Path) -> set[str]:
    return {one.tier for one in status(folder) if one.usable}


def as_hugging_face(folder: Path, out: Path, dtype: str) -> Path:
    """The directory's tensors, in their own type and then cast, as a plain folder made without any tier."""
    with ingot.open(folder) as checkpoint:
        out.mkdir()
        ingot.save(
            out / "model.safetensors",
            {name: value.numpy().astype(numpy_dtype(dtype)) for name, value in checkpoint.items()},
        )
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(folder / name, out)
    return out


@pytest.fixture
def squish(tmp_path: Path) -> Path:
    ingot.convert(DEMO, tmp_path / "squish", "squish-int8", "npydir")
    return tmp_path / "squish"


def test_the_first_load_builds_the_bf16_tier_and_the_second_reads_it(squish: Path, tmp_path: Path) -> None:
    wanted = logits(utils.load_model(as_hugging_face(squish, tmp_path / "hf", "bf16"))[0])
    first, tokenizer = load_model(squish)
    assert states(squish) == {"bf16", "tensors"}
    assert np.array_equal(logits(first), wanted)
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    changed = (squish / "squish_weights.safetensors").stat().st_mtime_ns
    second, _ = load_model(squish)
    assert (squish / "squish_weights.safetensors").stat().st_mtime_ns == changed
    assert np.array_equal(logits(second), wanted)


def test_the_bf16_tier_goes_through_no_array_of_ours(squish: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(squish, "bf16")
    wanted = logits(load_model(squish)[0])

    def never(*_arguments: Any) -> Any:
        raise AssertionError("decoded")

    monkeypatch.setattr("ingot.runtime.loading.mlx_load.from_numpy", never)
    before = anonymous_rss()
    model, _ = load_model(squish, lazy=True)
    assert anonymous_rss() - before < (squish / "squish_weights.safetensors").stat().st_size
    assert np.array_equal(logits(model), wanted)


def test_finalized_and_tensors(squish: Path, tmp_path: Path) -> None:
    plain, _ = load_model(squish, cache=False)
    assert states(squish) == {"tensors"}
    build(squish, "finalized")
    assert choose(squish, "mlx").tier.name == "finalized"
    wanted = logits(utils.load_model(as_hugging_face(squish, tmp_path / "hf", "f16"))[0])
    assert np.array_equal(logits(load_model(squish)[0]), wanted)
    assert np.abs(logits(plain) - wanted).max() <= 0.05 * np.abs(wanted).max()


@pytest.mark.parametrize("tier", ["4bit", "3bit"])
def test_packed_tiers_are_what_mlx_lm_loads(squish: Path, tier: str) -> None:
    report = build(squish, tier, ungated=True)
    wanted, _ = utils.load_model(Path(report.path))
    model, _ = load_model(squish)
    assert np.array_equal(logits(model), logits(wanted))
    widths = {module.bits for _, module in model.named_modules() if hasattr(module, "bits")}
    assert widths == {int(tier[0])}


def test_the_first_load_of_four_bits_has_the_values_of_the_arrays(tmp_path: Path) -> None:
    ingot.convert(DEMO, tmp_path / "squish", "squish-int4", "npydir")
    model, _ = load_model(tmp_path / "squish")
    assert states(tmp_path / "squish") == {"4bit", "tensors"}
    assert np.array_equal(logits(model), logits(utils.load_model(tmp_path / "squish" / "squish_4bit")[0]))
    plain, _ = load_model(tmp_path / "squish", cache=False)
    wanted = logits(plain)
    assert np.abs(logits(model) - wanted).max() <= 0.05 * np.abs(wanted).max()


def test_arrays_that_mlx_cannot_take_are_not_quantized_again_by_a_load(tmp_path: Path) -> None:
    ingot.convert(DEMO, tmp_path / "squish", "squish-int3", "npydir")
    load_model(tmp_path / "squish")
    assert states(tmp_path / "squish") == {"bf16", "tensors"}


def test_a_tier_that_mlx_lm_made_with_an_empty_sentinel(squish: Path, tmp_path: Path) -> None:
    """As squish does: mlx_lm converts, and the sentinel is touched; inside the folder or beside it."""
    source = as_hugging_face(squish, tmp_path / "hf", "bf16")
    plain, config = utils.load_model(source, lazy=True)
    packed, config = utils.quantize_model(plain, config, 64, 4)
    utils.save_model(squish / "squish_4bit", packed)
    utils.save_config(config, squish / "squish_4bit" / "config.json")
    shutil.copy(source / "tokenizer.json", squish / "squish_4bit")
    assert next(one for one in status(squish) if one.tier == "4bit").state == "incomplete"
    (squish / "squish_4bit" / ".squish_4bit_ready").touch()
    found = choose(squish, "mlx")
    assert (found.tier.name, "another program" in found.why) == ("4bit", True)
    wanted, _ = utils.load_model(squish / "squish_4bit")
    assert np.array_equal(logits(load_model(squish)[0]), logits(wanted))
    with (squish / "squish_4bit" / "config.json").open("a") as file:
        file.write(" ")
    later = (squish / "squish_4bit" / ".squish_4bit_ready").stat().st_mtime_ns + 1
    os.utime(squish / "squish_4bit" / "model.safetensors", ns=(later, later))
    assert choose(squish, "mlx").tier.name == "tensors"


@pytest.mark.parametrize("tier", ["4bit", "bf16", "finalized"])
def test_too_little_memory(squish: Path, tier: str) -> None:
    build(squish, tier, ungated=True)
    with pytest.raises(IngotError) as caught:
        load_model(squish, max_ram="64KiB")
    assert caught.value.rule == "ram.guard"
    load_model(squish, max_ram="1GiB")
