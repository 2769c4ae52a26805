"""Slices for tensor parallelism: together they are the whole, and a model that is run by them gives its logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ingot
from ingot.errors import UnsupportedError, UsageError

transformers = pytest.importorskip("transformers")

HEADS, KEYS, HIDDEN, INNER, VOCAB = 4, 2, 128, 256, 96
TOKENS = torch.tensor([[5, 9, 2, 90, 11, 7]])
BY_COLUMNS = ("o_proj.weight", "down_proj.weight")
BY_ROWS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KEYS, vocab_size=VOCAB, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("whole") / "model"
    transformers.LlamaForCausalLM(config).half().save_pretrained(path)
    return path


def packed(model: Path, path: Path, how: str) -> Path:
    """The model as it is, in INT4, or in GPTQ's words, from which the slices are cut."""
    if how == "dense":
        return model
    zero = "zero_point = 8" if how == "gptq" else "symmetric = false"
    options = f'{{ bits = 4, group = 32, signed = false, {zero}, scales = "f16" }}'
    rule = f'match = ["*_proj.weight"]\ncodec = "affine"\noptions = {options}'
    (path / "r.toml").write_text(f'name = "n"\ndescription = "n"\n[[rules]]\nlabel = "n"\n{rule}\n')
    ingot.convert(model, path / "int4", path / "r.toml", format="zt")
    if how == "gptq":
        ingot.convert(path / "int4", path / "gptq", format="gptq")
    return path / how


def values(path: Path) -> dict[str, Any]:
    with ingot.open(path) as checkpoint:
        return {name: tensor.numpy("f32").copy() for name, tensor in checkpoint.items()}


def joined(name: str, parts: list[Any], whole: Any) -> Any:
    if name.endswith(BY_COLUMNS):
        return np.concatenate(parts, axis=1)
    if name.endswith(BY_ROWS):
        return np.concatenate(parts)
    if name.startswith(("model.embed_tokens", "lm_head")):
        every = np.concatenate(parts)
        assert len(every) == 128  # the next multiple of 64
        assert not every[VOCAB:].any()
        return every[:VOCAB]
    assert all(np.array_equal(part, parts[0]) for part in parts)
    return parts[0]


@pytest.mark.parametrize(("how", "format"), [("dense", "safetensors"), ("int4", "zt"), ("gptq", "gptq")])
def test_slices_are_the_whole_in_the_packed_form(model: Path, tmp_path: Path, how: str, format: str) -> None:
    source = packed(model, tmp_path, how)
    report = ingot.convert(source, tmp_path / "out", format=format, tp=2)
    assert report.exact
    assert not {"decoded", "encoded"} & set(report.actions)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["rank0", "rank1"]
    whole, parts = values(source), [values(tmp_path / "out" / f"rank{rank}") for rank in range(2)]
    for name, wanted in whole.items():
        assert np.array_equal(joined(name, [part[name] for part in parts], wanted), wanted), name
    with ingot.open(tmp_path / "out" / "rank1") as made, ingot.open(source) as one:
        for name in one:
            assert made[name].codec == one[name].codec
        stated = made.metadata["ingot.tensor_parallel"]
        stated = json.loads(stated) if isinstance(stated, str) else stated
        assert stated == {"rank": 1, "size": 2, "vocabulary": VOCAB}


class Cut(torch.nn.Module):
    """A linear layer of several ranks: outputs side by side, or partial sums of shares of the input."""

    def __init__(self, parts: list[Any], *, by_columns: bool) -> None:
        super().__init__()
        self.parts, self.by_columns = [torch.from_numpy(part) for part in parts], by_columns

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if not self.by_columns:
            return torch.cat([value @ part.T for part in self.parts], -1)
        shares = value.chunk(len(self.parts), -1)
        return sum(share @ part.T for share, part in zip(shares, self.parts, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("how", ["dense", "int4"])
def test_a_model_of_the_slices_gives_its_logits(model: Path, tmp_path: Path, how: str) -> None:
    source = packed(model, tmp_path, how)
    ingot.convert(source, tmp_path / "out", format="zt", tp=4)  # twice as many ranks as key-value heads
    parts = [values(tmp_path / "out" / f"rank{rank}") for rank in range(4)]
    whole = ingot.load_model(source, dtype="f32")
    with torch.inference_mode():
        wanted = whole(TOKENS).logits
        for name in parts[0]:
            module = name.removesuffix(".weight")
            own = [part[name] for part in parts]
            if module.endswith(("k_proj", "v_proj")):
                assert np.array_equal(own[0], own[1])
                assert not np.array_equal(own[1], own[2])
                own = own[::2]
            if module.endswith("_proj"):
                parent, _, last = module.rpartition(".")
                setattr(whole.get_submodule(parent), last, Cut(own, by_columns=name.endswith(BY_COLUMNS)))
        assert torch.allclose(whole(TOKENS).logits, wanted, rtol=1e-4, atol=1e-4)


def test_fused_layers_are_cut_part_by_part(tmp_path: Path) -> None:
    """As vLLM has them: a rank's queries, keys and values, a rank's gate and up."""
    config = {"model_type": "phi3", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    rng = np.random.default_rng(0)
    qkv, mlp = (rng.standard_normal((rows, 64)).astype(np.float32) for rows in (4 * 16 + 2 * 2 * 16, 2 * 96))
    folder, start = tmp_path / "model", "model.layers.0."
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {f"{start}self_attn.qkv_proj.weight": qkv, f"{start}mlp.gate_up_proj.weight": mlp}
    ingot.save(folder / "model.safetensors", tensors)
    ingot.convert(folder, tmp_path / "out", format="safetensors", tp=2)
    query, key, value, gate, up = np.split(np.concatenate([qkv, mlp]), [64, 96, 128, 224])
    for rank in range(2):
        found = values(tmp_path / "out" / f"rank{rank}")
        wanted = [np.split(part, 2)[rank] for part in (query, key, value)]
        assert np.array_equal(found[f"{start}self_attn.qkv_proj.weight"], np.concatenate(wanted))
        wanted = [np.split(part, 2)[rank] for part in (gate, up)]
        assert np.array_equal(found[f"{start}mlp.gate_up_proj.weight"], np.concatenate(wanted))
    ingot.save(folder / "model.safetensors", {**tensors, "model.odd.weight": mlp}, overwrite=True)
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(folder, tmp_path / "more", format="safetensors", tp=2)
    assert caught.value.rule == "parallel.tensor"


@pytest.mark.parametrize(
    ("how", "ranks", "rule", "works"),
    [("dense", 3, "parallel.heads", "tp=2, 4"), ("int4", 8, "parallel.heads", "tp=2, 4")],
)
def test_what_cannot_be_cut_is_refused_with_what_would_work(
    model: Path, tmp_path: Path, how: str, ranks: int, rule: str, works: str
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(packed(model, tmp_path, how), tmp_path / "out", tp=ranks)
    assert caught.value.rule == rule
    assert works in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_groups_are_not_cut(model: Path, tmp_path: Path) -> None:
    rule = 'match = ["*o_proj.weight"]\ncodec = "affine"\noptions = { bits = 4, group = 64 }'
    (tmp_path / "r.toml").write_text(f'name = "n"\ndescription = "n"\n[[rules]]\nlabel = "n"\n{rule}\n')
    ingot.convert(model, tmp_path / "int4", tmp_path / "r.toml", format="zt")
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(tmp_path / "int4", tmp_path / "out", tp=4)
    assert caught.value.rule == "parallel.cut"
    assert "tp=2," in str(caught.value)


def test_ranks_that_are_there_stay_and_the_others_follow(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ingot.convert(model, out, format="safetensors", tp=2)
    first = (out / "rank0" / "model.safetensors").stat()
    second = (out / "rank1" / "model.safetensors").read_bytes()
    for path in (out / "rank1").iterdir():
        path.unlink()
    (out / "rank1").rmdir()
    report = ingot.convert(model, out, format="safetensors", tp=2, resume=True)
    assert report.resumed == len(report.tensors) // 2
    assert (out / "rank0" / "model.safetensors").stat().st_mtime_ns == first.st_mtime_ns
    assert (out / "rank1" / "model.safetensors").read_bytes() == second
    with ingot.open(model) as source:
        tensors = {name: tensor.numpy() * 2 for name, tensor in source.items()}
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes((model / "config.json").read_bytes())
    ingot.save(other / "model.safetensors", tensors)
    with pytest.raises(UsageError) as caught:
        ingot.convert(other, out, format="safetensors", tp=2, resume=True)
    assert caught.value.rule == "target.exists"


def test_ranks_of_another_recipe_are_none_of_these(model: Path, tmp_path: Path) -> None:
    """Values of a slice that is there as floats are those of the source; integers were asked for."""
    rule = 'match = ["*_proj.weight"]\ncodec = "affine"\noptions = { bits = 4, group = 32 }'
    (tmp_path / "r.toml").write_text(f'name = "n"\ndescription = "n"\n[[rules]]\nlabel = "n"\n{rule}\n')
    ingot.convert(model, tmp_path / "out", format="zt", tp=2)
    with pytest.raises(UsageError) as caught:
        ingot.convert(model, tmp_path / "out", tmp_path / "r.toml", format="zt", tp=2, resume=True)
    assert caught.value.rule == "target.exists"


@pytest.mark.parametrize("change", [{"hidden_size": "wide"}, {"head_dim": 1.5}, {"num_attention_heads": None}])
def test_a_config_without_whole_numbers_is_refused(model: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    config = {"model_type": "llama", "hidden_size": HIDDEN, "num_attention_heads": HEADS, **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(tmp_path, tmp_path / "out", tp=2)
    assert caught.value.rule == "architecture.config"


@pytest.mark.parametrize(("target", "ranks"), [("x.zt", 2), ("out", 0), ("x.gguf", 2)])
def test_slices_want_a_folder_and_a_number(model: Path, tmp_path: Path, target: str, ranks: int) -> None:
    with pytest.raises(UsageError) as caught:
        ingot.convert(model, tmp_path / target, tp=ranks)
    assert caught.value.rule == "parallel.size"
