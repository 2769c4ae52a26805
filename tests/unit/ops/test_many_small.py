"""Many small tensors are read together: values, findings and errors are those of each read by itself."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ingot
import ingot.numpy
from ingot.core.dtypes import DTYPES
from ingot.engine import bulk as engine
from ingot.errors import IngotError
from ingot.model import bulk as model
from ingot.model.bulk import number_kinds
from ingot.model.late_parts import LateParts
from ingot.model.lazy import Many
from ingot.model.tensor import Tensor
from ingot.ops.check import tensors
from ingot.ops.check.findings import Finding
from ingot.ops.check.verify import examine
from ingot.ops.load import owned
from ingot.ops.open import open_source
from tests.support import zt

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


def alone(_: object, names: Iterator[str]) -> Iterator[str]:
    return iter(names)


def outcome(path: Path, io: str = "pread") -> tuple[Any, Any]:
    """What loading gives or raises, and what ``verify`` finds."""
    loaded: Any
    try:
        found = ingot.numpy.load_file(path, io=io)
        loaded = [(name, str(each.dtype), each.shape, each.tobytes()) for name, each in found.items()]
    except IngotError as error:
        loaded = type(error), str(error)
    return loaded, ingot.verify(path, io=io)


def both(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    together = outcome(path)
    with monkeypatch.context() as patch:
        patch.setattr(owned, "groups", alone)
        patch.setattr(tensors, "groups", alone)
        by_itself = outcome(path)
    assert together == by_itself
    return together


@pytest.mark.parametrize(("count", "nbytes"), [(512, 1 << 19), (1, 1 << 19), (7, 1000)])
def test_whole_files_are_the_same(file: Path, monkeypatch: pytest.MonkeyPatch, count: int, nbytes: int) -> None:
    monkeypatch.setattr(engine, "_COUNT", count)
    monkeypatch.setattr(engine, "_BYTES", nbytes)
    loaded, findings = both(file, monkeypatch)
    assert not [item for item in findings if item.level == "error"]
    if file.suffix != ".wdelta":
        with ingot.open(file) as checkpoint:
            wanted = [(name, checkpoint[name].numpy().tobytes()) for name in checkpoint]
        assert [(name, data) for name, _, _, data in loaded] == wanted


def test_most_are_read_together(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def counted(tensor: Tensor) -> list[Finding]:
        seen.append(tensor.name)
        return checked(tensor)

    checked = tensors.check_tensor
    monkeypatch.setattr(tensors, "check_tensor", counted)
    ingot.verify(file)
    with ingot.open(file) as checkpoint:
        assert len(seen) < len(checkpoint) / 2
        for name in seen:  # the others are those that are not plain
            tensor = checkpoint[name]
            few = 0 < tensor.nbytes <= engine.EACH and DTYPES[tensor.dtype].kind != "b"
            assert not (few and tensor.codec == "dense" and tensor.parts["data"].type is None)


def test_arrays_are_owned(file: Path) -> None:
    if file.suffix == ".wdelta":
        pytest.skip("sparse differences are decoded")
    for array in ingot.numpy.load_file(file).values():
        assert array.flags.writeable
        assert array.flags.owndata


def test_damage_is_told_as_of_each_by_itself(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
            loaded, findings = both(file, monkeypatch)
            bad = [item.where for item in findings if item.level == "error"]
            errors += bool(bad)
            if digest is not None:
                assert name in bad[0]
                assert name in loaded[1]
    assert errors or file.suffix == ".safetensors"


def test_several_damaged_tensors_are_all_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for form in ("a.zt", "two.zt", "a.squizd"):
        path = tmp_path / form
        FORMS[form](path)
        with ingot.open(path) as checkpoint:
            places = {name: checkpoint[name].parts["data"].offset for name in ("behind.3", "behind.4", "behind.29")}
        data = bytearray(path.read_bytes())
        for at in places.values():
            data[at] ^= 1
        path.write_bytes(data)
        loaded, findings = both(path, monkeypatch)
        errors = [item for item in findings if item.level == "error"]
        assert [item.rule for item in errors] == ["part.digest-mismatch"] * 3
        assert all(name in item.where for name, item in zip(places, errors, strict=True))
        assert "behind.3" in loaded[1]


def test_a_file_that_shrinks_is_told_as_of_each_by_itself(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> Any:
        source = open_source(file, io="pread")
        data = file.read_bytes()
        try:
            file.write_bytes(data[: len(data) // 2])
            return [(item.level, item.rule, item.where) for item in examine(source)]
        finally:
            source.close()
            file.write_bytes(data)

    together = found()
    with monkeypatch.context() as patch:
        patch.setattr(tensors, "groups", alone)
        assert found() == together
    assert any(level == "error" for level, _, _ in together)


def test_progress_counts_every_tensor(file: Path) -> None:
    events: list[Any] = []
    ingot.verify(file, progress=events.append)
    with ingot.open(file) as checkpoint:
        assert [event.item for event in events] == list(checkpoint)
        assert events[-1].done == events[-1].total == checkpoint.nbytes


def test_kinds_are_counted_as_one_by_one(file: Path) -> None:
    with ingot.open(file) as checkpoint:
        many = checkpoint.many
        assert many.bulk is not None
        for names in (None, list(checkpoint)[::3]):
            kinds, counts = many.counted(names)
            chosen = list(checkpoint) if names is None else names
            assert sum(counts) == len(chosen)
            for ask in (
                lambda tensor: tensor.nbytes,
                lambda tensor: tensor.size,
                lambda tensor: len(str(tensor.params)),
            ):
                total = sum(count * ask(kind) for kind, count in zip(kinds, counts, strict=True))
                assert total == sum(ask(checkpoint[name]) for name in chosen)
        for test in (lambda tensor: tensor.size == 15, lambda tensor: tensor.dtype == "bool", lambda tensor: False):
            assert many.where(test) == [name for name in checkpoint if test(checkpoint[name])]


def test_sizes_with_one_key_are_no_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, starts = np.array([2, 3, 3, 2, 2, 3, 6]), np.array([0, 2, 4, 6, 7])
    types, meant = np.array([0, 0, 1, 0]), np.ones(4, bool)
    numbers, kinds = number_kinds(types, ["f32", "f16"], sizes, starts, meant)
    assert [kinds[number] for number in numbers.tolist()] == [
        ("f32", (2, 3)), ("f32", (3, 2)), ("f16", (2, 3)), ("f32", (6,))
    ]  # fmt: skip
    monkeypatch.setattr(model, "_FACTOR", 0)  # now all have the same
    numbers, kinds = number_kinds(types, ["f32", "f16"], sizes, starts, np.array([True, True, True, False]))
    assert sorted(numbers.tolist()) == [-1, -1, -1, 0]
    assert kinds[0] == ("f32", (2, 3))


def test_a_tensor_without_parts_may_be_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = {f"t{at}": zt.tensor(components={"data": zt.component(offset=64 * at)}) for at in (1, 2, 3)}
    nothing = {"nothing": {"shape": (4,), "format": "other", "components": {}}}
    path = tmp_path / "a.zt"
    path.write_bytes(zt.zt_file(zt.manifest(dense | nothing), {64 * at: bytes([at]) * 16 for at in (1, 2, 3)}))
    both(path, monkeypatch)
    with ingot.open(path) as checkpoint:
        bulk = checkpoint.many.bulk
        assert bulk is not None
        assert bulk.nbytes.size == len(checkpoint) == 4
        loaded = owned.load_owned(checkpoint, list(dense))
    assert [each.tobytes() for each in loaded.values()] == [bytes([at]) * 16 for at in (1, 2, 3)]


def test_of_kinds_only_those_of_the_group_are_looked_at(file: Path) -> None:
    class Kinds(list[tuple[str, tuple[int, ...]]]):
        def __iter__(self) -> Iterator[tuple[str, tuple[int, ...]]]:
            raise AssertionError("a file may have as many kinds as tensors")

    with ingot.open(file) as checkpoint:
        bulk = checkpoint.many.bulk
        assert bulk is not None
        few = replace(bulk, kinds=Kinds(bulk.kinds))
        group = next(item for item in engine.groups(bulk, checkpoint) if isinstance(item, list))
        assert engine.whole(few, group) == engine.whole(bulk, group)
        if file.suffix != ".wdelta":
            pairs = zip(engine.load(few, group), engine.load(bulk, group), strict=True)
            assert all(one is not None and other is not None and (one == other).all() for one, other in pairs)


def test_parts_are_made_when_they_are_asked_for(file: Path) -> None:
    with ingot.open(file) as checkpoint:
        late = [tensor.parts for tensor in checkpoint.values() if isinstance(tensor.parts, LateParts)]
        assert len(late) > len(checkpoint) / 2
        assert all(parts._made is None for parts in late)
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
        many = checkpoint.many
        for name in checkpoint:
            one, other = many.passing(name), many.passing(name)
            assert one is not other
            assert one.parts.keys() == other.parts.keys() == checkpoint[name].parts.keys()
            assert one.spec() == checkpoint[name].spec()
            for role, part in one.parts.items():
                kept = checkpoint[name].parts[role]
                assert (part.where, part.digest, part.offset, part.length) == (
                    kept.where, kept.digest, kept.offset, kept.length
                )  # fmt: skip


def test_a_mapping_without_columns_knows_no_places() -> None:
    class Few(Many[int]):
        def __getitem__(self, name: str) -> int:
            return len(name)

        def __iter__(self) -> Iterator[str]:
            return iter(("a", "bb", "cc"))

        def __len__(self) -> int:
            return 3

    few = Few()
    assert few.bulk is None
    assert few.counted() == ([1, 2, 2], [1, 1, 1])
    assert list(engine.groups(None, few)) == ["a", "bb", "cc"]
