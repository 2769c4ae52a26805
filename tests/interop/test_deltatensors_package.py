"""The package deltatensors reads what Ingot writes, and Ingot reads what it writes, to the same values bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.codecs.table import CODECS
from ingot.delta.parent import matching_order, parent_hash, parent_orders
from ingot.errors import IngotError
from ingot.model.delta import Change, DeltaInfo, Identity
from ingot.testing.codecs import encode_tensor

dt = pytest.importorskip("deltatensors")
torch = pytest.importorskip("torch")
from deltatensors.compress import compress, decompress  # noqa: E402
from deltatensors.format import read_wdelta, write_wdelta  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

Arrays = dict[str, np.ndarray[Any, Any]]
MODELS = Path(__file__).parents[3] / "shared" / "models"
STRATEGIES: Sequence[tuple[str, str, Mapping[str, Any]]] = (
    ("sparse", "delta_sparse", {"sparsity": 0.9}),
    ("sparse", "delta_sparse", {"sparsity": 0.5}),
    ("quantized", "delta_sign", {}),
    ("int4", "delta_int4", {"outlier_fraction": 0.01}),
    ("int4", "delta_int4", {"outlier_fraction": 0.2}),
)
SHAPES = {
    "layers.2.w": (40, 24),
    "layers.10.w": (24, 40),
    "b": (31,),
    "conv": (3, 4, 5),
    "row": (1, 7),
    "embed": (50, 8),
}
SHARDS = {
    "one": {"model.safetensors": list(SHAPES)},
    "a": {"a-1.safetensors": ["embed", "layers.2.w", "row"], "a-2.safetensors": ["layers.10.w", "b", "conv"]},
    "b": {
        "b-1.safetensors": ["b"],
        "b-2.safetensors": ["layers.10.w", "embed", "row"],
        "b-3.safetensors": ["conv", "layers.2.w"],
    },
}


@pytest.fixture(params=STRATEGIES, ids=lambda item: f"{item[0]}-{next(iter(item[2].values()), '')}")
def way(request: pytest.FixtureRequest) -> tuple[str, str, Mapping[str, Any]]:
    return request.param


@pytest.fixture
def base() -> Arrays:
    """Small values: their differences have no equal magnitudes, of which either side takes others."""
    rng = np.random.default_rng(1)
    return {name: rng.normal(0, 1e-3, shape).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.fixture
def tuned(base: Arrays) -> Arrays:
    rng = np.random.default_rng(2)
    return {name: (value + rng.normal(0, 0.01, value.shape)).astype(np.float32) for name, value in base.items()}


def folder(path: Path, arrays: Arrays, shards: Mapping[str, Sequence[str]], dtype: Any = torch.float32) -> Path:
    path.mkdir()
    for file, names in shards.items():
        save_file({name: torch.from_numpy(arrays[name]).to(dtype) for name in names}, str(path / file))
    if len(shards) > 1:
        weight_map = {name: file for file, names in shards.items() for name in names}
        (path / "model.safetensors.index.json").write_text(repr({"weight_map": weight_map}).replace("'", '"'))
    return path


def write(path: Path, delta: Arrays, codec: str, options: Mapping[str, Any], parent: str, dtype: str = "f32") -> Path:
    """Write differences with Ingot."""
    tensors = {name: encode_tensor(CODECS[codec], value, options, dtype="f32") for name, value in delta.items()}
    strategy = {"delta_sparse": "sparse", "delta_sign": "quantized", "delta_int4": "int4"}[codec]
    changes = {name: Change("apply", dtype) for name in delta}
    info = DeltaInfo(1, strategy, Identity(hashes={"wdelta": parent}), tensors=changes)
    ingot.save(path, tensors, {"delta": info.to_metadata()})
    return path


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two state dicts hold the same float32 values, bit for bit."""
    return one.keys() == other.keys() and all(
        np.array_equal(np.asarray(one[name]).view(np.uint32), np.asarray(other[name]).view(np.uint32)) for name in one
    )


def differences(path: Path) -> Arrays:
    """Decode a file with Ingot."""
    assert [item for item in ingot.verify(path) if item.level == "error"] == []
    with ingot.open(path) as delta:
        return {name: tensor.numpy().copy() for name, tensor in delta.items()}


def peer_differences(path: Path) -> Arrays:
    with path.open("rb") as file:
        _, _, tensors = read_wdelta(file)
    return {name: decompress(payload) for name, payload in tensors.items()}


def parent_of(path: Path) -> str:
    with ingot.open(path) as delta:
        return delta.metadata["delta"]["base"]["hashes"]["wdelta"]


def test_a_file_of_ingot_is_the_peers_file(tmp_path: Path, base: Arrays, tuned: Arrays, way: Any) -> None:
    strategy, codec, options = way
    parent = dt.save_delta(tmp_path / "peer.wdelta", tuned, base, strategy=strategy, **options)
    delta = {name: tuned[name] - base[name] for name in base}
    ours = write(tmp_path / "ours.wdelta", delta, codec, options, parent)
    assert ours.read_bytes() == (tmp_path / "peer.wdelta").read_bytes()


def test_the_peer_loads_what_ingot_writes(tmp_path: Path, base: Arrays, tuned: Arrays, way: Any) -> None:
    strategy, codec, options = way
    delta = {name: tuned[name] - base[name] for name in base}
    path = write(tmp_path / "x.wdelta", delta, codec, options, dt.hash_state_dict(base))
    expected = {name: base[name] + value for name, value in differences(path).items()}
    assert same(dt.load_delta(path, base), expected)
    single = folder(tmp_path / "single", base, SHARDS["one"])
    assert same(dt.load_delta_from_paths(path, single), expected)
    shown = dt.inspect(path)
    assert (shown["strategy"], shown["n_tensors"], shown["parent_hash"]) == (strategy, len(base), parent_of(path))
    assert {name: tuple(item["shape"]) for name, item in shown["tensors"].items()} == SHAPES
    assert [item["step"] for item in dt.inspect_chain([path, path])] == [0, 1]


def test_the_peer_loads_what_ingot_writes_for_bf16_in_shards(tmp_path: Path, base: Arrays, tuned: Arrays) -> None:
    wide = {name: torch.from_numpy(value).to(torch.bfloat16).float().numpy() for name, value in base.items()}
    delta = {name: tuned[name] - wide[name] for name in base}
    sharded = folder(tmp_path / "sharded", base, SHARDS["a"], torch.bfloat16)
    with ingot.open(sharded) as opened:
        parent = parent_hash(opened, parent_orders(opened, sorted(base))["shards"])
    path = write(tmp_path / "x.wdelta", delta, "delta_int4", {}, parent, "bf16")
    expected = {name: wide[name] + value for name, value in differences(path).items()}
    assert same(dt.load_delta_from_paths(path, sharded), expected)
    with ingot.open(path) as delta_file:
        assert {item["dtype"] for item in delta_file.metadata["delta"]["tensors"].values()} == {"bf16"}


def test_the_peer_loads_a_diff_of_shards_in_the_order_of_layers(tmp_path: Path) -> None:
    """Ten layers and more: neither the order of names nor that of records is what the peer hashes."""
    names = [f"layers.{index}.w" for index in range(12)]
    rng = np.random.default_rng(3)
    base = {name: rng.normal(0, 1, (4, 8)).astype(np.float32) for name in names}
    tuned = {name: value + np.float32(0.25) for name, value in base.items()}
    shards = {"model-1.safetensors": names[:6], "model-2.safetensors": names[6:]}
    one, two = folder(tmp_path / "one", base, shards), folder(tmp_path / "two", tuned, shards)
    path = tmp_path / "x.wdelta"
    ingot.diff(one, two, path, "int4")
    expected = {name: base[name] + value for name, value in differences(path).items()}
    assert same(dt.load_delta_from_paths(path, one), expected)
    ingot.patch(one, path, tmp_path / "out", verify=False)


@pytest.mark.parametrize("codec", ["delta_sparse", "delta_int4", "delta_sign"])
@pytest.mark.parametrize("shape", [(), (1,), (2,), (1, 1), (3, 1), (1, 9), (0,), (0, 3)])
def test_the_peer_reads_small_tensors(tmp_path: Path, codec: str, shape: tuple[int, ...]) -> None:
    if codec == "delta_sign" and shape == (0,):
        pytest.skip("the peer divides by a row's length, which is 0")
    delta = np.random.default_rng(3).normal(0, 1, shape).astype(np.float32)
    path = write(tmp_path / "x.wdelta", {"x": np.asarray(delta)}, codec, {}, "0" * 63 + "1")
    assert same(peer_differences(path), differences(path))


@pytest.mark.parametrize(("base_shards", "tuned_shards"), [("one", "one"), ("a", "a"), ("a", "b"), ("b", "one")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
def test_ingot_reads_what_the_peer_writes_from_folders(
    tmp_path: Path, base: Arrays, tuned: Arrays, base_shards: str, tuned_shards: str, dtype: Any
) -> None:
    one = folder(tmp_path / "base", base, SHARDS[base_shards], dtype)
    two = folder(tmp_path / "tuned", tuned, SHARDS[tuned_shards], dtype)
    for strategy, _, options in STRATEGIES[::2]:
        path = tmp_path / f"{strategy}.wdelta"
        parent = dt.save_delta_from_paths(path, two, one, strategy=strategy, **options)
        assert same(differences(path), peer_differences(path))
        assert parent_of(path) == parent
        with ingot.open(path) as delta, ingot.open(one) as opened:
            assert matching_order(opened, list(delta), parent) is not None
            assert matching_order(opened, list(delta), "0" * 64) is None


def test_only_the_order_of_records_knows_a_fine_tune_in_other_shards(
    tmp_path: Path, base: Arrays, tuned: Arrays
) -> None:
    """The peer refuses such a file of its own with its own base."""
    one, two = folder(tmp_path / "base", base, SHARDS["a"]), folder(tmp_path / "tuned", tuned, SHARDS["b"])
    path = tmp_path / "x.wdelta"
    parent = dt.save_delta_from_paths(path, two, one, strategy="quantized")
    with pytest.raises(ValueError, match="hash mismatch"):
        dt.load_delta_from_paths(path, one)
    with ingot.open(path) as delta, ingot.open(one) as opened:
        assert matching_order(opened, list(delta), parent) == "records"
        assert set(parent_orders(opened, list(delta))) == {"sorted", "records", "shards"}


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["f32", "f16"])
def test_parent_hashes_of_what_was_in_memory(tmp_path: Path, base: Arrays, tuned: Arrays, dtype: Any) -> None:
    arrays = {name: value.astype(dtype) for name, value in base.items()}
    ingot.save(tmp_path / "base.safetensors", arrays)
    raw = dt.save_delta(tmp_path / "raw.wdelta", tuned, arrays, strategy="quantized")
    wide = dt.save_delta(
        tmp_path / "wide.wdelta", tuned, {name: value.astype(np.float32) for name, value in arrays.items()}
    )
    with ingot.open(tmp_path / "base.safetensors") as opened:
        assert matching_order(opened, sorted(base), raw) == "sorted"
        assert matching_order(opened, sorted(base), wide) == ("sorted" if raw == wide else "sorted-f32")


def partial(path: Path, base: Arrays, tuned: Arrays, names: Sequence[str], parent: str) -> Path:
    """A delta of some tensors, by the peer's own functions."""
    deltas = {name: compress(tuned[name] - base[name].astype(np.float32), "sparse", sparsity=0.5) for name in names}
    with path.open("wb") as file:
        write_wdelta(file, parent, "sparse", deltas)
    return path


@pytest.mark.parametrize("shards", ["one", "a", "b"])
@pytest.mark.parametrize("stored", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("hashed", ["whole", "whole-f32", "covered"])
def test_a_partial_delta_of_the_peer(
    tmp_path: Path, base: Arrays, tuned: Arrays, hashed: str, stored: str, shards: str
) -> None:
    """``load_delta`` hashes the whole base that it is given, ``load_delta_from_paths`` what the delta covers."""
    dtype = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}[stored]
    arrays = {name: value.astype(dtype) for name, value in base.items()}
    wide = {name: value.astype(np.float32) for name, value in arrays.items()}
    torch_dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[stored]
    here = folder(tmp_path / "base", base, SHARDS[shards], torch_dtype)
    names = ["layers.2.w", "b"]
    given = arrays if hashed == "whole" else wide if hashed == "whole-f32" else {name: arrays[name] for name in names}
    path = partial(tmp_path / "x.wdelta", arrays, tuned, names, dt.hash_state_dict(given))
    ingot.patch(here, [path], tmp_path / "out.safetensors")
    loaded = dt.load_delta(path, given if hashed != "covered" else arrays, verify=hashed != "covered")
    with ingot.open(tmp_path / "out.safetensors") as patched:
        assert sorted(patched) == sorted(base)
        assert same({name: patched[name].numpy() for name in names}, {name: loaded[name] for name in names})
    state = {name: value.copy() for name, value in wide.items()}
    if hashed == "whole-f32":
        ingot.apply_delta(state, path)
        assert same({name: state[name] for name in names}, {name: loaded[name] for name in names})
    other = {**arrays, "embed": arrays["embed"] + 1}
    wrong = partial(tmp_path / "w.wdelta", arrays, tuned, names, dt.hash_state_dict(other))
    with pytest.raises(IngotError) as caught:
        ingot.patch(here, [wrong], tmp_path / "wrong.safetensors")
    assert caught.value.rule == "delta.base"


@pytest.mark.parametrize("second", [["layers.2.w", "b"], ["b"]])
def test_a_chain_of_partial_deltas_of_the_peer(
    tmp_path: Path, base: Arrays, tuned: Arrays, second: Sequence[str]
) -> None:
    """What the peer has after the first link is what that link covers, in float32."""
    here = folder(tmp_path / "base", base, SHARDS["one"])
    first = partial(tmp_path / "1.wdelta", base, tuned, ["layers.2.w", "b"], dt.hash_state_dict(base))
    middle = dt.load_delta(first, base)
    last = {name: value + np.float32(0.25) * tuned[name] for name, value in middle.items()}
    then = partial(tmp_path / "2.wdelta", middle, last, second, dt.hash_state_dict(middle))
    expected = dt.load_delta_chain([first, then], base)
    ingot.patch(here, [first, then], tmp_path / "out.safetensors")
    with ingot.open(tmp_path / "out.safetensors") as patched:
        assert same({name: patched[name].numpy() for name in second}, expected)


GOLDEN = Path(__file__).parent.parent / "golden" / "wdelta" / "valid"
OF_OTHERS = ("references", "types", "dtype", "int4-layout-1")


@pytest.mark.parametrize("stem", sorted(path.stem for path in GOLDEN.glob("*") if path.stem.startswith(OF_OTHERS)))
def test_ingot_reads_what_the_peers_reader_reads(tmp_path: Path, stem: str) -> None:
    """Arrays of other types, references of other forms, differences in float16: to the peer's result and its type."""
    path = GOLDEN / f"{stem}.wdelta"
    if stem == "references-to-other-names":  # as the document has references; the peer does not follow them
        with pytest.raises(KeyError):
            peer_differences(path)
        return
    peer = peer_differences(path)
    found = differences(path)
    assert all(np.array_equal(found[name], peer[name].astype(np.float32)) for name in peer)
    base = {name: np.full(value.shape, 0.375, value.dtype) for name, value in peer.items()}
    ingot.save(tmp_path / "base.safetensors", base)
    ingot.patch(tmp_path / "base.safetensors", [path], tmp_path / "out.safetensors", verify_base=False)
    loaded = dt.load_delta(path, base, verify=False)
    with ingot.open(tmp_path / "out.safetensors") as patched:
        for name, value in loaded.items():
            assert patched[name].numpy().dtype == value.dtype
            assert np.array_equal(patched[name].numpy(), value)
    ingot.convert(path, tmp_path / "moved.zt")
    with ingot.open(tmp_path / "moved.zt") as moved:
        assert all(np.array_equal(moved[name].numpy(), found[name]) for name in found)


def test_a_parent_hash_may_have_capitals(tmp_path: Path, base: Arrays, tuned: Arrays) -> None:
    parent = dt.hash_state_dict(base)
    path = partial(tmp_path / "x.wdelta", base, tuned, list(base), parent.upper())
    with ingot.open(path) as delta:
        assert delta.metadata["delta"]["base"]["hashes"]["wdelta"] == parent
    ingot.save(tmp_path / "base.safetensors", base)
    ingot.patch(tmp_path / "base.safetensors", [path], tmp_path / "out.safetensors")


def test_chains_in_both_directions(tmp_path: Path, base: Arrays, tuned: Arrays, way: Any) -> None:
    strategy, codec, options = way
    rng = np.random.default_rng(4)
    last = {name: (value + rng.normal(0, 0.003, value.shape)).astype(np.float32) for name, value in tuned.items()}
    one, three = folder(tmp_path / "base", base, SHARDS["one"]), folder(tmp_path / "last", last, SHARDS["b"])
    first = write(
        tmp_path / "1.wdelta",
        {name: tuned[name] - base[name] for name in base},
        codec,
        options,
        dt.hash_state_dict(base),
    )
    middle = {name: base[name] + value for name, value in differences(first).items()}
    parent = dt.save_delta_chain_from_paths(tmp_path / "2.wdelta", three, first, one, strategy=strategy, **options)
    ingot.save(tmp_path / "middle.safetensors", middle)
    with ingot.open(tmp_path / "middle.safetensors") as opened:
        assert matching_order(opened, sorted(base), parent) == "sorted"
    assert same(differences(tmp_path / "2.wdelta"), peer_differences(tmp_path / "2.wdelta"))
    second = write(
        tmp_path / "ours-2.wdelta", {name: last[name] - middle[name] for name in base}, codec, options, parent
    )
    expected = {name: middle[name] + value for name, value in differences(second).items()}
    assert same(dt.load_delta_chain([first, second], one), expected)
    assert same(dt.load_delta_chain([first, second], base), expected)
    assert second.read_bytes() == (tmp_path / "2.wdelta").read_bytes()


@pytest.mark.models
@pytest.mark.parametrize("way", STRATEGIES[::2], ids=lambda item: item[0], indirect=True)
def test_real_weights(tmp_path: Path, way: Any) -> None:
    strategy, codec, options = way
    peer = tmp_path / "peer.wdelta"
    parent = dt.save_delta_from_paths(peer, MODELS / "finetune", MODELS / "base", strategy=strategy, **options)
    assert same(differences(peer), peer_differences(peer))
    with ingot.open(MODELS / "base") as base, ingot.open(MODELS / "finetune") as tuned, ingot.open(peer) as delta:
        assert matching_order(base, list(delta), parent) is not None
        wide = {name: tensor.numpy("f32") for name, tensor in base.items()}
        made = {name: tensor.numpy("f32") - wide[name] for name, tensor in tuned.items()}
        orders = parent_orders(base, sorted(base))
        loadable = parent_hash(base, orders.get("shards", orders["sorted"]))
    ours = write(tmp_path / "ours.wdelta", made, codec, options, loadable, "bf16")
    expected = {name: wide[name] + value for name, value in differences(ours).items()}
    assert same(dt.load_delta_from_paths(ours, MODELS / "base"), expected)
    assert abs(ours.stat().st_size - peer.stat().st_size) < 100 * len(made)
