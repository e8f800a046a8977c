"""Starts the device `tpu` in this process, once: a real TPU, or the simulated one."""

from __future__ import annotations

import os
import warnings
from typing import Any

MODES = {"eager": "DEFER_NEVER", "fused": "DEFER_AND_FUSE", "compiled": "DEFER_NEVER"}
"""TorchTPU's execution mode for each of ours; compiled programs pass it by, the transfers around them do not."""


class TpuUnavailableError(OSError):
    """There is no TPU, or the simulated one lacks something; the text says what to do."""


def start(*, simulate: bool = False, mode: str = "compiled") -> None:
    """Registers `tpu` with torch and sets how single operations are executed.

    Raises:
        TpuUnavailableError: there is no TPU, or the simulated one lacks something.
        ImportError: torch_tpu is not installed.
        RuntimeError: TorchTPU cannot start the device.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    if simulate:
        from tpu import simulated

        try:
            simulated.prepare()
        except simulated.SimulationError as error:
            raise TpuUnavailableError(str(error)) from error
    import torch

    with warnings.catch_warnings():
        # Whether tcmalloc is preloaded is the service's business, not a user's.
        warnings.filterwarnings("ignore", message=".*tcmalloc.*")
        import torch_tpu  # noqa: F401
        from torch_tpu import _loader
        from torch_tpu._internal import execution_mode

        if torch._C._get_privateuse1_backend_name() != "tpu":
            from torch_tpu._internal.utils import hardware

            if simulate:
                # The one question that TorchTPU puts to the PCI bus.
                hardware.get_tpu_device_count = lambda *args, **kwargs: 1
            elif hardware.get_tpu_device_count() == 0:
                # libtpu would ask a metadata server for minutes.
                raise TpuUnavailableError(
                    "expected a TPU on the PCI bus, found none; --simulate-tpu runs TorchTPU on this machine's CPU"
                )
            _loader._init_device("tpu")
        warnings.filterwarnings("ignore", message=".*eager_mode is experimental.*")
        torch_device: Any = torch.tpu  # type: ignore[attr-defined]
        torch_device.eager_mode = execution_mode.EagerMode[MODES[mode]]
