"""A small, fixed part of ``make damage``: no byte of a covered artifact changes unseen, and no mutant ends badly."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from ingot.errors import ResourceError
from tests.damage import kills
from tests.support.damage import COVERED, UNCOVERED, Sample, exercise, flipped, judge, mutant, refusal, samples


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sample]:
    return {sample.name: sample for sample in samples(tmp_path_factory.mktemp("damage"))}


def test_every_artifact_is_listed(artifacts: dict[str, Sample]) -> None:
    assert sorted(artifacts) == sorted((*COVERED, *UNCOVERED))


@pytest.mark.parametrize("name", COVERED)
def test_no_byte_changes_unseen(artifacts: dict[str, Sample], name: str) -> None:
    sample, random = artifacts[name], Random(name)
    found = [judge(sample, flipped(sample, random))[0] for _ in range(250)]
    assert "SILENT" not in found
    assert found.count("harmless") < 100


@pytest.mark.parametrize("name", [*COVERED, *UNCOVERED])
def test_mutants_are_refused_by_a_rule_or_read(
    artifacts: dict[str, Sample], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGOT_MAX_DECODED", "64MiB")
    random = Random(name)
    rules = [exercise(artifacts[name], mutant(artifacts[name], random)) for _ in range(120)]
    assert len(set(rules)) > 3
    assert "none" not in rules


@pytest.mark.parametrize("name", [*COVERED, *UNCOVERED])
def test_damage_is_a_value_error(artifacts: dict[str, Sample], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the .wdelta document promises of its reader; too little memory for what a file states is none."""
    monkeypatch.setenv("INGOT_MAX_DECODED", "64MiB")
    sample, random = artifacts[name], Random(name)
    changed = [flipped(sample, random) for _ in range(60)] + [mutant(sample, random) for _ in range(120)]
    for refused in filter(None, (refusal(sample, files) for files in changed)):
        assert isinstance(refused, ValueError | ResourceError | MemoryError), repr(refused)


@pytest.mark.slow
def test_writers_that_are_killed_leave_nothing_or_everything(tmp_path: Path) -> None:
    assert [writer.name for writer in kills.writers(tmp_path) if kills.check(writer, 2, tmp_path / writer.name)] == []
