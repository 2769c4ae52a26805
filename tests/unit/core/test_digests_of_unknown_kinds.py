"""Digests that a file states and Ingot does not know: they are listed, and nothing is checked by them."""

from __future__ import annotations

import pytest

from ingot.core.bytes.chunk_digests import single_chunk


@pytest.mark.parametrize("digest", ["xxh3:0/11", "xxh3:" + "0" * 32, "md5:00"])
def test_a_small_parts_digest_of_an_unknown_kind_is_no_chunk(digest: str) -> None:
    assert single_chunk(digest, 16) is None
