"""rayfl simulates federated learning with heterogeneous clients. Public names for notebooks and other packages:

    import rayfl

    result = rayfl.run({"model": "digits_cnn", "method": "heterofl", "clients": {"capacities": [1, 0.25]}})
    result.metrics, result.submodel(0.25), result.plots

Names are imported on first use, so that `rayfl --help` does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayfl.config import ConfigError as ConfigError
    from rayfl.core import Axis as Axis
    from rayfl.core import Fold as Fold
    from rayfl.core import Net as Net
    from rayfl.core import Update as Update
    from rayfl.core import conv as conv
    from rayfl.core import declare as declare
    from rayfl.core import embedding as embedding
    from rayfl.core import linear as linear
    from rayfl.core import norm as norm
    from rayfl.data.base import Arrays as Arrays
    from rayfl.data.base import DataSet as DataSet
    from rayfl.data.datasets import Datasets as Datasets
    from rayfl.data.images import ImageData as ImageData
    from rayfl.data.images import Images as Images
    from rayfl.data.memory import InMemory as InMemory
    from rayfl.data.partition.base import NOBODY as NOBODY
    from rayfl.data.partition.base import Labels as Labels
    from rayfl.data.partition.base import Partition as Partition
    from rayfl.data.scores import Score as Score
    from rayfl.driver import Result as Result
    from rayfl.driver import run as run
    from rayfl.experiment import Experiment as Experiment
    from rayfl.listeners import Listener as Listener
    from rayfl.methods.base import Client as Client
    from rayfl.methods.base import Deployment as Deployment
    from rayfl.methods.base import Method as Method
    from rayfl.methods.base import Task as Task
    from rayfl.methods.base import Visit as Visit
    from rayfl.methods.dense import Dense as Dense
    from rayfl.models.base import ImageModel as ImageModel
    from rayfl.models.base import Model as Model
    from rayfl.models.inferred.module import Module as Module
    from rayfl.models.layers import scaler as scaler
    from rayfl.networks import export as export
    from rayfl.networks import generate as generate
    from rayfl.session import Session as Session
    from rayfl.session import start as start
    from rayfl.system import Availability as Availability
    from rayfl.system import Device as Device
    from rayfl.system import Devices as Devices
    from rayfl.system import Sampler as Sampler
    from rayfl.system import Speed as Speed
    from rayfl.training import Transform as Transform
    from rayfl.tuning.comparison import Comparison as Comparison
    from rayfl.tuning.comparison import sweep as sweep

_PUBLIC = {
    "config": ("ConfigError",),
    "core": ("Axis", "Fold", "Net", "Update", "conv", "declare", "embedding", "linear", "norm"),
    "data.base": ("Arrays", "DataSet"),
    "data.datasets": ("Datasets",),
    "data.scores": ("Score",),
    "data.images": ("ImageData", "Images"),
    "data.memory": ("InMemory",),
    "data.partition.base": ("NOBODY", "Labels", "Partition"),
    "driver": ("Result", "run"),
    "experiment": ("Experiment",),
    "listeners": ("Listener",),
    "methods.base": ("Client", "Deployment", "Method", "Task", "Visit"),
    "methods.dense": ("Dense",),
    "models.base": ("ImageModel", "Model"),
    "models.inferred.module": ("Module",),
    "models.layers": ("scaler",),
    "networks": ("export", "generate"),
    "session": ("Session", "start"),
    "system": ("Availability", "Device", "Devices", "Sampler", "Speed"),
    "training": ("Transform",),
    "tuning.comparison": ("Comparison", "sweep"),
}
"""Module -> the public names in it."""

_MODULES = {name: f"rayfl.{module}" for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'rayfl' has no attribute {name!r}. Public names: {', '.join(__all__)}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
