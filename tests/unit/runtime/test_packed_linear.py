"""Layers that compute from packed weights: what the dense layer gives, for every layout, type and batch."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

import ingot
from ingot.codecs.affine.codec import AffineCodec
from ingot.codecs.affine.matmul import BATCH, PackedMatrix, stays_packed
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.errors import UnsupportedError, UsageError
from ingot.runtime.layers import packed_linear, rounded_inputs
from ingot.runtime.layers.packed_linear import PackedEmbedding, PackedLinear, pack_linears
from ingot.testing.codecs import encode_tensor
from tests.support.packed import KINDS, PLAIN, matrix

DTYPES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", DTYPES)
def test_x_in_8_bits_is_what_the_kernels_make_of_it(dtype: torch.dtype) -> None:
    for params in KINDS:
        layer = PackedLinear(matrix(params, 20, 96), torch.nn.Parameter(torch.randn(20)))
        x = torch.randn(2, 7, 96, dtype=dtype)
        with torch.inference_mode():
            plain = layer(x)
            count = rounded_inputs.round_inputs(torch.nn.Sequential(layer))
            found = layer(x)
            with rounded_inputs.unrounded(layer):
                assert not rounded_inputs.rounds_inputs(layer)
                assert torch.equal(layer(x), plain)
        assert (count == 1) is rounded_inputs.rounds_inputs(layer) is layer.matrix.rounds
        if not count:
            assert torch.equal(found, plain)
            continue
        flat = x.reshape(14, 96)
        out = np.empty((14, 20), numpy_dtype(packed_linear._NAMES[dtype]))
        layer.matrix.int8(packed_linear.to_numpy(flat), out, packed_linear.to_numpy(layer.bias.detach()))
        assert torch.equal(found.reshape(14, 20), packed_linear.from_numpy(out))
        assert not torch.equal(found, plain)


def near(found: torch.Tensor, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Within what one rounding of the result, and of the decoded weights, can differ."""
    x64, w64 = x.detach().double(), dense.double()
    wanted = x64 @ w64.T + (0 if bias is None else bias.detach().double())
    room = x64.abs() @ w64.abs().T + (0 if bias is None else bias.detach().double().abs())
    assert found.dtype == x.dtype
    assert ((found.double() - wanted).abs() <= DTYPES[x.dtype] * room + 1e-6).all()


@pytest.mark.parametrize("params", KINDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, BATCH["bf16"], BATCH["f32"] + 1])
def test_equals_the_dense_layer(monkeypatch, params, dtype, batch):
    monkeypatch.setattr(packed_linear, "SCRATCH", 4096)  # blocks of a few rows
    held = matrix(params, 37, 203)
    dense = torch.from_numpy(held.decode(0, 37, "f32"))
    torch.manual_seed(0)
    for bias in (None, torch.nn.Parameter(torch.randn(37).to(dtype))):
        layer = PackedLinear(held, bias, dtype)
        x = torch.randn(batch, 203).to(dtype)
        with torch.no_grad():
            near(layer(x), x, dense, bias)
            assert torch.equal(layer(x.reshape(1, batch, 203))[0], layer(x))
            assert torch.equal(layer(x.T.contiguous().T), layer(x))


@pytest.mark.parametrize("params", KINDS, ids=str)
@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_torch_decodes_to_the_same_bits(params, name):
    held = matrix(params, 11, 45, name)
    layer = PackedLinear(held, dtype=torch.bfloat16)
    for dtype in DTYPES:
        wanted = held.decode(0, 11, str(packed_linear._NAMES[dtype])).astype(np.float32)
        assert layer.decode(slice(None), dtype).float().numpy().tobytes() == wanted.tobytes()
    assert layer.weight.dtype == torch.bfloat16
    assert not layer.weight.requires_grad


@given(st.data())
def test_any_shape(data):
    rows, cols, batch = (data.draw(st.integers(0, high)) for high in (40, 150, 20))
    params = data.draw(st.sampled_from(KINDS))
    held = matrix(params, rows, cols)
    layer = PackedLinear(held, dtype=torch.float32)
    x = torch.from_numpy(np.random.default_rng(1).normal(0, 1, (batch, cols)).astype(np.float32))
    with torch.no_grad():
        near(layer(x), x, torch.from_numpy(held.decode(0, rows, "f32")), None)


def test_threads_change_no_bit():
    layer = PackedLinear(matrix(PLAIN, 900, 300))
    x = torch.randn(3, 300, dtype=torch.bfloat16)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with torch.no_grad():
                found.append(layer(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_x_has_a_gradient_and_weights_have_none():
    held = matrix(PLAIN, 6, 64)
    layer = PackedLinear(held, torch.nn.Parameter(torch.zeros(6)), torch.float32)
    x = torch.randn(2, 64, requires_grad=True)
    layer(x).sum().backward()
    dense = torch.from_numpy(held.decode(0, 6, "f32"))
    assert torch.allclose(x.grad, dense.sum(0).expand(2, -1), atol=1e-5)
    assert layer.bias.grad is not None
    assert [name for name, _ in layer.named_parameters()] == ["bias"]


def test_types_and_copies_keep_the_parts():
    layer = PackedLinear(matrix(PLAIN, 9, 64, "f32"), torch.ones(9, dtype=torch.bfloat16))
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = layer(x)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.half(), layer.to(torch.float64)):
            assert torch.equal(other(x), wanted)
        fresh = PackedLinear(matrix(PLAIN, 9, 64, "f32", seed=1), torch.zeros(9, dtype=torch.bfloat16))
        fresh.load_state_dict(layer.state_dict())
        assert torch.equal(fresh(x), wanted)


def test_float64_and_other_devices_go_through_torch():
    held = matrix(PLAIN, 5, 64)
    layer = PackedLinear(held)
    x = torch.randn(2, 64, dtype=torch.float64)
    dense = torch.from_numpy(held.decode(0, 5, "f32")).double()
    assert torch.allclose(layer(x), x @ dense.T)
    assert layer.to("meta")(x.to("meta")).shape == (2, 5)


def test_a_wrong_width_is_refused():
    with pytest.raises(UsageError) as caught:
        PackedLinear(matrix(PLAIN, 5, 64))(torch.ones(2, 63))
    assert caught.value.rule == "matmul.shape"


def test_rows_of_an_embedding():
    held = matrix(KINDS[2], 50, 64)
    table = PackedEmbedding(held, dtype=torch.float32)
    dense = torch.from_numpy(held.decode(0, 50, "f32"))
    ids = torch.tensor([[3, 49, 3], [0, 1, 2]])
    assert torch.equal(table(ids), functional.embedding(ids, dense))
    for bad in (-1, 50):
        with pytest.raises((IndexError, RuntimeError)):
            table(torch.tensor([bad]))


def dense_of(layer: PackedLinear, dtype: torch.dtype) -> torch.nn.Linear:
    made = torch.nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(layer.weight)
        if layer.bias is not None:
            made.bias.copy_(layer.bias)
    return made


def test_buffers_that_are_replaced_count_at_once():
    one, other = (PackedLinear(matrix(PLAIN, 9, 64, seed=seed), dtype=torch.float32) for seed in (1, 2))
    x = torch.randn(2, 64)
    with torch.no_grad():
        before, wanted = one(x), other(x)
        assert not torch.equal(before, wanted)
        assert torch.equal(torch.func.functional_call(one, dict(other.named_buffers()), (x,)), wanted)
        assert torch.equal(one(x), before)
        one.load_state_dict(other.state_dict(), assign=True)
        assert torch.equal(one(x), wanted)
        one.scales.data = torch.zeros_like(one.scales)
        assert not one(x).any()


def test_asking_for_the_type_of_a_weight_decodes_nothing(monkeypatch):
    def decoded(*args):
        raise AssertionError("decoded")

    layer = PackedLinear(matrix(PLAIN, 9, 64), dtype=torch.bfloat16)
    wanted = layer.decode(slice(None), torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(packed_linear, "decode_rows", decoded)
        weight = layer.weight
        assert isinstance(weight, torch.Tensor)
        found = (weight.dtype, tuple(weight.shape), weight.device, weight.ndim, weight.requires_grad, weight.is_meta)
        assert found == (torch.bfloat16, (9, 64), torch.device("cpu"), 2, False, False)
    x = torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True)
    assert torch.equal(weight, wanted)
    assert torch.equal(weight[2:4], wanted[2:4])
    assert weight.float().numpy().tobytes() == wanted.float().numpy().tobytes()
    assert weight.tolist() == wanted.tolist()
    assert torch.equal(functional.linear(x, weight), functional.linear(x, wanted))
    functional.linear(x, weight).sum().backward()
    assert torch.equal(x.grad, wanted.sum(0).expand(3, -1))
    assert "DecodedOnUse" in repr(weight)
    for other in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert torch.equal(other, wanted)


def test_a_weight_is_not_written_to():
    layer = PackedLinear(matrix(PLAIN, 9, 64), dtype=torch.float32)
    wanted = layer.decode(slice(None), torch.float32)
    for write in (
        lambda: layer.weight.mul_(2),
        lambda: layer.weight.copy_(wanted),
        lambda: torch.add(wanted, 1, out=layer.weight),
    ):
        with pytest.raises(UsageError) as caught:
            write()
        assert caught.value.rule == "matmul.weight"
    assert torch.equal(torch.empty(9, 64).copy_(layer.weight), wanted)


def test_the_type_of_a_weight_follows_the_module():
    layer = PackedLinear(matrix(PLAIN, 9, 64), dtype=torch.bfloat16).half()
    assert layer.weight.dtype == torch.float16
    table = PackedEmbedding(matrix(PLAIN, 9, 64), dtype=torch.bfloat16).to(torch.float32)
    assert table(torch.tensor([1])).dtype == torch.float32
    assert layer.to("meta").weight.device.type == "meta"


@pytest.mark.parametrize("rows", [2, BATCH["f32"] + 1])
@pytest.mark.parametrize("trained", ["bias", "x", "both"])
def test_gradients_are_those_of_the_dense_layer(rows, trained):
    layer = PackedLinear(matrix(PLAIN, 6, 64), torch.nn.Parameter(torch.randn(6)), torch.float32)
    dense = dense_of(layer, torch.float32)
    dense.weight.requires_grad_(False)
    values, factors, found = torch.randn(rows, 64), torch.randn(rows, 6), []
    for module in (layer, dense):
        module.bias.requires_grad_(trained != "x")
        x = values.clone().requires_grad_(trained != "bias")
        (module(x) * factors).sum().backward()
        found.append((x.grad, module.bias.grad))
    for left, right in zip(*found, strict=True):
        assert (left is None) == (right is None)
        assert left is None or torch.allclose(left, right, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(layer(values), layer(values.clone().requires_grad_()))


def test_training_holds_no_decoded_matrix():
    layer = PackedLinear(matrix(PLAIN, 6, 64), dtype=torch.float32)
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda value: held.append(set(value.shape)), lambda value: value):
        layer(torch.randn(2, 64, requires_grad=True))
    assert {6, 64} not in held


def test_types_that_no_linear_layer_takes_are_refused():
    for dtype in (torch.int64, torch.uint8, torch.bool, torch.complex64):
        with pytest.raises(UsageError) as caught:
            PackedLinear(matrix(PLAIN, 5, 64))(torch.ones(2, 64, dtype=dtype))
        assert caught.value.rule == "matmul.dtype"
    with pytest.raises((RuntimeError, IndexError)):
        PackedEmbedding(matrix(PLAIN, 5, 64))(torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
def test_no_rows_give_none(dtype):
    layer = PackedLinear(matrix(PLAIN, 5, 64), torch.zeros(5, dtype=dtype), dtype)
    for grad in (torch.enable_grad, torch.no_grad):
        with grad():
            found = layer(torch.ones(0, 3, 64, dtype=dtype))
            assert (found.shape, found.dtype) == ((0, 3, 5), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_autocast_is_that_of_the_dense_layer(dtype):
    layer = PackedLinear(matrix(PLAIN, 5, 64), torch.randn(5, dtype=dtype), dtype)
    dense, x = dense_of(layer, dtype), torch.randn(2, 64, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = layer(x), dense(x)
    assert found.dtype == wanted.dtype == (torch.bfloat16 if dtype != torch.float64 else dtype)
    assert torch.allclose(found.double(), wanted.double(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", BATCH)
def test_a_batch_takes_the_codes(monkeypatch, name):
    taken = []
    for owner, way in ((PackedMatrix, "matmul_bits"), (PackedMatrix, "gemm_bits"), (PackedLinear, "_multiply_decoded")):
        monkeypatch.setattr(owner, way, lambda self, x, *_, way=way: taken.append((way, len(x))) or x[:, :5])
    layer, other = PackedLinear(matrix(PLAIN, 5, 64)), PackedLinear(matrix(replace(PLAIN, bits=3), 5, 64))
    dtype = next(dtype for dtype, known in packed_linear._NAMES.items() if known == name)
    for rows in (1, BATCH[name], BATCH[name] + 1):
        layer(torch.ones(rows, 64, dtype=dtype))
    other(torch.ones(2, 64, dtype=dtype))
    many = "_multiply_decoded" if name == "f32" else "gemm_bits"
    assert taken == [("matmul_bits", 1), ("matmul_bits", BATCH[name]), (many, BATCH[name] + 1), (many, 2)]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(64, 8, dtype=torch.bfloat16)
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False, dtype=torch.bfloat16), torch.nn.ReLU())
        self.norm = torch.nn.LayerNorm(16)


def stored(shape, **options):
    values = np.random.default_rng(2).normal(0, 0.1, shape).astype(np.float32)
    return encode_tensor(AffineCodec(), values, options, dtype="bf16")


def test_linear_layers_of_a_model_are_replaced(tmp_path):
    model = Model().eval()
    tensors = {
        "a.weight": stored((8, 64), bits=8),
        "inner.0.weight": stored((16, 8), bits=4, group=32),
        "norm.weight": None,
    }
    ingot.save(tmp_path / "x.zt", {name: tensor for name, tensor in tensors.items() if tensor})
    with ingot.open(tmp_path / "x.zt") as checkpoint:
        assert pack_linears(model, checkpoint) == ["a.weight", "inner.0.weight"]
        assert isinstance(model.a, PackedLinear)
        assert isinstance(model.inner[0], PackedLinear)
        stored_codes = bytes(checkpoint["a.weight"].parts["packed_weight"].view())
        model.a.packed.add_(1)  # the layer's memory is its own
        assert bytes(checkpoint["a.weight"].parts["packed_weight"].view()) == stored_codes
        model.a.packed.sub_(1)
        dense = checkpoint["a.weight"].torch("f32")
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        near(model.a(x), x, dense, model.a.bias)


def test_what_cannot_stay_packed_is_decoded_where_nothing_else_is_there():
    odd = stored((16, 8), bits=4, group=32)
    odd.params = {**odd.params, "granularity": "blocks", "block": [16, 8]}
    del odd.params["group_size"]
    odd.parts = {**odd.parts, "scales": stored((1, 1), bits=4, group=32).parts["scales"]}
    assert not stays_packed(odd)
    with pytest.raises(UnsupportedError) as caught:
        PackedMatrix.from_tensor(odd)
    assert caught.value.rule == "matmul.layout"
    model = Model()
    before = model.inner[0].weight
    assert pack_linears(model, {"inner.0.weight": odd}) == []
    assert model.inner[0].weight is before
    with torch.device("meta"):
        model = Model()
    assert pack_linears(model, {"inner.0.weight": odd}) == []
    assert torch.equal(model.inner[0].weight, odd.torch("bf16"))


def test_other_shapes_are_left_alone():
    model = Model()
    assert pack_linears(model, {"a.weight": stored((8, 32), bits=8), "b.weight": stored((8, 64), bits=8)}) == []
    assert type(model.a) is torch.nn.Linear


class Scaled(torch.nn.Linear):
    """A layer that computes something else with its weight."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_subclasses_of_linear_stay():
    model = torch.nn.Sequential(Scaled(64, 8, dtype=torch.bfloat16))
    assert pack_linears(model, {"0.weight": stored((8, 64), bits=8)}) == []
    assert type(model[0]) is Scaled
