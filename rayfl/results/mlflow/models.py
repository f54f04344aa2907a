"""A sweep's submodels as MLflow models: `mlflow.pytorch.load_model("models:/ID")` loads a network without rayfl, and
`mlflow.register_model` accepts the same URI."""

import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rayfl.config import ConfigError
from rayfl.experiment import read_experiment
from rayfl.exporting.preparation import Preparation
from rayfl.exporting.submodels import as_module
from rayfl.methods.base import Deployment
from rayfl.metrics import label as text_of
from rayfl.results.folder import RunFolder, flatten
from rayfl.results.mlflow.copy import PARAM_LENGTH, Copy, history
from rayfl.results.mlflow.sent import Sent, experiment_of
from rayfl.results.mlflow.store import first_line, imported
from rayfl.results.mlflow.study import Study

Deployments = Mapping[float, Deployment]
"""Capacity -> deployed network."""


def log_models(copy: Copy, sweep: RunFolder, deployments: Callable[[Path], Deployments]) -> int:
    """Log the network of every capacity after the first run of every row's best point, except those already in MLflow.
    Return the number of models logged. `deployments` returns the networks by the run's folder. A run without a
    checkpoint is reported and left out; any other error is reported and ends the call, and the next call continues.
    Each network is exported as a program, which takes about a second.

    A model is an output of its run and has its parameters and latest metrics. It is named by row and capacity,
    "heterofl-0_25", because MLflow allows no dots.
    """
    sent, count = Sent.of(sweep.path), 0
    try:
        for label, run in Study.of(sweep).first_runs().items():
            try:
                found = deployments(Path(run["path"]))
            except ConfigError as error:
                copy.note(f"MLflow at {copy.store} receives no models of {label}: {first_line(error)}")
                continue
            around = None
            for name, (capacity, deployed) in _names(label, found).items():
                if name in sent.models or deployed.is_start:
                    continue
                if around is None:
                    experiment = read_experiment(RunFolder.open(run["path"]).config, run["path"])
                    around = Preparation.of(experiment, experiment.data.arrays)
                with TemporaryDirectory() as folder:
                    about = {"label": label, "capacity": text_of(capacity), "rayfl.run_id": run["id"]}
                    _log(copy, RunFolder.open(run["path"]), name, deployed, around, about, Path(folder) / "model")
                count += 1
                sent.models.append(name)
                sent.save(sweep.path)
    # no error of a server, disk, or torch's exporter may fail a finished sweep
    except Exception as error:
        copy.note(f"MLflow at {copy.store} receives no more models: {first_line(error)}")
    return count


def _names(label: str, found: Deployments) -> dict[str, tuple[float, Deployment]]:
    return {re.sub(r"[/:.%\"']", "_", f"{label}-{text_of(c)}"): (c, deployed) for c, deployed in found.items()}


def _log(
    copy: Copy,
    run: RunFolder,
    name: str,
    deployed: Deployment,
    around: Preparation,
    about: Mapping[str, str],
    folder: Path,
) -> None:
    from mlflow.entities import LoggedModelOutput

    store, experiment = copy.store, experiment_of(run)

    def create() -> tuple[str, str]:
        run_id = copy.id_of(run.id, experiment)
        where = copy.experiment(experiment)
        params = {key: str(value)[:PARAM_LENGTH] for key, value in flatten(run.config).items()}
        model = store.call("create_logged_model", where, name, run_id, dict(about), params, "submodel")
        return run_id, model.model_id

    run_id, model_id = store.patiently(create)
    save(deployed, around, folder, run_id, model_id)

    def send() -> None:
        store.call("log_model_artifacts", model_id, str(folder))
        copy.log(run_id, {value[0]: value for value in history(run)}.values(), model_id)
        store.call("finalize_logged_model", model_id, "READY")
        store.call("log_outputs", run_id, [LoggedModelOutput(model_id, run.facts.rounds)])

    store.patiently(send)


def save(
    deployed: Deployment, around: Preparation, folder: Path, run_id: str | None = None, model_id: str | None = None
) -> None:
    """Write an MLflow model into a new folder: the program of `rayfl export`."""
    imported()
    from mlflow import pytorch
    from mlflow.models import Model

    module, example = as_module(deployed, around), around.example(deployed.net, 2)
    with torch.no_grad():
        answer = module(example)
    with warnings.catch_warnings():
        # about type hints of functions that are never called
        warnings.simplefilter("ignore")
        pytorch.save_model(
            module,
            str(folder),
            mlflow_model=Model(run_id=run_id, model_id=model_id),
            signature=_signature(example, answer),
            input_example=example.numpy(),
            serialization_format="pt2",
            # by default a separate process infers them
            pip_requirements=[f"torch=={torch.__version__.partition('+')[0]}"],
        )


def _signature(example: torch.Tensor, answer: torch.Tensor) -> Any:
    """Return the signature of a network with any batch size."""
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    taken, given = (Schema([TensorSpec(t.numpy().dtype, (-1, *t.shape[1:]))]) for t in (example, answer))
    return ModelSignature(taken, given)
