"""``.squizd`` keeps what every format promises."""

from __future__ import annotations

from ingot.formats.base import WriteOptions
from ingot.formats.squizd.format import SquizdFormat
from ingot.testing.formats import FormatSuite


class TestSquizd(FormatSuite):
    format = SquizdFormat()


class TestSquizdWithSha256(FormatSuite):
    format = SquizdFormat()
    options = WriteOptions(digest="sha256")


class TestSquizdWithoutDigests(FormatSuite):
    format = SquizdFormat()
    options = WriteOptions(digest=None)
