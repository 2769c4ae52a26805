"""``.zt`` keeps what every format promises."""

from __future__ import annotations

from ingot.formats.base import WriteOptions
from ingot.formats.zt.format import ZtFormat
from ingot.testing.formats import FormatSuite


class TestZtSuite(FormatSuite):
    format = ZtFormat()


class TestZtSuiteWithSha256(FormatSuite):
    format = ZtFormat()
    options = WriteOptions(digest="sha256")


class TestZtSuiteWithoutDigests(FormatSuite):
    format = ZtFormat()
    options = WriteOptions(digest=None)
