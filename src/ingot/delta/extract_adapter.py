"""Extraction of an adapter from a full fine-tune: the best low-rank approximation of each matrix's change.

Memory holds one tensor's change and the finished factors.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ingot.adapters.low_rank_fit import Change, Factors, ranks_for_size
from ingot.adapters.match import is_transposed
from ingot.adapters.options import AdapterExtractOptions
from ingot.adapters.record import Adapter, Factor, LowRank
from ingot.adapters.view import apply_adapters
from ingot.adapters.write import PEFT, adapter_destination, peft_files, stage_adapter, write_files
from ingot.artifacts.adapter_files import refuse_adapter
from ingot.artifacts.companions import companion_config, is_translated
from ingot.artifacts.destination import CPU, destination, stage
from ingot.artifacts.open import weights_of
from ingot.artifacts.state_dict import open_weights
from ingot.conversion.prepared import refuse_same
from ingot.conversion.statistics_files import statistics_of_one
from ingot.core.numeric.dtypes import DTYPES, FLOATS
from ingot.core.options import takes
from ingot.core.runtime.device import resolve_device
from ingot.core.runtime.memory import parse_size
from ingot.core.runtime.parallel import check_cancelled
from ingot.core.runtime.progress import Progress
from ingot.delta.diff import diff
from ingot.delta.options import DiffOptions
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DenseLayout
from ingot.model.statistics import Statistics
from ingot.model.tensor import Array
from ingot.naming.names import role_of
from ingot.quantization.encode import Whitening
from ingot.quantization.tensor import load_factors
from ingot.reporting.report import Bytes, Column, Count, Figure, Line, Report, Seconds, Table, Texts, figures_of
from ingot.reporting.reportable import Reportable
from ingot.stores.location import Location
from ingot.translate.view import to_model

DEFAULT_RANK = 32
RULE = "adapter.option"
_LISTED = 8
_NAMED = 3
_SPREAD = 4  # with --size, the largest rank of a matrix as a multiple of the rank that all matrices could have
_ENTRY = 256  # bytes of a tensor's entry in the file's header, without its name


@dataclass(frozen=True, slots=True)
class ExtractedTensor:
    """A matrix of the adapter: its rank, and the norm of the missing part of its change relative to the change."""

    name: str
    rank: Count
    error: float


@dataclass(frozen=True, slots=True)
class OmittedTensor:
    """A changed tensor that the adapter does not contain, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class AdapterExtractReport(Reportable):
    """An extracted adapter.

    Attributes
    ----------
    size : int
        Bytes of the factors.
    error : float
        The norm of the missing part of all matrices' changes, as a share of the norm of the changes.
    highest : str
        The matrix with the largest missing share.
    weighted : int
        The number of matrices whose errors are weighted by statistics. A weighted error is the error of the matrix's
        outputs.
    tensors : sequence of ExtractedTensor
    omitted : sequence of OmittedTensor
        Tensors of the fine-tune that differ from the base but are not in the adapter.
    residual : str or None
        The delta that turns the merged adapter into the fine-tune.
    """

    base: str
    tuned: str
    destination: str
    size: Bytes
    error: float
    highest: str
    weighted: Count
    seconds: Seconds
    tensors: Sequence[ExtractedTensor] = field(repr=False)
    omitted: Sequence[OmittedTensor] = field(repr=False)
    residual: str | None = None
    residual_size: Bytes | None = None

    @property
    def warnings(self) -> list[str]:
        """A warning that names the omitted tensors, unless the residual contains them."""
        if not self.omitted or self.residual is not None:
            return []
        names = ", ".join(item.name for item in self.omitted[:_NAMED])
        more = f" and {len(self.omitted) - _NAMED} more" if len(self.omitted) > _NAMED else ""
        text = f"{len(self.omitted)} changed tensors of the fine-tune are not in the adapter: {names}{more}"
        return [f"{text}; --residual exact stores what is missing"]

    def report(self) -> Report:
        """Return the figures, and the tables of matrices and of omitted tensors."""
        ranks = sorted(item.rank for item in self.tensors)
        highest = max(item.error for item in self.tensors)
        ranges = f"rank {ranks[0]}" if ranks[0] == ranks[-1] else f"ranks {ranks[0]} to {ranks[-1]}"
        norm = "the changed outputs" if self.weighted else "the changes"
        notes: Texts = [f"not in the adapter: {item.name}: {item.reason}" for item in self.omitted[:_LISTED]]
        if len(self.omitted) > _LISTED:
            notes = [*notes, f"not in the adapter: {len(self.omitted) - _LISTED} more tensors (--json lists them)"]
        texts = [
            Figure("matrices_text", f"{len(self.tensors)} matrices, {ranges}", data=False),
            Figure(
                "error_text",
                f"{100 * self.error:.3g} % of {norm} is left (RMS); at most {100 * highest:.3g} %, {self.highest}",
                data=False,
            ),
            Figure("notes", notes, "texts", data=False),
        ]
        lines = [
            Line("{tuned} - {base} -> {destination}"),
            Line("{matrices_text}, {size}", "adapter"),
            Line("{error_text}", "error"),
        ]
        if self.residual is not None:
            lines.append(Line("{residual}, {residual_size}: merged base + residual = fine-tune", "residual"))
        lines.append(Line("{item}", "note", items="notes"))
        shown = {"tensors", "omitted"}
        tensors = Table(
            "tensors",
            (Column("name"), Column("rank", "count"), Column("error", "number")),
            [(item.name, item.rank, item.error) for item in self.tensors],
            shown=False,
        )
        omitted = Table(
            "omitted",
            (Column("name"), Column("reason")),
            [(item.name, item.reason) for item in self.omitted],
            shown=False,
        )
        figures = [item for item in figures_of(self) if item.name not in shown]
        return Report([*figures, *texts], lines, [tensors, omitted])


@takes(AdapterExtractOptions, "adapter")
def extract_adapter(options: AdapterExtractOptions) -> AdapterExtractReport:
    """Write a LoRA adapter that approximates a full fine-tune, as PEFT stores it.

    The factors of each linear layer and embedding are the leading singular vectors of its change. For matrices with a
    side of at most 192 they are exact: no adapter of that rank has a smaller error. For larger matrices they come from
    randomized subspace iteration, whose error was at most about 1 % above the minimum. With statistics, errors are
    those of the layer's outputs.

    If ``rank`` is set, all matrices have this rank. If ``max_error`` is set, each matrix has the smallest rank whose
    error is within the limit. If ``size`` is set, the ranks minimize the total error in a file of this size.

    Returns
    -------
    AdapterExtractReport

    Raises
    ------
    UsageError
        ``adapter.option``: several of ``rank``, ``max_error`` and ``size``, or a value that is not possible;
        ``statistics.*``; ``model.device``.
    ResourceError
        ``device.memory``.
    UnsupportedError
        ``adapter.base``: no matrix has the same name and shape in the base, or none differs;
        ``adapter.error``: ``max_error`` needs factors larger than the matrix; ``adapter.residual``: the base is
        quantized or a GGUF file.
    CodecError
        ``adapter.values``: NaN or infinity. Nothing is left under the final names.

    Examples
    --------
    >>> report = ingot.merge("model", ["style"], "merged")
    >>> len(ingot.extract_adapter("model", "merged", "extracted", rank=4).tensors)
    4
    """
    started = time.perf_counter()
    max_error, size = _limits(options)
    if options.device != CPU:
        resolve_device(options.device)
    out = Location.parse(options.out)
    target = adapter_destination(out, PEFT)
    residual = None if options.residual is None else f"{target.display.rstrip('/')}.residual.zt"
    with stage_adapter(target, overwrite=options.overwrite):
        pass  # refuses an existing destination before the work
    if residual is not None:
        with stage(destination(Location.parse(residual)), overwrite=options.overwrite):
            pass
    with ExitStack() as stack:
        checkpoints = []
        for path in (options.base, options.tuned):
            source = open_weights(path)
            stack.callback(source.close)
            refuse_adapter(source)
            refuse_same(source, target)
            checkpoints.append(weights_of(source))
        base, tuned = checkpoints
        if residual is not None:
            _require_dense(base)
        pair = _Pair(_model_view(base), _model_view(tuned), options)
        if options.calibration is not None:
            pair.statistics = statistics_of_one(options.calibration, [tuned, base])
            if pair.statistics is not options.calibration:
                stack.callback(pair.statistics.close)
        pair.extract(max_error, size)
        adapter = Adapter(out.display, PEFT, "lora", {name: [item] for name, item in pair.low_ranks.items()})
        files = peft_files(adapter.changes, _base_name(options))
        if residual is not None:
            view = apply_adapters(base, [adapter], [1.0])
            report = diff(DiffOptions(view, tuned, residual, strategy="exact", overwrite=options.overwrite))
        try:
            location, nbytes = write_files(files, PEFT, out, overwrite=options.overwrite)
        except BaseException:
            if residual is not None:
                Path(residual).unlink(missing_ok=True)
            raise
        return AdapterExtractReport(
            base=Location.parse(options.base).display,
            tuned=Location.parse(options.tuned).display,
            destination=location,
            size=nbytes,
            error=pair.error,
            highest=max(pair.tensors, key=lambda item: item.error).name,
            weighted=pair.weighted,
            seconds=time.perf_counter() - started,
            tensors=pair.tensors,
            omitted=pair.omitted,
            residual=residual,
            residual_size=None if residual is None else report.size,
        )


def _limits(options: AdapterExtractOptions) -> tuple[float | None, int | None]:
    """Return the options ``max_error`` and ``size`` as numbers; an option that is not set is None.

    Raises ``UsageError`` ``adapter.option`` for more than one limit, or for an invalid one.
    """
    if sum(item is not None for item in (options.rank, options.max_error, options.size)) > 1:
        raise UsageError("expected one of --rank, --max-error and --size, found several", rule=RULE)
    error = options.max_error
    if error is not None and not 0 < error < 1:
        raise UsageError(
            f"expected --max-error between 0 and 1, such as 0.1, found {error:g}; for 0 store the fine-tune as a delta "
            "(ingot diff)",
            rule=RULE,
        )
    return error, None if options.size is None else parse_size(options.size)


def _base_name(options: AdapterExtractOptions) -> str:
    return Location.parse(options.base).display


def _model_view(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the names of a model folder."""
    return to_model(checkpoint, no_tokenizer=True).checkpoint if is_translated(checkpoint) else checkpoint


def _require_dense(base: Checkpoint) -> None:
    packed = next((tensor.name for tensor in base.values() if tensor.codec != DenseLayout.codec), None)
    if packed is None and not is_translated(base):
        return
    reason = "a GGUF file" if packed is None else f"quantized ({packed})"
    raise UnsupportedError(
        f"expected a dense model folder as base for --residual exact, found one that is {reason}: a merge would round "
        "the adapter; store the fine-tune as a delta (ingot diff)",
        rule="adapter.residual",
        where=base.location,
    )


class _Pair:
    """A base and its fine-tune, with the names of a model folder, and the factors of the changes."""

    def __init__(self, base: Checkpoint, tuned: Checkpoint, options: AdapterExtractOptions) -> None:
        self.statistics: Statistics | None = None
        self.low_ranks: dict[str, LowRank] = {}
        self.tensors: list[ExtractedTensor] = []
        self.omitted: list[OmittedTensor] = []
        self.error = 0.0
        self.weighted = 0
        self._base = base
        self._tuned = tuned
        self._options = options
        device = None if options.device == CPU else resolve_device(options.device)
        self._device = None if device is None or device.type == CPU else device
        config = companion_config(base.companions, RULE)
        self._model_type = str(config.get("model_type", ""))
        self._tied = config.get("tie_word_embeddings") is True or not any(role_of(name) == "head" for name in base)
        self._progress = Progress(sum(item.nbytes for item in tuned.values()), options.progress)

    def extract(self, max_error: float | None, size: int | None) -> None:
        """Find the factors of every changed matrix; list changed tensors without factors."""
        names = list(self._matrices())
        ranks = {} if size is None else self._ranks(names, size)
        remaining = 0.0
        total = 0.0
        for name in names:
            change = self._change(name)
            self._progress.advance(self._tuned[name].nbytes, name)
            if change is None:
                continue
            total += change.squared_norm
            self.weighted += change.is_weighted
            factors = self._factors(change, max_error, ranks.get(name) if size is not None else None)
            if factors is None:
                remaining += change.squared_norm
                self.omitted.append(OmittedTensor(name, "the size is too small for it"))
                continue
            remaining += change.squared_norm * factors.error**2
            self.tensors.append(ExtractedTensor(name, factors.rank, factors.error))
            self.low_ranks[name] = self._low_rank(name, factors)
        if not self.tensors:
            raise UnsupportedError(self._nothing(names, size), rule="adapter.base", where=self._tuned.location)
        self.error = float(np.sqrt(remaining / total))

    def _factors(self, change: Change, max_error: float | None, rank: int | None) -> Factors | None:
        if max_error is not None:
            return change.with_error(max_error, self._options.dtype)
        rank = rank if rank is not None else self._options.rank or DEFAULT_RANK
        return change.with_rank(rank, self._options.dtype) if rank else None

    def _low_rank(self, name: str, factors: Factors) -> LowRank:
        a, b = (
            replace(Factor.from_array(name, values), dtype=self._options.dtype) for values in (factors.a, factors.b)
        )
        transposed = is_transposed(name, self._model_type)
        return LowRank(a, b, 1.0, transposed=transposed, embedding=role_of(name) == "embedding")

    def _nothing(self, names: Sequence[str], size: int | None) -> str:
        if not names:
            return "expected the fine-tune of the base, found no linear layer with the name and shape that it has there"
        if size is not None and self.omitted:
            return "expected a --size with room for factors of rank 1 of a matrix, found less"
        return "expected a fine-tune whose linear layers differ from the base's, found the same values"

    def _ranks(self, names: Sequence[str], size: int) -> dict[str, int]:
        """Return the ranks with the least total error for a file of ``size`` bytes."""
        names = [name for name in names if self._differs(name)]
        bits = DTYPES[self._options.dtype].bits
        costs = {name: sum(self._tuned[name].shape) * bits // 8 for name in names}
        size -= sum(2 * (_ENTRY + len(name)) for name in names)
        max_rank = max(1, size // max(1, sum(costs.values()))) * _SPREAD
        values = {}
        for name in names:
            change = self._change(name)
            if change is not None:
                values[name] = change.singular_values(min(max_rank, change.useful_limit))
        return ranks_for_size(values, costs, size)

    def _change(self, name: str) -> Change | None:
        """Return the difference between fine-tune and base of a matrix, or None if their values are equal."""
        check_cancelled()
        values = self._difference(name)
        if not values.any():
            return None
        whitening = None
        if self.statistics is not None:
            factors, count = load_factors(self.statistics, name, *values.shape)
            if count:
                whitening = Whitening(factors)
        return Change(name, values, whitening, self._device)

    def _difference(self, name: str) -> Array:
        values = self._tuned[name].numpy("f32").astype(np.float32)
        values -= self._base[name].numpy("f32")
        if not np.isfinite(values).all():
            raise CodecError("adapter.values", "expected finite weights, found NaN or infinity", where=name)
        return values

    def _matrices(self) -> Iterator[str]:
        """Yield the matrices that an adapter can change; list other changed tensors in ``omitted``."""
        for name, tensor in self._tuned.items():
            if name not in self._base:
                self.omitted.append(OmittedTensor(name, "the base lacks it"))
            elif tensor.shape != self._base[name].shape:
                shape = list(self._base[name].shape)
                self.omitted.append(OmittedTensor(name, f"shape {list(tensor.shape)}, in the base {shape}"))
            else:
                reason = self._obstacle(name)
                if not reason:
                    yield name
                elif self._differs(name):
                    self.omitted.append(OmittedTensor(name, reason))
        self.omitted += [
            OmittedTensor(name, "the fine-tune lacks it") for name in self._base if name not in self._tuned
        ]

    def _obstacle(self, name: str) -> str:
        """Return why an adapter cannot have factors of a tensor; empty if it can."""
        tensor = self._tuned[name]
        role = role_of(name)
        if tensor.dtype not in FLOATS or self._base[name].dtype not in FLOATS:
            return f"values of type {tensor.dtype}"
        if len(tensor.shape) != 2 or not name.endswith(".weight") or 0 in tensor.shape:
            return "no matrix of a linear layer"
        if role == "router":
            return "a router, which is no linear layer in PEFT"
        if role in ("embedding", "head") and self._tied:
            return "embedding and head share these weights, and an adapter would change one of them alone"
        return ""

    def _differs(self, name: str) -> bool:
        tuned = self._tuned[name]
        base = self._base[name]
        if tuned.dtype not in FLOATS or base.dtype not in FLOATS:
            return tuned.dtype != base.dtype or not np.array_equal(tuned.numpy(), base.numpy())
        return bool(self._difference(name).any())
