"""Which format a file or folder is of, and how other containers are turned away."""

from __future__ import annotations

from itertools import product

import pytest

from ingot.errors import FormatError, IngotError, UnsupportedError, UsageError
from ingot.formats.detect import FORMATS, detect_file, detect_folder

ST_HEAD = (10).to_bytes(8, "little") + b'{"a": 1}'


@pytest.mark.parametrize(
    ("name", "head", "format"),
    [
        ("model.zt", b"ZTEN1000" + bytes(8), "zt"),
        ("model", b"ZTEN1000" + bytes(8), "zt"),
        ("model.zt", b"garbage", "zt"),
        ("model.ZT", b"garbage", "zt"),
        ("model", b"\x89ZT2\r\n\x1a\n", "zt2"),
        ("model", b"ZTEN0001", "zt"),
        ("model", b"GGUF\x03\0\0\0", "gguf"),
        ("model.gguf", b"garbage", "gguf"),
        ("model.safetensors", ST_HEAD, "safetensors"),
        ("model.safetensors", b"PK\x03\x04\0\0\0\0{", "safetensors"),
        ("pytorch_model.bin", b"PK\x03\x04\x00\x00\x08\x08", "torch"),
        ("old.pt", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "torch"),
    ],
)
def test_formats_by_head_and_name(name: str, head: bytes, format: str) -> None:
    assert detect_file(name, head).name == format


@pytest.mark.parametrize(
    ("name", "head", "rule"),
    [
        ("weights.pkl", b"PK\x03\x04\x00\x00\x08\x08", "detect.pickle"),
        ("model.ckpt", b"\x80\x02}q\x00", "detect.pickle"),
        ("model.safetensors", b"\x80\x04\x95", "detect.pickle"),
        ("model.zt", b"\x80\x05", "detect.pickle"),
        ("a.keras", b"PK\x03\x04\x14\x00", "detect.zip"),
        ("a.h5", b"\x89HDF\r\n\x1a\n", "detect.hdf5"),
        ("a.npy", b"\x93NUMPY\x01\x00", "detect.npy"),
        ("a.tflite", b"\x1c\0\0\0TFL3", "detect.tflite"),
        ("model.safetensors", b"version https://git-lfs", "detect.lfs-pointer"),
        ("a.tar.gz", b"\x1f\x8b\x08", "detect.archive"),
        ("a.zst", b"\x28\xb5\x2f\xfd", "detect.archive"),
        ("README", b"# title", "detect.unknown"),
        ("model.safetensors", b"<!DOCTYPE html>\n", "detect.html"),
        ("model.zt", b"\n  <html lang=", "detect.html"),
        ("model.safetensors", b"Entry not found", "detect.error-text"),
        ("model.zt", b"<?xml version='1", "detect.error-text"),
        ("model.squizd", b'{"error":"Reposi', "detect.error-text"),
        ("model.safetensors.part", ST_HEAD, "detect.unfinished"),
        ("x.incomplete", b"ZTEN1000", "detect.unfinished"),
    ],
)
def test_other_containers_are_named(name: str, head: bytes, rule: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        detect_file(name, head)
    assert caught.value.rule == rule


def test_an_empty_file() -> None:
    with pytest.raises(FormatError) as caught:
        detect_file("model.zt", b"")
    assert caught.value.rule == "detect.empty"


@pytest.mark.parametrize(
    ("names", "entry"),
    [
        (["README.md", "config.json", "weights.zt"], "weights.zt"),
        (["a.zt", "b.zt", "model.zt"], "model.zt"),
        ([".hidden.zt", "b.zt"], "b.zt"),
    ],
)
def test_a_folder_with_one_zt(names: list[str], entry: str) -> None:
    found, file = detect_folder(names)
    assert (found.name, file) == ("zt", entry)


@pytest.mark.parametrize(
    ("names", "rule", "told"),
    [
        ([], "detect.none", "found an empty folder; was the download complete?"),
        (
            ["optimizer.pt", "config.json"],
            "detect.none",
            "found optimizer.pt, config.json: a model without its weights",
        ),
        (list("abcde"), "detect.none", "found a, b, c and 2 more; give the folder of the weights"),
        (["a.zt", "b.zt"], "detect.several", "name the file"),
        (["model.zt", "model.safetensors"], "detect.several", "name the file"),
    ],
)
def test_a_folder_without_one_checkpoint(names: list[str], rule: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        detect_folder(names)
    assert caught.value.rule == rule
    assert told in caught.value.message


def test_an_exported_program_is_passed_over_beside_the_weights_it_was_made_of() -> None:
    assert detect_folder(["model.onnx", "model.safetensors"])[0].name == "safetensors"
    assert detect_folder(["config.json", "decoder.onnx", "decoder.onnx.data"])[1] == "decoder.onnx"


def test_the_table_gives_one_instance_of_each() -> None:
    assert {"zt", "safetensors"} <= set(FORMATS)
    for name in FORMATS:
        assert FORMATS[name] is FORMATS[name]
        assert FORMATS[name].name == name
    with pytest.raises(IngotError) as caught:
        FORMATS.get_or_refuse("nope")
    assert caught.value.rule == "format.unknown"


def test_the_ends_of_names_are_known_without_the_formats() -> None:
    assert set(FORMATS.endings()) == {suffix for key in FORMATS for suffix in FORMATS[key].suffixes}


def test_formats_that_no_sign_speaks_for_would_not_have_claimed_it() -> None:
    """The table's signs change no answer: neither for names and first bytes of files, nor for folders."""
    known = [FORMATS[key] for key in FORMATS]
    heads = [b"ZTEN1000", b"ZTEN0001", b"\x89ZT2\r\n\x1a\n", b"SQZD", b"wdelta\0", b"GGUF", b"ANEKUNIT", b"PK\x03\x04"]
    heads += [(9).to_bytes(8, "little") + b"{", b"\x80\x02", b"{}"]
    names = [f"A{suffix.upper()}" for format in known for suffix in format.suffixes]
    names += ["a", "manifest.json", "Manifest.json", "kernels.json", "w.npy"]
    for file, head in product(names, heads):
        asked = [format for format in FORMATS.of_file(file, head) if format.claims(file, head)]
        assert asked[:1] == [format for format in known if format.claims(file, head)][:1], (file, head)
    for file in names:
        within = [file, "config.json", "tensors/", "tensors/a.npy", "Data/", "a-manifest.json"]
        assert {format for format in known if format.entry(within)} <= set(FORMATS.of_folder(within)), file
