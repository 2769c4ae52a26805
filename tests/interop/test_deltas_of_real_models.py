"""Deltas of the small language model and its fine-tune, where they are at hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.artifacts.identity import content_id

MODELS = Path(__file__).parents[3] / "shared" / "models"
BASE, TUNED = MODELS / "base", MODELS / "finetune"

pytestmark = pytest.mark.models


def id_of(path: Path) -> str:
    with ingot.open(path) as checkpoint:
        return content_id(checkpoint)


def test_exact_takes_half(tmp_path):
    report = ingot.diff(BASE, TUNED, tmp_path / "delta.zt")
    assert report.exact
    assert report.share <= 0.50
    ingot.patch(BASE, tmp_path / "delta.zt", tmp_path / "out", verify=True)
    assert id_of(tmp_path / "out") == id_of(TUNED)


def test_a_chain_of_three_and_the_wrong_base(tmp_path):
    ingot.diff(BASE, TUNED, tmp_path / "one.zt", "int4")
    ingot.patch(BASE, tmp_path / "one.zt", tmp_path / "m1.zt")
    ingot.diff(tmp_path / "m1.zt", BASE, tmp_path / "two.zt", "int8")
    ingot.patch(tmp_path / "m1.zt", tmp_path / "two.zt", tmp_path / "m2.zt")
    ingot.diff(tmp_path / "m2.zt", TUNED, tmp_path / "three.zt")
    links = [tmp_path / f"{name}.zt" for name in ("one", "two", "three")]
    ingot.patch(BASE, links, tmp_path / "out.safetensors", verify=True)
    assert id_of(tmp_path / "out.safetensors") == id_of(TUNED)
    for base, chain in ((TUNED, links), (BASE, links[1:]), (BASE, [links[1], links[0], links[2]])):
        with pytest.raises(ingot.IngotError) as caught:
            ingot.patch(base, chain, tmp_path / "bad.zt")
        assert caught.value.rule == "delta.base"
        assert not (tmp_path / "bad.zt").exists()


def test_two_fine_tunes_swapped(tmp_path):
    ingot.diff(BASE, TUNED, tmp_path / "exact.zt")
    ingot.diff(BASE, TUNED, tmp_path / "int4.zt", "int4")
    with ingot.open(BASE) as base:
        state = {name: tensor.numpy().copy() for name, tensor in base.items()}
    first = {name: value.tobytes() for name, value in state.items()}
    wanted = id_of(TUNED)
    for number in range(6):
        applied = ingot.apply_delta(state, tmp_path / ("exact.zt", "int4.zt")[number % 2])
        if number == 0:
            ingot.save(tmp_path / "now.zt", state)
            assert id_of(tmp_path / "now.zt") == wanted
        applied.revert()
    assert {name: value.tobytes() for name, value in state.items()} == first
    assert all(isinstance(value, np.ndarray) for value in state.values())
