"""Files packed from the SQUIZD document alone, by a writer that knows no directory, no padding and nothing of Ingot."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.artifacts.attachments import extract_draft
from ingot.cli.main import run
from ingot.errors import IngotError
from tests.support.squizd_document import (
    COREML_FLAG,
    EAGLE_FLAG,
    INT2_FLAG,
    INT4_FLAG,
    SPARSE_FLAG,
    TCA_FLAG,
    Array,
    Entry,
    document,
    id_of,
    int2,
    int4,
    npcl,
    table,
    tcaw,
)


def codes(rows: int, cols: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(-8, 8, (rows, cols))


def write(tmp_path: Path, data: bytes) -> Path:
    (tmp_path / "a.squizd").write_bytes(data)
    return tmp_path / "a.squizd"


def values(path: Path) -> dict[str, Array]:
    with ingot.open(path) as checkpoint:
        return {name: tensor.numpy() for name, tensor in checkpoint.items()}


def rule_of(path: Path) -> str:
    with pytest.raises(IngotError) as caught:
        ingot.open(path)
    return str(caught.value.rule)


UP = "model.layers.{}.mlp.up_proj.weight"


def scaled(matrix: Array, scale: float, zero: float = 0.0) -> Array:
    return np.asarray(np.float32(scale) * (matrix.astype(np.float32) - np.float32(zero)))


def test_entries_are_found_by_their_ids_wherever_they_lie(tmp_path: Path) -> None:
    """Section 8: an entry says by its id whose it is; the order of the table says nothing."""
    matrices = [codes(4, 6, seed) for seed in range(3)]
    entries = [(id_of(layer, UP.format(layer)), 2.0**-layer, float(layer)) for layer in range(3)]
    for order in ((0, 1, 2), (2, 0, 1), (1, 0, 2)):
        data = document([[int4(matrix)] for matrix in matrices], INT4_FLAG, [entries[index] for index in order])
        found = values(write(tmp_path, data))
        assert list(found) == [UP.format(layer) for layer in range(3)]
        for layer, matrix in enumerate(matrices):
            assert np.array_equal(found[UP.format(layer)], scaled(matrix, 2.0**-layer, float(layer)))


def test_an_id_that_fits_no_matrix_is_refused(tmp_path: Path) -> None:
    """Two entries of layer 1, which has one matrix, and none of layer 0."""
    other = UP.format(1).replace("up", "gate")
    entries = [(id_of(1, UP.format(1)), 1.0, 0.0), (id_of(1, other), 1.0, 0.0)]
    data = document([[int4(codes(2, 4))], [int4(codes(2, 4))]], INT4_FLAG, entries)
    assert rule_of(write(tmp_path, data)) == "squizd.scale-id"


@pytest.mark.parametrize("ids", [(0, 0), (0x0123456789ABCDEF, 2)])
def test_ids_that_tell_nothing_leave_the_order(tmp_path: Path, ids: tuple[int, int]) -> None:
    """Absent ones, or hashes of a kind that is not known here."""
    matrices = [codes(3, 4, seed) for seed in range(2)]
    data = document([[int4(one) for one in matrices]], INT4_FLAG, [(ids[0], 0.5, 0.0), (ids[1], 0.25, 1.0)])
    first, second = values(write(tmp_path, data)).values()
    assert np.array_equal(first, scaled(matrices[0], 0.5))
    assert np.array_equal(second, scaled(matrices[1], 0.25, 1.0))


def told(path: Path) -> dict[str, str]:
    """Level of each rule that a strict check tells."""
    return {item.rule: item.level for item in ingot.verify(path, strict=True)}


OPTIONAL = dict.fromkeys(("squizd.no-directory", "part.no-digest", "format.no-manifest-digest"), "note")


@pytest.mark.parametrize("crc", [0, zlib.crc32(bytes(32))])
def test_a_strict_check_passes_what_the_document_asks_for(tmp_path: Path, crc: int) -> None:
    """The toy of Appendix A with a CRC that is right: 0 (section 3) or that of 32 zero bytes (the appendix)."""
    toy = [[int4(codes(8, 16, layer))] for layer in range(2)]
    entries = [(layer + 1, 0.5, 0.0) for layer in range(2)]
    assert told(write(tmp_path, document(toy, INT4_FLAG, entries, crc=crc))) == OPTIONAL
    printed = write(tmp_path, document(toy, INT4_FLAG, entries, crc=0x2B5A))
    assert told(printed) == OPTIONAL | {"squizd.unused-sparsity-crc": "error"}


def test_a_strict_check_finds_reserved_bytes_and_leaves_what_lies_between(tmp_path: Path) -> None:
    """Section 3: reserved bytes and flag bits are zero. Nothing forbids bytes between layers or at the end."""
    data = document([[npcl(np.ones(3, np.float32))]], 0)
    assert told(write(tmp_path, data)) == OPTIONAL
    for at in (26, 127, 192, 255, 256 + 28, 9):
        rule = "squizd.reserved-flags" if at == 9 else "squizd.reserved"
        assert told(write(tmp_path, data[:at] + b"\x80" + data[at + 1 :])) == OPTIONAL | {rule: "error"}
    page = data[: 256 + 4] + struct.pack("<QQQ", 4096, len(data) - 288, 4096 + len(data) - 288)
    page += data[256 + 28 : 288] + bytes(4096 - 288) + data[288:] + b"end"
    notes = dict.fromkeys(("squizd.between", "squizd.trailing-bytes"), "note")
    assert told(write(tmp_path, page)) == OPTIONAL | notes


def sparse_layer(bits: Sequence[int], *, whole: bool, block: int = 4, hidden: int = 6, last: int | None = None) -> Any:
    """A gated network of blocks of ``block`` channels, zeros where a bit is 0: its matrices, blocks and mask."""
    width = block * len(bits) - (0 if last is None else block - last)
    kept = np.repeat(np.array(bits, bool), block)[:width]
    gate, up = (np.where(kept[:, None], codes(width, hidden, seed), 0) for seed in (1, 2))
    matrices = [gate, up, np.where(kept, codes(hidden, width, 3), 0)]
    stored = matrices if whole else [gate[kept], up[kept], matrices[2][:, kept]]
    mask = np.packbits(np.array(bits, np.uint8), bitorder="little").tobytes()
    return matrices, [int4(matrix) for matrix in stored], mask


def sparse_file(tmp_path: Path, layers: Sequence[Any], mean: float, *, block: int = 4, each: bool = False) -> Path:
    """Section 6: metadata, and each layer's mask behind its blocks; ``each``: one mask for every matrix."""
    blocks = [stored for _, stored, _ in layers]
    masks = [mask * (len(stored) if each else 1) for _, stored, mask in layers]
    meta = struct.pack("<IIIf16x", 1, block, len(layers), mean)
    entries = [(100 * layer + number, 0.5, 0.0) for layer, some in enumerate(blocks) for number in range(len(some))]
    return write(tmp_path, document(blocks, INT4_FLAG | SPARSE_FLAG, entries, masks=masks, sparsity=meta))


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("bits", [(1, 0, 1, 1, 0), (1, 0, 1, 0), (1, 1, 0, 1)])
def test_masks_beside_blocks_of_full_size(tmp_path: Path, bits: Sequence[int], each: bool) -> None:
    """Nothing in the document leaves anything out of a block: sizes and values are those in it."""
    layers = [sparse_layer(bits, whole=True), sparse_layer(bits[::-1], whole=True)]
    path = sparse_file(tmp_path, layers, bits.count(0) / len(bits), each=each)
    for found, expected in zip(values(path).values(), [one for layer in layers for one in layer[0]], strict=True):
        assert np.array_equal(found, scaled(expected, 0.5))
    assert "error" not in told(path).values()


def test_compacted_blocks_open_where_their_width_can_be_recovered(tmp_path: Path) -> None:
    layer = sparse_layer((1, 0, 1, 0, 1), whole=False, last=3)
    for found, expected in zip(values(sparse_file(tmp_path, [layer], 0.4)).values(), layer[0], strict=True):
        assert np.array_equal(found, scaled(expected, 0.5))
    lost = sparse_layer((1, 0, 1, 1, 0), whole=False)
    assert rule_of(sparse_file(tmp_path, [lost], 0.4)) == "squizd.sparse-without-directory"


def test_masks_that_fit_both_readings_or_none_are_refused(tmp_path: Path) -> None:
    both = sparse_layer((1, 1), whole=True)
    assert rule_of(sparse_file(tmp_path, [both], 0.7)) == "squizd.sparse-ambiguous"
    assert rule_of(sparse_file(tmp_path, [(*both[:2], bytes(5))], 0.5)) == "squizd.sparse-masks"


def draft_payload(blocks: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, Array], list[Entry]]:
    """Section 7.2: a head's blocks, matrices as INT4 and vectors as float32; what they hold, and scale entries."""
    payload, held, entries = b"", dict[str, Array](), list[Entry]()
    for number, (name, shape) in enumerate(blocks):
        if len(shape) == 1:
            held[name] = np.arange(shape[0], dtype=np.float32) + number
            payload += npcl(held[name])
        else:
            matrix = codes(*shape, number)
            held[name] = scaled(matrix, 2.0**-number)
            payload += int4(matrix)
            entries.append((1000 + number, 2.0**-number, 0.0))
    return payload, held, entries


HEAD = [
    ("midlayer.self_attn.q_proj.weight", (6, 8)),
    *((f"midlayer.self_attn.{name}_proj.weight", (2, 8)) for name in "kv"),
    ("midlayer.self_attn.o_proj.weight", (4, 6)),
    *((f"midlayer.mlp.{name}_proj.weight", (10, 4)) for name in ("gate", "up")),
    ("midlayer.mlp.down_proj.weight", (4, 10)),
    *((f"midlayer.{name}.weight", (4,)) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
    ("norm.weight", (4,)),
    ("fc.weight", (4, 24)),
    ("lm_head.weight", (12, 4)),
]  # fmt: skip


@pytest.mark.parametrize("tables", ["main", "own"])
@pytest.mark.parametrize("alike", [False, True])
def test_a_head_as_the_document_has_it_opens_verifies_extracts_and_travels(
    tmp_path: Path, alike: bool, tables: str
) -> None:
    """Section 7: blocks and nothing else, so no names. By shapes where they leave one way; else as they are."""
    blocks = [(name, (10, 4) if alike and name == "lm_head.weight" else shape) for name, shape in HEAD]
    payload, held, entries = draft_payload(blocks)
    own = [(1, 0.5, 0.0), *(entries if tables == "main" else [])]
    payload += table(entries) if tables == "own" else b""
    matrix = codes(4, 6)
    data = document([[int4(matrix)]], INT4_FLAG | EAGLE_FLAG, own, draft=(payload, 1, 12))
    path = write(tmp_path, data)
    names = [f"draft.0.{number}" if alike else name for number, (name, _) in enumerate(blocks)]

    def same(where: Path) -> None:
        with ingot.open(where) as checkpoint:
            draft = checkpoint.attachments.draft
            assert draft is not None
            assert sorted(draft) == sorted(names)
            for name, expected in zip(names, held.values(), strict=True):
                assert np.array_equal(draft[name].numpy(), expected)
            assert checkpoint.attachments.draft_vocab == 12 if alike else True
            assert np.array_equal(next(iter(checkpoint.values())).numpy(), scaled(matrix, 0.5))

    same(path)
    assert told(path) == OPTIONAL | ({"draft.nameless": "note"} if alike else {})
    ingot.convert(path, tmp_path / "b.squizd")
    same(tmp_path / "b.squizd")
    extract_draft(tmp_path / "b.squizd", tmp_path / "head.safetensors")
    for name, value in zip(names, held.values(), strict=True):
        assert np.array_equal(values(tmp_path / "head.safetensors")[name], value)
    ingot.convert(path, tmp_path / "c.squizd", draft=tmp_path / "head.safetensors")
    assert "error" not in {item.level for item in ingot.verify(tmp_path / "c.squizd")}


def test_arch_id_is_kept_through_other_formats_and_set_by_metadata(tmp_path: Path) -> None:
    """Section 3: an identifier, 0 for any architecture; the document has no other number."""
    data = bytearray(document([[npcl(np.ones(3, np.float32))]], 0))
    data[12:14] = struct.pack("<H", 513)
    path = write(tmp_path, bytes(data))
    ingot.convert(path, tmp_path / "b.squizd")
    ingot.convert(path, tmp_path / "b.safetensors")
    ingot.convert(tmp_path / "b.safetensors", tmp_path / "c.squizd")
    ingot.save(tmp_path / "d.squizd", {"t": np.ones(3, np.float32)}, metadata={"squizd.arch_id": 513})
    ingot.save(tmp_path / "plain.zt", {"t": np.ones(3, np.float32)})
    asked = [
        "convert",
        str(tmp_path / "plain.zt"),
        str(tmp_path / "e.squizd"),
        "--metadata",
        "squizd.arch_id=513",
        "-q",
    ]
    assert run(asked) == 0
    for name in "bcde":
        assert (tmp_path / f"{name}.squizd").read_bytes()[12:14] == data[12:14]
        with ingot.open(tmp_path / f"{name}.squizd") as checkpoint:
            assert dict(checkpoint.metadata) == {"squizd.arch_id": 513}
    with pytest.raises(IngotError) as caught:
        ingot.save(tmp_path / "e.squizd", {"t": np.ones(3, np.float32)}, metadata={"squizd.arch_id": 65536})
    assert caught.value.rule == "squizd.arch-id"


def test_what_is_written_lies_as_the_document_has_it(tmp_path: Path) -> None:
    """Sections 2, 4 and 7, by offsets alone: blocks side by side, tables behind them, appendices before all else."""
    rng = np.random.default_rng(0)
    shapes = {"input_layernorm.weight": (6,), "mlp.up_proj.weight": (4, 6), "mlp.down_proj.weight": (6, 4)}
    weights = {
        f"model.layers.{layer}.{name}": rng.standard_normal(shape).astype(np.float32)
        for layer in range(2)
        for name, shape in shapes.items()
    }
    ingot.save(tmp_path / "a.safetensors", weights)
    rule = '[[rules]]\nmatch = "*proj*"\ncodec = "affine"\noptions = { bits = 4, group = "tensor" }\n'
    (tmp_path / "r.toml").write_text(rule)
    payload, _, entries = draft_payload(HEAD)
    head = write(tmp_path, document([[npcl(np.ones(2, np.float32))]], EAGLE_FLAG, entries, draft=(payload, 1, 12)))
    extract_draft(head, tmp_path / "head.safetensors")
    ingot.convert(
        tmp_path / "a.safetensors", tmp_path / "b.squizd", tmp_path / "r.toml", draft=tmp_path / "head.safetensors"
    )
    data = (tmp_path / "b.squizd").read_bytes()
    end = 256 + 2 * 32
    for layer in range(2):
        at, length, scales = struct.unpack_from("<QQQ", data, 256 + 32 * layer + 4)
        assert not any(data[end:at])
        end, kinds = at + length, []
        while at < end:
            magic, first, second = struct.unpack_from("<4sII", data, at)
            kinds.append(magic)
            at += 12 + ((first * second + 1) // 2 if magic == b"INT4" else 4 * second + 4 * 6)
        assert (at, sorted(kinds)) == (end, [b"INT4", b"INT4", b"NPCL"])
        assert data[scales : scales + 4] == b"SCZT"
    assert scales == end
    draft, length = struct.unpack_from("<QQ", data, 160)
    assert 0 <= draft - (end + 8 + 16 * 4) < 64
    assert data[draft : draft + 4] == b"EGDH"
    assert data[draft + length :].startswith(b"TDIR")


@pytest.mark.parametrize("sub_block", [0, 3, 4, 7])
def test_a_sub_block_length_without_a_second_round_leaves_the_matrix_one_scale(tmp_path: Path, sub_block: int) -> None:
    matrix = codes(5, 7) % 4 - 2
    data = document([[int2(matrix, sub_block)]], INT2_FLAG, [(7, 0.5, 1.0)])
    assert np.array_equal(next(iter(values(write(tmp_path, data)).values())), scaled(matrix, 0.5, 1.0))


def test_a_second_round_has_a_scale_for_every_sub_block(tmp_path: Path) -> None:
    """Section 8: in the same layout, ids with the high bit set."""
    matrix, per_row = codes(2, 7) % 4 - 2, 3
    second = [(7 | 1 << 63, 2.0**-at, float(at)) for at in range(2 * per_row)]
    data = document([[int2(matrix, 3)]], INT2_FLAG, [(7, 1.0, 0.0), *second])
    scales = np.array([entry[1:] for entry in second], np.float32).reshape(2, per_row, 2).repeat(3, axis=1)[:, :7]
    expected = scales[..., 0] * (matrix.astype(np.float32) - scales[..., 1])
    assert np.array_equal(next(iter(values(write(tmp_path, data)).values())), expected)
    short = document([[int2(matrix, 3)]], INT2_FLAG, [(7, 1.0, 0.0), *second[:-1]])
    assert rule_of(write(tmp_path, short)) == "squizd.sub-blocks"


def test_headers_that_the_document_rules_out_are_refused(tmp_path: Path) -> None:
    """Sections 3, 4, 6 and 7: magic, version, order of layers, checksums."""
    layer = sparse_layer((1, 0, 1), whole=True)
    payload, _, entries = draft_payload(HEAD)
    sparse = sparse_file(tmp_path, [layer], 1 / 3).read_bytes()
    eagle = document([[npcl(np.ones(2, np.float32))]], EAGLE_FLAG, entries, draft=(payload, 1, 12))
    two = document([[npcl(np.ones(2, np.float32))], [npcl(np.ones(2, np.float32))]], 0)
    for data, at, rule in (
        (two, 0, "squizd.magic"),
        (two, 4, "squizd.version"),
        (two, 256, "squizd.index-order"),
        (sparse, 14, "squizd.sparsity-crc"),
        (sparse, 140, "squizd.sparsity-crc"),
        (eagle, 18, "squizd.draft-hash"),
        (eagle, 180, "squizd.draft-hash"),
    ):
        assert rule_of(write(tmp_path, data[:at] + bytes([data[at] ^ 2]) + data[at + 1 :])) == rule


def test_a_core_ml_package_ends_a_file_and_weights_stay_beside_it(tmp_path: Path) -> None:
    """Section 9: magic, length, a zip; the main blocks are still there."""
    package = b"PK" + bytes(30)
    data = document([[npcl(np.arange(3, dtype=np.float32))]], COREML_FLAG, coreml=package)
    with ingot.open(write(tmp_path, data)) as checkpoint:
        assert checkpoint.attachments.coreml is not None
        assert bytes(checkpoint.attachments.coreml.view()) == package
        assert np.array_equal(next(iter(checkpoint.values())).numpy(), np.arange(3, dtype=np.float32))
    assert rule_of(write(tmp_path, data + b"x")) == "squizd.coreml-length"


@pytest.mark.parametrize("options", ["bits = 4, group = 7", "bits = 2, group = 'row'"])
def test_odd_columns_are_quantized_as_one_stream(tmp_path: Path, options: str) -> None:
    """Sections 5.3 and 5.4: rows are not padded. The values are those of the rows that other formats pad."""
    weight = np.random.default_rng(0).standard_normal((9, 7)).astype(np.float32)
    ingot.save(tmp_path / "a.safetensors", {"t": weight})
    (tmp_path / "r.toml").write_text(f"[[rules]]\ncodec = 'affine'\noptions = {{ {options} }}\n")
    for name in ("b.squizd", "b.zt"):
        ingot.convert(tmp_path / "a.safetensors", tmp_path / name, tmp_path / "r.toml")
    assert np.array_equal(values(tmp_path / "b.squizd")["t"], values(tmp_path / "b.zt")["t"])
    with ingot.open(tmp_path / "b.squizd") as checkpoint:
        assert checkpoint["t"].params["packing"] == "flat_lsb"


@pytest.mark.parametrize("bits", [4, 2])
def test_rows_with_odd_columns_are_read_as_one_stream(bits: int, tmp_path: Path) -> None:
    """The same from the document's side: 9 rows of 7 columns, nothing between them; one scale for all."""
    matrix = np.random.default_rng(1).integers(-(1 << bits - 1), 1 << bits - 1, (9, 7))
    block = int4(matrix) if bits == 4 else int2(matrix, 63)
    data = document([[block]], INT4_FLAG if bits == 4 else INT2_FLAG, [(7, 0.25, 1.0)])
    (found,) = values(write(tmp_path, data)).values()
    assert np.array_equal(found, scaled(matrix, 0.25, 1.0))


def test_each_flag_is_recognised_from_the_header(tmp_path: Path) -> None:
    """Sections 1 and 3.3: bits 0 to 6, each in a file of its own; what they stand for is read without an option."""
    rng = np.random.default_rng(2)
    dense, matrix, small = rng.normal(size=(4, 6)).astype(np.float32), codes(4, 6), rng.integers(-2, 2, (4, 8))
    words = rng.normal(size=(3, 128)).astype(np.float32).view(np.uint32) >> 16
    words[:, :-1] *= rng.random((3, 127)) < 0.5  # the last column is used: it says where rows end
    texels = b"\xfc\xfd" + 6 * b"\xff" + struct.pack("<4H", 0x8000, 0x8000, 0x8000, 0xFFFF)  # one colour, whole block
    texture = b"ASTW" + struct.pack("<III", 5, 10, 5) + 2 * texels
    pruned, _, mask = sparse_layer((1, 0), whole=True)
    pruned = [matrix.astype(np.float32) for matrix in pruned]
    meta = struct.pack("<IIIf16x", 1, 4, 1, 0.5)
    payload, _, entries = draft_payload(HEAD)
    plain, own = npcl(dense), [(1, 0.5, 0.0)]
    files = {
        0: (document([[texture]], 1, [(1, 2.0, -1.0)]), np.full((10, 5), np.float16(0x8000 / 0xFFFF) * 2.0 - 1)),
        1: (document([[tcaw(words)]], TCA_FLAG), (words.astype(np.uint32) << 16).view(np.float32)),
        2: (document([[int4(matrix)]], INT4_FLAG, own), scaled(matrix, 0.5)),
        3: (document([[npcl(one) for one in pruned]], SPARSE_FLAG, masks=[mask], sparsity=meta), pruned[0]),
        4: (document([[plain]], EAGLE_FLAG, draft=(payload + table(entries), 1, 12)), dense),
        5: (document([[int2(small, 8)]], INT2_FLAG, own), scaled(small, 0.5)),
        6: (document([[plain]], COREML_FLAG, coreml=b"PK" + bytes(30)), dense),
    }
    for bit, (data, expected) in files.items():
        with ingot.open(write(tmp_path, data)) as checkpoint:
            assert checkpoint.features == 1 << bit
            assert np.array_equal(next(iter(checkpoint.values())).numpy("f32"), expected), bit
            assert (checkpoint.attachments.draft is not None) == (bit == 4)
            assert (checkpoint.attachments.coreml is not None) == (bit == 6)
