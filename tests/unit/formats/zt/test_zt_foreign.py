"""Manifests of other writers: indefinite lengths, tags, undefined; blobs that several tensors share."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import pytest

import ingot
from ingot.core.parsing import cbor
from ingot.errors import FormatError
from ingot.formats.zt import foreign_cbor
from ingot.formats.zt.foreign_cbor import rewrite
from tests.support.zt import loose_cbor

CORPUS = Path(__file__).parents[3] / "golden" / "zt" / "valid"


def value(rng: random.Random, depth: int = 0) -> Any:
    """Something that CBOR holds and that Ingot reads."""
    kinds = [
        lambda: rng.choice([0, 23, 24, 255, 256, 65535, 65536, 2**32, 2**64 - 1, -1, -25, -(2**63)]),
        lambda: "".join(rng.choice("aä重") for _ in range(rng.randrange(6))),
        lambda: rng.randbytes(rng.randrange(6)),
        lambda: rng.choice([True, False, None, 0.5, 1e300, -0.0]),
        lambda: [value(rng, depth + 1) for _ in range(rng.randrange(4))],
        lambda: {f"k{at}": value(rng, depth + 1) for at in range(rng.randrange(4))},
    ]
    return rng.choice(kinds[: 4 if depth > 3 else 6])()


@pytest.mark.parametrize("seed", range(40))
def test_what_is_rewritten_is_the_same_item(seed: int) -> None:
    rng = random.Random(seed)
    item = {"root": [value(rng) for _ in range(8)]}
    data = loose_cbor(item, rng)
    result, _ = rewrite(data, "m")
    assert repr(cbor.loads(result)) == repr(item)
    plain = cbor.dumps(item)
    assert rewrite(plain, "m") == (plain, [])


@pytest.mark.parametrize("seed", range(20))
def test_another_decoder_agrees(seed: int) -> None:
    """cbor2 on the same bytes; it freezes what is in a tag."""
    rng = random.Random(1000 + seed)
    item = {"root": [value(rng) for _ in range(8)]}

    def plain(found: Any) -> Any:
        if isinstance(found, cbor2.CBORTag):
            return plain(found.value)
        if isinstance(found, Mapping):
            return {plain(key): plain(inner) for key, inner in found.items()}
        if isinstance(found, list | tuple):
            return [plain(inner) for inner in found]
        return None if found is cbor2.undefined else found

    data = loose_cbor(item, rng)
    assert repr(cbor.loads(rewrite(data, "m")[0])) == repr(plain(cbor2.loads(data)))


@pytest.mark.parametrize("seed", range(200))
def test_damage_is_refused_by_rule_or_read(seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(loose_cbor({"root": [value(rng) for _ in range(8)]}, rng))
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    data = data[: rng.randrange(len(data) + 1)] if rng.random() < 0.3 else data
    rule = "cbor."
    try:
        cbor.loads(rewrite(bytes(data), "m")[0])
    except FormatError as error:
        rule = str(error.rule)
    assert rule.startswith("cbor.")


def test_items_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_cbor, "MAX_ITEMS", 100)
    rewrite(b"\x9f" + b"\x00" * 99 + b"\xff", "m")
    for data in (b"\x9f" + b"\x00" * 100 + b"\xff", b"\xc1" * 100 + b"\x00", b"\x5f" + b"\x40" * 100 + b"\xff"):
        with pytest.raises(FormatError) as caught:
            rewrite(data, "m")
        assert caught.value.rule == "cbor.items"


RULES = {
    "foreign-indefinite": "zt.cbor-indefinite",
    "foreign-tags": "zt.cbor-tag",
    "foreign-undefined": "zt.cbor-undefined",
    "shared-blobs": "zt.blob-shared",
}


@pytest.mark.parametrize("stem", sorted(RULES))
def test_a_strict_check_reports_them(stem: str, tmp_path: Path) -> None:
    for strict in (False, True):
        levels = {item.rule: item.level for item in ingot.verify(CORPUS / f"{stem}.zt", strict=strict)}
        assert levels[RULES[stem]] == ("error" if strict else "note")
        assert "error" not in {level for rule, level in levels.items() if rule != RULES[stem]}
    ingot.convert(CORPUS / f"{stem}.zt", tmp_path / "b.zt")
    assert ingot.compare(CORPUS / f"{stem}.zt", tmp_path / "b.zt").same
    assert not [item for item in ingot.verify(tmp_path / "b.zt", strict=True) if item.level == "error"]


def test_tensors_that_share_a_blob_have_the_same_bytes(tmp_path: Path) -> None:
    with ingot.open(CORPUS / "shared-blobs.zt") as checkpoint:
        assert np.array_equal(checkpoint["a"].numpy(), checkpoint["b"].numpy())
        assert checkpoint["c"].numpy().tobytes() == checkpoint["a"].numpy().tobytes()
        assert checkpoint["c"].shape == (2, 2)
