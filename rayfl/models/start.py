"""Initial weights from files: the state of a network, a run, or an export."""

import hashlib
import json
import pickle
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from rayfl.config import ConfigError
from rayfl.core.net import Net, params_of
from rayfl.core.norms import fresh, is_statistic
from rayfl.core.tensors import Params

FILES = (".pth", ".pt", ".safetensors")
SHOWN = 3
"""Tensors that do not match and are named in an error."""


def is_state(place: str) -> bool:
    """Return whether a text names a file of a network's state, or the folder of a run or an export."""
    path = Path(place).expanduser()
    return path.suffix in FILES or any((path / name).exists() for name in ("checkpoints", "model.pt2"))


def read(place: str, hint: str) -> Params:
    """Return the tensors of a file, of a run's newest checkpoint, or of an export, by name. Raise ConfigError, with a
    hint, if there are none."""
    path = Path(place).expanduser()
    checkpoints = sorted(path.glob("checkpoints/round-*/state.safetensors"))
    if path.is_dir():
        path = checkpoints[-1] if checkpoints else path / "model.safetensors"
    if not path.is_file():
        raise ConfigError(
            f"model.weights: {place!r} is not valid. Allowed: an existing file {', '.join(FILES)} of a network's "
            f"state, or the folder of a run with a checkpoint or of an export. Hint: {hint}"
        )
    try:
        if checkpoints:
            _check_sum(path)
            with safe_open(path, "pt") as file:
                names = [name for name in file.keys() if name.startswith("params/")]
                return {name.removeprefix("params/"): file.get_tensor(name) for name in names}
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, "cpu", weights_only=True)
    except (OSError, KeyError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        [reason, *_] = [*str(error).splitlines(), type(error).__name__]
        raise ConfigError(
            f"model.weights: {path} cannot be read ({reason}). Allowed: the state of a network as torch or safetensors "
            "saves it; delete the file if it is damaged"
        ) from None
    if not isinstance(state, dict) or not all(isinstance(t, torch.Tensor) for t in state.values()):
        raise ConfigError(f"model.weights: {path} has no named tensors. Allowed: the state of a network")
    return state


def _check_sum(path: Path) -> None:
    """Raise ValueError if the SHA-256 of a checkpoint's file differs from the one in its manifest."""
    sums = json.loads((path.parent / "manifest.json").read_text(encoding="utf-8"))["sha256"]
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sums[path.name]:
            raise ValueError("the SHA-256 differs from the manifest's")


def matching(found: Params, net: Net, place: str, drawn: Collection[str], hint: str) -> Params:
    """Return the tensors of a whole network as float32. The classifier and layers at the paths `drawn` may be missing
    or have other shapes: they start as in a new network, and so do all statistics of norms if there are none. Raise
    ConfigError for other differences."""
    blank = net.blank()
    wanted = params_of(blank) | fresh(blank)
    # buffers are made by the constructor
    buffers = {name for name, _ in blank.named_buffers()}
    found = {n: t for n, t in found.items() if n not in buffers and not n.endswith("num_batches_tracked")}
    if not any(map(is_statistic, found)):
        wanted = {name: t for name, t in wanted.items() if not is_statistic(name)}
    given, fits = ({name: list(t.shape) for name, t in tensors.items()} for tensors in (found, wanted))
    wrong = [name for name in sorted(given.keys() | fits.keys()) if given.get(name) != fits.get(name)]
    free, paths = set(net.layout.classifier), tuple(f"{path}." for path in drawn)
    if differ := [name for name in wrong if name not in free and not name.startswith(paths)]:
        first = "; ".join(
            f"{name} is {given.get(name, 'missing')} and should be {fits.get(name, 'missing')}"
            for name in differ[:SHOWN]
        )
        raise ConfigError(
            f"model.weights: {len(differ)} tensors of {place} do not match {net.model.name} as it is configured "
            f"({first}). Allowed: {hint}"
        )
    return {name: t.float() if t.is_floating_point() else t for name, t in found.items() if name not in wrong}
