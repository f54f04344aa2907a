"""The device on which a process trains: the CPU or a GPU."""

import os
from typing import Literal

import torch

from rayfl.config import ConfigError

ONLY_DECLARED = "RAYFL_GPUS_ONLY_DECLARED"
"""Environment variable of tests that declare GPUs to Ray on machines without any: with 1, their actors run on CPUs."""


def only_declared() -> bool:
    return os.environ.get(ONLY_DECLARED) == "1"


def usable() -> bool:
    """Return whether PyTorch can use a GPU of this machine."""
    return only_declared() or torch.cuda.is_available()


def indexed(device: torch.device | str) -> torch.device:
    """Return a device with its index, as tensors state it: networks are cached by device."""
    return torch.empty(0, device=device).device


def is_lost(device: torch.device) -> bool:
    """Return whether this process can no longer use its GPU: most errors of CUDA stay until the process ends."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def of_serial(gpus: float | Literal["auto"]) -> tuple[torch.device, str]:
    """Return the device of a serial run, and a sentence on it for the user. Raise ConfigError if `run.gpus` asks for a
    GPU that PyTorch cannot use."""
    if gpus == 0 or (gpus == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu"), f"one process on the CPU; {'no GPU found' if gpus else 'run.gpus is 0'}"
    if not torch.cuda.is_available():
        raise ConfigError(
            f"run.gpus: {gpus:g} is not valid, because PyTorch {torch.__version__} finds no CUDA device here. Allowed: "
            "auto or 0"
        )
    return torch.device("cuda"), f"one process on one GPU ({torch.cuda.get_device_name()})"
