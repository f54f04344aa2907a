"""A run's metrics in Weights & Biases: `listeners: [wandb]`, after `wandb login`."""

import importlib
import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import PrivateAttr, model_validator

from rayfl.listeners.base import Listener
from rayfl.listeners.tracking import name_of, numbers, require
from rayfl.metrics import Line


class WeightsAndBiases(Listener):
    """Sends the configuration, and every number of a round, to Weights & Biases (`pip install 'rayfl[wandb]'`)."""

    name: Literal["wandb"] = "wandb"
    project: str = "rayfl"
    """Where its runs are collected."""
    entity: str | None = None
    """The user or team whose project it is; null: whoever is logged in."""
    mode: Literal["online", "offline"] = "online"
    """offline: files in `folder`, for `wandb sync`."""
    folder: str | None = None
    """Where it keeps its files; null: the run's folder, or of a trial of a sweep the working folder."""
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
            # who goes on sends to the run that is there
            id=_id_of(folder) or name,
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def on_round(self, line: Line) -> None:
        self._run.log(numbers(line), step=line["round"])

    def on_end(self, status: str) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if status == "finished" else 1)


def _id_of(folder: Path | None) -> str | None:
    """Of the run in a folder: other runs may have a folder of this name elsewhere."""
    return None if folder is None else json.loads((folder / "run.json").read_text())["id"]
