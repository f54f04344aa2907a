"""Whole networks of one size, trained by every client: one published method a file, on `Dense`."""

from rayfl.methods.base import Method
from rayfl.methods.whole.fedavg import FedAvg
from rayfl.methods.whole.fedprox import FedProx
from rayfl.methods.whole.scaffold import Scaffold

WHOLE: dict[str, type[Method]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
}
