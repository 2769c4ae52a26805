"""Every cell and form that may be assumed changes an answer; what decides nothing is refused, and says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ingot.errors import UsageError
from ingot.ext.ane.chips.activation import fit_lut
from ingot.ext.ane.chips.chips import IDLE, LABELS, Chip, chip_names, contradictions, load_chip
from ingot.ext.ane.chips.cost import budget, predict
from ingot.ext.ane.chips.gates import ORDINARY, Conditions, decide
from ingot.ext.ane.chips.storage_form import StorageForm
from ingot.ext.ane.chips.winograd import winograd
from ingot.ext.ane.kernel_units.pack import KernelWeight, pack_unit

N = 1 << 22
DENSE = StorageForm("dense", N)
INT8 = StorageForm("int", N, 8, scales=256)
ZEROS = StorageForm("int", N, 8, scales=256, zero_point=True)
BLOCKS = StorageForm("blockwise", N, 8, scales=N // 32)
SPARSE = StorageForm("sparse", N, nonzeros=N // 2)
E4M3 = StorageForm("fp8", N, 8, "e4m3")
LUT = fit_lut("tanh", domain=(-3.0, 3.0)).lut

Answer = Callable[[Chip], Any]


def palette(bits: int, **more: Any) -> StorageForm:
    return StorageForm("palette", N, bits, **more)


def sparse(inner: StorageForm) -> StorageForm:
    return StorageForm("sparse", N, nonzeros=N // 2, inner=inner)


def becomes(form: StorageForm, conditions: Conditions = ORDINARY) -> Answer:
    return lambda chip: decide(form, chip, conditions).outcome


def takes(form: StorageForm, conditions: Conditions = ORDINARY) -> Answer:
    def answer(chip: Chip) -> Any:
        time = predict(form, decide(form, chip), chip, conditions)
        return None if time is None else time.alone

    return answer


def room(form: StorageForm) -> Answer:
    def answer(chip: Chip) -> Any:
        found = budget(form, decide(form, chip), chip)
        return found.cap, found.passes, found.working_set

    return answer


def packs(chip: Chip) -> Any:
    weight = KernelWeight((96, 64), np.ones((96, 64), np.float16), 16, scale=np.ones(96, np.float16), lut=LUT)
    try:
        return pack_unit(weight, chip)
    except UsageError as error:
        return error.rule


ACTS: dict[str, tuple[str, Any, Answer]] = {
    "gate_master": ("m1", 0, becomes(SPARSE)),
    "gate_palette": ("m1", 0, becomes(palette(4))),
    "gate_affine": ("m1", 1, becomes(INT8)),
    "gate_blockwise": ("m4", 1, becomes(BLOCKS)),
    "gate_e4m3": ("m1", 1, becomes(E4M3)),
    "palette_width_1": ("m1", "legal", becomes(palette(1))),
    "palette_width_2": ("m1", "as 4 bits", becomes(palette(2))),
    "palette_width_3": ("m4", "refused", becomes(palette(3))),
    "palette_width_4": ("m4", "refused", becomes(palette(4))),
    "palette_width_6": ("m1", "legal", becomes(palette(6))),
    "palette_width_8": ("m1", "refused", becomes(palette(8))),
    "asymmetric": ("m2", True, becomes(ZEROS)),
    "sparse_binary": ("m1", True, becomes(sparse(palette(4)))),
    "multi_palette": ("m1", True, becomes(palette(4, codebooks=16))),
    "vector_palette": ("m4", False, becomes(palette(4, vector=2))),
    "winograd": ("m1", False, lambda chip: winograd(DENSE, (3, 3), chip).eligible),
    "copies_per_core": ("m1", False, packs),
    "dense_cap": ("m1", 1 << 20, room(DENSE)),
    "streamed_cap": ("m1", 1 << 16, room(palette(4))),
    "working_set": ("m1", 1 << 30, room(DENSE)),
    "activation_lut_budget": ("m1", 80, packs),
    "palette_lut_budget": ("m1", 80, packs),
    "weight_tiles": ("m1", 4, packs),
    "ocg_channels": ("m1", 2, packs),
    "bandwidth": ("m3", 60.0, takes(DENSE)),
    "palette_rate": ("m1", 1.0, takes(palette(4))),
    "bandwidth_sparse": ("m1", 10.0, takes(SPARSE)),
    "bandwidth_sparse_palette": ("m4", 10.0, takes(sparse(palette(4)))),
    "mac_rate": ("m4", 1.0, takes(DENSE)),
    "detect_zeros": ("m1", False, takes(SPARSE, Conditions(positions=4096))),
    "floor": ("m1", 5.0, takes(DENSE)),
}


@pytest.mark.parametrize("key", ACTS)
def test_what_is_assumed_of_a_cell_changes_an_answer(key: str) -> None:
    name, value, answer = ACTS[key]
    chip = load_chip(name)
    assert answer(chip.assuming(key, value)) != answer(chip)


def test_every_cell_acts_or_is_refused() -> None:
    cells = {key for name in chip_names() for key in load_chip(name).cells}
    assert cells == {*ACTS, *IDLE}
    for key in IDLE:
        with pytest.raises(UsageError) as found:
            load_chip("m1").assuming(key, 1)
        assert found.value.rule == "ane.assume"


def of_label(label: str) -> StorageForm:
    if label.startswith("sparse+"):
        return sparse(of_label(label.removeprefix("sparse+")))
    if label.startswith("palette"):
        return palette(int(label.removeprefix("palette")))
    return {"e4m3": E4M3, "int8": INT8, "blockwise8": BLOCKS, "sparse": SPARSE}[label]


@pytest.mark.parametrize("outcome", ["streams", "folds", "refused"])
@pytest.mark.parametrize("chip", ["a12", "m1", "m6"])
def test_what_is_assumed_of_a_form_is_what_becomes_of_it(chip: str, outcome: str) -> None:
    for label in LABELS:
        known = load_chip(chip).assuming(label, outcome)
        found = decide(of_label(label), known)
        assert (found.outcome, found.evidence) == (outcome, "assumed"), label
    # What is said of a layer says more than what is said of a form.
    assert not decide(palette(4), load_chip(chip).assuming("palette4", "streams"), Conditions(stride=2)).streams


def test_three_bits_widen_to_four_and_wider_indices_do_not() -> None:
    for key in ("palette_width_4", "palette_width_6", "palette_width_8"):
        with pytest.raises(UsageError):
            load_chip("m1").assuming(key, "as 4 bits")


def test_contradictions_name_only_what_may_be_assumed() -> None:
    told = contradictions()
    assert "vector-palettized" in told
    for item in told.values():
        assert set(item.keys) <= {*ACTS, *LABELS}, item.key
