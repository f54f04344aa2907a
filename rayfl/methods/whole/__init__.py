"""Methods that train whole networks of one size, one published method per file, based on `Dense`."""

from rayfl.methods.base import Method
from rayfl.methods.whole.fedavg import FedAvg
from rayfl.methods.whole.fedprox import FedProx
from rayfl.methods.whole.scaffold import Scaffold

WHOLE: dict[str, type[Method]] = {"fedavg": FedAvg, "fedprox": FedProx, "scaffold": Scaffold}
