"""Bytes, budgets and times: the formulas to the byte, and other people's measurements within 15 percent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import UnsupportedError
from ingot.ext.ane.chips.candidates import candidates, nearest_better, outcomes
from ingot.ext.ane.chips.chips import chip_names, load_chip
from ingot.ext.ane.chips.cost import budget, moved_bytes, predict, tables_fit
from ingot.ext.ane.chips.gates import ORDINARY, decide
from ingot.ext.ane.chips.measured import Row, measured_rows
from ingot.ext.ane.chips.storage_form import StorageForm

N = 2048 * 2048


@pytest.mark.parametrize(
    "row", measured_rows(), ids=lambda row: f"{row.chip} {row.weights} {row.label} {row.density:.2f}"
)
def test_predictions_are_within_15_percent(row: Row) -> None:
    assert abs(row.off) <= 0.15


def test_rows_cover_the_chips_that_were_measured() -> None:
    assert {row.chip for row in measured_rows()} == {"m1", "m2-pro", "m4", "m5-pro", "m6"}


@given(st.integers(0, 1 << 24), st.floats(0, 1))
def test_sparse_bytes_are_mask_and_halves(elements: int, density: float) -> None:
    kept = round(elements * density)
    form = StorageForm("sparse", elements, nonzeros=kept)
    assert form.streamed_bytes == -(-elements // 8) + 2 * kept


def test_sizes_to_the_byte() -> None:
    assert StorageForm("sparse", N, nonzeros=round(0.37 * N)).streamed_bytes / (2 * N) == pytest.approx(
        0.4325, abs=1e-6
    )
    assert StorageForm("palette", N, 4).streamed_bytes == N // 2 + 32
    assert StorageForm("palette", N, 8).streamed_bytes == N + 512
    assert StorageForm("palette", N, 4, codebooks=128, vector=2).streamed_bytes == N // 4 + 128 * 64
    assert StorageForm("int", N, 8, scales=2048).streamed_bytes == N + 4096
    assert (
        StorageForm("sparse", N, nonzeros=N // 2, inner=StorageForm("palette", N, 4)).streamed_bytes
        == N // 8 + N // 4 + 32
    )


def test_what_folds_moves_dense_and_what_is_refused_moves_nothing() -> None:
    m1 = load_chip("m1")
    for form, moved in (
        (StorageForm("int", N, 8), 2 * N),
        (StorageForm("palette", N, 4), N // 2 + 32),
        (StorageForm("palette", N, 2), 0),
    ):
        assert moved_bytes(form, decide(form, m1)) == moved
    three = StorageForm("palette", N, 3)
    assert moved_bytes(three, decide(three, load_chip("m4"))) == N // 2 + 32  # as 4 bits: 16 entries
    assert moved_bytes(three, decide(three, load_chip("m6"))) == 3 * N // 8 + 16


def test_the_budget_rule() -> None:
    """64 KiB for what is dense or folds, 16 MiB for what streams, per weight tile; more is cut into passes."""
    m1 = load_chip("m1")
    dense, streamed = StorageForm("dense", N), StorageForm("palette", N, 4)
    room = budget(dense, decide(dense, m1), m1)
    assert (room.cap, room.tile_bytes, room.passes) == (65536, 2 * N // 16, 8)
    room = budget(streamed, decide(streamed, m1), m1)
    assert (room.cap, room.passes) == (16 << 20, 1)
    exactly = StorageForm("dense", 65536 * 16 // 2)
    assert budget(exactly, decide(exactly, m1), m1).passes == 1  # split where the cap is below the demand, strictly


def test_tables_share_a_budget_that_nobody_published() -> None:
    form = StorageForm("palette", N, 8)
    with pytest.raises(UnsupportedError):
        tables_fit(form, load_chip("m1"), 86)
    assert tables_fit(form, load_chip("m1").assuming("palette_lut_budget", 598), 86)
    assert not tables_fit(form, load_chip("m1").assuming("palette_lut_budget", 597), 86)


def test_no_bandwidth_no_time() -> None:
    form = StorageForm("palette", N, 4)
    m3 = load_chip("m3")
    assert predict(form, decide(form, m3), m3) is None
    m3 = m3.assuming("bandwidth", 60.0)
    found = predict(form, decide(form, m3), m3)
    assert found is not None
    assert (found.share, found.evidence) == (pytest.approx((N / 2 + 32) / 60e6), "assumed")


@given(
    st.sampled_from([name for name in chip_names() if load_chip(name).published("bandwidth")]), st.integers(1, 1 << 28)
)
def test_streaming_is_never_slower_than_dense(chip: str, elements: int) -> None:
    known = load_chip(chip)
    dense = StorageForm("dense", elements)
    slowest = predict(dense, decide(dense, known), known)
    palette = StorageForm("palette", max(elements, 1024), 4)
    found = predict(palette, decide(palette, known), known)
    assert slowest is not None
    assert found is not None
    if elements >= 1024:
        assert found.alone <= slowest.alone


@pytest.mark.parametrize(
    ("chip", "form", "label", "exact"),
    [
        ("m1", StorageForm("dense", N), "palette8", False),
        ("m4", StorageForm("dense", N), "palette8", False),
        ("m1", StorageForm("int", N, 8, scales=1), "palette8", True),
        ("m1", StorageForm("int", N, 8, scales=2048), "palette8", False),
        ("m1", StorageForm("int", N, 4, scales=1), "palette4", True),
        ("m4", StorageForm("blockwise", N, 8, scales=N // 32), "int8", False),
        ("m5", StorageForm("blockwise", N, 4, scales=N // 32), "palette4", False),
        ("m1", StorageForm("palette", N, 6), "palette8", False),
        ("m1", StorageForm("foreign", N, codec="sparse_csr"), "sparse", True),
        ("a13", StorageForm("dense", N), None, False),
    ],
)
def test_the_nearest_better_form(chip: str, form: StorageForm, label: str | None, exact: bool) -> None:
    known = load_chip(chip)
    found = nearest_better(form, moved_bytes(form, decide(form, known)), 2048, outcomes(known, ORDINARY))
    assert (found.label if found else None) == label
    if found is not None:
        assert found.exact is exact
        assert found.moved < form.dense_bytes


def test_candidates_do_not_depend_on_size_for_their_outcome() -> None:
    for name in chip_names():
        chip = load_chip(name)
        known = outcomes(chip, ORDINARY)
        for label, form in candidates(1 << 12, 64):
            assert decide(form, chip).outcome == known[label].outcome
