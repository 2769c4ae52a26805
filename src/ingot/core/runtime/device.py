"""The device that a caller requests for torch's computations (``spec/loading.md``, "Devices")."""

from __future__ import annotations

import warnings
from typing import Any

from ingot.core.border import require
from ingot.errors import ResourceError, UsageError

# Types of devices that torch itself can count; further types need other packages.
_COUNTED = ("cuda", "mps", "xpu")


def resolve_device(device: Any) -> Any:
    """Return the ``torch.device`` for a name, an index or a ``torch.device``, if it has memory for values.

    Raises
    ------
    UsageError
        ``model.device``: torch does not have the device, or the device has no memory for values.
    MissingExtraError
        torch is not installed.
    """
    torch = require("torch", "torch")
    shown = f"{str(device)!r:.80}"
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns of names that it will drop
            target = torch.device(device)
            torch.empty(0, device=target)
    except (RuntimeError, TypeError, ValueError, AssertionError, ImportError) as error:
        raise _device_error(torch, f"expected a device that this torch has, found {shown}") from error
    if target.type == "meta":
        raise _device_error(torch, f"expected a device with memory for values, found {shown}")
    if target.index and target.type in ("cpu", *_COUNTED) and str(target) not in available_devices(torch):
        raise _device_error(torch, f"expected a device that is present, found {shown}")
    return torch.device("cpu") if target.type == "cpu" else target


def available_devices(torch: Any) -> list[str]:
    """Return the names of the devices that torch can use here: the CPU, then the others by type and index."""
    names = ["cpu"]
    for device_type in _COUNTED:
        backend = getattr(torch, device_type, None)
        if backend is not None and backend.is_available():
            count = backend.device_count()
            names += [device_type] if device_type == "mps" else [f"{device_type}:{index}" for index in range(count)]
    return names


def _device_error(torch: Any, problem: str) -> UsageError:
    devices = available_devices(torch)
    present = f"the only device here is {devices[0]}" if len(devices) == 1 else f"devices here: {', '.join(devices)}"
    return UsageError(f"{problem}; {present}", rule="model.device")


def free_memory(torch: Any, device: Any) -> int | None:
    """Return the bytes that are free on a device; None if torch does not count the device's memory."""
    backend: Any = getattr(torch, device.type, None)
    if device.type == "mps":
        return int(backend.recommended_max_memory() - backend.current_allocated_memory())
    measure = getattr(backend, "mem_get_info", None)
    return None if measure is None else int(measure(device)[0])


def release_cached(torch: Any, device: Any) -> None:
    """Return memory that torch caches on a device, so that larger blocks of it are free."""
    empty_cache = getattr(getattr(torch, device.type, None), "empty_cache", None)
    if empty_cache is not None:
        empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of torch means that a device has no memory for a tensor."""
    return isinstance(error, RuntimeError) and "out of memory" in str(error)


def no_device_memory(device: Any, error: BaseException) -> ResourceError:
    """Return the error for a device without memory for the smallest block of work."""
    first_line = next(iter(str(error).strip().splitlines()), "out of memory")
    return ResourceError(
        f"{device} has too little free memory, also for one window and one matrix at a time: {first_line:.200}; close "
        "other programs on it, use a smaller --length, or --device cpu; --resume keeps what is finished",
        rule="device.memory",
    )


def widest_float(torch: Any, device: Any) -> Any:
    """Return f64 if the device has it, else f32."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


def synchronize(torch: Any, device: Any) -> None:
    """Wait until a device has computed everything: all devices except the CPU compute asynchronously."""
    if device.type == "cpu":
        return
    backend = getattr(torch, device.type)
    if device.type == "mps":
        backend.synchronize()
    else:
        backend.synchronize(device)
