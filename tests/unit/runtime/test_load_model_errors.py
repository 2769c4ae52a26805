"""What load_model refuses, each by its rule, before transformers fills in anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import IngotError
from ingot.runtime.loading.transformers import load_model
from ingot.runtime.loading.transformers_tokenizer import load_tokenizer
from tests.support.models import make, output_of

Change = Callable[[dict[str, Any], dict[str, Any]], None]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("models") / "llama")


def changed(source: Path, folder: Path, change: Change) -> Path:
    """Write the model with another config and other tensors."""
    config = json.loads((source / "config.json").read_text())
    with ingot.open(source) as checkpoint:
        tensors: dict[str, Any] = dict(checkpoint.items())
        change(config, tensors)
        ingot.save(folder / "model.zt", tensors)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def refused(path: Path, **options: Any) -> IngotError:
    with pytest.raises(IngotError) as caught:
        load_model(path, **options)
    assert "\n" not in str(caught.value)
    return caught.value


def set_config(**values: Any) -> Change:
    return lambda config, tensors: config.update(values)


CASES: dict[str, tuple[str, Change]] = {
    "fewer layers stored": ("model.missing", set_config(num_hidden_layers=3)),
    "more layers stored": ("model.unexpected", set_config(num_hidden_layers=1)),
    "hidden size": ("model.shape", set_config(hidden_size=64)),
    "vocabulary of a trillion": ("model.shape", set_config(vocab_size=10**12)),
    "a billion layers": ("model.config", set_config(num_hidden_layers=10**9)),
    "negative sizes": ("model.config", set_config(hidden_size=-32)),
    "text for a number": ("model.config", set_config(hidden_size="large")),
    "no heads": ("model.config", set_config(num_attention_heads=0)),
    "a billion labels": ("model.config", set_config(num_labels=10**9)),
    "unknown type": ("model.architecture", set_config(model_type="nobody_knows")),
    "no type": ("model.architecture", lambda config, tensors: config.pop("model_type")),
    "type of no text": ("model.architecture", set_config(model_type=["llama"])),
    "unknown class": ("model.architecture", set_config(architectures=["NobodyForCausalLM"])),
    "class of another config": ("model.architecture", set_config(architectures=["BertModel"])),
    "no class of a model": ("model.architecture", set_config(architectures=["PreTrainedModel", "pipeline"])),
    "foreign quantization": ("model.quantized", set_config(quantization_config={"quant_method": "gptq", "bits": 4})),
    "missing tensor": ("model.missing", lambda config, tensors: tensors.pop("model.norm.weight")),
    "extra tensor": (
        "model.unexpected",
        lambda config, tensors: tensors.update({"model.extra": np.zeros(3, np.float32)}),
    ),
    "transposed": (
        "model.shape",
        lambda config, tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].numpy().T.copy()}),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_config_that_disagrees(llama: Path, tmp_path: Path, name: str) -> None:
    rule, change = CASES[name]
    assert refused(changed(llama, tmp_path, change)).rule == rule


def test_a_class_that_is_no_text(llama: Path, tmp_path: Path) -> None:
    """Older releases of transformers refuse such a config themselves."""
    path = changed(llama, tmp_path, set_config(architectures=[7]))
    assert refused(path).rule in {"model.architecture", "model.config"}


def test_which_shapes(llama: Path, tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        config["intermediate_size"] = 40

    message = str(refused(changed(llama, tmp_path, change)))
    assert "model.layers.0.mlp.down_proj.weight" in message
    assert "[32, 40]" in message
    assert "[32, 48]" in message


def test_extra_tensors_may_be_left_out(llama: Path, tmp_path: Path) -> None:
    path = changed(llama, tmp_path, lambda config, tensors: tensors.update({"extra": np.zeros(3, np.float32)}))
    model = load_model(path, strict=False)
    assert (output_of(model) == output_of(load_model(llama))).all()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (None, "model.config-missing"),
        ("", "model.config"),
        ("[]", "model.config"),
        ("[" * 100_000, "model.config"),
        ('{"model_type": "llama", "hidden_size": 1' + "0" * 5000 + "}", "model.config"),
        ("\udcff", "model.config"),
    ],
)
def test_config_that_is_none(llama: Path, tmp_path: Path, text: str | None, rule: str) -> None:
    changed(llama, tmp_path, lambda config, tensors: None)
    if text is None:
        (tmp_path / "config.json").unlink()
    else:
        (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert refused(tmp_path).rule == rule


def test_code_of_the_model_is_never_run(llama: Path, tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
        config["model_type"] = "evil"

    (tmp_path / "evil.py").write_text("raise SystemExit('code of the model ran')")
    assert refused(changed(llama, tmp_path, change)).rule == "model.architecture"


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_code_named_in_a_config_is_not_fetched(llama: Path, tmp_path: Path, key: str) -> None:
    model = load_model(changed(llama, tmp_path, set_config(**{key: "somebody/kernel"})))
    assert "/" not in str(getattr(model.config, "_" + key.removeprefix("_")))
    assert (output_of(model) == output_of(load_model(llama))).all()


def test_way_to_compute_is_kept(llama: Path, tmp_path: Path) -> None:
    model = load_model(changed(llama, tmp_path, set_config(attn_implementation="eager")))
    assert model.config._attn_implementation == "eager"


def test_tables_larger_than_memory(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTJConfig(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2, rotary_dim=4)
    transformers.GPTJForCausalLM(config).save_pretrained(tmp_path)
    values = {**json.loads((tmp_path / "config.json").read_text()), "n_positions": 10**12}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert refused(tmp_path).rule == "ram.guard"


def test_damage_is_found_while_loading(llama: Path, tmp_path: Path) -> None:
    changed(llama, tmp_path, lambda config, tensors: None)
    with ingot.open(tmp_path) as checkpoint:
        part = checkpoint["model.layers.1.mlp.up_proj.weight"].parts["data"]
        where = part.offset + 5
    data = bytearray((tmp_path / "model.zt").read_bytes())
    data[where] ^= 1
    (tmp_path / "model.zt").write_bytes(data)
    assert refused(tmp_path).rule == "part.digest-mismatch"
    load_model(tmp_path, verify=False)


def test_memory(llama: Path) -> None:
    error = refused(llama, dtype="f32", max_ram="10KiB")
    assert error.rule == "ram.guard"
    load_model(llama, max_ram="10KiB")  # mapped as stored: nothing is decoded
    load_model(llama, dtype="f32", max_ram="1GiB")


def test_generation_config(llama: Path, tmp_path: Path) -> None:
    changed(llama, tmp_path, lambda config, tensors: None)
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": "many"}')
    assert refused(tmp_path).rule == "model.generation-config"


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"device": "toaster"}, "model.device"),
        ({"device": "meta"}, "model.device"),
        ({"device": 3.5}, "model.device"),
        ({"dtype": "i8"}, "model.dtype"),
        ({"dtype": "f8_e4m3fn"}, "model.dtype"),
        ({"dtype": "float17"}, "dtype.unknown"),
        ({"sctrict": False}, "model.option"),
    ],
)
def test_wrong_calls(llama: Path, options: dict[str, Any], rule: str) -> None:
    assert refused(llama, **options).rule == rule


def test_no_tokenizer(llama: Path, tmp_path: Path) -> None:
    for text in (None, "{}", '{"format": "another", "merges": [[5, 999]]}'):
        if text is not None:
            (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(IngotError) as caught:
            load_tokenizer(tmp_path)
        assert caught.value.rule == "model.tokenizer"


def test_empty_tokenizer_of_a_model_type(tmp_path: Path) -> None:
    """transformers makes a tokenizer without tokens of a config.json alone."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(IngotError) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.rule == "model.tokenizer"


def test_experts_that_are_joined_are_copies_and_count(tmp_path: Path) -> None:
    mixtral = make("mixtral", tmp_path / "mixtral")
    assert refused(mixtral, max_ram="10KiB").rule == "ram.guard"
    found: list[Any] = []
    load_model(mixtral, max_ram="1GiB", report=found.append)
    assert found[0].decoded > 0
    with ingot.open(mixtral) as checkpoint:
        experts = sum(tensor.nbytes for name, tensor in checkpoint.items() if ".experts." in name)
        assert found[0].mapped == checkpoint.nbytes - experts


def test_a_transformers_that_checks_nothing(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if its hook had another name: it fills in what is missing, and nobody was asked."""
    transformers = pytest.importorskip("transformers")
    load = transformers.PreTrainedModel.from_pretrained.__func__
    renamed = classmethod(lambda cls, *args, **options: load(cls.__mro__[1], *args, **options))
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", renamed)
    path = changed(llama, tmp_path, lambda config, tensors: tensors.pop("model.norm.weight"))
    assert refused(path).rule == "model.unchecked"
    assert refused(llama).rule == "model.unchecked"
