"""No operation leaves a source tensor out without saying so, and none publishes if the loss was not accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot import views
from ingot.artifacts.account import account_of_conversion
from ingot.cli.main import run
from ingot.errors import IngotError, UnsupportedError
from ingot.formats.base import Catalog
from ingot.formats.safetensors.format import SafetensorsFormat
from ingot.model.account import Account, Omission, list_by_reason
from ingot.views.names import omit

UNREAD = {"inner.weight": "a palette with scales"}


def arrays(count: int = 3) -> dict[str, Any]:
    return {f"layers.{index}.up_proj.weight": np.full((4, 8), index, np.float32) for index in range(count)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    ingot.save(tmp_path / "a.safetensors", arrays())
    return tmp_path / "a.safetensors"


@pytest.fixture
def unread(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of which the reader says that it left something out."""
    read = SafetensorsFormat.read

    def incomplete(self: SafetensorsFormat, *arguments: Any, **options: Any) -> Catalog:
        return replace(read(self, *arguments, **options), unread=UNREAD)

    monkeypatch.setattr(SafetensorsFormat, "read", incomplete)
    return checkpoint


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(IngotError) as caught:
        call()
    return caught.value.rule or ""


def test_what_a_reader_left_out_is_lost(unread: Path, tmp_path: Path) -> None:
    out = tmp_path / "b.zt"
    with pytest.raises(UnsupportedError, match=r"inner\.weight \(a palette with scales\).*--drop"):
        ingot.convert(unread, out)
    assert not out.exists()
    report = ingot.convert(unread, out, drop=["inner.*"])
    assert report.dropped == UNREAD
    assert not report.exact
    assert "kept bit for bit" not in str(report.report())


def test_dry_runs_and_the_matrix_say_the_same(unread: Path, tmp_path: Path) -> None:
    from ingot.conversion.matrix import matrix
    from ingot.conversion.run import prepare

    assert refusal(lambda: prepare(unread, tmp_path / "b.zt")) == "account.lost"
    refused = [way for way in matrix(unread, to=["zt"]).tensors if way.action == "refused"]
    assert [(way.name, way.why) for way in refused] == [*UNREAD.items()]


def test_deltas_need_both_sides_complete(unread: Path, tmp_path: Path) -> None:
    assert refusal(lambda: ingot.diff(unread, unread, tmp_path / "d.zt")) == "account.lost"
    report = ingot.diff(unread, unread, tmp_path / "d.zt", drop=["inner.weight"])
    assert not report.exact
    assert refusal(lambda: ingot.patch(unread, tmp_path / "d.zt", tmp_path / "p.safetensors")) == "account.lost"
    assert not (tmp_path / "p.safetensors").exists()
    patched = ingot.patch(unread, tmp_path / "d.zt", tmp_path / "p.safetensors", drop=["inner.weight"])
    assert any("inner.weight" in note for note in patched.notes)


def test_incomplete_readings_are_never_identical(unread: Path) -> None:
    report = ingot.compare(unread, unread)
    assert not report.same
    assert {item.status for item in report.tensors} == {"identical"}
    assert "inner.weight" in str(report.unread)


@pytest.mark.parametrize(
    "command",
    [["inspect"], ["verify"], ["plan", "--chip", "m1"], ["report", "--json"], ["plan", "--chip", "m1", "--json"]],
)
def test_commands_name_what_was_not_read(command: list[str], unread: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command[0], str(unread), *command[1:]]) == 0
    assert "inner.weight" in capsys.readouterr().out


def test_a_dropped_tensor_is_left_out_even_if_the_target_could_hold_it(checkpoint: Path, tmp_path: Path) -> None:
    report = ingot.convert(checkpoint, tmp_path / "b.zt", drop=["layers.1.*", "nothing*"])
    with ingot.open(tmp_path / "b.zt") as result:
        assert set(result) == {"layers.0.up_proj.weight", "layers.2.up_proj.weight"}
    assert set(report.dropped) == {"layers.1.up_proj.weight"}
    assert [text for text in report.warnings if "nothing*" in text]
    assert not [text for text in report.warnings if "layers.1" in text]


def test_a_plan_carries_its_account(checkpoint: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert (
        run(["convert", str(checkpoint), str(tmp_path / "b.zt"), "--drop", "layers.1.*", "--plan-out", str(plan)]) == 0
    )
    assert list(json.loads(plan.read_text())["dropped"]) == ["layers.1.up_proj.weight"]
    report = ingot.execute(plan)
    assert set(report.dropped) == {"layers.1.up_proj.weight"}
    assert not report.exact


def test_views_know_what_each_tensor_is_made_of(checkpoint: Path) -> None:
    with ingot.open(checkpoint) as source:
        names = list(source)
        view = views.stack(source, {"both": names[:2]})
        view = views.rename(view, {"both": "pair", names[2]: "single"})
        view = views.unstack(view, {"pair": ["one", "two"]})
        assert view.origins_of("one") == view.origins_of("two") == tuple(names[:2])
        assert view.origins_of("single") == (names[2],)
        target = SafetensorsFormat()
        assert account_of_conversion(source, view, view, target, ()) == Account()
        assert set(account_of_conversion(source, view, ["one"], target, ()).missing) == {names[2]}
        fewer = omit(view, {"single": Omission("the program computes it", superseded=True)})
        account = account_of_conversion(source, fewer, fewer, target, ())
        assert account.superseded == {names[2]: "the program computes it"}
        assert account.is_complete


def test_a_long_list_is_cut_after_ten_names() -> None:
    account = Account(missing={f"t{index}": "no place" for index in range(25)})
    with pytest.raises(UnsupportedError, match=r"25 tensors.*t9 and 15 more \(no place\)"):
        account.require_complete("x")
    assert list_by_reason({"a": "x", "b": "y", "c": "x"}) == "a, c (x); b (y)"
