"""What a careless or hostile user does to the operations: one clear refusal, and the source survives."""

from __future__ import annotations

import copy
import errno
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot import errors
from ingot.conversion.run import convert, prepare
from ingot.model.part import memory_part
from ingot.model.tensor import Tensor

ERRORS = (
    errors.IngotError("message", rule="a.b", where="here"),
    errors.FormatError("a.b", "message", where="here"),
    errors.IntegrityError("a.b", "message"),
    errors.CodecError("a.b", "message", where="here"),
    errors.UnsupportedError("message", rule="a.b"),
    errors.UsageError("message"),
    errors.ResourceError("message", rule="a.b"),
    errors.MissingExtraError("package", "extra"),
)


def rule(call: Any, *arguments: Any, **options: Any) -> str | None:
    with pytest.raises(ingot.IngotError) as caught:
        call(*arguments, **options)
    return caught.value.rule


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("through", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_errors_cross_process_borders(error: ingot.IngotError, through: Any) -> None:
    again = through(error)
    assert type(again) is type(error)
    assert (str(again), again.rule, again.where) == (str(error), error.rule, error.where)
    assert vars(again) == vars(error)


@pytest.mark.parametrize("text", ["a\nb", "a\x1b[31mb", "a\u2028b", "a\u202eb", "a\ud800b", "a\0b"])
def test_an_error_is_one_printable_line(text: str) -> None:
    line = str(errors.FormatError("a.b", text, where=text))
    assert line.isprintable()
    assert line.encode()


def test_odd_paths_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.chdir(model)
    assert rule(ingot.open, "") == "open.missing"  # not the present folder
    assert rule(ingot.open, "x" * 5000) == "store.name-too-long"
    for call in (
        ingot.open,
        ingot.verify,
        lambda path: ingot.save(path, {}),
        lambda path: ingot.convert(model, path),
        lambda path: ingot.convert(model, tmp_path / "out.zt", recipe=path),
        lambda path: ingot.diff(model, model, path),
        lambda path: ingot.plan(path, chip="m1"),
    ):
        assert rule(call, "a\0b") == rule(call, b"bytes") == "store.path"
    loop = tmp_path / "loop.zt"
    loop.symlink_to(loop)
    assert rule(ingot.save, loop, {}) == "target.not-a-file"
    assert loop.is_symlink()


def test_what_cannot_be_saved_is_refused_by_rule(tmp_path: Path) -> None:
    target = tmp_path / "x.safetensors"
    assert rule(ingot.save, target, {1: np.ones(2)}) == "save.name"
    assert rule(ingot.save, target, {"x": [[1], [2, 3]]}) == "save.value"
    assert rule(ingot.save, target, {"x": np.ones(2)}, digest="md5") == "convert.digest"
    assert not list(tmp_path.iterdir())


def test_a_tensor_without_values_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    assert rule(ingot.save, tmp_path / "x.zt", {"x": torch.empty(3, device="meta")}) == "adapter.layout"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"threads": 0}, "convert.option"),
        ({"threads": -1}, "convert.option"),
        ({"digest": "md5"}, "convert.digest"),
        ({"max_ram": "9" * 400 + "GiB"}, "size.syntax"),
        ({"max_ram": 1}, "ram.ceiling"),
        ({"max_ram": 1, "recipe": "int4"}, "ram.ceiling"),
    ],
)
def test_options_out_of_range(model: Path, tmp_path: Path, options: dict[str, Any], expected: str, strays: Any) -> None:
    assert rule(convert, model, tmp_path / "out.zt", **options) == expected
    assert not strays()
    assert not (tmp_path / "out.zt").exists()


def test_a_recipe_may_be_a_path(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[[rules]]\nmatch = "*"\ndtypes = ["bf16"]\ncodec = "dense"\noptions = { dtype = "f32" }\n')
    assert convert(model, tmp_path / "out.zt", file).recipe == "mine"


def test_a_conversion_never_replaces_its_source(model: Path, tmp_path: Path) -> None:
    file = model / "model.safetensors"
    before = file.read_bytes()
    outer, sharded = model.parent, tmp_path / "sharded"
    for source, destination in [(file, model), (model, model), (file, outer), (model, outer), (model, file)]:
        assert rule(convert, source, destination, overwrite=True) == "convert.same-path"
    convert(model, sharded, format="safetensors", max_shard=20_000)
    shard = next(sharded.glob("*-00001-of-*"))
    assert rule(convert, sharded, shard) == "convert.same-path"
    assert file.read_bytes() == before
    assert (model / "config.json").exists()


def test_a_source_that_is_linked_to_is_safe_too(model: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    (model / "model.safetensors").rename(blobs / "abc.safetensors")
    (snapshot / "model.safetensors").symlink_to(blobs / "abc.safetensors")
    for destination in (blobs, snapshot, blobs / "abc.safetensors"):
        assert rule(convert, snapshot, destination, overwrite=True) == "convert.same-path"
    assert convert(snapshot, tmp_path / "out.zt").exact


@pytest.mark.parametrize("resume", [False, True])
def test_a_source_written_to_meanwhile_is_no_result(model: Path, tmp_path: Path, resume: bool, strays: Any) -> None:
    file = model / "model.safetensors"
    begun: list[int] = []

    def meddle(_: object) -> None:
        if not begun:
            begun.append(1)
            with file.open("r+b") as out:
                out.seek(-1, os.SEEK_END)
                out.write(b"\x7f")
            os.utime(file, ns=(0, 0))

    assert rule(convert, model, tmp_path / "out.zt", progress=meddle, resume=resume) == "store.changed"
    assert not (tmp_path / "out.zt").exists()
    if resume:  # what was kept is of the file that was, and not taken for the one that is
        assert rule(convert, model, tmp_path / "out.zt", resume=True) == "resume.changed"
    else:
        assert not strays()


def test_a_source_replaced_meanwhile_is_read_as_it_was(model: Path, tmp_path: Path) -> None:
    file = model / "model.safetensors"
    other = tmp_path / "other.safetensors"
    ingot.save(other, {"x": np.ones(3)})
    with prepare(model, tmp_path / "out.zt", None, None) as prepared:
        other.replace(file)
        assert not any(source.changed() for source in prepared.source.catalog.sources)


def test_room_for_chunks_does_not_depend_on_what_the_process_holds(model: Path, tmp_path: Path) -> None:
    """Without a ceiling, a caller that holds much memory already is no reason to refuse."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ingot.conversion.prepare_source.anonymous_in_use", lambda: 1 << 50)
        assert convert(model, tmp_path / "out.zt", "int4").tensors


@pytest.mark.parametrize(
    ("choice", "dense"),
    [
        ('codec = "sparse_csr"', True),
        ('codec = "sparse_coo"', True),
        ('codec = "sparse_coo"', False),
        ('codec = "dense"\nencoding = "zstd"', True),
        ('codec = "affine"\nencoding = "zstd"\noptions = { bits = 8 }', True),
    ],
)
def test_a_plan_never_promises_less_than_is_written(tmp_path: Path, choice: str, dense: bool) -> None:
    """Noise does not shrink, and a matrix without zeros grows when it is stored as a sparse one."""
    noise = np.random.default_rng(0).integers(0, 2**16, (600, 700), np.uint16)
    values = (noise & 0x7BFF | 1).view(np.float16) if dense else np.zeros((600, 700), np.float16)
    ingot.save(tmp_path / "noise.zt", {"x": values, "empty": np.zeros((0, 4), np.float16)})
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'[[rules]]\nmatch = "*"\n{choice}\n')
    with prepare(tmp_path / "noise.zt", tmp_path / "out.zt", str(recipe), None) as prepared:
        planned = prepared.plan.size
    assert convert(tmp_path / "noise.zt", tmp_path / "out.zt", str(recipe)).size <= planned


@pytest.mark.parametrize("codec", ["sparse_csr", "sparse_coo"])
def test_a_few_bytes_that_stand_for_more_than_the_machine_has(
    tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system would grant the memory and end the process when it is touched."""
    monkeypatch.setattr("ingot.codecs.base.available_ram", lambda: 1 << 28)
    huge = 1 << 28
    one = memory_part(np.array([1], np.float32), "f32")
    position = {"sparse_csr": [0, 1], "sparse_coo": [0, 5]}[codec]
    role = {"sparse_csr": "indptr", "sparse_coo": "coords"}[codec]
    parts = {"values": one, role: memory_part(np.array(position, np.uint64), "u64")}
    if codec == "sparse_csr":
        parts["indices"] = memory_part(np.array([5], np.uint64), "u64")
    path = tmp_path / "bomb.zt"
    ingot.save(path, {"x": Tensor("x", (1, huge), "f32", codec, parts)})
    with ingot.open(path) as checkpoint:
        assert rule(checkpoint["x"].numpy) == "codec.too-large"
    assert [finding.rule for finding in ingot.verify(path) if finding.level == "error"] == ["codec.too-large"]
    assert rule(convert, path, tmp_path / "out.safetensors", max_ram="256MiB") == "ram.ceiling"


def test_file_names_that_are_not_text(model: Path, tmp_path: Path) -> None:
    """A name in another encoding than the locale's comes with surrogates, which JSON in UTF-8 cannot hold."""
    name = os.fsdecode(b"mod\xe8le")
    source = tmp_path / f"{name}.safetensors"
    (model / "model.safetensors").rename(source)
    assert convert(source, tmp_path / f"{name}.zt").exact
    assert not ingot.verify(tmp_path / f"{name}.zt")


def test_an_unreadable_companion_is_named(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def denied(source: Any, *args: Any, **options: Any) -> int:
        if source == str(model / "config.json"):
            raise PermissionError(errno.EACCES, "Permission denied", str(source))
        return real(source, *args, **options)

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(ingot.IngotError) as caught:
        convert(model, tmp_path / "out")
    assert caught.value.rule == "store.denied"
    assert caught.value.where == str(model / "config.json")
