"""A base, and a library that is not there yet."""

from __future__ import annotations

from pathlib import Path

import pytest

import ingot
from tests.support.libraries import folder, weights


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return folder(tmp_path / "base", weights())


@pytest.fixture
def library(tmp_path: Path) -> ingot.Library:
    return ingot.Library(tmp_path / "library")
