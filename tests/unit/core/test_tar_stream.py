"""Tar archives as streams: what tarfile and GNU tar write, and hostile bytes."""

from __future__ import annotations

import gzip
import io
import random
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from ingot.core.bytes.encodings import compress_frame
from ingot.core.files.archive import NameChecker
from ingot.core.files.tar_stream import decompressed, tar_files
from ingot.errors import FormatError, UnsupportedError

LONG = "folder/" + "n" * 120 + "/" + "m" * 120 + ".bin"
FILES = {"a.txt": b"alpha", "empty": b"", "sub/b.bin": bytes(range(256)) * 700, "ünïcode.md": b"x" * 512, LONG: b"long"}
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def reader(data: bytes, step: int = 1 << 30) -> Callable[[int], bytes]:
    """Return a function that reads at most ``step`` bytes at once."""
    stream = io.BytesIO(data)
    return lambda count: stream.read(min(count, step))


def unpacked(data: bytes, compression: str = "", step: int = 1 << 30) -> dict[str, bytes]:
    read = decompressed(reader(data, step), compression, "x")
    return {file.name: b"".join(file.chunks) for file in tar_files(read, NameChecker(), "x")}


def packed(files: dict[str, bytes], format: str = "pax", *more: tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=FORMATS[format]) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for info in more:
            archive.addfile(info)
    return out.getvalue()


def entry(name: str, type: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = type
    info.linkname = link
    return info


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("step", [1 << 30, 100])
def test_files_of_each_format(format: str, step: int) -> None:
    files = {name: data for name, data in FILES.items() if format != "ustar" or name != LONG}
    assert unpacked(packed(files, format), step=step) == files


@pytest.mark.parametrize("format", ["gnu", "posix", "ustar", "v7"])
def test_archives_of_gnu_tar(tmp_path: Path, format: str) -> None:
    if shutil.which("tar") is None:
        pytest.skip("no tar")
    files = {name: data for name, data in FILES.items() if format in ("gnu", "posix") or name != LONG}
    for name, data in files.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data)
    command = ["tar", f"--format={format}", "-C", str(tmp_path / "in"), "-cf", "-", "."]
    assert unpacked(subprocess.run(command, check=True, capture_output=True).stdout) == files


@pytest.mark.parametrize("step", [1 << 30, 1000])
def test_compressed_archives(step: int) -> None:
    data = packed(FILES)
    assert unpacked(gzip.compress(data), "gzip", step) == FILES
    assert unpacked(gzip.compress(data[:700]) + gzip.compress(data[700:]), "gzip", step) == FILES
    assert unpacked(compress_frame(data), "zstd", step) == FILES
    assert unpacked(compress_frame(data[:700]) + compress_frame(data[700:]), "zstd", step) == FILES


def test_files_that_are_not_consumed_are_passed() -> None:
    names = [file.name for file in tar_files(reader(packed(FILES)), NameChecker(), "x")]
    assert names == list(FILES)


@pytest.mark.parametrize(
    "name",
    ["../up", "a/../../b", "/etc/passwd", "C:/x", "a\\b", "a//b", "a/./b", "..", "tab\t", "a/\x01", "con.txt/.."],
)
def test_names_that_lead_elsewhere(name: str) -> None:
    for format in FORMATS:
        with pytest.raises(FormatError) as caught:
            unpacked(packed({name: b"x"}, format))
        assert caught.value.rule == "archive.name"


@pytest.mark.parametrize(("first", "second"), [("a", "a"), ("Readme", "README"), ("a", "a/b")])
def test_names_that_collide(first: str, second: str) -> None:
    with pytest.raises(FormatError, match=r"found|twice|both"):
        unpacked(packed({first: b"1"})[:1024] + packed({second: b"2"}))


@pytest.mark.parametrize(
    "type",
    [
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.CHRTYPE,
        tarfile.BLKTYPE,
        tarfile.FIFOTYPE,
        tarfile.GNUTYPE_SPARSE,
        b"Q",
    ],
)
@pytest.mark.parametrize("target", ["a", "/etc/passwd", "../x"])
def test_links_and_devices_are_refused(type: bytes, target: str) -> None:
    if type in (tarfile.GNUTYPE_SPARSE, b"Q"):
        data = bytearray(packed({"a": b""}, "gnu"))
        data[156:157] = type
        data[148:156] = b"%06o\0 " % (sum(data[:148]) + 8 * 32 + sum(data[156:512]))
    else:
        data = bytearray(packed({"z": b""}, "pax", entry("link", type, target)))
    with pytest.raises(UnsupportedError) as caught:
        unpacked(bytes(data))
    assert caught.value.rule == "tar.entry"


def test_folders_are_no_files() -> None:
    assert unpacked(packed({"a/b": b"1"}, "pax", entry("a", tarfile.DIRTYPE), entry("c/d", tarfile.DIRTYPE))) == {
        "a/b": b"1"
    }


def test_truncated_archives() -> None:
    data = packed(FILES)
    end = len(data.rstrip(b"\0"))
    for size in (1, 511, 513, 1000, end - 600, end - 1):
        with pytest.raises(FormatError) as caught:
            unpacked(data[:size])
        assert caught.value.rule == "tar.stream"
    for name, content in (("gzip", gzip.compress(data)), ("zstd", compress_frame(data))):
        with pytest.raises(FormatError) as caught:
            unpacked(content[:-3], name)
        assert caught.value.rule == "tar.stream"
        with pytest.raises(FormatError):
            unpacked(b"\x00" * 30 + content, name)
        with pytest.raises(FormatError):
            unpacked(content + b"trailing bytes", name)


def test_bytes_after_the_end_are_refused() -> None:
    with pytest.raises(FormatError, match="after the end"):
        unpacked(packed({"a": b"1"}) + b"hidden")
    assert unpacked(packed({"a": b"1"}) + bytes(4096)) == {"a": b"1"}


def test_bombs_are_refused() -> None:
    zeros = packed({"a": bytes(66 << 20)})
    for name, content in (("gzip", gzip.compress(zeros, 1)), ("zstd", compress_frame(zeros))):
        with pytest.raises(FormatError, match="200 times"):
            unpacked(content, name)


def test_sizes_that_are_not_there() -> None:
    data = bytearray(packed({"a": b"1"}))
    for field in (b"777777777777", b"\x80" + b"\x7f" * 11, b"\xff" * 12, b"12 3        ", b"-1         \0"):
        data[124:136] = field
        data[148:156] = b"%06o\0 " % (sum(data[:148]) + 8 * 32 + sum(data[156:512]))
        with pytest.raises(FormatError) as caught:
            unpacked(bytes(data))
        assert caught.value.rule == "tar.stream"


def test_attributes_of_gigabytes_are_refused() -> None:
    data = bytearray(packed({LONG: b"1"}, "pax"))
    assert data[156:157] == b"x"
    data[124:136] = b"77777777777\0"
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + 8 * 32 + sum(data[156:512]))
    with pytest.raises(FormatError, match="attributes of more than"):
        unpacked(bytes(data))


def test_changed_bytes_give_files_or_an_error() -> None:
    rng = random.Random(0)
    original = packed({**FILES, "sub/b.bin": b"b" * 700})
    for _ in range(1500):
        data = bytearray(original[: rng.choice((len(original), rng.randrange(len(original))))])
        for _ in range(rng.randrange(1, 4)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        with suppress(FormatError, UnsupportedError):
            unpacked(bytes(data))
