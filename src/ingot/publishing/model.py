"""The files of a model to push, and the description of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.artifacts.archive_layout import check_names
from ingot.artifacts.companions import is_weights
from ingot.artifacts.replaceable import is_sentinel
from ingot.errors import IngotError, UnsupportedError, UsageError
from ingot.inspect.inspect import Inspection, inspect_found
from ingot.library.cut import files_of
from ingot.model.layouts.dense import DenseLayout
from ingot.model.store import Store
from ingot.naming.config import CONFIG, MAX_CONFIG, parse_config
from ingot.stores.location import Location

_DOCUMENTS = ("readme", "license", "licence", "notice", "use_policy", "model_card")
_PROGRAMS = (".py", ".sh", ".ipynb", ".ps1")
_CONTAINERS = (".safetensors", ".gguf", ".zt")
_PRECISIONS = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8_e4m3": "float8_e4m3",
    "f8_e5m2": "float8_e5m2",
}
_SCALES = (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3))
PRESET = "ingot.preset"
ROUNDING = "ingot.rounding"


@dataclass(frozen=True, slots=True)
class PushedModel:
    """The files to push, and the description of the model.

    ``files`` maps the published name of a file to its name in ``store``. ``inspection`` is None if the files do not
    open as a model. ``notes`` name the files that are left out, and state why the files do not open.
    """

    location: str
    store: Store
    files: Mapping[str, str]
    size: int
    inspection: Inspection | None
    notes: Sequence[str] = ()

    def metadata(self, key: str) -> str:
        """Return a text of the model's metadata; empty if the key is missing."""
        value = {} if self.inspection is None else self.inspection.metadata
        return str(value.get(key, ""))

    def quantization(self) -> str:
        """Return the preset, else the packing of a safetensors folder, else the most frequent type of packed weights.

        The result is empty if no weights are packed.
        """
        preset = self.metadata(PRESET)
        if preset or self.inspection is None:
            return preset
        if self.container() == "safetensors" != self.inspection.format:
            return self.inspection.format
        counts: Counter[str] = Counter()
        for tensor in self.inspection.tensors:
            counts[str(tensor.params.get("type") or tensor.codec)] += tensor.nbytes
        counts.pop(DenseLayout.codec, None)
        return counts.most_common(1)[0][0] if counts else ""

    def container(self) -> str:
        """Return the container of the weights, such as gguf or safetensors; empty without weights.

        In an archive it is the container of the archived model.
        """
        for suffix in _CONTAINERS:
            if any(name.lower().endswith(suffix) for name in self.files):
                return suffix[1:]
        return "" if self.inspection is None else self.inspection.format

    def precisions(self) -> list[str]:
        """Return the element types of the tensors by their names in ModelPack, the most frequent first."""
        counts: Counter[str] = Counter()
        for tensor in () if self.inspection is None else self.inspection.tensors:
            counts[tensor.dtype] += tensor.size
        return [_PRECISIONS[dtype] for dtype, _ in counts.most_common() if dtype in _PRECISIONS]


def model_to_push(location: Location) -> PushedModel:
    """Return the files of a folder, or a file with its companions and shards, and their description.

    Hidden files are left out, unless they belong to a format of Ingot.

    Raises
    ------
    UsageError
        ``push.none``: no files; the errors of ``Location.find_model``.
    FormatError, IntegrityError
        ``archive.name``, ``archive.collision``: a name that other systems cannot have; the errors of opening a damaged
        model.
    """
    store, single = location.find_model("pread")  # an archive is pushed as it is
    notes: list[str] = []
    inspection: Inspection | None = None
    try:
        inspection = inspect_found(store, single)
    except (UsageError, UnsupportedError) as error:
        notes.append(f"these files do not open as a model: {error.message}")
    else:
        notes += inspection.notes
    if single:
        parts = [single] if inspection is None or single not in inspection.files else inspection.files  # of an archive
        folder = single.rpartition("/")[0]
        names = {name.removeprefix(f"{folder}/") if folder else name: name for name in parts}
    else:
        listed = sorted(files_of(store, outside=True))
        names = {name: name for name in listed if not _is_hidden(name)}
        hidden = [name for name in listed if name not in names]
        notes += [f"hidden files are not pushed: {', '.join(hidden[:8])}"] if hidden else []
    if not names:
        raise UsageError("expected files, but the folder has none", rule="push.none", where=store.location)
    check_names(sorted(names), store.location)
    size = sum(store.stat(name).size for name in names.values())
    return PushedModel(store.location_of(single), store, names, size, inspection, notes)


def is_document(name: str) -> bool:
    """Return whether a file, by its name, is a text for people, such as a readme or a license."""
    last = name.rpartition("/")[2].lower()
    return last.startswith(_DOCUMENTS) or last.endswith(".md")


def is_program(name: str) -> bool:
    """Return whether a file, by its name, is source code."""
    return name.lower().endswith(_PROGRAMS)


def is_weights_file(name: str) -> bool:
    """Return whether a file, by its name, contains weights; an index of shards does not."""
    return is_weights(name) and not name.lower().endswith(".json")


def parameter_count(elements: int) -> str:
    """Return the number of weights as text with at most one decimal, such as 6.7B."""
    for letter, scale in _SCALES:
        if elements >= scale:
            return f"{elements / scale:.1f}".removesuffix(".0") + letter
    return f"{elements / 1000:.1f}K"


def describe(model: PushedModel, base: str | None) -> dict[str, Any]:
    """Return the objects ``descriptor`` and ``config`` of ModelPack's model description; unknown facts are left out."""
    descriptor = {"name": Location.parse(model.location).name}
    if base:
        descriptor["sourceURL"] = f"https://huggingface.co/{base}" if Location.parse(base).may_be_hub_id else base
    config: dict[str, str] = {}
    inspection = model.inspection
    if inspection is not None:
        config = {"format": model.container(), "paramSize": parameter_count(inspection.elements)}
        family = _family(model)
        if family:
            descriptor["family"] = family
        if precisions := model.precisions():
            config["precision"] = ",".join(precisions)
        if quantization := model.quantization():
            config["quantization"] = quantization
    return {"descriptor": descriptor, "config": config}


def _family(model: PushedModel) -> str:
    """Return the architecture's name from the metadata or from ``config.json``; empty if there is none."""
    if architecture := model.metadata("general.architecture"):
        return architecture
    if CONFIG not in model.files:
        return ""
    try:
        raw = model.store.read(model.files[CONFIG], MAX_CONFIG, "companions.config")
        return str(parse_config(raw, "companions.config", model.location).get("model_type", ""))
    except IngotError:
        return ""


def _is_hidden(name: str) -> bool:
    folder, _, last = name.rpartition("/")
    is_folder_hidden = any(component.startswith(".") for component in folder.split("/"))
    return is_folder_hidden or (last.startswith(".") and not is_sentinel(last))
