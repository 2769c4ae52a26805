"""The chips' data: every cell has its evidence, what is not published is refused, what is assumed replaces."""

from __future__ import annotations

import pytest

from ingot.errors import UnsupportedError, UsageError
from ingot.ext.ane.chips.chips import EVIDENCE, LABELS, OUTCOMES, chip_names, contradictions, data, load_chip

M_SERIES = ("m1", "m2", "m3", "m4", "m5", "m6")


@pytest.mark.parametrize("name", chip_names())
def test_every_cell_has_evidence_and_source(name: str) -> None:
    chip = load_chip(name)
    told = contradictions()
    for key, cell in {**chip.cells, **chip.outcomes}.items():
        assert cell.evidence in EVIDENCE, key
        assert cell.source, key
        assert (cell.value is None) == (cell.evidence == "unknown"), key
        assert cell.contradiction is None or cell.contradiction in told, key
        assert cell.evidence != "contradicted" or cell.contradiction is not None, key
    for label, cell in chip.outcomes.items():
        assert label in LABELS
        assert cell.value in OUTCOMES


@pytest.mark.parametrize("name", chip_names())
def test_a_file_of_a_generation_says_nothing_twice_for_nothing(name: str) -> None:
    """A chip's cells are those of the common file, so that a misspelt key in a data file is found."""
    optional = {"bandwidth_sparse", "bandwidth_sparse_palette", "palette_rate", "mac_rate", "isa_version"}
    assert set(load_chip(name).cells) - optional == set(data("common")["cells"])


def test_all_macs_and_their_siblings_are_there() -> None:
    assert set(M_SERIES) <= set(chip_names())
    siblings = ("a14", "a15", "a16", "a17-pro", "a18", "a20-pro")
    for mac, phone in zip(M_SERIES, siblings, strict=True):
        assert load_chip(mac).value("isa_version") == load_chip(phone).value("isa_version")


@pytest.mark.parametrize(
    ("text", "name"), [("M1", "m1"), ("h13", "m1"), ("H13g", "m1-pro"), ("m5-max", "m5-pro"), ("H17s", "m5-pro")]
)
def test_aliases_and_targets(text: str, name: str) -> None:
    assert load_chip(text).name == name


def test_an_unknown_chip_is_refused() -> None:
    with pytest.raises(UsageError) as found:
        load_chip("m0")
    assert found.value.rule == "ane.chip"


def test_an_unpublished_cell_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError) as found:
        load_chip("m1").value("palette_lut_budget")
    assert found.value.rule == "ane.unknown-cell"
    with pytest.raises(UsageError) as wrong:
        load_chip("m1").value("gate_of_dreams")
    assert wrong.value.rule == "ane.cell"


def test_the_gates_are_the_chapters() -> None:
    """B7's table of feature bytes by generation, and B36's of E4M3."""
    for key, expected in {
        "gate_master": (0, 1, 1, 1, 1, 1, 1),
        "gate_affine": (0, 0, 1, 1, 1, 1, 1),
        "gate_blockwise": (0, 0, 0, 1, 1, 1, 1),
        "gate_e4m3": (0, 0, 0, 0, 0, 0, 1),
    }.items():
        chips = map(load_chip, ("a13", "m1", "m2", "m3", "m4", "m5", "a19"))
        assert tuple(chip.value(key) for chip in chips) == expected, key


def test_caps_are_the_same_everywhere() -> None:
    for name in chip_names():
        assert load_chip(name).value("dense_cap") == 64 * 1024
        assert load_chip(name).value("streamed_cap") == 16 * 1024 * 1024
        assert load_chip(name).value("activation_lut_budget") == (150 if name in ("a12", "a13") else 86)


def test_an_assumption_replaces_a_cell_and_says_so() -> None:
    chip = load_chip("m3").assuming("bandwidth", 60)
    assert (chip.value("bandwidth"), chip.cell("bandwidth").evidence) == (60, "assumed")
    assert load_chip("m3").published("bandwidth") is None
    assert chip.assuming("int8", "folds").outcomes["int8"].evidence == "assumed"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bandwidth", 0), ("bandwidth", "fast"), ("bandwidth", True), ("bandwidth", float("nan")), ("floor", -1),
        ("gate_affine", 2), ("palette_width_2", "yes"), ("asymmetric", 1), ("weight_tiles", 0), ("weight_tiles", 2.5),
        ("int8", "flies"), ("int9", "streams"), ("nothing", 1), ("weight_tiles", True), ("dense_cap", float("inf")),
    ],
)  # fmt: skip
def test_a_wrong_assumption_is_refused(key: str, value: object) -> None:
    with pytest.raises(UsageError) as found:
        load_chip("m1").assuming(key, value)
    assert found.value.rule == "ane.assume"
