"""Tiers of a Squish directory: which one is loaded, what makes it complete, and what happens when things go wrong."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.errors import IngotError, ResourceError
from ingot.ext.squish.tiers.build import build, drop
from ingot.ext.squish.tiers.choose import choose
from ingot.ext.squish.tiers.prepare import prepare
from ingot.ext.squish.tiers.status import status

NAMES = {
    "model.embed_tokens.weight": (96, 64),
    "model.layers.0.self_attn.q_proj.weight": (128, 128),
    "model.layers.0.mlp.down_proj.weight": (64, 128),
    "model.layers.0.input_layernorm.weight": (64,),
    "model.norm.weight": (64,),
}


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in NAMES.items()}


def make_directory(folder: Path, seed: int = 0) -> Path:
    source = folder.with_name(folder.name + "-source")
    source.mkdir()
    ingot.save(source / "model.safetensors", weights(seed))
    (source / "config.json").write_text(json.dumps({"model_type": "llama", "model_file": "llama.py"}))
    ingot.convert(source, folder, "int8", "npydir")
    return folder


@pytest.fixture
def squish(tmp_path):
    return make_directory(tmp_path / "squish")


def states(folder: Path) -> dict[str, str]:
    return {one.tier: one.state for one in status(folder)}


def values(path: Path, dtype: str = "f32") -> dict[str, np.ndarray]:
    with ingot.open(path) as checkpoint:
        return {name: tensor.numpy(dtype) for name, tensor in checkpoint.items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def rule_of(fn, *args, **kwargs) -> str | None:
    with pytest.raises(IngotError) as caught:
        fn(*args, **kwargs)
    return caught.value.rule


def test_a_new_directory_has_its_tensors_and_nothing_else(squish):
    assert states(squish) == {
        "4bit": "missing",
        "3bit": "missing",
        "bf16": "missing",
        "finalized": "missing",
        "tensors": "complete",
    }
    assert choose(squish).tier.name == "tensors"


def test_the_first_load_builds_the_bf16_tier_and_the_second_takes_it(squish):
    first = prepare(squish)
    assert first.tier.name == "bf16"
    assert any("built" in note for note in first.notes)
    changed = Path(first.path).stat().st_mtime_ns
    second = prepare(squish)
    assert second.tier.name == "bf16"
    assert not second.notes
    assert Path(second.path).stat().st_mtime_ns == changed
    assert same(values(first.path, "bf16"), values(squish, "bf16"))


def test_without_a_cache_nothing_is_written(squish):
    before = sorted(squish.iterdir())
    assert prepare(squish, cache=False).tier.name == "tensors"
    assert sorted(squish.iterdir()) == before


def test_packed_weights_stay_what_they_are(squish):
    assert prepare(squish, keep_packed=True).tier.name == "tensors"


@pytest.mark.parametrize("runtime", ["torch", "mlx"])
def test_weights_of_32_bits_are_not_rounded_through_a_tier(tmp_path, runtime):
    arrays = {name: array.astype(np.float32) * np.float32(1.001) for name, array in weights().items()}
    ingot.save(tmp_path / "model.safetensors", arrays)
    folder = tmp_path / "squish"
    ingot.convert(tmp_path / "model.safetensors", folder, None, "npydir")
    assert same(values(prepare(folder, runtime).path), arrays)
    build(folder, "bf16")
    assert prepare(folder, runtime).tier.name == "tensors"
    assert prepare(folder, runtime, dtype="bf16").tier.name == "bf16"
    shutil.rmtree(folder / "tensors")
    (folder / "manifest.json").unlink()
    assert prepare(folder, runtime).tier.name == "bf16"


def test_the_type_that_is_wanted_decides_between_tiers_that_round(squish):
    build(squish, "bf16")
    build(squish, "finalized")
    found = {dtype: choose(squish, dtype=dtype).tier.name for dtype in (None, "bfloat16", "f16", "f32", "float64")}
    assert found == {None: "bf16", "bfloat16": "bf16", "f16": "finalized", "f32": "tensors", "float64": "tensors"}
    for text, tier in (
        ('{"torch_dtype": "float16"}', "finalized"),
        ('{"dtype": "float32", "torch_dtype": "bfloat16"}', "tensors"),
        ('{"dtype": 5}', "bf16"),
        ("no JSON", "bf16"),
        ("[" * 100_000, "bf16"),
    ):
        (squish / "config.json").write_text(text)
        assert choose(squish).tier.name == tier


@pytest.mark.parametrize("tier", ["bf16", "finalized", "4bit", "3bit"])
def test_every_tier_is_built_found_and_dropped(squish, tier):
    report = build(squish, tier, ungated=True)
    assert report.built
    assert report.nbytes > 0
    assert states(squish)[tier] == "complete"
    assert not build(squish, tier, ungated=True).built
    assert build(squish, tier, force=True, ungated=True).built
    with ingot.open(report.path) as checkpoint:
        assert {name: tensor.shape for name, tensor in checkpoint.items()} == NAMES
    assert [one.tier for one in drop(squish, tier)] == [tier]
    assert states(squish)[tier] == "missing"
    assert drop(squish, tier) == []


def test_the_orders_of_the_tree(squish):
    for tier in ("finalized", "4bit", "3bit"):
        build(squish, tier, ungated=True)
    assert choose(squish, "mlx").tier.name == "4bit"
    assert choose(squish).tier.name == "finalized"
    build(squish, "bf16")
    assert choose(squish).tier.name == "bf16"
    drop(squish, "4bit")
    assert choose(squish, "mlx").tier.name == "3bit"
    assert dict(choose(squish, "mlx").skipped)["4bit"].startswith("missing")


def test_weights_without_a_sentinel_do_not_count(squish):
    build(squish, "bf16")
    (squish / ".squish_ready").unlink()
    assert states(squish)["bf16"] == "incomplete"
    assert choose(squish).tier.name == "tensors"
    assert prepare(squish).tier.name == "bf16"


def test_a_sentinel_without_its_weights_does_not_count(squish):
    build(squish, "bf16")
    (squish / "squish_weights.safetensors").unlink()
    assert states(squish)["bf16"] == "damaged"
    assert prepare(squish).tier.name == "bf16"


@pytest.mark.parametrize(
    "content",
    [
        b'{"ingot_tier": 99, "tier": "bf16", "source": {}, "files": {}}',
        b'{"ingot_tier": 1, "tier": "bf16", "source": {"../x": [1,1,1,"a"]}, "files": {}}',
        b'{"ingot_tier": 1, "tier": "bf16", "source": {}}',
    ],
)
def test_a_record_that_cannot_be_read_is_damage(squish, content):
    build(squish, "bf16")
    (squish / ".squish_ready").write_bytes(content)
    assert states(squish)["bf16"] == "damaged"
    assert prepare(squish).tier.name == "bf16"
    assert states(squish)["bf16"] == "complete"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}"])
def test_a_sentinel_without_a_record_is_judged_by_times_and_shapes(squish, content):
    build(squish, "bf16")
    mark = squish / ".squish_ready"
    mark.write_bytes(content)
    assert states(squish)["bf16"] == "complete"
    later = mark.stat().st_mtime_ns + 1  # "now" may be the same tick of the file system's clock
    os.utime(squish / "manifest.json", ns=(later, later))
    assert states(squish)["bf16"] == "stale"


def test_a_foreign_sentinel_beside_other_weights_is_damage(squish):
    build(squish, "bf16")
    wrong = weights()
    wrong["model.norm.weight"] = wrong["model.norm.weight"][:32]
    ingot.save(squish / "squish_weights.safetensors", wrong)
    (squish / ".squish_ready").write_bytes(b"")
    assert states(squish)["bf16"] == "damaged"


def test_weights_that_changed_are_damage_whatever_their_times(squish):
    build(squish, "bf16")
    path = squish / "squish_weights.safetensors"
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert states(squish)["bf16"] == "damaged"


def test_a_tier_whose_tensors_changed_is_not_used(squish, tmp_path):
    build(squish, "bf16")
    other = make_directory(tmp_path / "other", seed=1)
    shutil.copytree(other, squish, dirs_exist_ok=True)
    assert states(squish)["bf16"] == "stale"
    found = prepare(squish)
    assert found.tier.name == "bf16"
    assert same(values(found.path, "bf16"), values(squish, "bf16"))


def test_a_copied_directory_stays_valid(squish, tmp_path):
    build(squish, "bf16")
    copy = shutil.copytree(squish, tmp_path / "copy", copy_function=shutil.copyfile)
    assert states(Path(copy))["bf16"] == "complete"


def test_a_tier_outlives_its_tensors_and_is_then_kept(squish):
    build(squish, "bf16")
    shutil.rmtree(squish / "tensors")
    (squish / "manifest.json").unlink()
    assert states(squish) | {"bf16": "complete", "tensors": "missing"} == states(squish)
    assert choose(squish).tier.name == "bf16"
    assert rule_of(drop, squish, "bf16") == "tier.last"
    assert rule_of(build, squish, "finalized") == "tier.no-source"


def test_refusals(squish, tmp_path):
    assert rule_of(status, tmp_path) == "tier.no-directory"
    assert rule_of(build, tmp_path, "bf16") == "tier.no-directory"
    assert rule_of(build, squish, "8bit") == "tier.unknown"
    assert rule_of(build, squish, "tensors") == "tier.not-built"
    assert rule_of(choose, squish, "jax") == "tier.runtime"


def test_a_full_disk_leaves_no_tier_and_the_load_goes_on(squish, monkeypatch):
    def full(*_args, **_options):
        raise ResourceError("the disk is full", rule="store.disk-full")

    monkeypatch.setattr("ingot.ext.squish.tiers.build.convert", full)
    found = prepare(squish)
    assert found.tier.name == "tensors"
    assert any("store.disk-full" in note for note in found.notes)
    assert states(squish)["bf16"] == "missing"


def test_tensors_that_change_meanwhile_are_told(squish, monkeypatch):
    from ingot.ext.squish.tiers import build as module

    real = module.convert

    def slow(*args, **options):
        report = real(*args, **options)
        os.utime(squish / "manifest.json")
        return report

    monkeypatch.setattr(module, "convert", slow)
    assert rule_of(build, squish, "bf16") == "tier.source-changed"
    assert states(squish)["bf16"] == "incomplete"


BUILD = """
import sys
from ingot.ext.squish.tiers.prepare import prepare
print(prepare(sys.argv[1]).tier.name)
"""


@pytest.mark.slow
def test_killed_at_any_moment_no_tier_lies(squish):
    expected, rng = values(squish, "bf16"), random.Random(7)
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", BUILD, str(squish)], check=True, capture_output=True)
    whole = time.perf_counter() - started
    for _ in range(int(os.environ.get("INGOT_KILLS", "20"))):
        drop(squish)
        process = subprocess.Popen([sys.executable, "-c", BUILD, str(squish)], stdout=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.3, 1.0) * whole)
        process.send_signal(signal.SIGKILL)
        process.wait()
        for one in status(squish):
            if one.usable and one.tier != "tensors":
                assert same(values(Path(one.path), "bf16"), expected)
        assert same(values(prepare(squish).path, "bf16"), expected)


@pytest.mark.slow
def test_four_processes_load_at_once(squish):
    started = [
        subprocess.Popen([sys.executable, "-c", BUILD, str(squish)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in started] == ["bf16"] * 4
    assert same(values(choose(squish).path, "bf16"), values(squish, "bf16"))
