"""Activation tables: the record of 43 entries, its evaluation in half precision, fits, plots."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.errors import FormatError, UsageError
from ingot.ext.ane.chips.activation import ENTRIES, FUNCTIONS, SEGMENTS, Fitted, fit_lut, read_lut
from ingot.ext.ane.chips.lut_plot import svg_plot, text_plot


@pytest.fixture(scope="module")
def fits() -> dict[str, Fitted]:
    return {name: fit_lut(name) for name in FUNCTIONS}


# The engine's own errors were measured as 0.0034, 0.0017 and 0.0059 for the first three (B3).
LARGEST = {"sigmoid": 0.0015, "tanh": 0.0026, "gelu": 0.0092, "silu": 0.017, "exp": 0.003, "rsqrt": 0.015}


@pytest.mark.parametrize(
    ("name", "outside", "domain"),
    [
        ("tanh", "clamp", (-3.0, 3.0)),
        ("tanh", "line", (-3.0, 3.0)),  # 0.00335: less than what distances before rounding rank first
        ("gelu", "line", (-4.0, 4.0)),  # 0.00436
        ("gelu", "best", (-3.0, 5.0)),
        ("rsqrt", "line", (0.25, 4.0)),
    ],
)
def test_no_round_domain_errs_less_than_the_fitted_one(
    fits: dict[str, Fitted], name: str, outside: str, domain: tuple[float, float]
) -> None:
    fitted = fits[name] if outside == "clamp" else fit_lut(name, outside=outside)
    assert fitted.max_error <= fit_lut(name, domain=domain, outside=outside).max_error


def test_beyond_the_domain_the_end_knots_hold_unless_lines_are_asked_for(fits: dict[str, Fitted]) -> None:
    """B25: the output clamps to the end knot; lines are inferred, and an option."""
    for fitted in fits.values():
        lut = fitted.lut
        far = np.array([float(lut.lo) - 3, float(lut.hi) + 3])
        np.testing.assert_array_equal(lut(far), lut.knots[[0, -1]])
    line = fit_lut("gelu", domain=(-4.0, 4.0), outside="line").lut
    assert abs(float(line(9.0)) - 9) < 0.02
    assert fit_lut("gelu", domain=(-4.0, 4.0), outside="best").lut.outside == "line"
    with pytest.raises(UsageError) as found:
        fit_lut("gelu", outside="wrap")
    assert found.value.rule == "ane.function"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_are_what_the_report_says(fits: dict[str, Fitted], name: str) -> None:
    fitted, (function, interval) = fits[name], FUNCTIONS[name]
    x = np.linspace(*interval, 20011).astype(np.float16)
    x = x[(x >= interval[0]) & (x <= interval[1])]
    error = np.abs(fitted.lut(x).astype(np.float64) - function(x.astype(np.float64)))
    assert float(error.max()) <= fitted.max_error <= LARGEST[name]
    assert fitted.rms_error <= fitted.max_error
    at = np.array([fitted.worst_x])
    assert abs(float(fitted.lut(at)[0]) - float(function(at)[0])) == fitted.max_error


@pytest.mark.parametrize("name", FUNCTIONS)
def test_records_have_43_entries_and_come_back(fits: dict[str, Fitted], name: str) -> None:
    lut = fits[name].lut
    entries = lut.entries()
    assert entries.shape == (ENTRIES,)
    assert entries.nbytes == 86  # the budget from H13 on
    x = np.linspace(-30, 30, 501)
    np.testing.assert_array_equal(read_lut(entries)(x), lut(x))
    assert lut([np.nan])[0] == np.inf


@pytest.mark.parametrize("outside", ["clamp", "line"])
def test_evaluation_is_half_precision_step_by_step(outside: str) -> None:
    """Affine map, segment, fraction, interpolation, lines up to the clamps: each rounded to float16, step by step."""
    lut = fit_lut(np.tanh, (-4.0, 4.0), (-3.0, 3.0), outside).lut
    half = np.float16
    for x in np.linspace(-5, 5, 301).astype(half):
        held = min(max(x, lut.lo), lut.hi)
        u = half(half(held * lut.scale) + lut.shift)
        segment = min(math.floor(2 * float(u)) + 16, SEGMENTS - 1)
        fraction = half(2 * float(u) + 16 - segment)
        if -8 <= u <= 8:
            step = half(lut.knots[segment + 1] - lut.knots[segment])
            expected = half(lut.knots[segment] + half(fraction * step))
        else:
            slope, offset = lut.tails[:2] if u < -8 else lut.tails[2:]
            expected = half(half(slope * held) + offset)
        assert lut(x) == expected


def test_any_callable_and_a_given_domain() -> None:
    fitted = fit_lut(lambda x: x * x, (-2.0, 2.0), (-2.0, 2.0))
    assert (float(fitted.lut.lo), float(fitted.lut.hi)) == (-2.0, 2.0)
    assert fitted.max_error <= (4 / SEGMENTS) ** 2 / 8 + 0.5 * 2**-7 + 4 * 2**-10  # chord, place, rounding


def test_fitting_the_domain_beats_the_whole_interval() -> None:
    function, interval = FUNCTIONS["gelu"]
    assert fit_lut(function, interval, outside="line").max_error < fit_lut(function, interval, interval).max_error


@settings(max_examples=8)
@given(st.floats(-8, 7), st.floats(0.5, 8), st.floats(-3, 3), st.floats(-3, 3))
def test_lines_are_exact_to_rounding(low: float, width: float, slope: float, offset: float) -> None:
    interval = (low, low + width)
    fitted = fit_lut(lambda x: slope * x + offset, interval, interval)
    largest = abs(offset) + abs(slope) * 16
    assert fitted.max_error <= 8 * 2**-11 * largest + 1e-4


@pytest.mark.parametrize(
    ("name", "interval", "domain"),
    [
        ("relu6", None, None),
        ("gelu", (1.0, 1.0), None),
        ("gelu", (0.0, 1e9), None),
        ("exp", (0.0, 100.0), None),  # values past float16
        ("rsqrt", (-1.0, 1.0), None),
        ("tanh", (-1.0, 1.0), (1.0, -1.0)),
        ("tanh", (float("nan"), 1.0), None),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_cannot_be_fitted_is_refused(
    name: str, interval: tuple[float, float] | None, domain: tuple[float, float] | None
) -> None:
    with pytest.raises(UsageError) as found:
        fit_lut(name, interval, domain)
    assert found.value.rule == "ane.function"


def test_a_callable_needs_an_interval() -> None:
    with pytest.raises(UsageError):
        fit_lut(np.tanh)


@pytest.mark.parametrize(
    ("index", "value"), [(0, np.nan), (1, -100), (2, np.nan), (3, 0), (3, -1), (10, np.inf), (41, 1), (42, 0)]
)
def test_hostile_records_are_refused(fits: dict[str, Fitted], index: int, value: float) -> None:
    entries = fits["tanh"].lut.entries()
    entries[index] = value
    with pytest.raises(FormatError) as found:
        read_lut(entries)
    assert found.value.rule == "ane.lut"


@given(st.binary(min_size=86, max_size=86))
def test_any_86_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        lut = read_lut(np.frombuffer(data, np.float16))
    except FormatError:
        return
    assert lut(np.linspace(-5, 5, 11)).shape == (11,)


def test_plots(fits: dict[str, Fitted]) -> None:
    function, _ = FUNCTIONS["silu"]
    text = text_plot(fits["silu"], function)
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("*") == 72
    root = ET.fromstring(svg_plot(fits["silu"], function, "silu <&>"))
    names = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert names.count("polyline") == 3
    assert 0 < names.count("circle") <= 33
