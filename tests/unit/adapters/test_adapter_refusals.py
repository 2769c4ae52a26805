"""Adapters that are damaged, of another method or of another base are refused by one error with a rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.adapters.read import open_adapter
from ingot.adapters.view import with_adapters
from ingot.cli.main import run
from ingot.errors import IngotError
from tests.support import model_folder
from tests.support.adapters import DOWN, EMBED, Q, base_folder, lora, peft_folder, values


def rule_of(path: Path) -> str | None:
    with pytest.raises(IngotError) as error, open_adapter(path):
        pass
    assert "\n" not in str(error.value)
    return error.value.rule


@pytest.mark.parametrize("method", ["LOHA", "IA3", "VERA", "ADALORA", "PROMPT_TUNING", "C3A"])
def test_other_methods_are_refused_by_name(tmp_path: Path, method: str) -> None:
    with pytest.raises(IngotError, match=method) as error:
        open_adapter(peft_folder(tmp_path / "a", lora(), peft_type=method))
    assert error.value.rule == "adapter.method"


@pytest.mark.parametrize(
    "config",
    [
        {"layer_replication": [[0, 2], [1, 3]]},
        {"alora_invocation_tokens": [1, 2]},
        {"use_qalora": True},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "olora"},
        {"setting_of_2031": 3},
        {"lora_alpha": "8"},
        {"lora_alpha": float("nan")},
        {"lora_alpha": 1e300},
        {"lora_alpha": 1e-60},
        {"lora_alpha": 10**400},
        {"r": 10**400},
        {"rank_pattern": {"q_proj": 10**400}},
        {"peft_type": 3},
        {"peft_type": None},
        {"r": 0},
        {"rank_pattern": {"(": 4}},
        {"rank_pattern": ["q_proj"]},
        {"alpha_pattern": {"q_proj": None}},
        {"target_parameters": "mlp"},
    ],
)
def test_settings_that_cannot_be_applied(tmp_path: Path, config: dict[str, Any]) -> None:
    assert rule_of(peft_folder(tmp_path / "a", lora(), **config)) == "adapter.config"


def test_a_pattern_cannot_take_forever(tmp_path: Path) -> None:
    with open_adapter(peft_folder(tmp_path / "a", lora(), rank_pattern={"(.*.*)*x": 8})) as adapter:
        assert adapter.ranks == [4]


@pytest.mark.parametrize(
    ("tensors", "rule"),
    [
        ({f"{Q}.lora_A.weight": values(4, 16)}, "adapter.tensors"),
        ({**lora(), f"{Q}.lora_A.weight": values(3, 16)}, "adapter.rank"),
        (lora(rank=2), "adapter.rank"),
        ({**lora(), f"{Q}.lora_magnitude_vector": values(5)}, "adapter.tensors"),
        ({**lora(), f"{Q}.lora_B.weight": values()}, "adapter.rank"),
        ({**lora(), f"{Q}.lora_A.weight": values(16)}, "adapter.rank"),
        ({name: item.astype(np.int32) for name, item in lora().items()}, "adapter.tensors"),
        ({name: item > 0 for name, item in lora().items()}, "adapter.tensors"),
        ({**lora(), f"{EMBED}.trainable_tokens_delta": values()}, "adapter.config"),
        ({}, "adapter.tensors"),
        ({**lora(), f"{Q}.lora_C.weight": values(5)}, "adapter.tensors"),
    ],
)
def test_tensors_that_do_not_fit_together(tmp_path: Path, tensors: dict[str, Any], rule: str) -> None:
    assert rule_of(peft_folder(tmp_path / "a", tensors)) == rule


def test_a_model_is_no_adapter(tmp_path: Path) -> None:
    assert rule_of(base_folder(tmp_path / "base")) == "adapter.none"


def test_the_config_must_be_there(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "a", lora())
    (folder / "adapter_config.json").unlink()
    with pytest.raises(IngotError, match="adapter_config"):
        open_adapter(folder)


@pytest.mark.parametrize(
    ("tensors", "rule"),
    [
        (lora("model.layers.7.self_attn.q_proj"), "adapter.base"),
        (lora("lm_head"), "adapter.base"),
        (lora(rows=32), "adapter.shape"),
        (lora(DOWN, cols=16), "adapter.shape"),
        ({f"{DOWN}.weight": values(16, 41)}, "adapter.shape"),
    ],
)
def test_another_base(tmp_path: Path, tensors: dict[str, Any], rule: str) -> None:
    adapter = peft_folder(tmp_path / "a", tensors)
    with ingot.open(base_folder(tmp_path / "base")) as base, pytest.raises(IngotError) as error:
        with_adapters(base, [adapter])
    assert error.value.rule == rule


def test_two_adapters_of_different_bases(tmp_path: Path) -> None:
    good = peft_folder(tmp_path / "a", lora())
    other = peft_folder(tmp_path / "b", lora(rows=24, cols=24))
    with ingot.open(base_folder(tmp_path / "base")) as base, pytest.raises(IngotError, match="another base"):
        with_adapters(base, [good, other])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite(tmp_path: Path, value: float) -> None:
    tensors = lora()
    tensors[f"{Q}.lora_A.weight"][1, 2] = value
    adapter = peft_folder(tmp_path / "a", tensors)
    with ingot.open(base_folder(tmp_path / "base")) as base, with_adapters(base, [adapter]) as view:
        with pytest.raises(IngotError) as error:
            view[f"{Q}.weight"].numpy()
        assert error.value.rule == "adapter.values"


def test_a_truncated_file(tmp_path: Path) -> None:
    file = peft_folder(tmp_path / "a", lora()) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(IngotError):
        open_adapter(file.parent)


SCALES = [0, 1e39, 10**400, "20", float("inf"), True]


@pytest.mark.parametrize("parameters", [None, {}, *({"scale": scale} for scale in SCALES)])
def test_mlx_adapters_need_a_scale(tmp_path: Path, parameters: object) -> None:
    folder = tmp_path / "mlx"
    folder.mkdir()
    ingot.save(folder / "adapters.safetensors", {f"{Q}.lora_a": values(16, 4), f"{Q}.lora_b": values(4, 16)})
    (folder / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "lora", "lora_parameters": parameters}))
    assert rule_of(folder) == "adapter.config"


@pytest.mark.parametrize("weight", ["nan", "inf"])
def test_weights_are_finite(tmp_path: Path, weight: str) -> None:
    adapter = peft_folder(tmp_path / "a", lora())
    with ingot.open(base_folder(tmp_path / "base")) as base, pytest.raises(IngotError) as error:
        with_adapters(base, [f"{adapter}:{weight}"])
    assert error.value.rule == "adapter.weight"


def test_mlx_factors_of_rank_0(tmp_path: Path) -> None:
    folder = tmp_path / "mlx"
    folder.mkdir()
    ingot.save(folder / "adapters.safetensors", {f"{Q}.lora_a": values(16, 0), f"{Q}.lora_b": values(0, 16)})
    settings = {"fine_tune_type": "lora", "lora_parameters": {"scale": 2.0}}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    assert rule_of(folder) == "adapter.rank"


def test_a_scale_that_gguf_cannot_store(tmp_path: Path) -> None:
    size = model_folder.HIDDEN
    adapter = peft_folder(tmp_path / "a", lora(rows=size, cols=size), lora_alpha=1e39)
    base = model_folder.write(tmp_path / "base")
    with pytest.raises(IngotError) as error:
        ingot.convert_adapter(adapter, tmp_path / "a.gguf", base=base)
    assert error.value.rule == "adapter.unsupported"
    assert not (tmp_path / "a.gguf").exists()


def changed_factor(value: float) -> dict[str, Any]:
    tensors = lora()
    tensors[f"{Q}.lora_B.weight"][3, 1] = value
    return tensors


COMMANDS = {
    "merge": ["merge", "base", "a", "-o", "out"],
    "merge to GGUF": ["merge", "base", "a", "-o", "out.gguf", "--keep-names"],
    "patch": ["patch", "base", "a", "-o", "out"],
    "convert": ["adapter", "convert", "a", "-o", "out"],
    "convert by base": ["adapter", "convert", "a", "--base", "base", "-o", "out"],
    "verify": ["verify", "a", "-q"],
    "verify by base": ["verify", "a", "--base", "base", "-q"],
    "store add": ["store", "add", "out", "a"],
}
DAMAGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "NaN": (changed_factor(np.nan), {}),
    "infinity": (changed_factor(-np.inf), {}),
    "rank": (lora(), {"r": 5}),
    "ranks": ({**lora(), f"{Q}.lora_A.weight": values(3, 16)}, {}),
    "no lora_B": ({f"{Q}.lora_A.weight": values(4, 16)}, {}),
    "rank 0": (lora(), {"r": 0}),
    "alpha NaN": (lora(), {"lora_alpha": float("nan")}),
    "alpha 1e300": (lora(), {"lora_alpha": 1e300}),
    "alpha of 400 digits": (lora(), {"lora_alpha": 10**400}),
    "scalars": ({f"{Q}.lora_A.weight": values(), f"{Q}.lora_B.weight": values()}, {}),
    "integers": ({name: item.astype(np.int8) for name, item in lora().items()}, {}),
    "no tensors": ({}, {}),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("damage", [*DAMAGED, "truncated", "no config"])
def test_commands_refuse_damage_in_one_line_and_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage: str, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    base_folder(Path("base"))
    tensors, config = DAMAGED.get(damage, (lora(), {}))
    folder = peft_folder(Path("a"), tensors, **config)
    if damage == "truncated":
        (folder / "adapter_model.safetensors").write_bytes((folder / "adapter_model.safetensors").read_bytes()[:-40])
    elif damage == "no config":
        (folder / "adapter_config.json").unlink()
    assert run(COMMANDS[command]) == 1
    output = capsys.readouterr()
    lines = [line for line in (output.out + output.err).splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "defect" not in lines[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "base"]


@pytest.mark.parametrize("command", ["merge", "patch", "convert by base", "verify by base"])
@pytest.mark.parametrize("tensors", [lora("model.layers.9.self_attn.q_proj"), lora(rows=24, cols=24)])
def test_commands_refuse_the_adapter_of_another_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, tensors: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    base_folder(Path("base"))
    peft_folder(Path("a"), tensors)
    assert run(COMMANDS[command]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "base"]


@pytest.mark.parametrize("method", ["IA3", "LOHA", "PROMPT_TUNING"])
def test_commands_refuse_other_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.chdir(tmp_path)
    base_folder(Path("base"))
    peft_folder(Path("a"), lora(), peft_type=method)
    for command in ("merge", "patch", "convert", "verify by base"):
        assert run(COMMANDS[command]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "base"]
