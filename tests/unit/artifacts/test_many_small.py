"""Files of many small tensors of several types: values, findings, errors and progress."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ingot
import ingot.numpy
from ingot.artifacts.open import open_source
from ingot.errors import IngotError
from ingot.inspect.verify import examine
from ingot.model.reading.lazy_parts import LazyParts
from ingot.stores.location import Location

RNG = np.random.default_rng(5)
TYPES = [
    np.float16,
    np.float32,
    np.int8,
    np.uint64,
    np.complex64,
    np.bool_,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
]


def arrays() -> dict[str, Any]:
    """Small ones of several kinds, and others between them."""
    found: dict[str, Any] = {}
    for index in range(60):
        shape = [(16, 16), (3, 5), (7,), (), (2, 0), (1, 2, 3)][index % 6]
        values = RNG.integers(0, 2, shape).astype(TYPES[index // 6 % len(TYPES)])
        found[f"model.layers.{index}.weight"] = values
    found["large"] = RNG.integers(0, 9, (80, 80)).astype(np.float32)
    return found | {f"behind.{index}": np.full((4, 4), index, np.float16) for index in range(30)}


ARRAYS = arrays()


def source_of(path: Path) -> Path:
    ingot.save(path.with_name("source.safetensors"), ARRAYS)
    return path.with_name("source.safetensors")


def diff(path: Path) -> None:
    plain = {name: each.astype(np.float32) for name, each in ARRAYS.items() if each.dtype == np.float16}
    other = {name: each + RNG.normal(0, 1, each.shape).astype(np.float32) for name, each in plain.items()}
    ingot.save(path.with_name("base.safetensors"), plain)
    ingot.save(path.with_name("tuned.safetensors"), other)
    ingot.diff(
        path.with_name("base.safetensors"), path.with_name("tuned.safetensors"), path, strategy="sparse", measure=False
    )


FORMS: dict[str, Callable[[Path], object]] = {
    "a.zt": lambda path: ingot.save(path, ARRAYS),
    "sha.zt": lambda path: ingot.convert(source_of(path), path, digest="sha256", measure=False),
    "bare.zt": lambda path: ingot.convert(source_of(path), path, digest=None, measure=False),
    "two.zt": lambda path: ingot.convert(source_of(path), path, container="2", measure=False),
    "a.squizd": lambda path: ingot.save(path, {name: each for name, each in ARRAYS.items() if each.size}),
    "a.safetensors": lambda path: ingot.save(path, ARRAYS),
    "a.wdelta": diff,
}


@pytest.fixture(params=FORMS)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / str(request.param)
    FORMS[str(request.param)](path)
    return path


def outcome(path: Path, io: str = "pread") -> tuple[Any, Any]:
    """What loading gives or raises, and what ``verify`` finds."""
    loaded: Any
    try:
        found = ingot.numpy.load_file(path, io=io)
        loaded = [(name, str(each.dtype), each.shape, each.tobytes()) for name, each in found.items()]
    except IngotError as error:
        loaded = type(error), str(error)
    return loaded, ingot.verify(path, io=io)


def test_files_load_and_verify(file: Path) -> None:
    loaded, findings = outcome(file)
    assert not [item for item in findings if item.level == "error"]
    if file.suffix != ".wdelta":
        with ingot.open(file) as checkpoint:
            wanted = [(name, checkpoint[name].numpy().tobytes()) for name in checkpoint]
        assert [(name, data) for name, _, _, data in loaded] == wanted


def test_arrays_are_owned(file: Path) -> None:
    if file.suffix == ".wdelta":
        pytest.skip("sparse differences are decoded")
    for array in ingot.numpy.load_file(file).values():
        assert array.flags.writeable
        assert array.flags.owndata


def test_damage_is_found_in_each_tensor(file: Path) -> None:
    data = file.read_bytes()
    with ingot.open(file) as checkpoint:
        parts = [(name, part) for name in checkpoint for part in checkpoint[name].parts.values() if part.length]
        places = [(name, part.offset, part.length, part.digest) for name, part in parts]
    errors = 0
    for name, offset, length, digest in places[:: len(places) // 12]:
        for at, mask in ((offset, 0xFF), (offset + length - 1, 0x7F)):
            damaged = bytearray(data)
            damaged[at] ^= mask
            file.write_bytes(damaged)
            loaded, findings = outcome(file)
            bad = [item.where for item in findings if item.level == "error"]
            errors += bool(bad)
            if digest is not None:
                assert name in bad[0]
                assert name in loaded[1]
    assert errors or file.suffix == ".safetensors"


def test_several_damaged_tensors_are_all_found(tmp_path: Path) -> None:
    for form in ("a.zt", "two.zt", "a.squizd"):
        path = tmp_path / form
        FORMS[form](path)
        with ingot.open(path) as checkpoint:
            places = {name: checkpoint[name].parts["data"].offset for name in ("behind.3", "behind.4", "behind.29")}
        data = bytearray(path.read_bytes())
        for at in places.values():
            data[at] ^= 1
        path.write_bytes(data)
        loaded, findings = outcome(path)
        errors = [item for item in findings if item.level == "error"]
        assert [item.rule for item in errors] == ["part.digest-mismatch"] * 3
        assert all(name in item.where for name, item in zip(places, errors, strict=True))
        assert "behind.3" in loaded[1]


def test_a_file_that_shrinks_is_refused(file: Path) -> None:
    source = open_source(Location.parse(file), io="pread")
    data = file.read_bytes()
    try:
        file.write_bytes(data[: len(data) // 2])
        findings = examine(source)
    finally:
        source.close()
    assert any(item.level == "error" for item in findings)


def test_progress_counts_every_tensor(file: Path) -> None:
    events: list[Any] = []
    ingot.verify(file, progress=events.append)
    with ingot.open(file) as checkpoint:
        assert [event.item for event in events] == list(checkpoint)
        assert events[-1].processed == events[-1].total == checkpoint.nbytes


def test_names_are_found_by_a_test_of_the_tensors(file: Path) -> None:
    with ingot.open(file) as checkpoint:
        for test in (lambda tensor: tensor.size == 15, lambda tensor: tensor.dtype == "bool", lambda tensor: False):
            assert checkpoint.tensor_map.names_where(test) == [name for name in checkpoint if test(checkpoint[name])]


def test_parts_are_made_when_they_are_asked_for(file: Path) -> None:
    with ingot.open(file) as checkpoint:
        late = [tensor.parts for tensor in checkpoint.values() if isinstance(tensor.parts, LazyParts)]
        assert late or file.suffix in (".safetensors", ".wdelta")
        assert all(parts._parts is None for parts in late)
        for parts in late:
            role = next(iter(parts))
            assert len(parts) == len(list(parts)) == len(parts.items())
            assert parts[role] is parts[role]
            assert role in parts
            assert "other" not in parts
            assert repr(parts) == repr(dict(parts))
            assert isinstance(copy.copy(parts), dict)
            if file.suffix != ".wdelta":
                copied = pickle.loads(pickle.dumps(parts))
                assert bytes(copied[role].view()) == bytes(parts[role].view())
            with pytest.raises(KeyError):
                parts["other"]


def test_who_passes_keeps_nothing(file: Path) -> None:
    with ingot.open(file) as checkpoint:
        many = checkpoint.tensor_map
        for name in checkpoint:
            one, other = many.get_uncached(name), many.get_uncached(name)
            assert one is not other
            assert one.parts.keys() == other.parts.keys() == checkpoint[name].parts.keys()
            assert one.spec() == checkpoint[name].spec()
            for role, part in one.parts.items():
                kept = checkpoint[name].parts[role]
                assert (part.where, part.digest, part.offset, part.length) == (
                    kept.where, kept.digest, kept.offset, kept.length
                )  # fmt: skip
