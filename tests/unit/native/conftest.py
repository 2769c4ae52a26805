"""Every test here runs once per instruction set that this processor has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ingot.core import isa


@pytest.fixture(params=isa.available_isas(), autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    before = isa.isa()
    isa.set_isa(request.param)
    yield request.param
    isa.set_isa(before)
