"""``ingot kernel``, and the output of ``ingot inspect`` for a kernel unit."""

from __future__ import annotations

from click.exceptions import Exit

from ingot.cli.declare import declare
from ingot.cli.output import Json, render
from ingot.errors import UsageError
from ingot.ext.ane.options import KernelOptions
from ingot.stores.location import AnyPath

EPILOG = (
    "Examples:\n\n"
    "  ingot kernel model.safetensors model.layers.0.mlp.up_proj.weight up.anek --chip m1\n\n"
    "  ingot kernel model.zt conv1.weight conv1.anek --chip m4 --bias conv1.bias --activation gelu\n\n"
    "  ingot kernel model.zt conv1.weight conv1.anek --chip m4 --activation tanh --domain=-3,3 --outside line\n\n"
    "  ingot kernel ./m1-model ./m1-kernels --chip m1\n\n"
    "  ingot inspect up.anek"
)


@declare("kernel", EPILOG)
def command(options: KernelOptions, json: Json = False) -> None:
    """Pack a weight for an Apple Neural Engine as published: six sections, records of output-channel groups, tiles.

    Without OUT, every kernel of the checkpoint is packed into a folder. Weights that stream on the chip keep their
    stored form; weights that fold become dense fp16. The layout is partly inferred and has a version; no tool of
    Apple's reads it.
    """
    if options.out is None:
        _pack_model(options, json)
        return
    from ingot.ext.ane.kernel import pack_kernel

    render(pack_kernel(options).report(), json=json)


def _pack_model(options: KernelOptions, json: bool) -> None:
    """Pack every kernel; exit code 1 if some are refused."""
    from ingot.ext.ane.kernel import pack_model

    if (options.bias, options.activation, options.domain, options.outside) != (None, None, None, None):
        raise UsageError("expected --bias and --activation with a tensor and a file", rule="ane.layout")
    folder = options.name
    chip = options.chip
    report = pack_model(options.path, folder, chip, assume=options.assume, overwrite=options.overwrite)
    render(report.report(), json=json)
    if report.refused:
        raise Exit(1)


def show(path: AnyPath, list_records: bool, json: bool) -> None:
    """Print the content of a kernel unit."""
    from ingot.ext.ane.kernel import inspect_kernel

    render(inspect_kernel(path).report(records=list_records), json=json)
