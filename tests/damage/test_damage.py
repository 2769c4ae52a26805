"""A small, fixed part of ``make damage``: no byte of a covered artifact changes unseen, and no mutant ends badly."""

from __future__ import annotations

from random import Random

import pytest

from ingot.testing.damage import COVERED, UNCOVERED, Sample, exercise, flipped, judge, mutant, samples


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
