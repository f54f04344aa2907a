"""Logger for Weights & Biases: `listeners: [wandb]`, after `wandb login`."""

import importlib
import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import PrivateAttr, model_validator

from rayfl.listeners.base import Listener
from rayfl.listeners.tracking import name_of, numbers, require
from rayfl.metrics import Line


class WeightsAndBiases(Listener):
    """Logger of configuration and all numeric metrics for Weights & Biases (extra `wandb`)."""

    name: Literal["wandb"] = "wandb"
    project: str = "rayfl"
    """Project of the runs."""
    entity: str | None = None
    """User or team of the project. Default: the user who is logged in."""
    mode: Literal["online", "offline"] = "online"
    """online: send metrics. offline: write files to `folder` for `wandb sync`."""
    folder: str | None = None
    """Folder of the files of wandb. Default: the folder of the run, or the working folder in trials of a sweep."""
    _run: Any = PrivateAttr(None)

    @model_validator(mode="after")
    def _installed(self) -> Self:
        require("wandb", "wandb")
        return self

    def on_start(self, config: dict[str, Any], folder: Path | None, round: int) -> None:
        wandb: Any = importlib.import_module("wandb")

        name = name_of(config, folder)
        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            mode=self.mode,
            dir=self.folder or folder,
            config=config,
            name=name,
            # a resumed run continues the existing one
            id=_id_of(folder) or (name if "trial" in config else None),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def on_round(self, line: Line) -> None:
        self._run.log(numbers(line), step=line["round"])

    def on_end(self, status: str) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if status == "finished" else 1)


def _id_of(folder: Path | None) -> str | None:
    """Return the id of the run in a folder, because folder names are not unique."""
    return None if folder is None else json.loads((folder / "run.json").read_text(encoding="utf-8"))["id"]
