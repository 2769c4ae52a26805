"""Deltas between tensors of other element types or numbers of rows give the fine-tune back, and reports say how."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

import ingot
from ingot.codecs.delta.base import difference
from ingot.conversion.candidates import sampled_rows
from ingot.core.runtime.progress import ProgressEvent
from ingot.delta.auto import SAMPLE
from ingot.delta.cost import delta_cost
from ingot.delta.strategy import Storage
from ingot.errors import FormatError, IntegrityError, UnsupportedError, UsageError
from ingot.inspect.overview import delta_lines
from ingot.model.delta import DeltaInfo, delta_of
from ingot.numpy import load_file
from tests.support.workers import Inline

BF16 = ml_dtypes.bfloat16
F16, F32, F64 = np.float16, np.float32, np.float64
Weights = dict[str, Any]
EMBED, UP, NORM = "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"


@pytest.fixture(autouse=True)
def _small_matrices_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.delta.strategy.SMALL", 100)
    monkeypatch.setattr("ingot.delta.plan.SMALL", 100)


def base_weights(dtype: Any, rows: int = 40) -> Weights:
    rng = np.random.default_rng(0)
    weights = {EMBED: rng.standard_normal((rows, 64)), UP: rng.standard_normal((48, 64)), NORM: np.ones(rows)}
    return {name: values.astype(dtype) for name, values in weights.items()}


def tuned_from(base: Weights, dtype: Any, rows: int = 40, seed: int = 1) -> Weights:
    """Change every value a little, and give embedding and norm another number of rows."""
    rng = np.random.default_rng(seed)
    tuned = {}
    for name, values in base.items():
        moved = values.astype(F64) * (1 + 0.01 * rng.random(values.shape))
        if name != UP:
            more = rng.standard_normal((max(rows - len(moved), 0), *moved.shape[1:]))
            moved = np.concatenate([moved[:rows], more])
        tuned[name] = moved.astype(dtype)
    return tuned


def same_bits(found: Weights, wanted: Weights) -> bool:
    return found.keys() == wanted.keys() and all(
        (found[name].dtype, found[name].shape) == (values.dtype, values.shape)
        and found[name].tobytes() == values.tobytes()
        for name, values in wanted.items()
    )


def files(folder: Path, **states: Weights) -> list[Path]:
    paths = [folder / f"{name}.safetensors" for name in states]
    for path, state in zip(paths, states.values(), strict=True):
        ingot.save(path, state, overwrite=True)
    return paths


def info_of(path: Path) -> DeltaInfo:
    with ingot.open(path) as delta:
        info = delta_of(delta.metadata)
    assert info is not None
    return info


def rewritten(source: Path, target: Path, **changes: Any) -> Path:
    """Copy a delta with another description of itself."""
    with ingot.open(source) as delta:
        metadata = dict(delta.metadata)
        metadata["delta"] = {**metadata["delta"], **changes}
        ingot.save(target, dict(delta.items()), metadata, overwrite=True)
    return target


@pytest.mark.parametrize("rows", [40, 43, 37])
@pytest.mark.parametrize(("old", "new"), [*product((BF16, F16, F32, F64), repeat=2)])
def test_an_exact_delta_gives_every_bit_back(tmp_path: Path, old: Any, new: Any, rows: int) -> None:
    base = base_weights(old)
    tuned = tuned_from(base, new, rows)
    paths = files(tmp_path, base=base, tuned=tuned)
    report = ingot.diff(*paths, tmp_path / "d.zt")
    assert report.exact
    assert report.ops == {"apply": 3}
    assert info_of(tmp_path / "d.zt").version == (1 if (rows, old) == (40, new) else 2)
    done = ingot.patch(paths[0], tmp_path / "d.zt", tmp_path / "out.safetensors", verify=True)
    assert done.result_id == report.result_id
    assert same_bits(load_file(tmp_path / "out.safetensors"), tuned)
    assert not [finding for finding in ingot.verify(tmp_path / "d.zt") if finding.level == "error"]


@pytest.mark.parametrize("new", [F16, F32, F64])
def test_bits_that_no_cast_keeps_come_back(tmp_path: Path, new: Any) -> None:
    """Overflow, NaN payloads, signs of zero and subnormals in the base, and any bits in the fine-tune."""
    base = {"w": np.arange(1 << 16, dtype=np.uint16).view(BF16).reshape(256, 256)}
    width = np.dtype(new).itemsize
    bits = np.random.default_rng(3).integers(0, 256, (1 << 16) * width, np.uint8).view(new).reshape(256, 256)
    paths = files(tmp_path, base=base, tuned={"w": bits})
    assert ingot.diff(*paths, tmp_path / "d.zt").exact
    ingot.patch(paths[0], tmp_path / "d.zt", tmp_path / "out.safetensors", verify=True)
    assert load_file(tmp_path / "out.safetensors")["w"].tobytes() == bits.tobytes()


def test_the_report_says_what_the_difference_is_taken_of(tmp_path: Path) -> None:
    base = {"rounded": base_weights(BF16)[UP], "cast": base_weights(BF16)[UP], "rows": base_weights(F32)[EMBED]}
    base |= {"cut": base["rows"], "turned": np.ones((4, 6), F32), "ids": np.arange(4, dtype=np.int32)}
    tuned = {
        "rounded": (base["rounded"].astype(F32) * 1.01).astype(F16),
        "cast": base["cast"].astype(F32) * np.float32(1.01),
        "rows": np.concatenate([base["rows"] * 2, base["rows"][:3]]),
        "cut": base["cut"][:1] * 2,
        "turned": np.ones((6, 4), F32),
        "ids": np.arange(4),
        "more": np.ones(3, F32),
    }
    paths = files(tmp_path, base=base, tuned=tuned)
    notes = {item.name: item.note for item in ingot.diff(*paths, tmp_path / "d.zt").tensors}
    assert notes == {
        "rounded": "base in bf16, fine-tune in f16: exact differences to the base rounded to f16",
        "cast": "base in bf16, fine-tune in f32: exact differences to the base cast to f32",
        "rows": "rows 0-39 as a delta, 3 rows added",
        "cut": "row 0 as a delta, 39 rows removed",
        "turned": "stored whole, shape [4, 6] -> [6, 4]",
        "ids": "stored whole, element type i32 -> i64",
        "more": "stored whole, new",
    }
    report = ingot.diff(*paths, tmp_path / "d.zt", "int4", overwrite=True)
    assert "base in bf16, fine-tune in f16: differences in f32: rounded" in report.notes
    assert "stored whole, new: more (12 B)" in report.notes
    assert not report.exact
    with ingot.open(tmp_path / "d.zt") as delta:
        lines = delta_lines(delta.metadata, "d.zt")[0]
    assert "of these 2 have another element type in the base, 2 another number of rows" in lines


@pytest.mark.parametrize("rows", [40, 43, 37])
@pytest.mark.parametrize("strategy", ["int8", "int4", "int1", "low-rank"])
def test_a_lossy_difference_is_in_f32_and_rounded_once(tmp_path: Path, strategy: str, rows: int) -> None:
    base = base_weights(BF16)
    tuned = tuned_from(base, F16, rows)
    paths = files(tmp_path, base=base, tuned=tuned)
    report = ingot.diff(*paths, tmp_path / "d.zt", strategy)
    lossy = {item.name for item in report.tensors if not item.exact}
    assert lossy == {EMBED, UP}
    assert {item.op for item in report.tensors} == {"apply"}
    ingot.patch(paths[0], tmp_path / "d.zt", tmp_path / "out.safetensors", verify=True)
    out = load_file(tmp_path / "out.safetensors")
    with ingot.open(tmp_path / "d.zt") as delta:
        assert delta[EMBED].codec == ("delta_rows" if rows == 43 else delta[UP].codec)
        moved = base[UP].astype(F32) + delta[UP].numpy("f32")
    assert np.array_equal(out[UP], moved.astype(F16))
    assert same_bits({EMBED: out[EMBED][40:]}, {EMBED: tuned[EMBED][40:]})
    assert same_bits({NORM: out[NORM]}, {NORM: tuned[NORM]})
    errors = np.abs(difference(tuned[EMBED], out[EMBED]))
    before = np.abs(difference(tuned[EMBED][: min(rows, 40)], base[EMBED][:rows].astype(F16)))
    assert errors.max() <= before.max()
    costs = {item.name: item.exact for item in delta_cost(paths[0], tmp_path / "d.zt", paths[1])}
    assert costs[NORM]
    assert not costs[UP]


def test_what_was_only_cast_or_extended_takes_no_bytes(tmp_path: Path) -> None:
    """Under a lossy strategy too: a frozen layer of a fine-tune in f32 is no matrix of differences."""
    base = base_weights(BF16)
    tuned = {EMBED: np.concatenate([base[EMBED].astype(F32), np.ones((1, 64), F32)]), UP: base[UP].astype(F32)}
    tuned[NORM] = base[NORM]
    paths = files(tmp_path, base=base, tuned=tuned)
    for strategy, more in (("int8", {}), ("auto", {"max_error": 0.5})):
        report = ingot.diff(*paths, tmp_path / "d.zt", strategy, overwrite=True, **more)
        assert report.exact
        assert sum(item.nbytes for item in report.tensors) < 200


class TestExactDtype:
    """The element type that an exact difference is taken in: that of fewest bytes."""

    def test_values_of_the_base_s_type_take_what_they_take_in_it(self, tmp_path: Path) -> None:
        """A bf16 fine-tune that was saved in f32 or f16."""
        base = {UP: base_weights(BF16, 500)[EMBED]}
        tuned = (base[UP].astype(F32) * np.float32(1.01)).astype(BF16)
        state: Weights = {UP: tuned}
        files(tmp_path, base=base, plain=state)
        plain = ingot.diff(base, state, tmp_path / "plain.zt")
        for dtype, name in ((F32, "f32"), (F16, "f16")):
            wide = {UP: tuned.astype(dtype)}
            [path] = files(tmp_path, wide=wide)
            report = ingot.diff(tmp_path / "base.safetensors", path, tmp_path / "d.zt", overwrite=True)
            assert report.exact
            assert report.tensors[0].nbytes == plain.tensors[0].nbytes
            assert report.tensors[0].note == (
                f"base in bf16, fine-tune in {name}: exact differences in bf16, whose result is cast to {name}"
            )
            out = tmp_path / f"{name}.safetensors"
            ingot.patch(tmp_path / "base.safetensors", tmp_path / "d.zt", out, verify=True)
            assert same_bits(load_file(out), wide)
            changed: Weights = dict(base)
            ingot.apply_delta(changed, tmp_path / "d.zt", verify=True).revert()
            assert changed[UP] is base[UP]

    def test_one_other_value_that_no_sample_shows_is_kept(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(1)
        base = {UP: rng.standard_normal((4096, 256)).astype(BF16)}
        tuned = {UP: (base[UP].astype(F32) * 2).astype(F32)}
        paths = files(tmp_path, base=base, tuned=tuned)
        with ingot.open(paths[1]) as checkpoint:
            sampled = sampled_rows(checkpoint[UP], SAMPLE)
        assert sampled is not None
        row = next(index for index in range(4096) if index not in set(sampled.tolist()))
        tuned[UP][row, 3] = np.float32(1) + np.float32(2**-20)
        paths = files(tmp_path, base=base, tuned=tuned)
        report = ingot.diff(*paths, tmp_path / "d.zt")
        assert report.exact
        ingot.patch(paths[0], tmp_path / "d.zt", tmp_path / "out.safetensors", verify=True)
        assert same_bits(load_file(tmp_path / "out.safetensors"), tuned)

    def test_a_tensor_that_is_smaller_than_a_difference_is_stored_whole(self, tmp_path: Path) -> None:
        base = {UP: base_weights(BF16, 500)[EMBED]}
        tuned = {UP: np.full((500, 64), 1 + 2**-10, F16)}
        paths = files(tmp_path, base=base, tuned=tuned)
        report = ingot.diff(*paths, tmp_path / "d.zt")
        assert report.tensors[0].note == "stored whole, element type bf16 -> f16, smaller than a difference"
        assert info_of(tmp_path / "d.zt").version == 1
        ingot.patch(paths[0], tmp_path / "d.zt", tmp_path / "out.safetensors", verify=True)
        assert same_bits(load_file(tmp_path / "out.safetensors"), tuned)

    def test_a_step_proves_what_was_found_before(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A source that changed since, or a plan by hand, gives no delta that is silently not exact."""
        base = base_weights(BF16)
        monkeypatch.setattr("ingot.delta.plan.exact_dtype", lambda both: both.base.dtype)
        with pytest.raises(IntegrityError) as caught:
            ingot.diff(base, tuned_from(base, F32), tmp_path / "d.zt")
        assert caught.value.rule == "delta.result"
        assert not list(tmp_path.iterdir())


def test_auto_measures_the_rows_that_both_have(tmp_path: Path) -> None:
    base = base_weights(BF16, rows=400)
    tuned = tuned_from(base, F16, 410)
    paths = files(tmp_path, base=base, tuned=tuned)
    report = ingot.diff(*paths, tmp_path / "d.zt", "auto", max_error=0.5)
    assert {item.name: item.op for item in report.tensors} == dict.fromkeys(tuned, "apply")
    embed = next(item for item in report.tensors if item.name == EMBED)
    assert embed.unrestored is not None
    assert embed.unrestored < 0.3
    assert embed.nbytes < 0.5 * tuned[EMBED].nbytes
    sized = ingot.diff(*paths, tmp_path / "d.zt", "auto", target_size=0.4, overwrite=True)
    assert sized.size < 0.45 * sized.tuned_nbytes


def test_chains_in_files_and_in_memory_and_back(tmp_path: Path) -> None:
    """Four deltas, each of another element type and number of rows, applied at once, one by one, and taken back."""
    states = [base_weights(BF16)]
    for seed, (dtype, rows) in enumerate(((F16, 43), (F32, 35), (BF16, 41), (BF16, 41))):
        states.append(tuned_from(states[-1], dtype, rows, seed))
    for strategy in ("exact", "int8"):
        paths = files(tmp_path, **{f"s{index}": state for index, state in enumerate(states)})
        deltas, now = [], paths[0]
        for index, path in enumerate(paths[1:], 1):
            deltas.append(tmp_path / f"{strategy}{index}.zt")
            ingot.diff(now, path, deltas[-1], strategy)
            ingot.patch(now, deltas[-1], tmp_path / f"{strategy}{index}.safetensors", verify=True)
            now = tmp_path / f"{strategy}{index}.safetensors"
        ingot.patch(paths[0], deltas, tmp_path / f"{strategy}.safetensors", verify=True)
        wanted = load_file(now)
        assert same_bits(load_file(tmp_path / f"{strategy}.safetensors"), wanted)
        for undo in (False, True):
            state: Weights = load_file(paths[0])
            before = dict(state)
            applied = [ingot.apply_delta(state, delta, verify=True, undo=undo) for delta in deltas]
            assert same_bits(state, wanted)
        for item in reversed(applied):
            item.revert()
        assert all(state[name] is value for name, value in before.items())
        assert same_bits(state, load_file(paths[0]))


def test_tied_tensors_stay_tied(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    base = torch.randn(40, 64, dtype=torch.bfloat16)
    tuned = torch.cat([base.float() * 1.5, torch.ones(2, 64)])
    ingot.diff({"a": base, "b": base}, {"a": tuned, "b": tuned}, tmp_path / "d.zt")
    state = {"a": base, "b": base}
    applied = ingot.apply_delta(state, tmp_path / "d.zt")
    assert state["a"] is state["b"]
    assert torch.equal(state["a"], tuned)
    applied.revert()
    assert state["a"] is base
    assert state["b"] is base


def test_large_tensors_are_cut_across_the_last_row_of_the_base(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    base = {"w": rng.standard_normal((2500, 512)).astype(BF16)}
    for rows in (4700, 1100):
        grown = np.resize(base["w"].astype(F32) * 1.01, (rows, 512)).astype(F16)
        paths = files(tmp_path, base=base, tuned={"w": grown})
        for strategy in ("exact", "int4"):
            out = tmp_path / f"{strategy}{rows}.safetensors"
            report = ingot.diff(*paths, tmp_path / "d.zt", strategy, overwrite=True)
            ingot.patch(paths[0], tmp_path / "d.zt", out, verify=True)
            if report.exact:
                assert same_bits(load_file(out), {"w": grown})
            state: Weights = dict(base)
            ingot.apply_delta(state, tmp_path / "d.zt", verify=True)
            assert same_bits(state, load_file(out))


@pytest.mark.parametrize("strategy", ["exact", "int4"])
def test_workers_write_the_same_bytes(tmp_path: Path, strategy: str, hire: Callable[..., None]) -> None:
    base = base_weights(BF16, 400)
    tuned = tuned_from(base, F16, 410)
    tuned[UP] = tuned[UP].astype(BF16).astype(F16)  # an exact difference in bf16
    paths = files(tmp_path, base=base, tuned=tuned)
    here, there = tmp_path / "here.zt", tmp_path / "there.zt"
    ingot.diff(*paths, here, strategy)
    hire(Inline(), Inline())
    ingot.diff(*paths, there, strategy, engine="processes")
    assert here.read_bytes() == there.read_bytes()
    outs = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    ingot.patch(paths[0], here, outs[0])
    ingot.patch(paths[0], here, outs[1], engine="processes")
    assert outs[0].read_bytes() == outs[1].read_bytes()


class StoppedError(Exception):
    """Raised from the progress callback."""


@pytest.mark.parametrize("strategy", ["exact", "int4"])
def test_an_interrupted_run_goes_on(tmp_path: Path, strategy: str) -> None:
    base = base_weights(BF16, 400)
    paths = files(tmp_path, base=base, tuned=tuned_from(base, F16, 410))
    report = ingot.diff(*paths, tmp_path / "full.zt", strategy)
    ingot.patch(paths[0], tmp_path / "full.zt", tmp_path / "full.safetensors")

    def stop(event: ProgressEvent) -> None:
        if event.item == UP and event.processed:
            raise StoppedError

    with pytest.raises(StoppedError):
        ingot.diff(*paths, tmp_path / "d.zt", strategy, resume=True, progress=stop)
    again = ingot.diff(*paths, tmp_path / "d.zt", strategy, resume=True)
    assert again.resumed
    assert again.result_id == report.result_id
    assert (tmp_path / "d.zt").read_bytes() == (tmp_path / "full.zt").read_bytes()
    with pytest.raises(StoppedError):
        ingot.patch(paths[0], tmp_path / "d.zt", tmp_path / "o.safetensors", resume=True, progress=stop)
    ingot.patch(paths[0], tmp_path / "d.zt", tmp_path / "o.safetensors", resume=True)
    assert (tmp_path / "o.safetensors").read_bytes() == (tmp_path / "full.safetensors").read_bytes()


def test_a_quantized_base_counts_as_what_it_decodes_to(tmp_path: Path) -> None:
    base = {UP: base_weights(BF16, 256)[EMBED]}
    [path] = files(tmp_path, base=base)
    ingot.convert(path, tmp_path / "base.zt", "int8")
    tuned = tuned_from({EMBED: base[UP]}, F16, 260)
    [other] = files(tmp_path, tuned={UP: tuned[EMBED]})
    for strategy in ("exact", "int4"):
        ingot.diff(tmp_path / "base.zt", other, tmp_path / "d.zt", strategy, overwrite=True)
        ingot.patch(tmp_path / "base.zt", tmp_path / "d.zt", tmp_path / f"{strategy}.safetensors", verify=True)
    assert same_bits(load_file(tmp_path / "exact.safetensors"), {UP: tuned[EMBED]})


def test_another_base_and_a_false_description_are_refused(tmp_path: Path) -> None:
    base = base_weights(BF16)
    tuned = tuned_from(base, F16, 43)
    paths = files(tmp_path, base=base, tuned=tuned, other=base_weights(F32), longer=base_weights(BF16, 41))
    delta, out = tmp_path / "d.zt", tmp_path / "out.safetensors"
    ingot.diff(paths[0], paths[1], delta, "int4")

    def refusal(base_path: Path, path: Path = delta) -> str | None:
        with pytest.raises((IntegrityError, FormatError, UnsupportedError)) as caught:
            ingot.patch(base_path, path, out, verify_base=False)
        assert not out.exists()
        return caught.value.rule

    assert refusal(paths[2]) == "delta.base"
    assert refusal(paths[3]) == "delta.base"
    changes = {name: msgspec.to_builtins(change) for name, change in info_of(delta).tensors.items()}
    changed = tmp_path / "changed.zt"

    def with_change(name: str, **fields: Any) -> str | None:
        tensors = {**changes, name: {**changes[name], **fields}}
        return refusal(paths[0], rewritten(delta, changed, tensors=tensors))

    assert with_change(EMBED, base_shape=[41, 64]) == "delta.base"
    assert with_change(EMBED, base_shape=[40, 32]) == "delta.base"
    assert with_change(UP, base_shape=[48, 64]) == "delta.shape"
    assert with_change(EMBED, base_dtype="f32") == "delta.base"
    assert with_change(NORM, base_dtype=None) == "delta.base"
    assert with_change(EMBED, dtype="bf16") == "delta.dtype"
    assert with_change(EMBED, base_shape=[-1, 64]) == "delta.base"
    assert with_change(NORM, dtype="f64") == "delta.dtype"
    assert refusal(paths[0], rewritten(delta, changed, version=1)) == "delta.metadata"
    assert refusal(paths[0], rewritten(delta, changed, version=3)) == "delta.version"


def test_a_wdelta_has_other_types_but_not_other_rows(tmp_path: Path) -> None:
    base = base_weights(BF16)
    paths = files(tmp_path, base=base, tuned=tuned_from(base, F16), grown=tuned_from(base, BF16, 43))
    report = ingot.diff(*paths[:2], tmp_path / "d.wdelta")
    assert report.tensors[0].note == "base in bf16, fine-tune in f16: differences in f32"
    ingot.patch(paths[0], tmp_path / "d.wdelta", tmp_path / "out.safetensors")
    assert {array.dtype for array in load_file(tmp_path / "out.safetensors").values()} == {np.dtype(F16)}
    for out in ("e.wdelta", "e.safetensors"):
        with pytest.raises(UnsupportedError, match=r"same shape .* write a \.zt") as caught:
            ingot.diff(paths[0], paths[2], tmp_path / out)
        assert caught.value.rule == "delta.keys"
    with pytest.raises(UnsupportedError, match=r"same element type .* write a \.zt"):
        ingot.diff(*paths[:2], tmp_path / "e.safetensors")
    cut = files(tmp_path, one={UP: base[UP]}, cut={UP: base[UP][:30] * BF16(2)})
    ingot.diff(*cut, tmp_path / "cut.zt", storages={UP: Storage("delta_int4")})
    with pytest.raises(UnsupportedError, match="another number of rows") as caught:
        ingot.convert(tmp_path / "cut.zt", tmp_path / "cut.wdelta")
    assert caught.value.rule == "wdelta.change"


def test_a_patch_says_that_its_dtype_rounds(tmp_path: Path) -> None:
    base = base_weights(BF16)
    paths = files(tmp_path, base=base, tuned=tuned_from(base, F32))
    ingot.diff(*paths, tmp_path / "d.zt")
    plain = ingot.patch(paths[0], tmp_path / "d.zt", tmp_path / "a.safetensors")
    rounded = ingot.patch(paths[0], tmp_path / "d.zt", tmp_path / "b.safetensors", dtype="bf16")
    wider = ingot.patch(paths[0], tmp_path / "d.zt", tmp_path / "c.safetensors", dtype="f64")
    assert [item.cast for item in (plain, rounded, wider)] == [None, "bf16", None]
    lines = [line.template for line in rounded.report().lines]
    assert "{result_id}, as the delta promises, before floats were rounded to {cast}" in lines


class TestLarger:
    def test_a_sparse_patch_of_all_elements_is_refused_before_it_is_written(self, tmp_path: Path) -> None:
        base = {UP: base_weights(BF16, 400)[EMBED]}
        paths = files(tmp_path, base=base, tuned={UP: tuned_from({EMBED: base[UP]}, BF16, 400, 5)[EMBED]})
        with pytest.raises(UsageError, match=r"strategy=exact into a \.zt would take about .* \(exact\)") as caught:
            ingot.diff(*paths, tmp_path / "d.safetensors")
        assert caught.value.rule == "delta.larger"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["base.safetensors", "tuned.safetensors"]
        report = ingot.diff(*paths, tmp_path / "d.safetensors", allow_larger=True)
        assert report.share > 1

    def test_a_quantized_fine_tune_is_smaller_than_an_exact_delta(self, tmp_path: Path) -> None:
        """Known only when the delta is written: nothing of it is left."""
        base = {UP: base_weights(F32, 500)[EMBED]}
        [path] = files(tmp_path, base=base)
        ingot.convert(path, tmp_path / "tuned.zt", "int4")
        with pytest.raises(UsageError, match=r"strategy=int\d into a \.zt .* \(not exact\)") as caught:
            ingot.diff(path, tmp_path / "tuned.zt", tmp_path / "d.zt")
        assert caught.value.rule == "delta.larger"
        assert sorted(item.name for item in tmp_path.iterdir()) == ["base.safetensors", "tuned.zt"]
        assert ingot.diff(path, tmp_path / "tuned.zt", tmp_path / "d.zt", allow_larger=True).exact

    def test_nothing_smaller_is_not_promised(self, tmp_path: Path) -> None:
        base = {UP: base_weights(F32, 500)[EMBED]}
        [path] = files(tmp_path, base=base)
        ingot.convert(path, tmp_path / "tuned.zt", "int2")
        with ingot.open(tmp_path / "tuned.zt") as tuned:
            small = {"t": tuned[UP]}
            ingot.save(tmp_path / "renamed.zt", small)
        with pytest.raises(UsageError, match="no strategy is smaller: keep the fine-tune as it is"):
            ingot.diff(path, tmp_path / "renamed.zt", tmp_path / "d.zt")

    def test_tiny_tensors_may_take_more(self, tmp_path: Path) -> None:
        base = {f"{index}": np.full(2, index, BF16) for index in range(50)}
        tuned = {name: values + BF16(0.5) for name, values in base.items()}
        assert ingot.diff(base, tuned, tmp_path / "d.zt").share > 1
