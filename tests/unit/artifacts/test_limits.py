"""Few bytes that stand for very many: refused before work begins, by every operation; read where that is meant."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.artifacts.identity import content_id
from ingot.cli.main import run
from ingot.delta.cost import delta_cost
from ingot.errors import FormatError, IngotError
from ingot.model.reading.limits import DECOMPRESSED, VARIABLE
from tests.support.wdelta import Made
from tests.support.wdelta import sparse as add_sparse
from tests.support.zt import component, manifest, tensor, zstd_frame, zt_file


def sparse(shape: list[int]) -> bytes:
    """A ``.zt`` with a sparse tensor that stores nothing."""
    parts = {role: component(dtype=kind, length=0) for role, kind in (("values", "f32"), ("coords", "u64"))}
    return zt_file(manifest({"t": tensor(shape=shape, format="sparse_coo", components=parts)}), {64: bytes(4)})


def difference(shape: list[int], indices: tuple[int, ...] = (1, 5)) -> bytes:
    """A ``.wdelta`` that stores a few elements of a tensor."""
    return add_sparse(Made(), "t", shape, indices).file()


@pytest.fixture(params=["zt", "wdelta"])
def bomb(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"bomb.{request.param}"
    path.write_bytes(sparse([2**32, 128]) if request.param == "zt" else difference([2**32, 128]))
    return path


def rule_of(call: object) -> str | None:
    assert callable(call)
    with pytest.raises(IngotError) as caught:
        call()
    return caught.value.rule


def test_every_operation_refuses_terabytes_from_nothing(bomb: Path, tmp_path: Path) -> None:
    assert rule_of(lambda: ingot.compare(bomb, bomb)) == "decoded.limit"
    assert rule_of(lambda: ingot.numpy.load_file(bomb)) == "decoded.limit"
    if bomb.suffix == ".zt":
        out = tmp_path / "o.safetensors"
        assert rule_of(lambda: ingot.convert(bomb, out)) == "decoded.limit"
        assert not out.exists()
    with ingot.open(bomb) as checkpoint:
        assert rule_of(lambda: content_id(checkpoint)) == "decoded.limit"
        assert rule_of(checkpoint.state_dict) == "decoded.limit"
        assert rule_of(checkpoint["t"].numpy) == "decoded.limit"


def test_verify_reads_what_is_stored_of_a_difference(tmp_path: Path) -> None:
    (tmp_path / "a.wdelta").write_bytes(difference([2**32, 128]))
    assert [item for item in ingot.verify(tmp_path / "a.wdelta") if item.level == "error"] == []
    (tmp_path / "b.wdelta").write_bytes(difference([4, 4], (3, 3)))
    assert "delta_sparse.duplicate" in {item.rule for item in ingot.verify(tmp_path / "b.wdelta")}
    (tmp_path / "a.zt").write_bytes(sparse([2**32, 128]))
    assert "decoded.limit" in {item.rule for item in ingot.verify(tmp_path / "a.zt")}


def test_the_limit_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.zt").write_bytes(sparse([1024, 1024]))
    with ingot.open(tmp_path / "a.zt") as checkpoint:
        assert not checkpoint["t"].numpy().any()
        monkeypatch.setenv(VARIABLE, "1MiB")
        assert rule_of(checkpoint["t"].numpy) == "decoded.limit"
        monkeypatch.setenv(VARIABLE, "4MiB")
        assert checkpoint["t"].numpy().shape == (1024, 1024)


def test_what_does_not_fit_into_memory_together_is_refused_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.core.runtime.memory.available_ram", lambda: 1 << 28)
    (tmp_path / "a.zt").write_bytes(sparse([1 << 15, 1 << 12]))
    with ingot.open(tmp_path / "a.zt") as checkpoint:
        assert rule_of(checkpoint.state_dict) == "ram.guard"
    ingot.save(tmp_path / "b.zt", {"x": np.zeros(4, np.float32)})
    with ingot.open(tmp_path / "b.zt") as checkpoint:
        assert list(checkpoint.state_dict()) == ["x"]


COMPRESSED = 1 << 20


@pytest.fixture
def compressed(tmp_path: Path) -> Path:
    """A part of zstd that becomes a mebibyte, and a raw one that is larger."""
    frame, stated = zstd_frame(b"\1", repeat=COMPRESSED), COMPRESSED
    parts = {
        "small": component("u8", length=len(frame), encoding="zstd", uncompressed_length=stated),
        "large": component("u8", offset=1 << 16, length=stated + 64),
    }
    shapes = {"small": [stated], "large": [stated + 64]}
    objects = {name: tensor(shapes[name], components={"data": part}) for name, part in parts.items()}
    path = tmp_path / "a.zt"
    path.write_bytes(zt_file(manifest(objects), {64: frame, 1 << 16: bytes(stated + 64)}))
    return path


def test_what_a_compressed_part_may_become_is_bounded(compressed: Path, tmp_path: Path) -> None:
    """By the option of everything that opens files, before anything is decompressed."""
    out, other = tmp_path / "o.safetensors", tmp_path / "b.zt"
    ingot.save(other, {"small": np.zeros(4, np.uint8)})

    def bounded(limit: int | str) -> dict[str, object]:
        """What each operation is refused by, or nothing."""
        calls = {
            "open": lambda: ingot.open(compressed, max_decompressed=limit).close(),
            "load_file": lambda: ingot.numpy.load_file(compressed, max_decompressed=limit),
            "convert": lambda: ingot.convert(compressed, out, max_decompressed=limit, overwrite=True),
            "compare": lambda: ingot.compare(other, compressed, max_decompressed=limit),
            "diff": lambda: ingot.diff(
                compressed, compressed, tmp_path / "d.zt", max_decompressed=limit, overwrite=True
            ),
        }
        refused: dict[str, object] = {}
        for name, call in calls.items():
            try:
                call()
            except FormatError as error:
                refused[name] = error.rule
        errors = [item.rule for item in ingot.verify(compressed, max_decompressed=limit) if item.level == "error"]
        return refused | ({"verify": errors[0]} if errors else {})

    assert bounded(COMPRESSED) == {}
    rule = "part.max-decompressed"
    every = ("open", "load_file", "convert", "compare", "diff", "verify")
    assert bounded("1023KiB") == dict.fromkeys(every, rule)
    assert rule_of(lambda: ingot.open(compressed, max_decompressed="many")) == "size.syntax"


def test_the_bound_holds_beside_a_delta_too(compressed: Path, tmp_path: Path) -> None:
    """``compare --delta`` opens all three with it."""
    delta = tmp_path / "d.zt"
    ingot.diff(compressed, compressed, delta)
    command = ["compare", str(compressed), str(compressed), "--delta", str(delta), "-q", "--max-decompressed"]
    assert run([*command, "1MiB"]) == 0
    assert run([*command, "1023KiB"]) == 1
    assert rule_of(lambda: delta_cost(compressed, delta, compressed, max_decompressed=4096)) == "part.max-decompressed"


def test_the_bound_comes_from_the_environment_too(compressed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DECOMPRESSED, "4KiB")
    assert rule_of(lambda: ingot.open(compressed)) == "part.max-decompressed"
    assert rule_of(lambda: ingot.numpy.load(compressed.read_bytes())) == "part.max-decompressed"
    assert len(ingot.numpy.load_file(compressed, max_decompressed="1MiB")) == 2
    assert run(["verify", str(compressed)]) == 1
    assert run(["verify", str(compressed), "--max-decompressed", "1MiB"]) == 0
