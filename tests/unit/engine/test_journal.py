"""Lines of the journal that wait to be written together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ingot.engine.journal import Journal
from ingot.stores.local import LocalTarget


def record(name: str) -> dict[str, Any]:
    return {"written": {"name": name, "blobs": []}}


def test_lines_that_wait_are_there_once_the_journal_is_closed(tmp_path: Path) -> None:
    journal, names = Journal(LocalTarget(tmp_path, late=True), "f"), [f"t{at}" for at in range(300)]
    journal.start([record("earlier")])
    for name in names:
        journal.append(record(name), 1)
    journal.close()
    found = Journal(LocalTarget(tmp_path), "f").earlier()
    assert [each["written"]["name"] for each in found] == ["earlier", *names]


@pytest.mark.parametrize("nbytes", [1, 1 << 20])
def test_a_run_that_is_stopped_while_lines_are_handed_over_loses_none(
    nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, names = Journal(LocalTarget(tmp_path, late=True), "f"), [f"t{at}" for at in range(300)]
    journal.start([])
    told = iter(names)

    def stopped(offset: int, data: object) -> None:
        raise KeyboardInterrupt

    def run() -> None:
        for name in told:
            journal.append(record(name), nbytes)

    with monkeypatch.context() as patched:
        patched.setattr(journal._sink, "write_at", stopped)
        with pytest.raises(KeyboardInterrupt):
            run()
    journal.close()
    found = Journal(LocalTarget(tmp_path), "f").earlier()
    assert [*(each["written"]["name"] for each in found), *told] == names
