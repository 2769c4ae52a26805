"""Decide from a program's profile and from headers whether the program would load a file or folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ingot.artifacts.adapter_files import RULE as ADAPTER
from ingot.artifacts.adapter_files import adapter_of
from ingot.artifacts.open import Source
from ingot.errors import IngotError, UnsupportedError
from ingot.formats.packed_folders.awq import AwqFormat
from ingot.formats.packed_folders.fp8 import Fp8Format
from ingot.formats.packed_folders.gptq import GptqFormat
from ingot.model.layouts.dense import DenseLayout
from ingot.model.reading.lazy import as_tensor_map
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Tensor
from ingot.naming.config import CONFIG
from ingot.naming.names import merged_matrix, pattern_of, role_of
from ingot.reporting.report import count_text
from ingot.runtimes.profile import Requirement, RuntimeProfile, Scheme
from ingot.runtimes.stored import StoredScheme, mismatch, stored_scheme
from ingot.translate.completeness import defects_of
from ingot.translate.unsupported_families import unknown_gguf_names, unopened_note

_TOKENS = "tokenizer.ggml.tokens"
_TOKENIZER = "tokenizer.json"
_MAX_TOKENIZER = 128 << 20
_EMBEDDING = ("token_embd.weight",)
_KEY = re.compile(r"\{([^{}]+)\}")
_SECOND = "second_scale"
_UNPACKED = ("embedding", "head")
_COPY = "copy it from the folder of the original model"
_SHOWN = 3
_PAIR = 2


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason for which a program does not load an artifact: the rule, the tensor, file or key, and the message."""

    rule: str
    location: str
    message: str

    def __str__(self) -> str:
        return f"{self.location}: {self.message} [{self.rule}]"


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of comparing an artifact with a profile.

    ``reasons`` is empty if the program would load the artifact. ``schemes`` are the profile's schemes that its tensors
    match.
    """

    profile: RuntimeProfile
    container: str
    reasons: Sequence[Reason]
    schemes: Sequence[Scheme] = ()

    @property
    def accepted(self) -> bool:
        """Whether the program would load the artifact."""
        return not self.reasons

    @property
    def untested(self) -> Sequence[Scheme]:
        """The schemes with which the program was not run."""
        return [scheme for scheme in self.schemes if scheme.outcome not in ("run", "loads")]


def accepts(profile: RuntimeProfile, source: Source) -> Answer:
    """Return whether a program would load an open file or folder, and the reasons if not.

    Reads headers, ``config.json`` and the tokenizer, and second scales of tensors.
    """
    container = container_of(source)
    adapter = adapter_of(source)
    if adapter is not None:
        return Answer(profile, container, [Reason(ADAPTER, source.location, adapter.describe())])
    if container not in profile.containers:
        expected = " or ".join(readable_containers(profile))
        text = f"{profile.label} reads {expected}, this is {container}; use `ingot convert --for {profile.name}`"
        return Answer(profile, container, [Reason("runtime.container", source.location, text)])
    config = source.config()
    tensors: Mapping[str, Tensor] = source.catalog.tensors
    activations = any("input" in key or "activation" in key for key in source.format.activations(config))
    stored, faults = _stored(as_tensor_map(tensors).uncached(), container, _declared_symmetric(source, config))
    stored = _with_declared_blocks(stored, source, config)
    reasons = [*faults]
    matched, refused = match_schemes(profile, container, stored, activations=activations)
    reasons += refused
    reasons += embedding_reasons(profile, stored)
    reasons += merged_reasons(profile, stored, tensors)
    for requirement in profile.requirements:
        if container in requirement.containers:
            reasons += _unmet(requirement, source, config)
    reasons += _unopened(profile, source)
    reasons += _heads(profile, source)
    reasons += _vocabulary(profile, source, config, tensors)
    return Answer(profile, container, reasons, matched)


def source_reasons(profile: RuntimeProfile, container: str, source: Source) -> list[Reason]:
    """Return reasons why a folder converted from ``source`` would fail in the program: missing files, keys or tokens.

    The folder's files and keys of ``config.json`` are copied unchanged from the source. A GGUF source gives no reasons,
    because the conversion creates these files.
    """
    if source.catalog.metadata.get("general.architecture") is not None:
        return []
    config = source.config()
    reasons: list[Reason] = []
    for requirement in profile.requirements:
        if container in requirement.containers and not requirement.metadata:
            reasons += _unmet(requirement, source, config)
    fits = [] if container == "gguf" else _vocabulary(profile, source, config, source.catalog.tensors)
    return [*reasons, *fits]


def accepts_specs(
    profile: RuntimeProfile, container: str, specs: Iterable[TensorSpec], *, activations: bool = False
) -> Answer:
    """Return whether a program accepts the tensors of a planned artifact.

    Checks the container, schemes of tensors, packed embeddings and merged projections. Files and second scales are not
    checked, because they do not exist yet.
    """
    if container not in profile.containers:
        expected = " or ".join(readable_containers(profile))
        reason = Reason("runtime.container", container, f"{profile.label} reads {expected}, not {container}")
        return Answer(profile, container, [reason])
    stored, faults = _stored(specs, container)
    matched, refused = match_schemes(profile, container, stored, activations=activations)
    return Answer(
        profile,
        container,
        [*faults, *refused, *embedding_reasons(profile, stored), *merged_reasons(profile, stored, {})],
        matched,
    )


def why_not_a_file(profile: RuntimeProfile, container: str, path: str) -> str:
    """Return why a program does not load a single file of a container; empty if it loads one.

    A program loads folders if its profile requires files such as ``config.json`` for the container. ``path`` is the
    location of the result.
    """
    needs = [item for item in profile.requirements if container in item.containers]
    files = sorted({name for item in needs for name in (*item.files, *item.any_files[:1])})
    if not files:
        return ""
    return f"{profile.title} loads a folder with {' and '.join(files)}, and {path} is a single file"


def refusal(answer: Answer, location: str) -> UnsupportedError:
    """Return the error for an artifact that a program would not load: the first reason, and the number of others."""
    first = answer.reasons[0]
    prefix = "" if first.location == location else f"{first.location}: "
    more = f" (and {count_text(len(answer.reasons) - 1, 'more reason')})" if len(answer.reasons) > 1 else ""
    return UnsupportedError(
        f"{answer.profile.label} would not load this: {prefix}{first.message}{more}",
        rule="runtime.refused",
        where=location,
    )


def readable_containers(profile: RuntimeProfile) -> list[str]:
    """Return the containers of a profile for which the program accepts at least one scheme."""
    accepted = [scheme for scheme in profile.schemes if scheme.outcome != "refused"]
    return [name for name in profile.containers if any(name in scheme.containers for scheme in accepted)]


def container_of(source: Source) -> str:
    """Return the name of an artifact's container in profiles."""
    return container_name(source.format.name)


def container_name(format: str) -> str:
    """Return the name of a format in profiles, which call both packings of GPTQ ``gptq``."""
    return {"gptq-planes": "gptq"}.get(format, format)


def _declared_symmetric(source: Source, config: Mapping[str, Any]) -> bool | None:
    """Return whether ``config.json`` declares symmetric integers; None for containers without such a key."""
    if isinstance(source.format, GptqFormat | AwqFormat):
        return source.format.is_symmetric(source.format.quantization(config))
    return None


def _with_declared_blocks(
    stored: Mapping[str, StoredScheme], source: Source, config: Mapping[str, Any]
) -> dict[str, StoredScheme]:
    """Return the schemes; matrices smaller than a block get the block size that ``config.json`` declares."""
    block = None
    if isinstance(source.format, Fp8Format):
        block = source.format.quantization(config).get("weight_block_size")
    if not isinstance(block, list) or len(block) != _PAIR:
        return dict(stored)
    tiles = "x".join(map(str, block))
    return {
        name: replace(item, group=tiles) if item.storage == "floats" and item.group == "tensor" else item
        for name, item in stored.items()
    }


def _stored(
    tensors: Iterable[Tensor | TensorSpec], container: str, symmetric: bool | None = None
) -> tuple[dict[str, StoredScheme], list[Reason]]:
    stored: dict[str, StoredScheme] = {}
    faults = []
    for tensor in tensors:
        try:
            stored[tensor.name] = stored_scheme(tensor, container, symmetric=symmetric)
        except IngotError as error:
            faults.append(Reason(error.rule or "runtime.scheme", tensor.name, error.message))
    return stored, faults


def match_schemes(
    profile: RuntimeProfile, container: str, stored: Mapping[str, StoredScheme], *, activations: bool
) -> tuple[list[Scheme], list[Reason]]:
    """Return the schemes that tensors match, and a reason for each type of tensor that the program does not accept.

    If a tensor matches a refused scheme and an accepted one, it is refused.
    """
    candidates = [scheme for scheme in profile.schemes if container in scheme.containers]
    matched: dict[int, Scheme] = {}
    by_message: dict[str, list[str]] = {}
    verdicts: dict[StoredScheme, tuple[int | None, str]] = {}
    for name, item in stored.items():
        if item not in verdicts:
            verdicts[item] = _verdict(profile, candidates, item, activations=activations)
        index, message = verdicts[item]
        if message:
            by_message.setdefault(message, []).append(name)
        elif index is not None:
            matched[index] = candidates[index]
    reasons = [Reason("runtime.scheme", _names(names), message) for message, names in by_message.items()]
    return [matched[index] for index in sorted(matched)], reasons


def _verdict(
    profile: RuntimeProfile, candidates: Sequence[Scheme], item: StoredScheme, *, activations: bool
) -> tuple[int | None, str]:
    """Return the index of the scheme that a tensor matches, or None and why it is not accepted."""
    problems = {
        index: mismatch(scheme, item, activations=activations)
        for index, scheme in enumerate(candidates)
        if scheme.storage == item.storage
    }
    fitting = [index for index, differences in problems.items() if not differences]
    for index in fitting:
        scheme = candidates[index]
        if scheme.outcome == "refused":
            return index, f"{profile.label} does not accept {scheme.name}: {scheme.note or 'its profile says so'}"
    if fitting:
        return fitting[0], ""
    accepted = {index: lines for index, lines in problems.items() if candidates[index].outcome != "refused"}
    if not accepted:
        names = ", ".join(dict.fromkeys(scheme.name for scheme in candidates if scheme.outcome != "refused"))
        return None, f"{profile.label} accepts in this container: {names or 'nothing'}; this is {item.scheme_text}"
    nearest = min(accepted, key=lambda index: len(accepted[index]))
    difference = "; ".join(accepted[nearest])
    return None, f"{profile.label} accepts {candidates[nearest].name}; this is {item.scheme_text} ({difference})"


def embedding_reasons(profile: RuntimeProfile, stored: Mapping[str, StoredScheme]) -> Iterator[Reason]:
    """Yield a reason for packed embeddings and heads, if the program packs only linear layers."""
    if not profile.constraints.dense_embeddings:
        return
    packed = [name for name, item in stored.items() if item.storage != "dense" and role_of(name) in _UNPACKED]
    if packed:
        message = f"the tensor is packed; {profile.title} reads embeddings and heads as 16-bit values"
        yield Reason("runtime.embeddings", packed[0], message)


def merged_reasons(
    profile: RuntimeProfile, stored: Mapping[str, StoredScheme], tensors: Mapping[str, Tensor]
) -> Iterator[Reason]:
    """Yield a reason for each rule that merged projections break.

    The rules concern members with different schemes or second scales, and rows that blocks do not divide.
    """
    rules = profile.constraints
    if not (rules.merged_scheme or rules.merged_blocks or rules.merged_second_scale):
        return
    groups: dict[str, list[str]] = {}
    for name in stored:
        common = merged_matrix(name)
        if common is not None:
            groups.setdefault(common, []).append(name)
    different: list[str] = []
    uneven: dict[str, list[str]] = {}
    second: list[str] = []
    for names in groups.values():
        members = [stored[name] for name in names]
        if rules.merged_scheme and len({_shared(member) for member in members}) > 1:
            different.append(names[0])
        tiles = next((member.group for member in members if "x" in str(member.group)), None)
        if rules.merged_blocks and tiles and len(members) > 1:
            size = int(str(tiles).partition("x")[0])
            bad = [name for name in names if stored[name].rows % size]
            if bad:
                uneven.setdefault(f"blocks of {tiles}", []).extend(bad)
        if rules.merged_second_scale and len({_second_scale(tensors.get(name)) for name in names}) > 1:
            second.append(names[0])
    if different:
        text = "q, k, v and gate, up are multiplied as one matrix and need one scheme; their members differ"
        yield Reason("runtime.merged", _names(different), text)
    for tiles_text, names in uneven.items():
        text = f"{tiles_text} do not divide the rows of this member of a merged matrix: other values would be read"
        yield Reason("runtime.blocks", _names(names), text)
    if second:
        text = "members of a merged matrix need one second scale, and these have several"
        yield Reason("runtime.merged", _names(second), text)


def _shared(item: StoredScheme) -> tuple[Any, ...]:
    type = "" if item.storage == "dense" else item.type
    return (item.storage, type, item.packing, item.bits, item.symmetric, item.group, item.scales, item.second)


def _second_scale(tensor: Tensor | None) -> bytes:
    """Return the bytes of a tensor's second scale; empty if it has none."""
    part = None if tensor is None else tensor.parts.get(_SECOND)
    if part is None:
        return b""
    data = bytearray(part.nbytes)
    part.readinto(0, memoryview(data))
    return bytes(data)


def _unmet(requirement: Requirement, source: Source, config: Mapping[str, Any]) -> Iterator[Reason]:
    metadata = source.catalog.metadata
    if any(str(metadata.get(key)) in values for key, values in requirement.unless.items()):
        return
    why = f": {requirement.why}" if requirement.why else ""
    needs_files = requirement.files or requirement.any_files
    names = set(source.store.names()) if source.is_folder and needs_files else set()
    for name in requirement.files:
        if name not in names:
            yield Reason("runtime.file", source.location, f"{name} is missing{why}; {_COPY}")
    if requirement.any_files and not names & set(requirement.any_files):
        yield Reason("runtime.file", source.location, f"{' or '.join(requirement.any_files)} is missing{why}; {_COPY}")
    if _TOKENIZER in names & {*requirement.files, *requirement.any_files} and not _is_tokenizer(source):
        text = f"{_TOKENIZER} has no model with a vocabulary, so that the package tokenizers does not read it{why}"
        yield Reason("runtime.file", source.location, text)
    for key in requirement.metadata:
        name = _KEY.sub(lambda match: str(metadata.get(match[1], "")), key)
        if not name.startswith(".") and metadata.get(name) is None:
            yield Reason("runtime.metadata", source.location, f"the key {name} is missing{why}")
    inner = config.get("text_config")
    for key in requirement.config if config else ():
        if config.get(key) is None and not (isinstance(inner, Mapping) and inner.get(key) is not None):
            yield Reason("runtime.config", f"{source.location}: {CONFIG}", f"the key {key} is missing{why}")


def _unopened(profile: RuntimeProfile, source: Source) -> Iterator[Reason]:
    note = unopened_note(source)
    if note:
        yield Reason("runtime.tensors", source.location, note)
    elif profile.constraints.known_tensors:
        unknown = unknown_gguf_names(source.catalog.metadata, source.catalog.tensors)
        if unknown:
            architecture = source.catalog.metadata.get("general.architecture")
            text = f"the architecture {architecture} has no tensor of this name, and {profile.title} refuses others"
            yield Reason("runtime.tensors", _names(unknown), text)
    if profile.constraints.complete:
        for defect in defects_of(source, source.view()):
            yield Reason("runtime.tensors", defect.name, defect.message)


def _heads(profile: RuntimeProfile, source: Source) -> Iterator[Reason]:
    """Yield a reason if heads have another size than the program computes from the embedding."""
    metadata = source.catalog.metadata
    architecture = metadata.get("general.architecture")
    keys = (f"{architecture}.{key}" for key in ("attention.key_length", "embedding_length", "attention.head_count"))
    length, width, count = (metadata.get(key) for key in keys)
    if not (profile.constraints.derived_heads and isinstance(length, int) and isinstance(count, int)):
        return
    if length * count != width:
        text = f"heads of {length} columns; {profile.title} takes {width} / {count}, and fails to load others"
        yield Reason("runtime.heads", f"{architecture}.attention.key_length", text)


def _vocabulary(
    profile: RuntimeProfile, source: Source, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Iterator[Reason]:
    """Yield a reason if the number of tokens does not fit the rows of the embedding, by the rule ``vocabulary``."""
    rule = profile.constraints.vocabulary
    embedding = _embedding(tensors)
    if rule == "any" or embedding is None or not embedding.shape:
        return
    rows = embedding.shape[0]
    if not source.is_folder or _TOKENS in source.catalog.metadata:
        tokens = source.catalog.metadata.get(_TOKENS)
        count = len(tokens) if isinstance(tokens, Sequence) else None
        if count is not None and (count != rows if rule == "equal" else count > rows):
            text = f"{rows} rows, and the tokenizer has {count} tokens; {profile.title} needs equal numbers"
            yield Reason("runtime.vocabulary", embedding.name, text)
        return
    count = _token_count(source)
    if count is not None and count > rows:
        text = f"{rows} rows, and {_TOKENIZER} has tokens up to the id {count - 1}"
        yield Reason("runtime.vocabulary", embedding.name, text)
    declared = config.get("vocab_size")
    if isinstance(declared, int) and declared != rows and embedding.codec == DenseLayout.codec:
        yield Reason("runtime.vocabulary", embedding.name, f"{rows} rows, and {CONFIG} states vocab_size {declared}")


def _embedding(tensors: Mapping[str, Tensor]) -> Tensor | None:
    for name in tensors:
        if name in _EMBEDDING or (role_of(name) == "embedding" and "embed_tokens" in name):
            return tensors[name]
    return None


def _is_tokenizer(source: Source) -> bool:
    """Return whether ``tokenizer.json`` has a model with a vocabulary, as the package ``tokenizers`` expects."""
    model = _read_tokenizer(source).get("model")
    return isinstance(model, Mapping) and isinstance(model.get("vocab"), Mapping | list)


def _read_tokenizer(source: Source) -> Mapping[str, Any]:
    """Return ``tokenizer.json``; an empty mapping if it is missing, too large or no JSON object."""
    try:
        if _TOKENIZER not in source.store.names():
            return {}
        data = source.store.read(_TOKENIZER, _MAX_TOKENIZER, "runtime.vocabulary")
        parsed = json.loads(data)
    except (IngotError, ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _token_count(source: Source) -> int | None:
    """Return the largest id in ``tokenizer.json`` plus 1; None without a readable vocabulary."""
    tokenizer = _read_tokenizer(source)
    model = tokenizer.get("model")
    added = tokenizer.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = [value for value in vocabulary.values() if isinstance(value, int)] if isinstance(vocabulary, dict) else []
    if isinstance(vocabulary, list):
        ids = [len(vocabulary) - 1]
    entries = added if isinstance(added, list) else []
    ids += [item["id"] for item in entries if isinstance(item, dict) and isinstance(item.get("id"), int)]
    return max(ids) + 1 if ids else None


def _names(names: Sequence[str]) -> str:
    """Return names as one line: the first names, and the number of further names.

    Names that differ only in numbers, such as those of layers, are shown once as a pattern.
    """
    patterns = list(dict.fromkeys(map(pattern_of, names)))
    shown = ", ".join(patterns[:_SHOWN])
    more = f" and {len(patterns) - _SHOWN} more" if len(patterns) > _SHOWN else ""
    return f"{shown}{more}" + (f" ({len(names)} tensors)" if len(names) > 1 else "")
