"""A model as a stack of layers that are run one at a time: what goes into the first, between, and out of the last.

The model's own forward is run with its layers replaced: each notes what it is called with and hands its input on. So
masks and positions are the model's own, and so is all that stands before and behind the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ingot.core.border import require
from ingot.errors import IngotError, UnsupportedError

_FORMS: tuple[Callable[[Any], Any], ...] = (
    lambda hidden: hidden,
    lambda hidden: (hidden,),
    lambda hidden: (hidden, None),
    lambda hidden: (hidden, None, None),
)


@dataclass(frozen=True, slots=True)
class Call:
    """What one layer is called with beside its hidden states."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    named: str | None


@dataclass(frozen=True, slots=True)
class Entered:
    """What the first layer gets, and how each is called."""

    hidden: Any
    calls: Sequence[Call]


class Stack:
    """The layers of a model.

    Parameters
    ----------
    model : PreTrainedModel
        Everything outside its lists of layers has its weights.
    tokens : i64 [1, n]
        A few, to find the layers with.

    Attributes
    ----------
    paths : list of str
        The layers' paths, in the order in which they run.

    Raises
    ------
    UnsupportedError
        ``calibrate.architecture``: layers that do not run once each, one on what the one before put out.
    """

    def __init__(self, model: Any, tokens: Any) -> None:
        self._torch = require("torch", "torch")
        self._model = model
        lists = _outermost(self._torch, model)
        candidates = {f"{name}.{number}": layer for name, items in lists.items() for number, layer in enumerate(items)}
        reason: BaseException | None = None
        self._running, self._zeros = _Run(), self._torch.zeros_like(self.embedded(tokens))
        for form in _FORMS:
            self._form = form
            try:
                run = self._run(candidates, self._zeros, None)
            except IngotError:
                raise
            except Exception as error:  # whatever a model does with what is no layer's output
                reason = error
                continue
            names = [name for name, _, _ in run.entries]
            if names and len(set(names)) == len(names) and run.handed_on:
                self.paths = names
                self._layers = [candidates[name] for name in names]
                return
        raise UnsupportedError(
            f"expected layers of which each runs once, on what the one before puts out; {type(model).__name__} is "
            "built otherwise",
            rule="calibrate.architecture",
        ) from reason

    def embedded(self, tokens: Any) -> Any:
        """Return the embedding of tokens: f32 [windows, length, width]."""
        return self._model.get_input_embeddings()(tokens)

    def enter(self, embedded: Any, *, learns: bool = False) -> Entered:
        """Return what the first layer gets for these embeddings, and how the layers are called.

        Unless ``learns``, values beside the input that depend on the embeddings are refused.
        """
        entries = self._headless(embedded, None).entries
        calls = [call for _, call, _ in entries]
        if not learns and any(
            _learns(self._torch, value) for call in calls for value in (*call.args, *call.kwargs.values())
        ):
            raise UnsupportedError(
                "expected layers that get no other values of the embeddings than their input",
                rule="calibrate.architecture",
            )
        return Entered(entries[0][2], calls)

    def stands_before(self, modules: Sequence[Any]) -> list[bool]:
        """Return of modules outside the layers which run before the first, with the input that tells the tokens."""
        found = [False] * len(modules)

        def note(number: int, *_: Any) -> None:
            found[number] = not self._running.entries

        hooks = [module.register_forward_pre_hook(partial(note, number)) for number, module in enumerate(modules)]
        try:
            self.enter(self._zeros)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def layer(self, number: int, hidden: Any, call: Call) -> Any:
        """Return what a layer puts out for hidden states: [windows, length, width]."""
        given = (hidden, *call.args) if call.named is None else call.args
        named = call.kwargs if call.named is None else {**call.kwargs, call.named: hidden}
        out = self._layers[number](*given, **named)
        return out[0] if isinstance(out, tuple) else out

    def leave(self, hidden: Any, width: int, *, headless: bool = False) -> Any:
        """Return the model's output where the last layer puts out ``hidden``: [windows, length, width].

        ``headless``: what would tell the tokens is called, and what it gets may stand in the place of its product.
        """
        zeros = hidden.new_zeros(*hidden.shape[:-1], width)
        return (self._headless if headless else self._through)(zeros, hidden).out

    def _through(self, embedded: Any, last: Any) -> _Run:
        return self._run(dict(zip(self.paths, self._layers, strict=True)), embedded, last)

    def _headless(self, embedded: Any, last: Any) -> _Run:
        """Run the model without its head, of which nothing is wanted: it may be as large as some layers."""
        head = self._model.get_output_embeddings()
        if head is None:
            return self._through(embedded, last)
        own = head.__dict__.get("forward")
        head.forward = lambda inputs: inputs
        try:
            return self._through(embedded, last)
        except IngotError:
            raise
        except Exception:  # a model that does more with logits than to scale them
            _put_back(head, own)
            return self._through(embedded, last)
        finally:
            _put_back(head, own)

    def _run(self, layers: Mapping[str, Any], embedded: Any, last: Any) -> _Run:
        """Run the model without its layers; where ``last`` is given the last one puts that out."""
        run = self._running = _Run()
        before: list[Any] = []

        def replaced(name: str) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                named = None if args else "hidden_states"
                hidden = args[0] if args else kwargs["hidden_states"]
                rest = {key: value for key, value in kwargs.items() if key != named}
                run.handed_on &= not before or hidden is before[-1]
                run.entries.append((name, Call(args[1:], rest, named), hidden))
                out = last if last is not None and len(run.entries) == len(layers) else hidden.view_as(hidden)
                before.append(out)
                return self._form(out)

            return forward

        with _replaced(layers, replaced):
            run.out = self._model(inputs_embeds=embedded, use_cache=False)
        return run


@dataclass(slots=True)
class _Run:
    """What each layer got, in order, whether it was what the one before put out, and the model's output."""

    entries: list[tuple[str, Call, Any]] = field(default_factory=list)
    handed_on: bool = True
    out: Any = None


def _put_back(module: Any, forward: Any) -> None:
    """Give a module the forward that was set on it, or that of its class."""
    if forward is not None:
        module.forward = forward
    elif "forward" in module.__dict__:
        del module.forward


def _learns(torch: Any, value: Any) -> bool:
    """Whether a value depends on the embeddings, or may come to, as what layers put into a dictionary does."""
    if isinstance(value, dict):
        return True
    if isinstance(value, tuple | list):
        return any(_learns(torch, item) for item in value)
    return isinstance(value, torch.Tensor) and value.requires_grad


def _outermost(torch: Any, model: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


@contextmanager
def _replaced(layers: Mapping[str, Any], forward: Callable[[str], Any]) -> Iterator[None]:
    for name, layer in layers.items():
        layer.forward = forward(name)
    try:
        yield
    finally:
        for layer in layers.values():
            del layer.forward
