"""Products in bf16 where no gradients are taken: of weights that bf16 holds, on processors that have them."""

from __future__ import annotations

import pytest
import torch

from ingot.runtime.layers import bf16_products
from ingot.runtime.layers.bf16_products import bf16_product


@pytest.fixture(autouse=True)
def multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_products, "_has_bf16_products", lambda torch: True)


@pytest.mark.parametrize("biased", [True, False])
def test_products_are_those_of_bf16(biased: bool) -> None:
    torch.manual_seed(0)
    inputs, weight = torch.randn(2, 5, 64), torch.randn(48, 64).bfloat16().float()
    bias = torch.randn(48) if biased else None
    product = bf16_product(torch)
    assert product is not None
    found = product(inputs, weight, bias)
    exact = inputs.bfloat16().double() @ weight.double().T
    wanted = exact if bias is None else exact + bias
    assert found.dtype == torch.float32
    assert ((found - wanted).abs() <= 2.0**-8 * exact.abs() + 1e-4).all()
    assert not torch.equal(found, torch.nn.functional.linear(inputs, weight, bias))


def test_weights_that_bf16_does_not_hold_stay_in_f32() -> None:
    inputs, weight = torch.randn(5, 64), torch.randn(48, 64)
    product = bf16_product(torch)
    assert product is not None
    assert torch.equal(product(inputs, weight, None), torch.nn.functional.linear(inputs, weight))


def test_without_a_processor_for_it_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_products, "_has_bf16_products", lambda torch: False)
    assert bf16_product(torch) is None
