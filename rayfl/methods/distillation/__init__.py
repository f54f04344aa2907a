"""Unequal architectures that exchange what they know: one published method a file, on `base.py: Distilling`."""

from rayfl.methods.distillation.base import Distilling
from rayfl.methods.distillation.fedbe import FedBE
from rayfl.methods.distillation.feddf import FedDF
from rayfl.methods.distillation.fedet import FedET

DISTILLATION: dict[str, type[Distilling]] = {
    "fedbe": FedBE,
    "feddf": FedDF,
    "fedet": FedET,
}
