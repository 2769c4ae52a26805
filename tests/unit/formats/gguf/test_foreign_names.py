"""GGUF files of other programs: names that llama.cpp does not read, and strings that are not UTF-8."""

from __future__ import annotations

from pathlib import Path
from struct import pack

import pytest

import ingot
from ingot.errors import IngotError, UnsupportedError
from tests.support.gguf import ARRAY, STRING, Item, Value, build

LONG = "model.diffusion_model.input_blocks.2.1.transformer_blocks.0.attn2.to_q.weight"
BYTES = [b"plain", b"\xff\xfe", b"\xe2\x96\x81a", b"half \xe2\x96", "\ufffd".encode(), b""]
NUMBERS = pack("<2f", 1, 2)


def saved(path: Path, name: str | bytes = "a", metadata: dict[str, Value] | None = None) -> Path:
    path.write_bytes(build(metadata or {}, [Item(name, (2,), 0, NUMBERS)]))
    return path


def test_long_names_are_read_and_written_elsewhere(tmp_path: Path) -> None:
    source = saved(tmp_path / "x.gguf", LONG)
    ingot.convert(source, tmp_path / "x.safetensors")
    with ingot.open(tmp_path / "x.safetensors") as made:
        assert made[LONG].numpy().tolist() == [1, 2]
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(source, tmp_path / "y.gguf")
    assert caught.value.rule == "convert.unsupported"


@pytest.mark.parametrize(("length", "rules"), [(63, []), (64, ["gguf.long-name"])])
def test_verify_names_those_that_llama_cpp_does_not_read(tmp_path: Path, length: int, rules: list[str]) -> None:
    source = saved(tmp_path / "x.gguf", "\u00e9" * (length // 2) + "n" * (length % 2))
    found = {item.rule: item.level for item in ingot.verify(source)}
    assert [rule for rule in found if rule == "gguf.long-name"] == rules
    strict = {item.rule: item.level for item in ingot.verify(source, strict=True)}
    assert [strict[rule] for rule in rules] == ["error"] * len(rules)


@pytest.mark.parametrize("name", [b"\xff", b"a\xe2\x96", "n\0"])
def test_names_without_text_are_refused(tmp_path: Path, name: str | bytes) -> None:
    with pytest.raises(IngotError) as caught:
        ingot.open(saved(tmp_path / "x.gguf", name))
    assert caught.value.rule in ("gguf.utf8", "gguf.name")


@pytest.mark.parametrize("between", ["x.zt", "x.safetensors", "x.squizd", "y.gguf"])
def test_strings_that_are_no_text_come_back_as_their_bytes(tmp_path: Path, between: str) -> None:
    metadata = {"tokens": Value(ARRAY, BYTES, STRING), "one": Value(STRING, b"\x80"), "two": Value(STRING, b"ok")}
    source = saved(tmp_path / "a.gguf", metadata=metadata)
    with ingot.open(source) as checkpoint:
        assert checkpoint.metadata["tokens"][:3] == ["plain", "\ufffd\ufffd", "\u2581a"]
        ingot.save(tmp_path / "first.gguf", dict(checkpoint), checkpoint.metadata)
    ingot.convert(tmp_path / "first.gguf", tmp_path / between)
    ingot.convert(tmp_path / between, tmp_path / "back.gguf", keep_names=True)
    assert (tmp_path / "back.gguf").read_bytes() == (tmp_path / "first.gguf").read_bytes()
    assert all(pack("<Q", len(text)) + text in (tmp_path / "back.gguf").read_bytes() for text in BYTES)


def test_bytes_of_a_text_that_was_changed_since_do_not_count(tmp_path: Path) -> None:
    metadata = {"tokens": Value(ARRAY, [b"\xff", b"\xfe"], STRING)}
    with ingot.open(saved(tmp_path / "a.gguf", metadata=metadata)) as checkpoint:
        changed = {**checkpoint.metadata, "tokens": ["new", "\ufffd", "more"]}
        ingot.save(tmp_path / "b.gguf", dict(checkpoint), changed)
    data = (tmp_path / "b.gguf").read_bytes()
    assert pack("<Q", 1) + b"\xfe" in data
    assert pack("<Q", 1) + b"\xff" not in data
    with ingot.open(tmp_path / "b.gguf") as checkpoint:
        assert checkpoint.metadata["tokens"] == ["new", "\ufffd", "more"]


@pytest.mark.parametrize(
    "raw",
    [
        5,
        {"tokens": 5},
        {"tokens": {"x": "gA=="}},
        {"tokens": {"0": 5}},
        {"tokens": {"9": "gA=="}},
        {"n": {"0": "gA=="}},
    ],
)
def test_a_description_that_is_none_is_left_out(tmp_path: Path, raw: object) -> None:
    metadata = {"tokens": ["\ufffd"], "n": 5, "ingot.gguf": {"types": {}, "raw": raw}}
    ingot.save(tmp_path / "x.gguf", {"a": ingot.open(saved(tmp_path / "a.gguf"))["a"]}, metadata)
    with ingot.open(tmp_path / "x.gguf") as checkpoint:
        assert (checkpoint.metadata["tokens"], checkpoint.metadata["n"]) == (["\ufffd"], 5)
        assert "raw" not in checkpoint.metadata["ingot.gguf"]
