"""DeepSpeed's ZeRO folders, written here by the layout of ``zero_to_fp32.py``, give the weights of all ranks."""

from __future__ import annotations

import enum
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.errors import IngotError

torch = pytest.importorskip("torch")

SHAPES = {"embed.weight": (11, 5), "layer.weight": (7, 9), "layer.bias": (7,), "scale": (), "wide": (3, 4, 5)}


class ZeroStageEnum(int, enum.Enum):
    """The enumeration as which DeepSpeed pickles the stage."""

    gradients = 2
    weights = 3


def weights() -> dict[str, Any]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def model_states(groups: list[list[str]], **entries: Any) -> dict[str, Any]:
    return {
        "module": {},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedDict((name, torch.Size(SHAPES[name])) for name in group) for group in groups],
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        "ds_version": "0.19.8",
        **entries,
    }


def optimizer_states(stage: Any, count: Any, key: str, flats: list[Any], **entries: Any) -> dict[str, Any]:
    state = {"zero_stage": stage, "partition_count": count, key: flats, "base_optimizer_state": {"step": 3}, **entries}
    return {"optimizer_state_dict": state, "ds_version": "0.19.8"}


def write_stage2(
    folder: Path,
    ranks: int,
    groups: list[list[str]],
    prefix: str = "",
    gaps: list[list[int]] | None = None,
    **model: Any,
) -> Path:
    """Write each group as one vector, padded to twice the ranks and cut into equal shares; the last is not padded."""
    folder.mkdir(parents=True)
    tensors = weights()
    torch.save(model_states(groups, **model), folder / "mp_rank_00_model_states.pt")
    shares: list[list[Any]] = [[] for _ in range(ranks)]
    for index, group in enumerate(groups):
        parts = []
        for position, name in enumerate(group):
            parts.append(tensors[name].reshape(-1))
            if gaps is not None:
                parts.append(torch.full((gaps[index][position],), torch.nan))
        flat = torch.cat(parts)
        size = -(-len(flat) // (2 * ranks)) * 2 * ranks // ranks
        for rank in range(ranks):
            shares[rank].append(flat[rank * size : (rank + 1) * size].clone())
    extra = {} if gaps is None else {"param_alignment_paddings": gaps}
    for rank in range(ranks):
        stage = ZeroStageEnum(2)
        state = optimizer_states(stage, [ranks] * len(groups), "single_partition_of_fp32_groups", shares[rank], **extra)
        torch.save(state, folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def write_stage3(folder: Path, ranks: int, groups: list[list[str]], cut: int | None = None, **model: Any) -> Path:
    """Write each weight in equal shares, padded at the end; flat tensors have two weights each, or ``cut`` elements."""
    folder.mkdir(parents=True)
    tensors = weights()
    frozen = model.pop("frozen", {})
    for rank in range(ranks):
        parts = []
        for name in (name for group in groups for name in group):
            flat = tensors[name].reshape(-1)
            size = -(-len(flat) // ranks)
            padded = torch.cat([flat, torch.full((size * ranks - len(flat),), torch.nan)])
            parts.append(padded[rank * size : (rank + 1) * size])
        flats = [torch.cat(parts[start : start + 2]) for start in range(0, len(parts), 2)]
        if cut is not None:
            flats = [item.clone() for item in torch.cat(parts).split(cut)]
        entries: dict[str, Any] = dict(model)
        if frozen:
            entries["frozen_param_shapes"] = OrderedDict((name, value.shape) for name, value in frozen.items())
            entries["frozen_param_fragments"] = {
                name: torch.nn.functional.pad(value.reshape(-1), (0, -value.numel() % ranks)).chunk(ranks)[rank].clone()
                for name, value in frozen.items()
            }
        torch.save(model_states(groups, **entries), folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        state = optimizer_states(ZeroStageEnum(3), ranks, "fp32_flat_groups", flats)
        torch.save(state, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


GROUPS = [["embed.weight", "layer.weight"], ["layer.bias", "scale", "wide"]]


def require_weights(folder: Path, expected: dict[str, Any]) -> None:
    with ingot.open(folder) as checkpoint:
        assert set(checkpoint) == set(expected)
        for name, value in expected.items():
            assert torch.equal(checkpoint[name].torch(), value), name


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("prefix", ["", "bf16_"])
def test_stage_2(tmp_path: Path, ranks: int, prefix: str) -> None:
    require_weights(write_stage2(tmp_path / "step", ranks, GROUPS, prefix), weights())


def test_stage_2_with_paddings_between_weights(tmp_path: Path) -> None:
    require_weights(write_stage2(tmp_path / "step", 3, GROUPS, gaps=[[3, 0], [1, 7, 4]]), weights())


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("cut", [None, 13])
def test_stage_3(tmp_path: Path, ranks: int, cut: int | None) -> None:
    folder = write_stage3(tmp_path / "step", ranks, GROUPS, cut)
    require_weights(folder, weights())
    with ingot.open(folder) as checkpoint:
        np.testing.assert_array_equal(checkpoint["layer.weight"][2:4], weights()["layer.weight"][2:4].numpy())


def test_buffers_frozen_and_shared_weights(tmp_path: Path) -> None:
    frozen = {"frozen": torch.randn(3, 5).bfloat16()}
    buffer = torch.arange(4.0).half()
    module = {"buffer": buffer, "layer.weight": torch.empty(0), "head.weight": torch.empty(0)}
    common = {
        "module": module,
        "buffer_names": ["buffer", "not_saved"],
        "shared_params": {"head.weight": "embed.weight"},
    }
    expected = {**weights(), **frozen, "buffer": buffer, "head.weight": weights()["embed.weight"]}
    require_weights(write_stage3(tmp_path / "three", 2, GROUPS, frozen=frozen, **common), expected)
    shapes = {"frozen_param_shapes": {"frozen": torch.Size((3, 5))}, "frozen_param_fragments": frozen}
    require_weights(write_stage2(tmp_path / "two", 2, GROUPS, **common, **shapes), expected)


def test_the_folder_above_names_the_tag_and_keeps_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoint-500"
    write_stage3(folder / "global_step500", 2, GROUPS)
    (folder / "latest").write_text("global_step500")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    require_weights(folder, weights())
    assert run(["convert", str(folder), str(tmp_path / "out"), "--format", "safetensors", "--keep-names"]) == 0
    assert "optimizer's state of 2 ranks is left out" in capsys.readouterr().out
    assert (tmp_path / "out" / "config.json").exists()
    require_weights(tmp_path / "out", weights())


def rule_of(folder: Path) -> str | None:
    with pytest.raises(IngotError) as error:
        ingot.open(folder)
    assert "\n" not in str(error.value)
    assert error.value.exit_code in (1, 2)
    return error.value.rule


@pytest.mark.parametrize("write", [write_stage2, write_stage3])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_missing_rank(tmp_path: Path, write: Callable[..., Path], rank: int) -> None:
    folder = write(tmp_path / "step", 3, GROUPS)
    (folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").unlink()
    assert rule_of(folder) == "torchfile.shards"


@pytest.mark.parametrize("write", [write_stage2, write_stage3])
def test_missing_names_and_shapes(tmp_path: Path, write: Callable[..., Path]) -> None:
    folder = write(tmp_path / "step", 2, GROUPS)
    for path in folder.glob("*_model_states.pt"):
        path.unlink()
    assert rule_of(folder) == "torchfile.shards"


@pytest.mark.parametrize("write", [write_stage2, write_stage3])
def test_a_truncated_file(tmp_path: Path, write: Callable[..., Path]) -> None:
    folder = write(tmp_path / "step", 2, GROUPS)
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        for size in (len(data) - 1, len(data) // 2, 30):
            path.write_bytes(data[:size])
            assert rule_of(folder) in ("torchfile.zip", "torchfile.damaged")
        path.write_bytes(data)
    require_weights(folder, weights())


@pytest.mark.parametrize("write", [write_stage2, write_stage3])
def test_ranks_of_two_saves(tmp_path: Path, write: Callable[..., Path]) -> None:
    folder = write(tmp_path / "step", 2, GROUPS)
    other = write(tmp_path / "other", 3, GROUPS)
    name = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    shutil.copy(other / name.format(1), folder / name.format(1))
    assert rule_of(folder) == "torchfile.shards"
    folder = write(tmp_path / "again", 2, GROUPS)
    shutil.copy(other / name.format(2), folder / name.format(2))
    assert rule_of(folder) == "torchfile.shards"


def test_shapes_that_differ_between_ranks(tmp_path: Path) -> None:
    folder = write_stage3(tmp_path / "step", 2, GROUPS)
    shapes = model_states([GROUPS[0], ["layer.bias", "wide", "scale"]])
    torch.save(shapes, folder / "zero_pp_rank_1_mp_rank_00_model_states.pt")
    assert rule_of(folder) == "torchfile.shards"
    shapes["param_shapes"][1]["layer.bias"] = torch.Size((8,))
    torch.save(shapes, folder / "zero_pp_rank_1_mp_rank_00_model_states.pt")
    assert rule_of(folder) == "torchfile.shards"


@pytest.mark.parametrize(
    ("entries", "rule"),
    [
        ({"param_shapes": None}, "torchfile.metadata"),
        ({"param_shapes": [["layer.bias"]]}, "torchfile.metadata"),
        ({"param_shapes": [OrderedDict({"x": torch.Size((10**6,))})]}, "torchfile.shards"),
        ({"param_shapes": [OrderedDict({"x": torch.Size((4,))}), OrderedDict()]}, "torchfile.shards"),
        ({"param_shapes": [OrderedDict({"x": "y"}), OrderedDict()]}, "torchfile.damaged"),
        ({"module": {"left.out": torch.ones(3)}}, "torchfile.metadata"),
        ({"buffer_names": 5}, "torchfile.metadata"),
        ({"frozen_param_shapes": {"lost": torch.Size((3,))}}, "torchfile.shards"),
    ],
)
@pytest.mark.parametrize("write", [write_stage2, write_stage3])
def test_entries_that_contradict_each_other(
    tmp_path: Path, write: Callable[..., Path], entries: dict[str, Any], rule: str
) -> None:
    assert rule_of(write(tmp_path / "step", 2, GROUPS, **entries)) == rule


@pytest.mark.parametrize(
    "state",
    [
        {"zero_stage": 7},
        {"zero_stage": None},
        {"partition_count": 0},
        {"partition_count": 10**9},
        {"partition_count": [2, 4]},
        {"single_partition_of_fp32_groups": []},
        {"single_partition_of_fp32_groups": [1, 2]},
        {"single_partition_of_fp32_groups": [torch.ones(2, 2), torch.ones(2)]},
        {"single_partition_of_fp32_groups": [torch.ones(20)]},
        {"param_alignment_paddings": [[1]]},
        {"param_alignment_paddings": [[-1, 0], [0, 0, 0]]},
    ],
)
def test_states_of_the_optimizer_that_cannot_be_read(tmp_path: Path, state: dict[str, Any]) -> None:
    folder = write_stage2(tmp_path / "step", 2, GROUPS)
    path = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    content = torch.load(path, weights_only=False)
    content["optimizer_state_dict"].update(state)
    torch.save(content, path)
    assert (rule_of(folder) or "").startswith("torchfile.")


@pytest.mark.parametrize("name", ["mp_rank_01_model_states.pt", "layer_0_expert_0_mp_rank_00_model_states.pt"])
def test_other_parallelism_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = write_stage2(tmp_path / "step", 2, GROUPS)
    (folder / name).write_bytes(b"PK\x03\x04")
    assert rule_of(folder) == "torchfile.placement"


@pytest.mark.parametrize("tag", ["../outside", "", "missing", "/", "a/b", "\0"])
def test_a_tag_that_is_no_folder(tmp_path: Path, tag: str) -> None:
    write_stage2(tmp_path / "outside", 2, GROUPS)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").write_text(tag)
    assert (rule_of(tmp_path / "run") or "").startswith("detect.")


def test_nothing_of_a_file_is_executed(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "executed",))

    folder = write_stage2(tmp_path / "step", 2, GROUPS, client_state=Payload())
    require_weights(folder, weights())
    assert not (tmp_path / "executed").exists()
