"""The golden corpus of GGUF: in step with its script, read or refused as names say, all types with known values."""

from __future__ import annotations

import importlib.util
import re
import zlib
from pathlib import Path

import pytest

import ingot
from ingot.errors import IngotError

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "gguf"
# CRC-32 of the values in f32 of every-type.gguf as the package gguf 0.19.0 gives them; q1_0 and q2_0, which it does not
# decode, as Ingot does.
VALUES = {
    "q4_0": 0x4C9A322A,
    "q4_1": 0xC618AD20,
    "q5_0": 0x2D86DFA7,
    "q5_1": 0xCFDCD361,
    "q8_0": 0x360BADA0,
    "q2_k": 0xF2B89F92,
    "q3_k": 0x3DB8DFFC,
    "q4_k": 0xA33EB3EF,
    "q5_k": 0x2C7A63BF,
    "q6_k": 0x5246C98D,
    "iq2_xxs": 0x5141C532,
    "iq2_xs": 0xAF06C346,
    "iq3_xxs": 0xD4CA619C,
    "iq1_s": 0xE21A4732,
    "iq4_nl": 0x6DF09FFB,
    "iq3_s": 0x57346EDA,
    "iq2_s": 0x90751A95,
    "iq4_xs": 0x07FD1248,
    "iq1_m": 0xC7B6D6A3,
    "tq1_0": 0x1F8788C2,
    "tq2_0": 0x7EFBCE9A,
    "mxfp4": 0xB1E20A89,
    "nvfp4": 0x2CE7B05B,
    "q1_0": 0x8E541541,
    "q2_0": 0x9F73BD94,
}


def corpus():
    spec = importlib.util.spec_from_file_location("make_gguf", Path(__file__).parent / "make_gguf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.corpus()


def cases(part: str) -> list[str]:
    return sorted(path.name for path in (FOLDER / part).iterdir())


def test_the_corpus_is_what_its_script_makes():
    found = {str(path.relative_to(FOLDER)): path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}
    assert found == corpus()


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("name", cases("valid"))
def test_valid_files_open_and_decode(name, io):
    with ingot.open(FOLDER / "valid" / name, io=io) as checkpoint:
        values = checkpoint.state_dict()
        assert set(values) == set(checkpoint)
        for item in ("a", "b"):
            assert item not in values or values[item].reshape(-1).tolist() == [0, 1, 2, 3, 4, 5]


def test_every_type_has_the_values_that_the_package_gives():
    with ingot.open(FOLDER / "valid" / "every-type.gguf") as checkpoint:
        blocks = [name for name in checkpoint if checkpoint[name].codec == "ggml_blocks"]
        assert {name: zlib.crc32(checkpoint[name].numpy().tobytes()) for name in blocks} == VALUES


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("name", cases("reject"))
def test_rejected_files_name_their_rule(name, io):
    with pytest.raises(IngotError) as caught:
        ingot.open(FOLDER / "reject" / name, io=io)
    assert caught.value.rule == "gguf." + name.removesuffix(".gguf").partition("--")[0]


def test_every_rule_has_a_golden_file():
    """Notes, the writer's rules and the limit of a header, which a file of that size would need, have none."""
    folder = ROOT / "src" / "ingot" / "formats" / "gguf"
    used = set(re.findall(r'"gguf\.([a-z0-9-]+)"', "".join(path.read_text() for path in folder.glob("*.py"))))
    covered = {name.removesuffix(".gguf").partition("--")[0] for name in cases("reject")}
    assert used - covered == {"alignment-ignored", "long-name", "trailing", "metadata", "unsupported", "header-length"}
