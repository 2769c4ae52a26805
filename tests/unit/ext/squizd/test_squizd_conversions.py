"""Conversions to, from and between .squizd and other formats: what moves, what decodes, resuming, sizes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.codecs.table import CODECS
from ingot.conversion.run import prepare
from ingot.core.runtime.progress import ProgressEvent
from ingot.errors import IngotError, UnsupportedError
from ingot.ext.squizd.format import SquizdFormat
from ingot.formats.base import WriteOptions
from ingot.formats.zt.format import ZtFormat
from ingot.inspect.inspect import inspect
from ingot.model.artifact import Artifact
from ingot.model.spec import PartSpec, TensorSpec
from ingot.recipes.choice import Choice
from ingot.recipes.recipe import Recipe, Rule
from ingot.stores.local import LocalTarget
from ingot.stores.memory import MemoryTarget
from ingot.testing.formats import Item, feed

RULE = '[[rules]]\nmatch = ["*_proj.weight"]\ncodec = "affine"\noptions = {{ {} }}\n'
RECIPES = {
    "group": RULE.format("bits = 4, group = 32"),
    "row": RULE.format('bits = 4, group = "row"'),
    "zeros": RULE.format("bits = 2, group = 16, symmetric = false, signed = true, scales = 'bf16'"),
    "tensor": RULE.format('bits = 4, group = "tensor"'),
    "tca": '[[rules]]\nmatch = ["*_proj.weight"]\ncodec = "tca_tbe"\n',
    "astc": '[[rules]]\nmatch = ["*_proj.weight"]\ncodec = "astc"\n',
    "dense": "",
}
PRUNE: dict[str, Any] = {"prune": 0.5, "prune_block": 16}


def pruning(name: str) -> dict[str, Any]:
    """Textures hold no exact zeros, so that their pruned matrices have no full size."""
    return {**PRUNE, "prune_compact": name == "astc"}


class StopHereError(Exception):
    """Raised from the progress callback where a test wants the run to end."""


def recipe(folder: Path, name: str) -> Path | None:
    if not RECIPES[name]:
        return None
    (folder / f"{name}.toml").write_text(RECIPES[name])
    return folder / f"{name}.toml"


def stored(path: Path) -> dict[str, dict[str, bytes]]:
    """Bytes of every part."""
    with ingot.open(path) as checkpoint:
        return {
            name: {role: bytes(part.stored()) for role, part in tensor.parts.items()}
            for name, tensor in checkpoint.items()
        }


def shown(path: Path) -> dict[str, Any]:
    with ingot.open(path) as checkpoint:
        return {name: (item.shape, item.dtype, item.codec, dict(item.params)) for name, item in checkpoint.items()}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("pruned", [False, True])
def test_parts_move_to_zt_and_back_as_they_are(model: Path, tmp_path: Path, name: str, pruned: bool) -> None:
    first = ingot.convert(model, tmp_path / "a.squizd", recipe(tmp_path, name), **(pruning(name) if pruned else {}))
    assert {item.action for item in first.tensors} <= {"moved", "encoded", "pruned"}
    there = ingot.convert(tmp_path / "a.squizd", tmp_path / "b.zt")
    back = ingot.convert(tmp_path / "b.zt", tmp_path / "c.squizd", prune_compact=pruned and name == "astc")
    for report in (there, back):
        assert report.actions == {"moved": len(report.tensors)}
    assert stored(tmp_path / "a.squizd") == stored(tmp_path / "b.zt") == stored(tmp_path / "c.squizd")
    assert shown(tmp_path / "a.squizd") == shown(tmp_path / "b.zt") == shown(tmp_path / "c.squizd")
    assert (tmp_path / "a.squizd").read_bytes() == (tmp_path / "c.squizd").read_bytes()
    assert [item for item in ingot.verify(tmp_path / "a.squizd", strict=True) if item.level == "error"] == []


@pytest.mark.parametrize("name", ["group", "zeros", "tensor", "tca", "dense"])
def test_the_same_recipe_gives_the_same_parts_in_zt(model: Path, tmp_path: Path, name: str) -> None:
    for suffix in ("zt", "squizd"):
        ingot.convert(model, tmp_path / f"a.{suffix}", recipe(tmp_path, name))
    assert stored(tmp_path / "a.zt") == stored(tmp_path / "a.squizd")


@pytest.mark.parametrize("name", RECIPES)
def test_safetensors_gets_decoded_weights(model: Path, tmp_path: Path, name: str) -> None:
    ingot.convert(model, tmp_path / "a.squizd", recipe(tmp_path, name), **pruning(name))
    report = ingot.convert(tmp_path / "a.squizd", tmp_path / "b.safetensors")
    assert report.actions.keys() <= {"moved", "decoded"}
    with ingot.open(tmp_path / "a.squizd") as packed, ingot.open(tmp_path / "b.safetensors") as plain:
        assert dict(plain.metadata) == {"format": "pt"}
        for key, tensor in packed.items():
            assert np.array_equal(tensor.numpy().view(np.uint16), plain[key].numpy().view(np.uint16))


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_ways_to_read_give_the_same(model: Path, tmp_path: Path, io: str) -> None:
    ingot.convert(model, tmp_path / "a.squizd", recipe(tmp_path, "zeros"), **PRUNE)
    with ingot.open(tmp_path / "a.squizd", io=io) as one, ingot.open(tmp_path / "a.squizd") as other:
        for key, tensor in one.items():
            assert np.array_equal(tensor.numpy("f32"), other[key].numpy("f32"))
    assert ingot.verify(tmp_path / "a.squizd", io=io) == []


@pytest.mark.parametrize("digest", ["crc32c", "sha256", None])
@pytest.mark.parametrize("name", RECIPES)
def test_the_size_is_known_before(
    model: Path, draft: Path, package: Path, tmp_path: Path, name: str, digest: str | None
) -> None:
    options: dict[str, Any] = {"digest": digest, "draft": draft, "coreml": package, **pruning(name)}
    with prepare(model, tmp_path / "a.squizd", recipe(tmp_path, name), **options) as prepared:
        planned, exact = prepared.plan.size, prepared.plan.size_exact
    report = ingot.convert(model, tmp_path / "a.squizd", recipe(tmp_path, name), **options)
    size = (tmp_path / "a.squizd").stat().st_size
    assert report.size == size
    assert planned == size if exact else (name == "tca" and planned >= size)
    assert exact == (name != "tca")


def moments(model: Path, target: Path, chosen: Path | None, options: dict[str, Any]) -> int:
    """Convert; return how often progress was told."""
    seen: list[ProgressEvent] = []
    ingot.convert(model, target, chosen, progress=seen.append, **options)
    return len(seen)


def stop_at(number: int) -> Callable[[ProgressEvent], None]:
    left = number

    def callback(_: ProgressEvent) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise StopHereError

    return callback


@pytest.mark.parametrize(("first", "name"), list(enumerate(["zeros", "tensor", "tca", "dense"])))
@pytest.mark.parametrize("pruned", [False, True])
def test_killed_at_any_tensor_a_conversion_goes_on_to_the_same_bytes(
    model: Path, draft: Path, package: Path, tmp_path: Path, first: int, name: str, pruned: bool
) -> None:
    """At every eighth moment, each time at others."""
    options: dict[str, Any] = {"draft": draft, "coreml": package, "threads": 1, **(PRUNE if pruned else {})}
    chosen = recipe(tmp_path, name)
    count = moments(model, tmp_path / "whole.squizd", chosen, options)
    whole = (tmp_path / "whole.squizd").read_bytes()
    resumed = set()
    for number in range(first + 4 * pruned, count, 8):
        with pytest.raises(StopHereError):
            ingot.convert(model, tmp_path / "out.squizd", chosen, resume=True, progress=stop_at(number), **options)
        assert not (tmp_path / "out.squizd").exists()
        report = ingot.convert(model, tmp_path / "out.squizd", chosen, resume=True, **options)
        assert (tmp_path / "out.squizd").read_bytes() == whole
        resumed.add(report.resumed)
        (tmp_path / "out.squizd").unlink()
    assert len(resumed) > 3


def test_attachments_travel_between_squizd_files(model: Path, draft: Path, package: Path, tmp_path: Path) -> None:
    ingot.convert(model, tmp_path / "a.squizd", None, draft=draft, coreml=package)
    ingot.convert(tmp_path / "a.squizd", tmp_path / "b.squizd", recipe(tmp_path, "group"))
    with ingot.open(tmp_path / "b.squizd") as one, ingot.open(draft) as other:
        found = one.attachments.draft
        assert found is not None
        assert sorted(found) == sorted(other)
        assert all(np.array_equal(tensor.numpy(), other[name].numpy()) for name, tensor in found.items())
        assert one.attachments.coreml is not None
    assert [item for item in ingot.verify(tmp_path / "b.squizd", strict=True) if item.level == "error"] == []
    with pytest.raises(IngotError) as caught:
        ingot.convert(tmp_path / "b.squizd", tmp_path / "c.zt")
    assert caught.value.rule == "account.lost"


def test_two_primary_encodings_are_refused_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    rules = RECIPES["group"].replace("*_proj", "*q_proj") + RECIPES["astc"].replace("*_proj", "*k_proj")
    (tmp_path / "mixed.toml").write_text(rules)
    with pytest.raises(IngotError) as caught:
        ingot.convert(model, tmp_path / "a.squizd", tmp_path / "mixed.toml")
    assert caught.value.rule == "squizd.mixed-encodings"
    assert not (tmp_path / "a.squizd").exists()


def test_a_pruned_draft_head_is_refused(model: Path, draft: Path, tmp_path: Path) -> None:
    ingot.convert(draft, tmp_path / "pruned.zt", **PRUNE)
    with pytest.raises(IngotError) as caught:
        ingot.convert(model, tmp_path / "a.squizd", draft=tmp_path / "pruned.zt")
    assert caught.value.rule == "squizd.carry"
    assert not (tmp_path / "a.squizd").exists()


@pytest.mark.parametrize("name", ["group", "tca", "dense"])
def test_a_compressed_draft_head_moves_as_it_is(model: Path, draft: Path, tmp_path: Path, name: str) -> None:
    ingot.convert(draft, tmp_path / "head.zt", recipe(tmp_path, name) if name != "tca" else None)
    ingot.convert(model, tmp_path / "a.squizd", recipe(tmp_path, name), draft=tmp_path / "head.zt")
    with ingot.open(tmp_path / "a.squizd") as checkpoint, ingot.open(tmp_path / "head.zt") as head:
        found = checkpoint.attachments.draft
        assert found is not None
        for key, tensor in head.items():
            parts = {role: bytes(part.stored()) for role, part in tensor.parts.items()}
            assert {role: bytes(part.stored()) for role, part in found[key].parts.items()} == parts


def quantized_zt(path: Path, dtype: str, scales: bytes) -> None:
    """A .zt file with one INT4 matrix of two rows with these scales."""
    parts = {"packed_weight": bytes(range(8)), "scales": scales}
    params = {"codec_version": 1, "bits": 4, "granularity": "row", "axis": -1, "packing": "rows_lsb"}
    params |= {"signed": True, "zeros": False, "dtype": "f32"}
    specs = (PartSpec("packed_weight", "u8", 8), PartSpec("scales", dtype, len(scales)))
    item = Item(TensorSpec("t", (2, 8), "f32", "affine", specs, params), parts)
    target = MemoryTarget()
    writer = ZtFormat().writer(target, "a.zt", Artifact([item.spec]), WriteOptions())
    feed(writer, item)
    writer.finish()
    path.write_bytes(bytes(target.files["a.zt"]))


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        ("f16", (0x0001, 0x83FF)),
        ("f16", (0x7C00, 0x8000)),
        ("f16", (0xFE37, 0x3C00)),
        ("bf16", (0x0001, 0x8001)),
        ("bf16", (0xFFC3, 0x7F80)),
    ],
)
def test_odd_scales_come_back_bit_for_bit(tmp_path: Path, dtype: str, words: tuple[int, int]) -> None:
    scales = b"".join(word.to_bytes(2, "little") for word in words)
    quantized_zt(tmp_path / "a.zt", dtype, scales)
    ingot.convert(tmp_path / "a.zt", tmp_path / "b.squizd")
    assert stored(tmp_path / "b.squizd")["t"]["scales"] == scales


@pytest.mark.parametrize(("dtype", "word"), [("f16", 0x7C01), ("bf16", 0xFF81)])
def test_a_scale_that_would_not_come_back_is_refused(tmp_path: Path, dtype: str, word: int) -> None:
    quantized_zt(tmp_path / "a.zt", dtype, bytes(2) + word.to_bytes(2, "little"))
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(tmp_path / "a.zt", tmp_path / "b.squizd")
    assert caught.value.rule == "squizd.carry"


def test_scales_count_with_the_entries_that_hold_them(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).standard_normal((8, 128), np.float32)
    ingot.save(tmp_path / "m.safetensors", {"model.layers.0.mlp.up_proj.weight": weights})
    rule = Rule(Choice("affine", {"bits": 4, "group": 64}))
    ingot.convert(tmp_path / "m.safetensors", tmp_path / "m.squizd", Recipe("q", (rule,)))
    found = inspect(tmp_path / "m.squizd").tensors[0]
    assert found.nbytes == 8 * 64 + 16 * (1 + 8 * 2)  # codes; one entry of the first round, one per group
    assert sum(part.length for part in found.parts) == 8 * 64 + 2 * 8 * 2


def test_scales_are_written_as_they_come_and_not_kept(tmp_path: Path) -> None:
    shape, options = (4096, 4096), {"bits": 2, "group": 16, "symmetric": False, "signed": True}
    encoder = CODECS["affine"].encoder(shape, "f32", options)
    spec = TensorSpec("layers.0.up_proj.weight", shape, "f32", encoder.codec, encoder.parts, encoder.params)
    writer = SquizdFormat().writer(LocalTarget(tmp_path), "a.squizd", Artifact([spec]), WriteOptions())
    piece = bytes(1 << 16)
    tracemalloc.start()
    try:
        writer.begin(spec)
        for part in spec.parts:
            for start in range(0, part.length, len(piece)):
                writer.write(part.role, piece[: part.length - start])
        writer.end()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        writer.finish()
    assert sum(part.length for part in spec.parts if part.role != "packed_weight") >= 4 << 20
    assert peak < 2 << 20
    with ingot.open(tmp_path / "a.squizd") as checkpoint:
        scales = checkpoint[spec.name].parts["scales"]
        assert bytes(scales.stored()) == bytes(scales.length)
