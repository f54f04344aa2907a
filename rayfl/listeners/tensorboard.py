"""Logger for TensorBoard: `listeners: [tensorboard]`, then `tensorboard --logdir runs`."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import PrivateAttr, model_validator

from rayfl.config import ConfigError
from rayfl.listeners.base import Listener
from rayfl.listeners.tracking import name_of, numbers, require
from rayfl.metrics import Line


class TensorBoard(Listener):
    """Logger of all numeric metrics for TensorBoard (extra `tensorboard`)."""

    name: Literal["tensorboard"] = "tensorboard"
    folder: str | None = None
    """Folder of the event files, with one subfolder per run. Default: `tensorboard/` in the folder of the run. Sweeps
    need one; a relative path is inside the folder of the trial."""
    _writer: Any = PrivateAttr(None)

    @model_validator(mode="after")
    def _installed(self) -> Self:
        require("tensorboard", "tensorboard")
        return self

    def on_start(self, config: dict[str, Any], folder: Path | None, round: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self.folder is not None:
            place = Path(self.folder).expanduser() / name_of(config, folder)
        elif folder is not None:
            place = folder / "tensorboard"
        else:
            raise ConfigError(
                "listeners: tensorboard.folder: a value is required in a sweep and with rayfl.start. Allowed: a "
                "folder, in a sweep relative to that of the trial"
            )
        # events of repeated rounds are removed
        self._writer = SummaryWriter(str(place), purge_step=round + 1)

    def on_round(self, line: Line) -> None:
        for key, value in numbers(line).items():
            self._writer.add_scalar(key, value, line["round"])

    def on_end(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()
