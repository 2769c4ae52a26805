"""Archives: packing is deterministic and complete, unpacking refuses what could hurt, by rule."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.core.files import archive
from ingot.core.files import archive as archive_names
from ingot.core.files.archive import pack, unpack
from ingot.errors import FormatError, IngotError, IntegrityError

FILES = {
    "Manifest.json": b"{}",
    "Data/model/weights/weight.bin": bytes(range(256)) * 5000,
    "Data/model/model.mlmodel": b"model",
    "Data/empty.bin": b"",
    "Daten/Grüße.txt": "ä".encode(),
}


def write(folder: Path, files: dict[str, bytes] = FILES) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def packed(folder: Path) -> bytes:
    out = io.BytesIO()
    pack(folder, out)
    return out.getvalue()


def unpacked(data: bytes, folder: Path, most: int = archive.MAX_BYTES) -> dict[str, bytes]:
    folder.mkdir()

    def read_at(offset: int, out: memoryview) -> None:
        out[:] = data[offset : offset + out.nbytes]

    unpack(read_at, len(data), folder, "the archive", most)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def zipped(
    files: list[tuple[str, bytes]],
    method: int = zipfile.ZIP_STORED,
    change: Callable[[zipfile.ZipInfo], object] | None = None,
) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as file:
        for name, data in files:
            info = zipfile.ZipInfo(name)
            info.compress_type = method
            if change:
                change(info)
            file.writestr(info, data)
    return out.getvalue()


def refused(data: bytes, folder: Path) -> str:
    with pytest.raises(IngotError) as caught:
        unpacked(data, folder)
    assert "the archive" in str(caught.value)
    assert not any(path.is_symlink() for path in folder.parent.rglob("*"))
    assert set(folder.parent.iterdir()) == {folder}
    return caught.value.rule or ""


def test_a_folder_comes_back(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    (folder / "bare" / "deep").mkdir(parents=True)
    data = packed(folder)
    assert unpacked(data, tmp_path / "b") == FILES
    assert (tmp_path / "b" / "bare" / "deep").is_dir()
    with zipfile.ZipFile(io.BytesIO(data)) as file:  # and any other reader takes it
        assert file.testzip() is None
        assert {name: file.read(name) for name in FILES} == FILES
        assert {info.compress_type for info in file.infolist()} == {zipfile.ZIP_STORED}
        assert file.namelist() == sorted(file.namelist())


def test_the_same_files_make_the_same_bytes(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one"), write(tmp_path / "two", dict(reversed(FILES.items())))
    os.utime(two / "Manifest.json", (1e9, 1e9))
    (two / "Manifest.json").chmod(0o600)
    assert packed(one) == packed(two)
    (two / "Manifest.json").write_bytes(b"[]")
    assert packed(one) != packed(two)


def test_links_and_devices_are_not_packed(tmp_path: Path) -> None:
    for make in (lambda path: path.symlink_to("/etc/passwd"), lambda path: path.symlink_to("."), os.mkfifo):
        folder = write(tmp_path / "a")
        make(folder / "odd")
        with pytest.raises(FormatError) as caught:
            packed(folder)
        assert caught.value.rule == "archive.kind"
        (folder / "odd").unlink()


@pytest.mark.parametrize("names", [["a\\b"], ["a:b"], ["a\nb"], ["A", "a"]])
def test_names_that_cannot_be_unpacked_everywhere_are_not_packed(tmp_path: Path, names: list[str]) -> None:
    folder = write(tmp_path / "a", dict.fromkeys(names, b""))
    with pytest.raises(FormatError) as caught:
        packed(folder)
    assert caught.value.rule in ("archive.name", "archive.collision")


def test_only_what_unpacks_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_names, "MAX_ENTRIES", 4)
    for files, rule in (({"inner.zip": zipped([("a", b"")])}, "archive.nested"), (FILES, "archive.entries")):
        with pytest.raises(FormatError) as caught:
            packed(write(tmp_path / rule, files))
        assert caught.value.rule == rule


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_archives_of_others_are_taken(tmp_path: Path, method: int) -> None:
    assert unpacked(zipped(list(FILES.items()), method), tmp_path / "a") == FILES
    assert unpacked(zipped([], method), tmp_path / "b") == {}


def test_streamed_archives_are_taken(tmp_path: Path) -> None:
    """Sizes behind the data, as a writer to a pipe leaves them."""

    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def tell(self) -> int:
            raise OSError

        def seek(self, *_: int) -> int:
            raise OSError

    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        out = Pipe()
        with zipfile.ZipFile(out, "w", method) as file:
            for name, content in FILES.items():
                file.writestr(name, content)
        assert unpacked(out.getvalue(), tmp_path / str(method)) == FILES


def test_zip64_archives_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)
    assert unpacked(packed(write(tmp_path / "a")), tmp_path / "b") == FILES


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a/..",
        ".",
        "./a",
        "a//b",
        "a\\..\\b",
        "C:/x",
        "c:x",
        "a\x01b",
        "a\u202eb",
        "n" * 2000,
    ],
)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "deep" / "a"
    folder.parent.mkdir()
    assert refused(zipped([(name, b"x")]), folder) == "archive.name"


def test_a_nul_in_a_name_is_refused(tmp_path: Path) -> None:
    assert refused(zipped([("aXb", b"x")]).replace(b"aXb", b"a\0b"), tmp_path / "a") == "archive.name"


def test_a_name_in_no_encoding_is_refused(tmp_path: Path) -> None:
    assert refused(zipped([("aXb", b"x")]).replace(b"aXb", b"a\xffb"), tmp_path / "a") == "archive.name"


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("names", "rule"),
    [
        (["a", "a"], "archive.duplicate"),
        (["a/", "a/"], "archive.duplicate"),
        (["A", "a"], "archive.collision"),
        (["A/x", "a/y"], "archive.collision"),
        (["stra\u00dfe", "STRASSE"], "archive.collision"),
        (["\u00e9", "e\u0301"], "archive.collision"),
        (["a", "a/b"], "archive.conflict"),
        (["a/b", "a"], "archive.conflict"),
        (["a", "a/"], "archive.conflict"),
        (["a/", "a"], "archive.conflict"),
    ],
)
def test_names_that_fall_together_are_refused(tmp_path: Path, names: list[str], rule: str) -> None:
    assert refused(zipped([(name, b"") for name in names]), tmp_path / "a") == rule


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO, stat.S_IFDIR, stat.S_IFSOCK])
def test_links_and_devices_are_refused(tmp_path: Path, kind: int) -> None:
    def change(info: zipfile.ZipInfo) -> None:
        info.create_system = 3
        info.external_attr = (kind | 0o777) << 16

    assert refused(zipped([("a", b"/etc/passwd")], change=change), tmp_path / "a") == "archive.kind"


def central(data: bytes, offset: int, value: bytes) -> bytes:
    """Overwrite bytes of the first entry of the directory."""
    start = data.index(b"PK\x01\x02") + offset
    return data[:start] + value + data[start + len(value) :]


def local(data: bytes, offset: int, value: bytes) -> bytes:
    return data[:offset] + value + data[offset + len(value) :]


ONE = zipped([("a", b"content")])
TWO = zipped([("a", b"content"), ("b", b"more")])
PACKED = zipped([("a", b"content" * 100)], zipfile.ZIP_DEFLATED)


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (central(ONE, 8, b"\x01\0"), "archive.encrypted"),
        (central(ONE, 8, b"\x40\0"), "archive.encrypted"),
        (central(ONE, 10, b"\x0c\0"), "archive.method"),  # bzip2
        (local(ONE, 8, b"\x08\0"), "archive.layout"),  # another method than the directory's
        (local(ONE, 30, b"b"), "archive.layout"),  # another name
        (local(ONE, 0, b"PK\x07\x08"), "archive.layout"),
        (local(ONE, 14, b"\0\0\0\1"), "archive.layout"),
        (central(ONE, 16, b"\1\2\3\4"), "archive.layout"),
        (local(central(ONE, 16, b"\1\2\3\4"), 14, b"\1\2\3\4"), "archive.crc"),
        (central(ONE, 24, struct.pack("<I", 8)), "archive.layout"),
        (local(central(PACKED, 24, struct.pack("<I", 701)), 22, struct.pack("<I", 701)), "archive.size"),
        (local(central(PACKED, 24, struct.pack("<I", 3)), 22, struct.pack("<I", 3)), "archive.size"),
        (local(PACKED, 33, b"\xff\xff"), "archive.deflate"),
        (central(ONE, 20, struct.pack("<II", 9999, 9999)), "archive.layout"),
        (central(ONE, 24, b"\xff" * 4), "archive.layout"),  # zip64 without its field
        (central(ONE, 34, b"\1\0"), "archive.layout"),  # on another disk
        (central(ONE, 32, b"\5\0"), "archive.layout"),  # a comment that reaches past the directory
        (central(ONE, 30, b"\5\0"), "archive.layout"),  # an extra field that does
        (central(ONE, 28, b"\0\2"), "archive.layout"),  # a name that does
        (central(ONE, 6, b"\xff\0"), "archive.layout"),  # a version that no reader has
        (central(ONE, 0, b"PK\1\3"), "archive.layout"),
        (central(ONE, 42, struct.pack("<I", 1)), "archive.layout"),
        (central(ONE, 42, b"\xff" * 4), "archive.layout"),
        (central(TWO, 42, struct.pack("<I", 38)), "archive.layout"),  # both at one place
        (b"x" + ONE, "archive.layout"),  # bytes before
        (ONE + b"x", "archive.end"),
        (ONE[:-2] + b"\1\0x", "archive.end"),  # a comment
        (ONE[:-18] + b"\1" + ONE[-17:], "archive.end"),  # in several pieces
        (ONE[:-12] + b"\2\0" + ONE[-10:], "archive.end"),
        (ONE[:-14] + b"\2\0\2\0" + ONE[-10:], "archive.layout"),  # fewer entries than said
        (b"", "archive.truncated"),
        (b"PK\x05\x06", "archive.truncated"),
        (bytes(100), "archive.end"),
        (zipped([("a", zipped([("b", b"c")]))]), "archive.nested"),
        (zipped([("a", zipped([]))], zipfile.ZIP_DEFLATED), "archive.nested"),
    ],
)
def test_broken_archives_are_refused(tmp_path: Path, data: bytes, rule: str) -> None:
    assert refused(data, tmp_path / "a") == rule


def test_nothing_that_is_cut_or_flipped_passes_unnoticed(tmp_path: Path) -> None:
    """Every byte matters, but for times, versions and attributes."""
    good = zipped([("a", b"content"), ("b/c", b"more" * 50)], zipfile.ZIP_DEFLATED)
    wanted = {"a": b"content", "b/c": b"more" * 50}
    number = 0
    for end in range(len(good)):
        number += 1
        with pytest.raises(IngotError):
            unpacked(good[:end], tmp_path / str(number))
    for position in range(len(good)):
        number += 1
        with contextlib.suppress(IngotError):
            found = unpacked(local(good, position, bytes([good[position] ^ 0x40])), tmp_path / str(number))
            assert found == wanted


def test_too_many_entries_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (archive, archive_names):
        monkeypatch.setattr(module, "MAX_ENTRIES", 3)
    data = zipped([(str(number), b"") for number in range(4)])
    assert refused(data, tmp_path / "a") == "archive.entries"
    huge = ONE[:-14] + struct.pack("<HH", 0xFFFE, 0xFFFE) + ONE[-10:]
    (tmp_path / "other").mkdir()
    assert refused(huge, tmp_path / "other" / "a") == "archive.entries"


def test_folders_count_as_entries(tmp_path: Path) -> None:
    """A few thousand names could make millions of folders."""
    data = zipped([(f"{number}/" + "a/" * 500 + "f", b"") for number in range(200)])
    assert refused(data, tmp_path / "a") == "archive.entries"
    assert not list((tmp_path / "a").iterdir())


def test_bombs_are_noticed_while_they_unfold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the headers deny the size."""
    monkeypatch.setattr(archive, "_UNLIMITED", 1 << 16)
    zeros = zipped([("a", bytes(1 << 24))], zipfile.ZIP_DEFLATED)
    assert refused(zeros, tmp_path / "a") == "archive.bomb"
    written = sum(path.stat().st_size for path in (tmp_path / "a").iterdir())
    assert written <= max(1 << 16, archive.MAX_RATIO * len(zeros))
    liar = local(central(zeros, 24, struct.pack("<I", 10)), 22, struct.pack("<I", 10))
    with pytest.raises(IntegrityError) as caught:
        unpacked(liar, tmp_path / "b")
    assert caught.value.rule == "archive.size"


def test_the_limit_is_on_all_files_together(tmp_path: Path) -> None:
    data = zipped([(str(number), bytes(1000)) for number in range(5)])
    assert len(unpacked(data, tmp_path / "a", most=5000)) == 5
    with pytest.raises(FormatError) as caught:
        unpacked(data, tmp_path / "b", most=4999)
    assert caught.value.rule == "archive.bomb"


def test_a_first_chunk_of_two_bytes_hides_no_archive(tmp_path: Path) -> None:
    """Deflate blocks may be empty: the first bytes of a file need not come together."""
    inner = zipped([("b", b"c")])
    encode = zlib.compressobj(9, zlib.DEFLATED, -15)
    stream = encode.compress(inner[:2]) + b"".join(encode.flush(zlib.Z_FULL_FLUSH) for _ in range(1))
    stream += b"\0\0\0\xff\xff" * 300_000 + encode.compress(inner[2:]) + encode.flush()
    head = struct.pack("<IIIHH", zlib.crc32(inner), len(stream), len(inner), 1, 0)
    entry = b"PK\x03\x04" + struct.pack("<HHHHH", 20, 0, 8, 0, 33) + head + b"a" + stream
    table = (
        b"PK\x01\x02" + struct.pack("<HHHHHH", 20, 20, 0, 8, 0, 33) + head + struct.pack("<HHHII", 0, 0, 0, 0, 0) + b"a"
    )
    end = b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(table), len(entry), 0)
    assert refused(entry + table + end, tmp_path / "a") == "archive.nested"
