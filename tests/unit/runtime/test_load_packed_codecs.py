"""load_model(keep_packed=True) of codecs that are not the affine family: layers compute from trellises and palettes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ingot
from ingot.runtime.layers.packed_linear import PackedEmbedding, PackedLinear
from ingot.runtime.loading.load_report import LoadReport
from ingot.runtime.loading.transformers import load_model
from tests.support.models import make, output_of

OPTIONS = {"trellis": "{ bits = 4, group = 8 }", "palette": "{ bits = 4 }"}


@pytest.fixture(scope="module", params=OPTIONS)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, codec = tmp_path_factory.mktemp("packed"), request.param
    rule = f'match = ["*"]\nmin_ndim = 2\ncodec = "{codec}"\noptions = {OPTIONS[codec]}'
    (root / "all.toml").write_text(f'name = "all"\ndescription = "all"\n[[rules]]\nlabel = "all"\n{rule}\n')
    make("llama", root / "source", "float32")
    ingot.convert(root / "source", root / codec, root / "all.toml")
    return root / codec


def test_computes_the_same_and_decodes_nothing(stored: Path) -> None:
    reports: list[LoadReport] = []
    model = load_model(stored, keep_packed=True, report=reports.append)
    layers = [module for module in model.modules() if isinstance(module, PackedLinear | PackedEmbedding)]
    assert {layer.params.codec for layer in layers} == {stored.name}
    assert all(parameter.ndim == 1 for parameter in model.parameters())
    assert reports[0].decoded == 0
    with ingot.open(stored) as checkpoint:
        assert reports[0].packed == sum(tensor.nbytes for tensor in checkpoint.values() if tensor.codec == stored.name)
    wanted = output_of(load_model(stored))
    assert torch.allclose(output_of(model), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_weights_and_rows_are_those_of_the_decoded_model(stored: Path) -> None:
    model, dense = load_model(stored, keep_packed=True), load_model(stored)
    head, table = model.lm_head, model.model.embed_tokens
    assert torch.equal(head.weight + 0, dense.lm_head.weight)
    ids = torch.tensor([[3, 1, 1, 7]])
    assert torch.equal(table(ids), dense.model.embed_tokens(ids))
    x = torch.randn(40, head.in_features, dtype=torch.float64, requires_grad=True)
    head(x).sum().backward()
    assert torch.allclose(x.grad, dense.lm_head.weight.double().sum(0).expand_as(x))
    half = model.half().lm_head
    assert half(x.detach().half()).dtype == torch.float16
