"""Files of torch: read by torch's restricted unpickler, mapped, never by one of ours."""

from __future__ import annotations

import json
import pickle
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.core.runtime.memory import resident
from ingot.formats.torch.format import TorchFormat
from ingot.stores.local import LocalStore

torch = pytest.importorskip("torch")


def state() -> dict[str, Any]:
    torch.manual_seed(3)
    base = torch.randn(6, 8)
    return OrderedDict(
        {
            "a.weight": torch.nn.Parameter(base),
            "turned": base.t(),
            "half": torch.randn(3, 5).to(torch.bfloat16),
            "f8": torch.randn(4).to(torch.float8_e4m3fn),
            "some": base[2:4, 1:3],
            "count": torch.tensor(7),
            "none": torch.zeros(0, 4, dtype=torch.float16),
            "flags": torch.tensor([True, False]),
        }
    )


def same(path: Path, tensors: dict[str, Any]) -> None:
    with ingot.open(path) as checkpoint:
        assert set(checkpoint) == set(tensors)
        for name, value in tensors.items():
            assert checkpoint[name].shape == tuple(value.shape)
            found, wanted = checkpoint[name].torch().reshape(-1), value.detach().reshape(-1)
            assert found.dtype == wanted.dtype
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("legacy", [False, True])
def test_a_state_dict_converts_bit_for_bit(tmp_path: Path, legacy: bool) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    torch.save({}, tmp_path / "model" / "optimizer.pt")
    file, wanted = tmp_path / "model" / "pytorch_model.bin", state()
    if legacy:
        del wanted["f8"]  # which that torch had not
    torch.save({"state_dict": wanted, "epoch": 3}, file, _use_new_zipfile_serialization=not legacy)
    same(file, wanted)
    report = ingot.convert(tmp_path / "model", tmp_path / "out", format="safetensors")
    assert any("epoch" in note for note in report.notes)
    same(tmp_path / "out", wanted)
    assert (tmp_path / "out" / "config.json").exists()
    ingot.save(tmp_path / "model" / "model.safetensors", {"x": np.ones(2)})
    with ingot.open(tmp_path / "model") as checkpoint:  # the better container is taken
        assert list(checkpoint) == ["x"]


def test_shards_under_an_index(tmp_path: Path) -> None:
    whole, names = state(), list(state())
    shards = {"pytorch_model-00001-of-00002.bin": names[:3], "pytorch_model-00002-of-00002.bin": names[3:]}
    for file, part in shards.items():
        torch.save({name: whole[name].clone() for name in part}, tmp_path / file)
    places = {name: file for file, part in shards.items() for name in part}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    same(tmp_path, whole)
    for wrong in (
        {**places, "more": names[0]},
        {**places, "count": "../x.bin"},
        {**places, "count": next(iter(shards))},
    ):
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(ingot.IngotError) as caught:
            ingot.open(tmp_path)
        assert caught.value.rule == "torchfile.index"


def unread(path: Path) -> dict[str, str]:
    return dict(TorchFormat().read(LocalStore(path.parent), path.name).unread)


def test_tensors_beside_the_weights_are_listed_and_plain_values_are_not(tmp_path: Path) -> None:
    weights = {"a": torch.zeros(2), "config": {"depth": 3}, "deeper": {"b": [torch.ones(1)]}}
    state = {0: {"exp_avg": torch.zeros(2), "step": torch.tensor(3.0)}}
    optimizer: dict[str, Any] = {"state": state, "param_groups": [{"lr": 0.1}]}
    optimizer["again"] = optimizer["param_groups"]
    optimizer["param_groups"].append(optimizer["param_groups"])  # a list within itself
    torch.save({"model": weights, "optimizer": optimizer, "epoch": 3, "size": torch.Size([2])}, tmp_path / "m.pt")
    assert list(unread(tmp_path / "m.pt")) == [
        *("model.deeper.b.0", "optimizer.state.0.exp_avg", "optimizer.state.0.step"),
    ]
    (finding,) = [item for item in ingot.verify(tmp_path / "m.pt") if item.rule == "torchfile.left-out"]
    assert "they include 3 tensors" in finding.message
    torch.save({"model": {"a": torch.zeros(2)}, "epoch": 3}, tmp_path / "n.pt")
    assert not unread(tmp_path / "n.pt")
    torch.save({"a": torch.zeros(2), 7: torch.ones(1), "ema": {"a": torch.zeros(2)}}, tmp_path / "o.pt")
    assert list(unread(tmp_path / "o.pt")) == ["7", "ema.a"]


def test_an_entry_that_ends_past_the_file_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "m.pt")
    data = bytearray((tmp_path / "m.pt").read_bytes())
    with zipfile.ZipFile(tmp_path / "m.pt") as archive:
        size = next(entry.file_size for entry in archive.infolist() if entry.filename.endswith("data.pkl"))
    entry = data.index(b"PK\1\2")  # in the central directory; both sizes follow the checksum
    while not data[entry + 46 :].startswith((b"m/data.pkl", b"archive/data.pkl")):
        entry = data.index(b"PK\1\2", entry + 4)
    assert int.from_bytes(data[entry + 20 : entry + 24], "little") == size
    data[entry + 20 : entry + 28] = 2 * (1 << 20).to_bytes(4, "little")
    (tmp_path / "n.pt").write_bytes(data)
    with pytest.raises(ingot.IngotError) as caught:
        ingot.open(tmp_path / "n.pt")
    assert caught.value.rule in ("torchfile.zip", "torchfile.damaged")


class Code:
    def __reduce__(self) -> Any:
        return (sys.exit, ("ran",))


def hostile(path: Path, kind: str) -> None:
    plain = {"w": torch.zeros(2)}
    if kind == "code":
        torch.save({"w": torch.zeros(2), "x": Code()}, path)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(Code()))
    elif kind == "content":
        torch.save([torch.zeros(2)], path)
    elif kind == "repeated":
        torch.save({"w": torch.zeros(1).expand(1 << 40)}, path)
    elif kind == "sparse":
        torch.save({"w": torch.eye(3).to_sparse()}, path)
    else:
        torch.save(plain, path)
        if kind == "short":
            path.write_bytes(path.read_bytes()[:-40])
        else:
            with zipfile.ZipFile(path) as source:
                entries = {entry.filename: source.read(entry) for entry in source.infolist()}
            with zipfile.ZipFile(
                path, "w", zipfile.ZIP_DEFLATED if kind == "compressed" else zipfile.ZIP_STORED
            ) as made:
                for name, data in entries.items():
                    if kind == "compressed" or not name.endswith("data/0"):
                        made.writestr(name, data)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("code", "torchfile.weights-only"),
        ("pickle", "detect.pickle"),
        ("content", "torchfile.content"),
        ("repeated", "torchfile.tensor"),
        ("sparse", "torchfile.tensor"),
        ("short", "torchfile.zip"),
        ("compressed", "torchfile.zip"),
        ("missing", "torchfile.damaged"),
    ],
)
def test_what_is_refused(tmp_path: Path, kind: str, rule: str) -> None:
    hostile(tmp_path / "x.pt", kind)
    with pytest.raises(ingot.IngotError) as caught:
        ingot.open(tmp_path / "x.pt")
    assert caught.value.rule == rule


def test_views_that_torch_evaluates_late_have_their_values(tmp_path: Path) -> None:
    """A conjugated or negated view is stored with a bit set, and with the elements of what it is a view of."""
    values = torch.tensor([[1 + 2j, 3 - 4j], [5j, 0]])
    views = {"conj": values.conj(), "neg": values.conj().imag, "both": values.t().conj()}
    assert views["conj"].is_conj()
    assert views["neg"].is_neg()
    for name, view in views.items():
        torch.save({"w": view}, tmp_path / "x.pt")
        with ingot.open(tmp_path / "x.pt") as checkpoint:
            assert checkpoint["w"].numpy().tolist() == view.resolve_conj().resolve_neg().tolist()
        ingot.convert(tmp_path / "x.pt", tmp_path / f"{name}.zt")
        assert ingot.compare(tmp_path / "x.pt", tmp_path / f"{name}.zt").same


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    torch.save({"w": nested}, tmp_path / "x.pt")
    for call in (lambda: ingot.open(tmp_path / "x.pt"), lambda: ingot.save(tmp_path / "y.zt", {"w": nested})):
        with pytest.raises(ingot.IngotError) as caught:
            call()
        assert caught.value.rule in ("torchfile.tensor", "adapter.layout")


def test_without_torch_the_command_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "x.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ingot.IngotError) as caught:
        ingot.open(tmp_path / "x.bin")
    assert caught.value.rule == "extra.missing"
    assert "pip install" in str(caught.value)
    with pytest.raises(ingot.IngotError) as caught:
        ingot.save(tmp_path / "y.bin", {"w": np.ones(2)})
    assert caught.value.rule == "save.suffix"


def test_a_tensor_at_a_time_is_in_memory(tmp_path: Path) -> None:
    torch.save({str(number): torch.zeros(4 << 20) for number in range(6)}, tmp_path / "x.bin")  # 16 MiB each
    with ingot.open(tmp_path / "x.bin") as checkpoint:
        before = resident()
        for tensor in checkpoint.values():
            reader = tensor.parts["data"].source
            assert bytes(reader.view(0, 1 << 20)) == bytes(1 << 20)
        assert resident() - before < 48 << 20
