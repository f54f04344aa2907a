"""One published method a file; README.md says how to add one."""

from rayfl.config import Kind
from rayfl.fold import Update as Update
from rayfl.methods.base import Client as Client
from rayfl.methods.base import Deployment as Deployment
from rayfl.methods.base import Method as Method
from rayfl.methods.base import Task as Task
from rayfl.methods.base import Visit as Visit
from rayfl.methods.dense import Dense as Dense
from rayfl.methods.depthfl import DepthFL
from rayfl.methods.depthfl_nefl import DepthFLNeFL
from rayfl.methods.distillation import DISTILLATION
from rayfl.methods.fedavg import FedAvg
from rayfl.methods.feddropout import FedDropout
from rayfl.methods.fedpm import FedPM
from rayfl.methods.fedprox import FedProx
from rayfl.methods.fedrolex import FedRolex
from rayfl.methods.fiarse import FIARSE
from rayfl.methods.fiarse_neurons import FIARSENeurons
from rayfl.methods.fjord import FjORD
from rayfl.methods.heterofl import HeteroFL
from rayfl.methods.lg_fedavg import LGFedAvg
from rayfl.methods.lowrank import LOWRANK
from rayfl.methods.nefl import NeFL
from rayfl.methods.pruning_greedy import PruningGreedy
from rayfl.methods.scaffold import Scaffold
from rayfl.methods.scalefl import ScaleFL
from rayfl.methods.scalefl_nefl import ScaleFLNeFL
from rayfl.methods.spafl import SpaFL
from rayfl.methods.standalone import Standalone

METHODS: dict[str, type[Method]] = {
    "fedavg": FedAvg,
    "heterofl": HeteroFL,
    "fedrolex": FedRolex,
    "feddropout": FedDropout,
    "fjord": FjORD,
    "lg_fedavg": LGFedAvg,
    "standalone": Standalone,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "depthfl": DepthFL,
    "scalefl": ScaleFL,
    "scalefl_nefl": ScaleFLNeFL,
    "nefl": NeFL,
    "depthfl_nefl": DepthFLNeFL,
    "fiarse_neurons": FIARSENeurons,
    "spafl": SpaFL,
    "fedpm": FedPM,
    "fiarse": FIARSE,
    "pruning_greedy": PruningGreedy,
    **LOWRANK,
    **DISTILLATION,
}

METHODS_KIND = Kind("method", Method, METHODS, "rayfl.methods")
