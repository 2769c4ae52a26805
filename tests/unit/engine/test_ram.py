"""``--max-ram`` holds: measured from outside, on a checkpoint several times larger than the ceiling."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.core.runtime.memory import parse_size
from ingot.engine import resources
from ingot.engine.resources import Resources
from ingot.engine.steps import Move
from ingot.model.part import memory_part
from ingot.model.tensor import Tensor
from ingot.views.transpose import transpose
from tests.support.memory import peak_anonymous

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads RssAnon from /proc")


def big_checkpoint(path: Path, rows: int, cols: int, count: int, modules: tuple[str, ...] = ("up_proj",)) -> int:
    """Write ``count`` f32 matrices (one matrix's bytes repeated), ``modules`` per layer; returns the file's size."""
    size = rows * cols * 4
    header = {
        f"model.layers.{i // len(modules)}.mlp.{modules[i % len(modules)]}.weight": {
            "dtype": "F32",
            "shape": [rows, cols],
            "data_offsets": [i * size, (i + 1) * size],
        }
        for i in range(count)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    matrix = np.random.default_rng(0).standard_normal((rows, cols), np.float32).tobytes()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(count):
            file.write(matrix)
    return path.stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["int4", "int2", "int2-hybrid", "lossless", "bf16", None])
def test_peak_anonymous_memory_stays_under_the_ceiling(tmp_path: Path, recipe: str | None) -> None:
    """Each tensor (256 MB) alone is larger than the ceiling."""
    ceiling = parse_size("192MiB")
    size = big_checkpoint(tmp_path / "big.safetensors", 4096, 16384, 2)
    assert size > 2 * ceiling
    command = [
        sys.executable,
        "-m",
        "ingot.cli.main",
        "convert",
        str(tmp_path / "big.safetensors"),
        str(tmp_path / "out.zt"),
    ]
    command += ["--max-ram", "192MiB", "-q", *(["--recipe", recipe] if recipe else [])]
    assert peak_anonymous(command) < ceiling


@pytest.mark.slow
def test_the_scratch_of_many_threads_is_reckoned_with(tmp_path: Path) -> None:
    """A texture coder's contexts take megabytes per thread, more than a ceiling near the least would leave."""
    big_checkpoint(tmp_path / "big.safetensors", 1024, 2048, 2)
    command = [sys.executable, "-m", "ingot.cli.main", "convert", str(tmp_path / "big.safetensors")]
    command += [str(tmp_path / "out.zt"), "--recipe", "astc", "--threads", "8", "-q", "--max-ram"]
    assert peak_anonymous([*command, "160MiB"]) < parse_size("160MiB")
    assert subprocess.run([*command, "80MiB", "--overwrite"], check=False, capture_output=True).returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [["--recipe", "lossless"], ["--prune", "0.25", "--recipe", "int4"], ["--prune", "0.25"]]
)
def test_measuring_and_pruning_on_many_threads_stay_under_the_ceiling(tmp_path: Path, more: list[str]) -> None:
    """Ten large matrices, sampled or scored by eight threads at once if there were no ceiling."""
    big_checkpoint(tmp_path / "big.safetensors", 2048, 2048, 10, ("up_proj", "down_proj"))
    command = [sys.executable, "-m", "ingot.cli.main", "convert", str(tmp_path / "big.safetensors")]
    command += [str(tmp_path / "out.zt"), "--threads", "8", "--max-ram", "160MiB", "-q", *more]
    assert peak_anonymous(command) < parse_size("160MiB")


@pytest.mark.slow
@pytest.mark.parametrize("quantizer", ["absmax", "mse"])
def test_one_scale_for_a_whole_tensor_needs_no_whole_tensor(tmp_path: Path, quantizer: str) -> None:
    big_checkpoint(tmp_path / "big.safetensors", 4096, 16384, 1)
    recipe = f'[[rules]]\ncodec = "affine"\noptions = {{ group = "tensor", quantizer = "{quantizer}" }}\n'
    (tmp_path / "tensor.toml").write_text(recipe)
    command = [sys.executable, "-m", "ingot.cli.main", "convert", str(tmp_path / "big.safetensors")]
    command += [str(tmp_path / "out.zt"), "--recipe", str(tmp_path / "tensor.toml"), "--max-ram", "192MiB", "-q"]
    assert peak_anonymous(command) < parse_size("192MiB")


@pytest.mark.slow
def test_what_is_kept_of_many_small_tensors_counts(tmp_path: Path) -> None:
    """Headers, plans and reports are under the ceiling too; the least ceiling is told, and enough."""
    big_checkpoint(tmp_path / "many.safetensors", 1, 16, 40_000)
    command = [sys.executable, "-m", "ingot.cli.main", "convert", str(tmp_path / "many.safetensors")]
    command += [str(tmp_path / "out.zt"), "-q", "--max-ram"]
    refused = subprocess.run([*command, "60MiB"], check=False, capture_output=True, text=True)
    more = re.search(r"raise --max-ram by ([0-9.]+) MiB", " ".join(refused.stderr.split()))
    assert refused.returncode == 1
    assert more is not None
    ceiling = (60 << 20) + int((float(more[1]) + 1) * (1 << 20))
    peak = peak_anonymous([*command, str(ceiling)])
    assert peak < ceiling
    one = tmp_path / "one"
    one.mkdir()
    big_checkpoint(one / "one.safetensors", 1, 16, 1)
    alone = peak_anonymous([*command[:4], str(one / "one.safetensors"), str(one / "out.zt"), "-q"])
    assert (peak - alone) / 40_000 < 4096  # the reserve of a plan for each tensor


@pytest.mark.slow
def test_decoding_stays_under_the_ceiling(tmp_path: Path) -> None:
    ceiling = parse_size("192MiB")
    big_checkpoint(tmp_path / "big.safetensors", 4096, 16384, 1)
    for source, target, recipe in (("big.safetensors", "int8.zt", "int8"), ("int8.zt", "back.safetensors", None)):
        command = [sys.executable, "-m", "ingot.cli.main", "convert", str(tmp_path / source), str(tmp_path / target)]
        command += ["--max-ram", "192MiB", "-q", *(["--recipe", recipe] if recipe else [])]
        assert peak_anonymous(command) < ceiling


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["sparse_csr", "sparse_coo"])
def test_a_sparse_matrix_without_zeros_stays_under_the_ceiling(tmp_path: Path, codec: str) -> None:
    """Nothing is known of the output before: the worst case has to be reckoned with, written and read back."""
    ceiling = "512MiB"
    big_checkpoint(tmp_path / "big.safetensors", 2048, 4096, 1)
    (tmp_path / "sparse.toml").write_text(f'[[rules]]\ncodec = "{codec}"\n')
    (tmp_path / "dense.toml").write_text('[[rules]]\ncodec = "dense"\n')
    for source, target, recipe in (("big.safetensors", "s.zt", "sparse.toml"), ("s.zt", "back.zt", "dense.toml")):
        command = [sys.executable, "-m", "ingot.cli.main", "convert", str(tmp_path / source), str(tmp_path / target)]
        command += ["--max-ram", ceiling, "-q", "--recipe", str(tmp_path / recipe)]
        assert peak_anonymous(command) < parse_size(ceiling)


@pytest.mark.slow
def test_re_laying_holds_no_whole_tensor(tmp_path: Path) -> None:
    """384 MiB of unsigned codes in rows of an odd length, into signed ones without padding."""
    rows, cols = 32768, 24575  # 25 groups
    parts = {"packed_weight": memory_part(np.zeros((rows, (cols + 1) // 2), np.uint8), "u8")}
    parts["scales"] = memory_part(np.ones((rows, cols // 983), np.float16), "f16")
    parts["zeros"] = memory_part(np.full((rows, cols // 983), 7, np.float16), "f16")
    params = {"codec_version": 1, "bits": 4, "granularity": "group", "group_size": 983, "axis": -1, "dtype": "f16"}
    params |= {"packing": "rows_lsb", "signed": False, "zeros": True}
    tensor = Tensor("model.layers.0.mlp.up_proj.weight", (rows, cols), "f16", "affine", parts, params)
    ingot.save(tmp_path / "big.zt", {tensor.name: tensor})
    del parts, tensor
    command = [sys.executable, "-m", "ingot.cli.main", "convert", str(tmp_path / "big.zt")]
    command += [str(tmp_path / "out.squizd"), "--max-ram", "128MiB", "-q"]
    assert peak_anonymous(command) < parse_size("128MiB")
    with ingot.open(tmp_path / "out.squizd") as checkpoint:
        (stored,) = checkpoint.values()
        assert stored.params["packing"] == "flat_lsb"
        assert (np.frombuffer(stored.parts["packed_weight"].view(), np.uint8) == 0x88).all()


@pytest.mark.slow
def test_words_are_turned_some_columns_at_a_time(tmp_path: Path) -> None:
    """What is laid out column by column is larger than the room that is left, and so is what it is made of."""
    rows, cols = 4096, 28672
    parts = {"packed_weight": memory_part(np.zeros((rows, cols // 2), np.uint8), "u8")}
    parts["scales"] = memory_part(np.ones((rows, cols // 128), np.float16), "f16")
    params = {"codec_version": 1, "bits": 4, "granularity": "group", "group_size": 128, "axis": -1, "dtype": "f16"}
    params |= {"packing": "rows_lsb", "signed": False, "zeros": False, "zero_point": 8}
    tensor = Tensor("model.layers.0.mlp.up_proj.weight", (rows, cols), "f16", "affine", parts, params)
    ingot.save(tmp_path / "big.zt", {tensor.name: tensor})
    del parts, tensor
    ingot.convert(tmp_path / "big.zt", tmp_path / "big.gguf", keep_names=True)
    for source, target in (("big.gguf", "gptq"), ("gptq", "awq"), ("awq", "big2.gguf")):
        command = [sys.executable, "-m", "ingot.cli.main", "convert", str(tmp_path / source), str(tmp_path / target)]
        command += ["--max-ram", "112MiB", "-q", "--keep-names", "--format", target.removeprefix("big2.")]
        assert peak_anonymous(command) < parse_size("112MiB")
    assert (tmp_path / "big2.gguf").read_bytes() == (tmp_path / "big.gguf").read_bytes()


def test_without_a_ceiling_chunks_take_a_quarter_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, budget in ((16 << 30, 4 << 30), (1 << 30, 1 << 28), (0, 1 << 28)):
        monkeypatch.setattr(resources, "available_ram", lambda free=free: free)
        assert resources.chunk_budget(Resources(), []) == budget


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory in other ways")
def test_memory_that_was_freed_takes_no_room_under_a_ceiling() -> None:
    """The C library keeps what lies below a block that is in use, in the heap of every thread."""
    before = resources.chunk_budget(Resources(ram="8GiB"), [])

    def litter() -> bytearray:
        blocks = [bytearray(b"1") * 50_000 for _ in range(2000)]  # none that it would map for itself
        return blocks[-1]

    with ThreadPoolExecutor(1) as pool:
        kept = [litter(), pool.submit(litter).result()]
        found = resources.chunk_budget(Resources(ram="8GiB"), [])
    assert len(kept) == 2
    assert found > before - (25 << 20)


@pytest.mark.parametrize(("recipe", "least"), [("f16", 4), ("int4", 12)])
def test_matrices_that_are_turned_are_reckoned_with(
    recipe: str, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read some columns at a time; what has to be decoded for it is held whole."""
    monkeypatch.setattr(resources, "anonymous_in_use", lambda: 0)
    values = np.random.default_rng(2).standard_normal((512, 2048)).astype(np.float32)
    ingot.save(tmp_path / "m.zt", {"up_proj.weight": values})
    ingot.convert(tmp_path / "m.zt", tmp_path / "q.zt", recipe=recipe)
    with ingot.open(tmp_path / "q.zt") as plain, transpose(plain, {"up_proj.weight": "turned"}) as turned:
        steps = [[Move(tensor, tensor.spec())] for tensor in (plain["up_proj.weight"], turned["turned"])]
        budgets = [resources.chunk_budget(Resources(ram="4GiB"), step) for step in steps]
        assert budgets[0] - budgets[1] >= least * values.size
