"""A sweep's submodels as MLflow's models: `mlflow.pytorch.load_model("models:/ID")` gives a network that needs no
rayfl, and `mlflow.register_model` takes the same address."""

import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rayfl.exporting.submodels import as_module
from rayfl.methods.base import Deployment
from rayfl.metrics import label as named
from rayfl.results.folder import RunFolder
from rayfl.results.mlflow.copy import Copy
from rayfl.results.mlflow.sent import Sent, experiment_of
from rayfl.results.mlflow.store import first_line, imported
from rayfl.results.mlflow.study import Study

Deployments = Mapping[float, Deployment]
"""Capacity -> what a device of this capacity runs."""


def log_models(copy: Copy, sweep: RunFolder, deployments: Callable[[Path], Deployments]) -> int:
    """Logs what a device of every capacity runs after the best run of every row of a sweep, where MLflow has not got
    it; returns how many models. `deployments` gives the networks by the run's folder. What goes wrong is said, and the
    rest is left out: the next call goes on. Each becomes a program: that takes seconds for the first, and about one for
    others.

    A model is an output of its run, and is called as its row and capacity: "heterofl-0_25", for MLflow allows no dots.
    """
    sent, count = Sent.of(sweep.path), 0
    try:
        for label, run in Study.of(sweep).best_runs().items():
            missing = _names(label, deployments(Path(run["path"])))
            for name, (capacity, deployed) in missing.items():
                if name in sent.models or deployed.is_start:
                    continue
                with TemporaryDirectory() as folder:
                    about = {"label": label, "capacity": named(capacity), "rayfl.run_id": run["id"]}
                    _log(copy, RunFolder.open(run["path"]), name, deployed, about, Path(folder) / "model")
                count += 1
                sent.models.append(name)
                sent.save(sweep.path)
    # whatever a server, a disk, or torch's exporter raises: the sweep has ended well
    except Exception as error:
        copy.note(f"MLflow at {copy.store} gets no more models: {first_line(error)}")
    return count


def _names(label: str, found: Deployments) -> dict[str, tuple[float, Deployment]]:
    return {re.sub(r"[/:.%\"']", "_", f"{label}-{named(c)}"): (c, deployed) for c, deployed in found.items()}


def _log(copy: Copy, run: RunFolder, name: str, deployed: Deployment, about: Mapping[str, str], folder: Path) -> None:
    from mlflow.entities import LoggedModelOutput

    store, experiment = copy.store, experiment_of(run)

    def create() -> tuple[str, str]:
        run_id = copy.id_of(run.id, experiment)
        where = copy.experiment(experiment)
        model = store.call("create_logged_model", where, name, run_id, dict(about), model_type="submodel")
        return run_id, model.model_id

    run_id, model_id = store.patiently(create)
    save(deployed, folder, run_id, model_id)

    def send() -> None:
        store.call("log_model_artifacts", model_id, str(folder))
        store.call("finalize_logged_model", model_id, "READY")
        store.call("log_outputs", run_id, [LoggedModelOutput(model_id, run.facts.rounds)])

    store.patiently(send)


def save(deployed: Deployment, folder: Path, run_id: str | None = None, model_id: str | None = None) -> None:
    """Writes an MLflow model into a new folder: the program that `rayfl export` makes."""
    imported()
    from mlflow import pytorch
    from mlflow.models import Model

    module, example = as_module(deployed), deployed.net.model.example(2, "cpu")
    with torch.no_grad():
        answer = module(example)
    with warnings.catch_warnings():
        # of type hints of functions that nobody calls
        warnings.simplefilter("ignore")
        pytorch.save_model(
            module,
            str(folder),
            mlflow_model=Model(run_id=run_id, model_id=model_id),
            signature=_signature(example, answer),
            input_example=example.numpy(),
            serialization_format="pt2",
            # unless given, a process of its own finds them out
            pip_requirements=[f"torch=={torch.__version__.partition('+')[0]}"],
        )


def _signature(example: torch.Tensor, answer: torch.Tensor) -> Any:
    """Of a network that takes a batch of any size."""
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    taken, given = (Schema([TensorSpec(t.numpy().dtype, (-1, *t.shape[1:]))]) for t in (example, answer))
    return ModelSignature(taken, given)
