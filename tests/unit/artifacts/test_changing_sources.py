"""Sources that are copied, replaced, rewritten, or more than a process may hold open, while they are being read."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.artifacts.open import open_source
from ingot.artifacts.state_dict import open_bytes, save_bytes
from ingot.core.runtime.progress import ProgressEvent
from ingot.errors import IngotError, IntegrityError, UsageError

SHAPE = (64, 64)
NAMES = tuple(f"model.layers.{number}.mlp.up_proj.weight" for number in range(12))


def weights(value: float) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.full(SHAPE, value, np.float32) for name in NAMES}


def rewritten(path: Path, value: float) -> None:
    """Write other values into the same file, with the time of modification put back."""
    before = path.stat()
    other = path.with_name(f"other{path.suffix}")
    ingot.save(other, weights(value))
    time.sleep(0.02)  # the clock of file systems ticks a few hundred times a second
    with path.open("r+b") as file:
        file.write(other.read_bytes())
    other.unlink()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(path: Path, value: float) -> None:
    """Put another file of the same size and time under the name."""
    before = path.stat()
    other = path.with_name(f"other{path.suffix}")
    ingot.save(other, weights(value))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("io", ["pread", "mmap"])
@pytest.mark.parametrize("suffix", [".safetensors", ".zt", ".squizd"])
@pytest.mark.parametrize("copy", [deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copied_tensor_has_its_own_files(tmp_path: Path, io: str, suffix: str, copy: Callable[[Any], Any]) -> None:
    ingot.save(tmp_path / "one.safetensors", weights(1))
    source = tmp_path / f"one{suffix}"
    if suffix != ".safetensors":
        ingot.convert(tmp_path / "one.safetensors", source, recipe="int4")
    ingot.save(tmp_path / "two.safetensors", weights(2))
    with ingot.open(source, io=io) as checkpoint:
        wanted = checkpoint[NAMES[5]].numpy()
        twin = copy(checkpoint[NAMES[5]])
        assert np.array_equal(twin.numpy(), wanted)
        del twin
        gc.collect()
        others = [ingot.open(tmp_path / "two.safetensors", io="pread") for _ in range(8)]
        assert np.array_equal(checkpoint[NAMES[5]].numpy(), wanted)
        assert np.array_equal(checkpoint[NAMES[7]].numpy(), checkpoint[NAMES[5]].numpy())
        last = copy(checkpoint[NAMES[3]])
    assert np.array_equal(last.numpy(), wanted)  # the copy's file is not closed with the checkpoint
    for other in others:
        other.close()


def first_values(checkpoint: ingot.Checkpoint) -> list[float]:
    return [float(tensor.numpy()[0, 0]) for tensor in checkpoint.values()]


def test_a_checkpoint_reaches_spawned_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ingot.save(tmp_path / "a.safetensors", weights(3))
    monkeypatch.chdir(tmp_path)
    with ingot.open("a.safetensors", io="pread") as checkpoint:
        monkeypatch.chdir("/")
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.apply(first_values, (checkpoint,)) == [3.0] * len(NAMES)
        twin = deepcopy(checkpoint)
        assert (twin.io, twin.format, list(twin)) == (checkpoint.io, checkpoint.format, list(checkpoint))
    assert first_values(twin) == [3.0] * len(NAMES)
    twin.close()


@pytest.mark.parametrize("disturb", [replaced, rewritten])
def test_a_checkpoint_is_not_opened_again_as_another(tmp_path: Path, disturb: Callable[[Path, float], None]) -> None:
    ingot.save(tmp_path / "a.zt", weights(3))
    with ingot.open(tmp_path / "a.zt") as checkpoint:
        stored = pickle.dumps(checkpoint)
    pickle.loads(stored).close()
    disturb(tmp_path / "a.zt", 4)
    with pytest.raises(IntegrityError) as caught:
        pickle.loads(stored)
    assert caught.value.rule == "store.changed"


def test_a_checkpoint_of_bytes_is_copied_with_them() -> None:
    twin = pickle.loads(pickle.dumps(open_bytes(save_bytes(weights(5)))))
    assert first_values(twin) == [5.0] * len(NAMES)
    bare = ingot.Checkpoint({}, format="zt", location="nowhere")
    with pytest.raises(UsageError) as caught:
        pickle.dumps(bare)
    assert caught.value.rule == "checkpoint.copy"


def test_a_resumed_run_does_not_join_two_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source is replaced after it was opened, and before the journal begins."""
    source, target = tmp_path / "a.safetensors", tmp_path / "out.zt"
    ingot.save(source, weights(1))

    def opened_then_replaced(*args: Any, **options: Any) -> Any:
        opened = open_source(*args, **options)
        replaced(source, 2)
        return opened

    class Killed(BaseException):
        """Stands for the end of the process."""

    def kill(event: ProgressEvent) -> None:
        if event.processed > 5 * 4 * 64 * 64:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("ingot.conversion.run.open_source", opened_then_replaced)
        with pytest.raises(Killed):
            ingot.convert(source, target, resume=True, progress=kill, threads=1)
    with pytest.raises(UsageError) as caught:
        ingot.convert(source, target, resume=True)
    assert caught.value.rule == "resume.changed"
    ingot.convert(source, target)
    with ingot.open(target) as checkpoint:
        assert set(first_values(checkpoint)) == {2.0}


@pytest.mark.parametrize("io", ["pread", "mmap"])
@pytest.mark.parametrize("suffix", [".safetensors", ".zt"])
def test_a_source_that_is_rewritten_meanwhile_gives_no_mixture(tmp_path: Path, io: str, suffix: str) -> None:
    source, target = tmp_path / f"a{suffix}", tmp_path / "out.safetensors"
    ingot.save(source, weights(1))
    done: list[int] = []

    def rewrite(event: ProgressEvent) -> None:
        if not done:
            done.append(event.processed)
            rewritten(source, 2)

    with pytest.raises(IntegrityError) as caught:
        ingot.convert(source, target, progress=rewrite, io=io, threads=1)
    assert caught.value.rule in ("store.changed", "part.digest-mismatch")
    assert not target.exists()


@pytest.mark.parametrize("io", ["pread", "mmap"])
def test_bytes_that_were_proven_once_are_proven_again_when_the_file_has_changed(tmp_path: Path, io: str) -> None:
    ingot.save(tmp_path / "a.zt", weights(1))
    with ingot.open(tmp_path / "a.zt", io=io) as checkpoint:
        assert checkpoint[NAMES[0]].numpy()[0, 0] == 1
        rewritten(tmp_path / "a.zt", 2)
        with pytest.raises(IngotError) as caught:
            checkpoint[NAMES[0]].numpy()
    assert caught.value.rule == "part.digest-mismatch"


FEW_FILES = """
import resource, sys
import numpy as np
import ingot, ingot.numpy
from ingot.inspect.verify import verify
source, other, out = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
for io in ("mmap", "pread"):
    with ingot.open(source, io=io) as checkpoint:
        held = checkpoint.state_dict()
        assert len(held) == 40 and all(float(array[0]) == int(name) for name, array in held.items())
assert len(ingot.numpy.load_file(source)) == 40
assert not [finding for finding in verify(source) if finding.level == "error"]
assert ingot.compare(source, other).tensors
ingot.convert(source, out + "/copy", format="safetensors", max_shard=100)
ingot.convert(source, out + "/copy.zt", recipe="bf16")
ingot.diff(source, other, out + "/delta.zt")
ingot.patch(source, out + "/delta.zt", out + "/patched.safetensors")
assert float(ingot.open(out + "/patched.safetensors")["7"].numpy()[0]) == 8
print("all done")
"""


def test_more_shards_than_descriptors(tmp_path: Path) -> None:
    for folder, more in (("source", 0), ("other", 1)):
        values = {str(number): np.full(16, number + more, np.float32) for number in range(40)}
        ingot.save(tmp_path / "one.safetensors", values)
        ingot.convert(tmp_path / "one.safetensors", tmp_path / folder, format="safetensors", max_shard=64)
    arguments = [str(tmp_path / "source"), str(tmp_path / "other"), str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", FEW_FILES, *arguments], capture_output=True, text=True, check=False)
    assert done.stdout == "all done\n", done.stderr
