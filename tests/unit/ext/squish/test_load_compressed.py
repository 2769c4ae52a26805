"""load_compressed_model: the name that squish's document has, its tiers, and what a load reports."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.ext.squish.tiers.status import status
from ingot.runtime.loading.load_report import LoadReport
from tests.support.paths import DEMO_DATA as DEMO

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A directory of arrays alone, as squish's program writes it, and the model's own folder."""
    ingot.convert(DEMO, tmp_path / "squish", "squish-int8", "npydir")
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "squish" / name).rename(tmp_path / "model" / name)
    return tmp_path / "squish", tmp_path / "model"


def complete(folder: Path) -> set[str]:
    return {tier.tier for tier in status(folder) if tier.usable} - {"tensors"}


def check(report: LoadReport, tier: str) -> None:
    assert report.tier == tier
    assert report.seconds >= 0
    assert report.imports > 0
    assert report.ram_before > 1 << 20
    assert isinstance(report.ram_delta, int)
    assert report.memory_delta < 1 << 30


@pytest.mark.parametrize("runtime", ["torch", "mlx"])
def test_the_first_load_saves_a_tier_and_the_next_takes_it(folders: tuple[Path, Path], runtime: str) -> None:
    if runtime == "mlx":
        pytest.importorskip("mlx_lm")
        from ingot.mlx import load_compressed_model
    else:
        load_compressed_model = ingot.load_compressed_model
    compressed, model_dir = folders
    first, tokenizer, report = load_compressed_model(compressed, model_dir, return_stats=True)
    check(report, "bf16")
    assert "first load" in report.why
    assert complete(compressed) == {"bf16"}
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    second, _, report = load_compressed_model(compressed, model_dir, return_stats=True)
    check(report, "bf16")
    assert "first load" not in report.why
    if runtime == "torch":
        ids = torch.tensor([[1, 2, 3, 50]])
        assert torch.equal(first(ids).logits, second(ids).logits)
        assert report.mapped > 0
        assert report.decoded == 0
    else:
        assert report.decoded > 0


def test_weights_wanted_in_another_type_are_decoded_once_and_no_tier_is_made(folders: tuple[Path, Path]) -> None:
    """The finalized tier would round them to bf16, the tensors' own type, before f16."""
    compressed, model_dir = folders
    model, _, report = ingot.load_compressed_model(compressed, model_dir, return_stats=True, dtype="f16")
    check(report, "tensors")
    assert complete(compressed) == set()
    with ingot.open(compressed) as checkpoint:
        for name, values in model.state_dict().items():
            if name in checkpoint:
                assert np.array_equal(values.numpy(), checkpoint[name].numpy("f16"))


def test_the_directory_itself_is_the_default(tmp_path: Path) -> None:
    ingot.convert(DEMO, tmp_path / "squish", "squish-int8", "npydir")
    loaded = ingot.load_compressed_model(tmp_path / "squish", cache=False)
    assert len(loaded) == 2
    shutil.rmtree(tmp_path / "squish" / "tensors")
    with pytest.raises(ingot.IngotError):
        ingot.load_compressed_model(tmp_path / "squish")
