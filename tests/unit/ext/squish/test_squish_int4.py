"""Four bits in place: what is written, what counts, and that a kill at any moment leaves the directory as it was."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.errors import IngotError, ResourceError, UsageError
from ingot.ext.squish.tiers.int4 import add_int4

Arrays = dict[str, np.ndarray]


@pytest.fixture
def squish(model: Path, tmp_path: Path) -> Path:
    ingot.convert(model, tmp_path / "squish", "int8", "npydir")
    return tmp_path / "squish"


def values(folder: Path) -> Arrays:
    with ingot.open(folder) as checkpoint:
        return {name: tensor.numpy("f32") for name, tensor in checkpoint.items()}


def codecs(folder: Path) -> list[int]:
    with ingot.open(folder) as checkpoint:
        return sorted({tensor.params["bits"] for tensor in checkpoint.values() if tensor.codec != "dense"})


def equal(a: Arrays, b: Arrays) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in a) and set(a) == set(b)


def arrays(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "tensors").glob("*.npy")}


def test_four_bits_are_added_and_taken(squish: Path, model: Path) -> None:
    before = arrays(squish)
    report = add_int4(squish)
    assert codecs(squish) == [4]
    assert (squish / ".squish_int4_ready").read_bytes() == b""
    after = arrays(squish)
    assert {name: after[name] for name in before} == before
    assert len(after) == len(before) + 3 * len(report.converted)
    sizes = [sum(len(data) for name, data in after.items() if name.endswith(end)) for end in ("__q.npy", "__s.npy")]
    assert report.int8_bytes == sum(sizes)
    assert 0 < report.savings_pct < 50
    assert [item for item in ingot.verify(squish) if item.level == "error"] == []
    for item in ingot.compare(model, squish).tensors:
        assert item.same or (item.stats is not None and item.stats.snr_db > 18)


def test_the_step_is_that_of_squish(squish: Path) -> None:
    """With minmax: z is the smallest value of a group, s a fifteenth of its range, of the eight-bit weights."""
    before = values(squish)
    add_int4(squish, quantizer="minmax")
    name = "model.layers.1.mlp.down_proj.weight"
    key = name.replace(".", "__")
    codes, scales, zeros = (np.load(squish / "tensors" / f"{key}__{end}.npy") for end in ("q4a", "s4a", "z4a"))
    with ingot.open(squish) as checkpoint:
        shape = checkpoint[name].shape
    quarter = np.load(squish / "tensors" / f"{key}__q.npy").astype(np.float32)
    eight = quarter * np.load(squish / "tensors" / f"{key}__s.npy")[:, None]
    groups = eight.reshape(shape[0], -1, 32)
    assert np.array_equal(zeros, groups.min(-1))
    assert np.array_equal(scales, (groups.max(-1) - groups.min(-1)) / np.float32(15))
    unpacked = np.stack([codes & 15, codes >> 4], -1).reshape(groups.shape)
    assert np.abs(groups - (zeros[..., None] + unpacked * scales[..., None])).max() <= scales.max() / 2 * 1.001
    assert set(before) == set(values(squish))


def test_again_is_nothing_and_dropping_leaves_the_values(squish: Path) -> None:
    add_int4(squish)
    four = values(squish)
    report = add_int4(squish, drop_int8=True)
    assert report.converted == []
    assert report.dropped
    assert not list((squish / "tensors").glob("*__q.npy"))
    assert equal(values(squish), four)
    assert [item for item in ingot.verify(squish) if item.level == "error"] == []
    assert add_int4(squish).converted == []


def test_a_drop_that_ended_between_codes_and_scales_reads_the_same(squish: Path) -> None:
    add_int4(squish)
    four = values(squish)
    document = json.loads((squish / "ingot.json").read_text())
    for entry in document["tensors"].values():
        for kind in ("digests", "heads"):
            entry[kind] = {suffix: text for suffix, text in entry[kind].items() if suffix not in ("q", "s")}
    del document["ingot_digest"]
    (squish / "ingot.json").write_text(json.dumps(document))
    for path in (squish / "tensors").glob("*__q.npy"):
        path.unlink()
    assert equal(values(squish), four)


def test_odd_columns_stay_at_eight_bits(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = {"layers.0.mlp.a": (64, 66), "layers.0.mlp.b": (64, 68), "layers.0.mlp.c": (64, 96)}
    tensors = {name: rng.normal(0, 1, shape).astype(np.float32) for name, shape in shapes.items()}
    ingot.save(tmp_path / "a.safetensors", tensors)
    ingot.convert(tmp_path / "a.safetensors", tmp_path / "squish", "int8", "npydir")
    report = add_int4(tmp_path / "squish")
    assert (report.unchanged, len(report.converted)) == (["layers.0.mlp.a"], 2)
    with ingot.open(tmp_path / "squish") as checkpoint:
        assert [checkpoint[name].params.get("group_size") for name in shapes] == [None, 4, 32]
    assert np.load(tmp_path / "squish" / "tensors" / "layers__0__mlp__b__s4a.npy").shape == (64, 17)


def test_convolutions_keep_their_shape(tmp_path: Path) -> None:
    folder = tmp_path / "squish"
    (folder / "tensors").mkdir(parents=True)
    codes = np.random.default_rng(0).integers(-127, 128, (8, 36)).astype(np.int8)
    for end, array in (("q", codes), ("s", np.ones(8, np.float32)), ("shape", np.array([8, 4, 3, 3]))):
        np.save(folder / "tensors" / f"conv__{end}.npy", array)
    (folder / "manifest.json").write_text('{"conv": "conv"}')
    assert add_int4(folder).converted == ["conv"]
    assert not (folder / "ingot.json").exists()
    found = values(folder)["conv"]
    assert found.shape == (8, 4, 3, 3)
    assert np.abs(found.reshape(8, 36) - codes).max() < 10


def test_other_formats_and_nothing_to_do_are_refused(model: Path, tmp_path: Path) -> None:
    ingot.convert(model, tmp_path / "plain", None, "npydir")
    for path, rule in ((model, "int4.not-npydir"), (tmp_path / "plain", "int4.nothing")):
        with pytest.raises(UsageError) as caught:
            add_int4(path)
        assert caught.value.rule == rule


def test_a_full_disk_changes_nothing(squish: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = values(squish)
    from ingot.stores.local import LocalSink

    real, room = LocalSink.write_at, [30_000]

    def write_at(self: LocalSink, offset: int, data: bytes) -> None:
        room[0] -= memoryview(data).nbytes
        if room[0] < 0:
            raise ResourceError("simulated", rule="store.disk-full")
        real(self, offset, data)

    monkeypatch.setattr(LocalSink, "write_at", write_at)
    with pytest.raises(IngotError) as caught:
        add_int4(squish)
    assert caught.value.rule == "store.disk-full"
    monkeypatch.undo()
    assert equal(values(squish), before)
    assert not [path for path in (squish / "tensors").iterdir() if path.name.startswith(".ingot")]
    add_int4(squish)
    assert codecs(squish) == [4]


KILLED = """
import sys, time
from ingot.codecs.affine.encode import AffineEncoder
from ingot.ext.squish.tiers.int4 import add_int4
real = AffineEncoder.encode
def slow(*args):
    time.sleep(0.02)
    return real(*args)
AffineEncoder.encode = slow
print("ready", flush=True)
add_int4(sys.argv[1], drop_int8=True, threads=1)
"""


@pytest.mark.parametrize("delay", [0.02, 0.15, 0.4])
def test_a_kill_leaves_a_directory_that_is_right(squish: Path, delay: float, tmp_path: Path) -> None:
    eight = values(squish)
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(squish)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    found = values(squish)
    ready = (squish / ".squish_int4_ready").exists()
    assert equal(found, eight) != ready
    add_int4(squish, drop_int8=True)
    assert codecs(squish) == [4]
    assert [item for item in ingot.verify(squish) if item.level == "error"] == []


def test_what_a_killed_run_has_finished_is_taken_over(squish: Path, tmp_path: Path) -> None:
    shutil.copytree(squish, tmp_path / "whole")
    add_int4(tmp_path / "whole")
    killed = KILLED.replace("add_int4(sys.argv[1], drop_int8=True, threads=1)", KILLED_AT_THE_THIRD)
    assert subprocess.run([sys.executable, "-c", killed, str(squish)], check=False).returncode == -signal.SIGKILL
    assert codecs(squish) == [8]
    report = add_int4(squish)
    assert 0 < report.resumed < len(report.converted)
    assert arrays(squish) == arrays(tmp_path / "whole")
    assert not [path for path in squish.iterdir() if path.name.endswith(".ingot-partial")]


KILLED_AT_THE_THIRD = """
import os, signal
from ingot.engine.journal import Journal
note, done = Journal.append, []
def append(self, record, nbytes):
    note(self, record)
    done.append(record)
    if len(done) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
Journal.append = append
add_int4(sys.argv[1], threads=1)
"""


def test_an_interrupted_run_with_other_options_begins_anew(squish: Path) -> None:
    killed = KILLED.replace("add_int4(sys.argv[1], drop_int8=True, threads=1)", KILLED_AT_THE_THIRD)
    subprocess.run([sys.executable, "-c", killed, str(squish)], check=False)
    report = add_int4(squish, form="q4", group=64)
    assert report.resumed == 0
    with ingot.open(squish) as checkpoint:
        sizes = {tensor.params.get("zero_point") for tensor in checkpoint.values() if tensor.codec != "dense"}
    assert sizes == {7}


@pytest.mark.parametrize(
    ("form", "group", "scales", "bits"),
    [("q4a", None, None, 6.0), ("q4", None, None, 5.0), ("q4a", 64, "f16", 4.5), ("q4", 128, "f16", 4.125)],
)
def test_forms_and_groups_take_what_they_say(tmp_path: Path, form, group, scales, bits) -> None:
    rng = np.random.default_rng(0)
    ingot.save(tmp_path / "a.safetensors", {"layers.0.mlp.a.weight": rng.normal(0, 1, (256, 1024)).astype(np.float32)})
    folder = tmp_path / "squish"
    ingot.convert(tmp_path / "a.safetensors", folder, "int8", "npydir")
    eight = values(folder)
    report = add_int4(folder, form=form, group=group, scales=scales)
    heads = 128 * (3 if form == "q4a" else 2)
    assert report.int4_bytes == 256 * 1024 * bits / 8 + heads
    assert report.savings_pct == pytest.approx(100 * (1 - bits / (8 + 32 / 1024)), abs=0.1)
    for name, four in values(folder).items():
        error = np.sqrt(np.mean((four - eight[name]) ** 2))
        assert error < 0.16
        stranger = as_the_document_reads(folder / "tensors" / name.replace(".", "__"), form)
        assert np.allclose(stranger, four, rtol=0, atol=1e-6)
    assert [item for item in ingot.verify(folder) if item.level == "error"] == []


def as_the_document_reads(start: Path, form: str) -> np.ndarray:
    """Decode with NumPy: nibbles, even column low, scales widened as squish's loader does."""
    codes, scales = (np.load(f"{start}__{end}.npy") for end in (form, "s4a" if form == "q4a" else "s4"))
    unpacked = np.stack([codes & 15, codes >> 4], -1).reshape(*scales.shape, -1).astype(np.float32)
    if form == "q4":
        whole = (unpacked - 7) * scales.astype(np.float32)[..., None]
    else:
        whole = unpacked * scales.astype(np.float32)[..., None]
        whole += np.load(f"{start}__z4a.npy").astype(np.float32)[..., None]
    return whole.reshape(len(codes), -1)


def test_small_values_keep_wide_scales(tmp_path: Path) -> None:
    values_ = np.random.default_rng(0).normal(0, 1e-8, (64, 128)).astype(np.float32)
    ingot.save(tmp_path / "a.safetensors", {"layers.0.mlp.a.weight": values_})
    ingot.convert(tmp_path / "a.safetensors", tmp_path / "squish", "int8", "npydir")
    add_int4(tmp_path / "squish", scales="f16")
    assert np.load(tmp_path / "squish" / "tensors" / "layers__0__mlp__a__weight__s4a.npy").dtype == np.float32
    assert np.abs(values(tmp_path / "squish")["layers.0.mlp.a.weight"]).max() > 0


def test_groups_and_forms_that_cannot_be(squish: Path) -> None:
    for group in (0, 3, 48, 2048):
        with pytest.raises(UsageError) as caught:
            add_int4(squish, group=group)
        assert caught.value.rule in ("int4.group", "int4.option")
    add_int4(squish, group=16)
    assert add_int4(squish).converted == []
    for asked in ({"group": 32}, {"form": "q4"}, {"scales": "f16"}):
        with pytest.raises(UsageError) as caught:
            add_int4(squish, **asked)
        assert caught.value.rule == "int4.other-form"


def test_a_ceiling_too_low_is_refused_and_leaves_nothing(squish: Path) -> None:
    before = {path.name for path in squish.iterdir()}
    with pytest.raises(ResourceError) as caught:
        add_int4(squish, max_ram="1MiB")
    assert caught.value.rule == "ram.ceiling"
    assert {path.name for path in squish.iterdir()} - before <= {".ingot-tiers.lock"}


def test_the_command(squish: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["int4", str(squish), "--drop-int8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["dropped"]
    assert told["converted"]
    assert 0 < told["savings_pct"] < 50
    assert run(["int4", str(squish), "--group", "32", "--form", "q4a"]) == 0
    assert "0 tensors got 4 bits" in capsys.readouterr().out
