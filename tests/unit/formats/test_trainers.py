"""Checkpoints of trainers in the shards of several ranks: written by torch's own programs, read without torch."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.errors import FormatError, IngotError, UnsupportedError
from ingot.formats.torch.inert_pickle import Record, load

torch = pytest.importorskip("torch")
RANKS = 4
GRID = np.arange(63, dtype=np.float32).reshape(7, 9)


def _write(rank: int, folder: str, port: int) -> None:
    """Write one rank's share of a distributed checkpoint, of rank files, and of full tensors (run in its process)."""
    import os
    import warnings

    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3, bias=False)).to(torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5, dtype=torch.bfloat16)).float().sum().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "step": 7}, checkpoint_id=f"{folder}/fsdp2")
    torch.save(model.state_dict(), f"{folder}/ranks/model_world_size_{RANKS}_rank_{rank}.pt")
    full = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if rank == 0:
        torch.save(full, f"{folder}/full.pt")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    grid = torch.from_numpy(GRID)
    tensors = {
        "rows_and_columns": distribute_tensor(grid, mesh, [Shard(0), Shard(1)]),
        "rows_twice": distribute_tensor(grid, mesh, [Shard(0), Shard(0)]),
        "replicated": distribute_tensor(grid, mesh, [Replicate(), Shard(1)]),
        "plain": grid[0].clone(),
    }
    dcp.save(tensors, checkpoint_id=f"{folder}/grid")
    torch.save(tensors, f"{folder}/grid_ranks/model_world_size_{RANKS}_rank_{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of checkpoints that four processes of torch have written."""
    import socket

    folder = tmp_path_factory.mktemp("trainers")
    for name in ("ranks", "grid_ranks"):
        (folder / name).mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_write, args=(str(folder), port), nprocs=RANKS)
    return folder


def _same(folder: Path, expected: dict[str, Any]) -> None:
    with ingot.open(folder) as checkpoint:
        assert set(checkpoint) == set(expected)
        for name, value in expected.items():
            assert torch.equal(checkpoint[name].torch(), value), name


@pytest.mark.slow
def test_distributed_checkpoints_give_the_weights_and_leave_the_optimizer_out(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = torch.load(saved / "full.pt", weights_only=True)
    _same(saved / "fsdp2", expected)
    assert run(["inspect", str(saved / "fsdp2")]) == 0
    assert "entries of the optimizer" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["grid", "grid_ranks"])
def test_tensors_that_are_divided_along_two_axes_are_put_together(saved: Path, folder: str) -> None:
    with ingot.open(saved / folder) as checkpoint:
        for name in ("rows_and_columns", "rows_twice", "replicated"):
            np.testing.assert_array_equal(checkpoint[name].numpy(), GRID)
            np.testing.assert_array_equal(checkpoint[name][2:5], GRID[2:5])
        np.testing.assert_array_equal(checkpoint["plain"].numpy(), GRID[0])


@pytest.mark.slow
def test_rank_files_give_the_weights_and_need_every_rank(saved: Path, tmp_path: Path) -> None:
    expected = torch.load(saved / "full.pt", weights_only=True)
    _same(saved / "ranks", expected)
    shutil.copytree(saved / "ranks", tmp_path / "ranks")
    (tmp_path / "ranks" / f"model_world_size_{RANKS}_rank_2.pt").unlink()
    with pytest.raises(FormatError, match="those of 2 are missing") as caught:
        ingot.open(tmp_path / "ranks")
    assert caught.value.rule == "torchfile.shards"


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """Return a distributed checkpoint of one process."""
    import warnings

    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {
            "model": {"a.weight": torch.arange(24.0).reshape(6, 4).t(), "b": torch.arange(5, dtype=torch.bfloat16)},
            "optimizer": {"state": {"a.weight": {"exp_avg": torch.zeros(6, 4)}}},
            "step": 5,
        }
        dcp.save(state, checkpoint_id=tmp_path / "step-5", no_dist=True)
    return tmp_path / "step-5"


def test_a_checkpoint_of_one_process_converts_from_the_command_line(
    alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["convert", str(alone), str(tmp_path / "out.safetensors")]) == 0
    assert "left out" in capsys.readouterr().out
    with ingot.open(tmp_path / "out.safetensors") as written:
        assert set(written) == {"a.weight", "b"}
        np.testing.assert_array_equal(written["a.weight"].numpy(), np.arange(24.0).reshape(6, 4).T)
        np.testing.assert_array_equal(written["b"].numpy("f32"), np.arange(5.0))


def test_a_missing_or_shortened_shard_is_refused(alone: Path) -> None:
    shard = next(alone.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-200])
    with pytest.raises(FormatError, match="cut off") as caught:
        ingot.open(alone)
    assert caught.value.rule == "torchfile.shards"
    shard.rename(shard.with_suffix(".moved"))
    (alone / "other.distcp").write_bytes(b"")
    with pytest.raises(FormatError, match="is missing"):
        ingot.open(alone)
    (alone / ".metadata").unlink()
    with pytest.raises(FormatError, match="hidden files") as caught:
        ingot.open(alone)
    assert caught.value.rule == "torchfile.metadata"


def test_a_pickle_is_plain_data_and_calls_nothing(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "called",)

    content = {"numbers": [1, 2.5, None, True, "text", (1, 2, 3, 4)], "set": {1}, "attack": Attack()}
    for protocol in (2, 3, 4, 5):
        value = load(pickle.dumps(content, protocol), "test")
        assert value["numbers"] == content["numbers"]
        assert isinstance(value["attack"], Record)
    assert not (tmp_path / "called").exists()


def test_damaged_metadata_never_gives_other_errors_than_refusals(alone: Path) -> None:
    data = (alone / ".metadata").read_bytes()
    random = np.random.default_rng(0)
    for _ in range(150):
        damaged = bytearray(data)
        damaged[int(random.integers(len(data)))] = int(random.integers(256))
        (alone / ".metadata").write_bytes(damaged)
        try:
            with ingot.open(alone) as checkpoint:
                for tensor in checkpoint.values():
                    tensor.numpy()
        except (IngotError, UnsupportedError):
            pass
