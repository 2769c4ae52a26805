"""Operations accept a location where they accept text or a path."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.errors import UsageError
from ingot.inspect.inspect import inspect
from ingot.stores.location import Location
from ingot.stores.memory import shared_files


def weights(location: str | Location) -> list[float]:
    with ingot.open(location) as checkpoint:
        return checkpoint["w"].numpy().ravel().tolist()


@pytest.fixture
def base(tmp_path: Path) -> Location:
    location = Location.parse(tmp_path / "base.safetensors")
    ingot.save(location, {"w": np.arange(64, dtype=np.float32).reshape(8, 8)})
    return location


def test_a_location_is_saved_opened_inspected_and_verified(base: Location) -> None:
    with ingot.open(base) as checkpoint:
        assert checkpoint.location == base.display
        assert checkpoint["w"].numpy()[1, 0] == 8
    assert inspect(base).path == base.display
    assert not [item for item in ingot.verify(base) if item.level == "error"]


def test_a_location_is_converted_and_compared(base: Location) -> None:
    target = base.parent.child("model.zt")
    report = ingot.convert(base, target)
    assert (report.source, report.destination) == (base.display, target.display)
    assert weights(base) == weights(target)
    assert ingot.compare(base, target).a == base.display
    folder = Location.parse(f"{base.parent.display}/folder.v2/")
    assert ingot.convert(base, folder).destination == folder.display
    assert folder.find()[1] == ""


def test_deltas_are_made_and_applied_by_locations(base: Location) -> None:
    tuned, delta, again = (base.parent.child(name) for name in ("tuned.zt", "delta.zt", "again.zt"))
    ingot.save(tuned, {"w": np.arange(64, dtype=np.float32).reshape(8, 8) + 1})
    ingot.diff(base, tuned, delta, allow_larger=True)
    ingot.patch(base, delta, again)
    assert weights(tuned) == weights(again)
    ingot.patch(base, [delta], again, overwrite=True)
    assert weights(tuned) == weights(again)


def test_a_library_and_a_report_accept_locations(base: Location) -> None:
    library = ingot.Library(base.parent.child("lib"))
    library.add(base, "m")
    assert repr(library) == f"Library({base.parent.child('lib').display!r})"
    got = library.get("m", base.parent.child("got.safetensors"))
    assert weights(base) == weights(got.destination)
    page = base.parent.child("page.html")
    ingot.report(base, out=page)
    assert b"<html" in page.head(400)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "open.missing"),
        ("nothing/here/at all", "open.missing"),
        ("ftp://user:SECRET@host/x?sig=SECRET", "open.url"),
        ("file:///nobody/nothing", "open.missing"),
        ("memory:test_locations_none/x", "open.missing"),
        ("a\0b", "store.path"),
    ],
)
def test_a_missing_source_has_one_error_whatever_names_it(text: str, rule: str) -> None:
    messages = set()
    for path in (text, text if "\0" in text else Location.parse(text)):
        with pytest.raises(UsageError) as caught:
            ingot.open(path)
        assert caught.value.rule == rule
        messages.add(str(caught.value))
    assert len(messages) == 1
    assert not any("SECRET" in message for message in messages)


def test_a_folder_in_memory_with_a_space_in_its_name_is_copied_with_its_companions(base: Location) -> None:
    files = shared_files("test_locations")
    files["a b/model.safetensors"] = bytearray(base.read())
    files["a b/config.json"] = bytearray(b'{"model_type": "none"}')
    ingot.convert("memory:test_locations/a b", base.parent.child("copied"), keep_names=True)
    assert base.parent.child("copied").child("config.json").read() == b'{"model_type": "none"}'
