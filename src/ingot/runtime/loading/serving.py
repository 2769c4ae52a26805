"""Extensions that change how a loaded model generates: packed KV caches and draft heads.

They are registered in the groups ``ingot.kv_caches`` and ``ingot.draft_decoders``. Options of ``load_model`` and
``generate`` use the entries ``packed`` and ``eagle3``. Values need torch and transformers when they are imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ingot.core.registry import Instances
from ingot.model.tensor import Tensor
from ingot.runtime.loading.kv_options import KvCache, KvUse


class CacheInUse(Protocol):
    """A packed KV cache that a model has filled with keys and values."""

    def use(self) -> KvUse:
        """Return the number of cached tokens and the size of the cache in bytes."""
        ...


class KvCaching(Protocol):
    """Installs packed KV caches in models of transformers; the entry ``packed`` implements it."""

    def install(self, model: Any, settings: KvCache) -> None:
        """Install packed caches in ``model``. Raises ``UnsupportedError`` ``kv.model``, ``kv.evict``."""
        ...

    def use_kv_cache(self, model: Any, kv_cache: Any = "int4") -> Any:
        """Install caches with settings as text, a mapping or ``KvCache``; return the model.

        Raises ``UnsupportedError`` ``kv.model``, ``kv.evict``.
        """

    def settings_of(self, model: Any) -> KvCache | None:
        """Return the settings of a model's caches; None if they are transformers' own."""
        ...

    def read_in_steps(self, model: Any, batch: Any) -> tuple[Any, CacheInUse]:
        """Run a model on the tokens ``batch`` through a packed cache.

        Returns the logits, equal to those of reading one token at a time, and the filled cache.
        """
        ...


class DraftDecoding(Protocol):
    """Generates text with a draft head that proposes tokens; the entry ``eagle3`` implements it."""

    def head(self, tensors: Mapping[str, Tensor], model: Any, config: Mapping[str, Any] | None) -> Any:
        """Return the draft head of a target model. Raises ``FormatError`` ``draft.*``."""
        ...

    def speculate(
        self, model: Any, tokens: Any, count: int, enough: Callable[[list[int]], bool], drafter: Any, ahead: int
    ) -> Any:
        """Return up to ``count`` new tokens after ``tokens``, and measurements of the run.

        The tokens equal those that the model generates without the head.
        """
        ...


KV_CACHES: Instances[KvCaching] = Instances("KV cache", group="ingot.kv_caches", contract=KvCaching)
DRAFT_DECODERS: Instances[DraftDecoding] = Instances(
    "draft decoder", group="ingot.draft_decoders", contract=DraftDecoding
)

PACKED, EAGLE = "packed", "eagle3"
"""The names of the entries that ``load_model`` and ``generate`` use."""
