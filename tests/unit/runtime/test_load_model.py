"""load_model against from_pretrained: the same model, bit for bit, from every container."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import ingot
from ingot.codecs.affine.codec import AffineCodec
from ingot.core.runtime.memory import anonymous_rss
from ingot.runtime.loading.load_report import LoadReport
from ingot.runtime.loading.transformers import load_model
from ingot.runtime.loading.transformers_weights import materialize
from ingot.testing.codecs import encode_tensor
from tests.support.models import KINDS, make, output_of


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make(kind, root / kind.replace(" ", "-")) for kind in KINDS}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """INT4 for every matrix of every size, embeddings included."""
    path = tmp_path_factory.mktemp("recipes") / "all.toml"
    rule = 'match = ["*"]\nmin_ndim = 2\ncodec = "affine"\noptions = { bits = 4, group = 16 }'
    path.write_text(f'name = "all"\ndescription = "all"\n[[rules]]\nlabel = "all"\n{rule}\n')
    return path


def reference(folder: Path, kind: str, **options: object) -> torch.nn.Module:
    return getattr(transformers, KINDS[kind][1]).from_pretrained(folder, **options)


def require_equal(model: torch.nn.Module, wanted: torch.nn.Module, *, same_file: bool = False) -> None:
    assert type(model) is type(wanted)
    assert not model.training
    for left, right in (
        (model.state_dict(), wanted.state_dict()),
        (dict(model.named_buffers()), dict(wanted.named_buffers())),
    ):
        assert list(left) == list(right)
        for name, value in left.items():
            assert value.dtype == right[name].dtype
            assert value.device.type == "cpu"
            assert torch.equal(value, right[name]), name
    left, right = output_of(model), output_of(wanted)
    if same_file:
        assert torch.equal(left, right)
    else:  # weights at other alignments: a BLAS may sum in another order
        assert float((left - right).abs().max()) <= 16 * torch.finfo(left.dtype).eps * float(right.abs().max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("container", ["safetensors", "zt", "squizd"])
def test_equals_from_pretrained(models: dict[str, Path], tmp_path: Path, kind: str, container: str) -> None:
    folder = models[kind]
    if container != "safetensors":
        ingot.convert(folder, tmp_path / "converted", format=container)
        folder = tmp_path / "converted"
    require_equal(load_model(folder), reference(models[kind], kind), same_file=container == "safetensors")


@pytest.mark.parametrize("dtype", ["f32", "bf16", torch.float16])
def test_dtype(models: dict[str, Path], dtype: object) -> None:
    wanted = {"f32": torch.float32, "bf16": torch.bfloat16}.get(str(dtype), dtype)
    require_equal(load_model(models["llama"], dtype=dtype), reference(models["llama"], "llama", dtype=wanted))


def test_dtype_auto_is_the_models_own(models: dict[str, Path]) -> None:
    require_equal(load_model(models["llama"], dtype="auto"), load_model(models["llama"]), same_file=True)


def test_a_file_with_its_config_beside(models: dict[str, Path]) -> None:
    model = load_model(models["llama"] / "model.safetensors")
    require_equal(model, reference(models["llama"], "llama"))
    assert Path(model.config.name_or_path) == models["llama"]


@pytest.mark.parametrize("stored", ["both", "embedding", "head"])
def test_tied_weights_stay_tied(models: dict[str, Path], tmp_path: Path, stored: str) -> None:
    with ingot.open(models["tied qwen2"]) as source:
        tensors = dict(source.items())
        embedding = tensors.pop("model.embed_tokens.weight")
        if stored in ("both", "embedding"):
            tensors["model.embed_tokens.weight"] = embedding
        if stored in ("both", "head"):
            tensors["lm_head.weight"] = embedding.numpy()
        ingot.save(tmp_path / "model.zt", tensors)
    (tmp_path / "config.json").write_bytes((models["tied qwen2"] / "config.json").read_bytes())
    model = load_model(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    require_equal(model, reference(models["tied qwen2"], "tied qwen2"))


def test_generation_config_is_read(models: dict[str, Path], tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((models["llama"] / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 9], "max_new_tokens": 5}')
    model = load_model(tmp_path)
    assert model.generation_config.eos_token_id == [2, 9]
    assert model.generate(torch.tensor([[5, 6]]), do_sample=False).shape[1] <= 7


def test_quantized_weights_are_rounded_once(models: dict[str, Path], tmp_path: Path, recipe: Path) -> None:
    ingot.convert(models["llama"], tmp_path / "small", recipe)
    model = load_model(tmp_path / "small", dtype="bf16")
    with ingot.open(tmp_path / "small") as checkpoint:
        assert any(tensor.codec == "affine" for tensor in checkpoint.values())
        for name, value in model.state_dict().items():
            assert torch.equal(value, checkpoint[name].torch("bf16"))


def test_no_weight_is_rounded_by_its_own_type_on_the_way() -> None:
    """Told that it is of f16 and wanted in bf16: f32, then bf16, without f16 between."""
    values = np.random.default_rng(3).normal(0, 0.1, (32, 64)).astype(np.float32)
    tensor = encode_tensor(AffineCodec(), values, {"bits": 4, "group": 32}, dtype="f16")
    found = materialize(tensor, torch.bfloat16, torch.device("cpu"))
    assert torch.equal(found, tensor.torch("f32").bfloat16())
    assert not torch.equal(found, tensor.torch("f16").bfloat16())  # else this test says nothing


def test_mapped_weights_take_no_memory(tmp_path: Path) -> None:
    values = {**KINDS["llama"][2], "hidden_size": 256, "vocab_size": 32000, "intermediate_size": 1024}
    config = transformers.LlamaConfig(**values, dtype="float32")
    config.architectures = ["LlamaForCausalLM"]
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "source")
    ingot.convert(tmp_path / "source", tmp_path / "zt", format="zt")
    load_model(tmp_path / "zt")  # imports what it imports
    before = anonymous_rss()
    reports: list[LoadReport] = []
    model = load_model(tmp_path / "zt", report=reports.append)
    grown = anonymous_rss() - before
    (report,) = reports
    assert report.mapped > 64 << 20
    assert report.decoded == 0
    assert grown < 20 << 20
    assert all(value.max() > 0 for value in model.parameters())  # every page is touched, nothing is copied
    assert anonymous_rss() - before < 20 << 20


def test_report(models: dict[str, Path], tmp_path: Path, recipe: Path) -> None:
    ingot.convert(models["llama"], tmp_path / "small", recipe)
    reports: list[LoadReport] = []
    load_model(tmp_path / "small", dtype="f32", report=reports.append)
    (report,) = reports
    assert (report.format, report.model, report.dtype, report.packed) == ("zt", "LlamaForCausalLM", "f32", 0)
    with ingot.open(tmp_path / "small") as checkpoint:
        assert report.decoded == sum(4 * tensor.size for tensor in checkpoint.values())


def test_the_mapping_outlives_the_checkpoint(models: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "model.safetensors"
    copy.write_bytes((models["llama"] / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_bytes((models["llama"] / "config.json").read_bytes())
    model = load_model(tmp_path)
    copy.unlink()
    require_equal(model, reference(models["llama"], "llama"), same_file=True)


def test_writing_to_weights_leaves_the_file_alone(models: dict[str, Path]) -> None:
    before = (models["llama"] / "model.safetensors").read_bytes()
    model = load_model(models["llama"])
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    assert (models["llama"] / "model.safetensors").read_bytes() == before
