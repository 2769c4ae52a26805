"""What streams, folds and is refused: the chapter's tables, and properties that hold on every chip."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import UnsupportedError
from ingot.ext.ane.chips.chips import OUTCOMES, chip_names, load_chip
from ingot.ext.ane.chips.gates import ORDINARY, Conditions, decide, legal_vector
from ingot.ext.ane.chips.storage_form import StorageForm, form_of
from ingot.ext.ane.chips.winograd import winograd

N = 1 << 16
DENSE = StorageForm("dense", N)
INT8 = StorageForm("int", N, 8, scales=256)
BLOCKS = StorageForm("blockwise", N, 8, scales=N // 32)
SPARSE = StorageForm("sparse", N, nonzeros=N // 2)


def palette(bits: int, **more: object) -> StorageForm:
    return StorageForm("palette", N, bits, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("form", "outcomes"),
    [
        # Table 25.2 and B7's; int8 on the M5 and blockwise from H15 on are contradicted and taken to fold.
        (INT8, ("folds", "streams", "folds", "streams")),
        (palette(4), ("streams", "streams", "streams", "streams")),
        (SPARSE, ("streams", "streams", "streams", "streams")),
        (BLOCKS, ("folds", "folds", "folds", "folds")),
    ],
)
def test_the_chapters_four_codecs(form: StorageForm, outcomes: tuple[str, ...]) -> None:
    chips = ("m1", "m2", "m5", "m6")
    assert tuple(decide(form, load_chip(chip)).outcome for chip in chips) == outcomes


def test_only_palettes_of_4_and_8_bits_and_sparsity_stream_on_the_m1() -> None:
    m1 = load_chip("m1")
    forms = [DENSE, INT8, BLOCKS, SPARSE, *map(palette, (1, 2, 3, 4, 6, 8)), StorageForm("int", N, 4, scales=1)]
    forms += [StorageForm("fp8", N, 8, "e4m3"), StorageForm("fp8", N, 8, "e5m2"), StorageForm("foreign", N)]
    streaming = {form.label for form in forms if decide(form, m1).streams}
    assert streaming == {"sparse", "palette4", "palette8"}


def test_the_m1s_legal_space() -> None:
    """The paragraph below table 25.5: what is absent from the M1's codegen."""
    m1 = load_chip("m1")
    sparse_indices = StorageForm("sparse", N, nonzeros=9, inner=palette(4))
    for absent in (palette(3), palette(6), palette(4, codebooks=16), sparse_indices, StorageForm("fp8", N, 8, "e4m3")):
        assert decide(absent, m1).outcome == "refused", absent
    assert decide(palette(4, vector=2), m1).streams
    assert decide(INT8, m1).outcome == "folds"
    assert decide(StorageForm("int", N, 8, scales=1, zero_point=True), m1).gate == "asymmetric"


def test_four_bits_have_no_affine_path() -> None:
    for name in chip_names():
        assert decide(StorageForm("int", N, 4, scales=1), load_chip(name)).outcome == "folds"


def test_e4m3_needs_its_byte_and_e5m2_folds() -> None:
    e4m3, e5m2 = StorageForm("fp8", N, 8, "e4m3"), StorageForm("fp8", N, 8, "e5m2")
    for name in chip_names():
        chip = load_chip(name)
        assert decide(e4m3, chip).outcome == ("streams" if chip.value("gate_e4m3") else "refused")
        assert decide(e5m2, chip).outcome == "folds"
    assert decide(e4m3, load_chip("a19")).streams
    assert decide(e4m3, load_chip("a19"), Conditions(mutable=True)).outcome == "folds"
    assert decide(palette(4, entry="e4m3"), load_chip("m5")).outcome == "refused"


def test_the_vector_mask() -> None:
    assert [size for size in range(-2, 70) if legal_vector(size)] == [1, 2, 4]
    for size in (3, 5, 8):
        assert decide(palette(4, vector=size), load_chip("m6")).gate == "vector mask 0x36"


def test_a_quantized_palette_has_fewer_than_256_entries() -> None:
    assert decide(palette(8, entry="int8"), load_chip("m6")).gate == "quantized-palette"
    assert decide(palette(6, entry="int8"), load_chip("m6")).streams


@pytest.mark.parametrize("form", [palette(4), SPARSE, INT8])
@pytest.mark.parametrize(
    "conditions",
    [Conditions(stride=2), Conditions(dilation=2), Conditions(tile_overlap=True), Conditions(mutable=True)],
)
def test_the_masters_conditions_fold_what_would_stream(form: StorageForm, conditions: Conditions) -> None:
    chip = load_chip("m2")
    assert decide(form, chip).streams
    assert decide(form, chip, conditions).outcome == "folds"


def test_a_mask_without_a_zero_is_compiled_dense() -> None:
    assert decide(StorageForm("sparse", N, nonzeros=N), load_chip("m4")).gate == "density"


def test_nothing_streams_without_the_master_gate() -> None:
    for form in (palette(4), SPARSE, INT8, BLOCKS):
        assert decide(form, load_chip("a13")).gate == "gate_master (0x48f)"


def test_what_is_contradicted_is_marked_and_can_be_overridden() -> None:
    m5 = load_chip("m5")
    found = decide(INT8, m5)
    assert (found.outcome, found.evidence, found.contradictions) == ("folds", "contradicted", ("int8-m5",))
    other = decide(INT8, m5.assuming("int8", "streams"))
    assert (other.outcome, other.evidence) == ("streams", "assumed")
    assert decide(palette(2), m5.assuming("palette_width_2", "legal")).streams
    assert not decide(palette(4), m5.assuming("gate_master", 0)).streams


def test_an_unpublished_gate_is_refused_not_guessed() -> None:
    chip = load_chip("a12").assuming("gate_master", 1)
    with pytest.raises(UnsupportedError) as found:
        decide(palette(4), chip)
    assert found.value.rule == "ane.unknown-cell"


def test_three_bits_are_stored_as_four_before_h18() -> None:
    assert decide(palette(3), load_chip("m4")).stored_bits == 4
    assert decide(palette(3), load_chip("m6")).stored_bits is None


FORMS = st.builds(
    StorageForm,
    category=st.sampled_from(("dense", "int", "blockwise", "palette", "foreign", "fp8")),
    elements=st.integers(0, 1 << 30),
    bits=st.integers(1, 8),
    entry=st.sampled_from(("half", "int8", "uint8")),
    zero_point=st.booleans(),
    codebooks=st.sampled_from((1, 2, 64)),
    vector=st.integers(1, 6),
    scales=st.integers(0, 4096),
)


@given(st.sampled_from(chip_names()), FORMS, st.booleans(), st.integers(1, 2), st.booleans())
def test_every_form_has_an_answer_with_evidence(
    chip: str, form: StorageForm, mutable: bool, stride: int, sparse: bool
) -> None:
    if sparse and form.category not in ("foreign", "fp8"):
        form = StorageForm(
            "sparse", form.elements, nonzeros=form.elements // 3, inner=None if form.category == "dense" else form
        )
    conditions = Conditions(stride=stride, mutable=mutable)
    found = decide(form, load_chip(chip), conditions)
    assert found.outcome in (*OUTCOMES, "dense")
    assert found.reason
    assert found.source
    if conditions != ORDINARY or not load_chip(chip).value("gate_master"):
        assert not found.streams  # the master gate comes before everything that could stream
    if found.streams and form.category == "palette":
        assert form.bits in (1, 2, 3, 4, 6, 8)
        assert legal_vector(form.vector)


@given(st.sampled_from(("m1", "a14", "m1-pro")), FORMS)
def test_h13_streams_nothing_but_the_chapters_forms(chip: str, form: StorageForm) -> None:
    found = decide(form, load_chip(chip))
    assert found.streams == (
        form.category == "palette"
        and form.bits in (4, 8)
        and form.codebooks == 1
        and form.vector in (1, 2, 4)
        and (form.entry == "half" or form.bits < 8)
    )


@pytest.mark.parametrize(
    ("form", "kernel", "conditions", "eligible"),
    [
        (DENSE, (3, 3), ORDINARY, True),
        (INT8, (3, 5), ORDINARY, True),
        (palette(4), (1, 3), ORDINARY, True),
        (DENSE, (1, 1), ORDINARY, False),
        (DENSE, (3, 7), ORDINARY, False),
        (DENSE, (5, 5), ORDINARY, False),
        (DENSE, (3, 3), Conditions(stride=2), False),
        (SPARSE, (3, 3), ORDINARY, False),  # the clash with compression
        (palette(4, entry="uint8"), (3, 3), ORDINARY, False),
        (StorageForm("fp8", N, 8, "e4m3"), (3, 3), ORDINARY, False),
    ],
)
def test_winograd(form: StorageForm, kernel: tuple[int, int], conditions: Conditions, eligible: bool) -> None:
    found = winograd(form, kernel, load_chip("m1"), conditions)
    assert found.eligible is eligible
    assert bool(found.reason) is not eligible
    assert winograd(DENSE, (3, 3), load_chip("a13")).eligible is False
    assert found.evidence == "contradicted"


@pytest.mark.parametrize(
    ("codec", "params", "parts", "label"),
    [
        ("dense", {}, {}, "dense"),
        ("affine", {"bits": 8, "granularity": "row", "signed": True}, {}, "int8"),
        ("affine", {"bits": 8, "granularity": "tensor"}, {}, "int8"),
        ("affine", {"bits": 8, "granularity": "group", "group_size": 16}, {}, "blockwise8"),
        ("affine", {"bits": 4, "group_size": 64, "packing": "8_per_i32"}, {}, "int4"),
        ("affine", {"bits": 8, "granularity": "blocks", "block": [1, 64]}, {}, "int8"),
        ("affine", {"bits": 8, "granularity": "blocks", "block": [8, 1]}, {}, "blockwise8"),
        ("palette", {"bits": 4, "groups": [1, 1], "vector_size": 1}, {"codebook": "f16"}, "palette4"),
        ("sparse_mask", {"nnz": 9, "inner": {"codec": "dense", "params": {}}}, {}, "sparse"),
        ("sparse_mask", {"nnz": 9, "inner": {"codec": "palette", "params": {"bits": 6}}}, {}, "sparse+palette6"),
        ("tca_tbe", {}, {}, "foreign"),
        ("palette", {"bits": "4"}, {}, "foreign"),
        ("palette", {}, {}, "foreign"),
        ("sparse_mask", {"nnz": -1, "inner": {"codec": "dense"}}, {}, "foreign"),
        ("sparse_mask", {"nnz": 9, "inner": 3}, {}, "foreign"),
        ("affine", {"bits": 8, "granularity": "group", "group_size": 0}, {}, "foreign"),
        ("affine", {"bits": 8, "granularity": "blocks", "block": [8]}, {}, "foreign"),
    ],
)
def test_forms_of_stored_tensors(codec: str, params: dict[str, object], parts: dict[str, str], label: str) -> None:
    assert form_of(codec, (16, 64), "f16", params, parts).label == label


def test_zero_points_are_seen() -> None:
    def found(params: dict[str, object], parts: dict[str, str] | None = None) -> bool:
        return form_of("affine", (4, 8), "f16", {"bits": 8, "granularity": "row", **params}, parts).zero_point

    assert not found({"zeros": False})
    assert found({"zeros": True})
    assert found({"zero_point": 7})
    assert found({}, {"zeros": "u8"})
