"""Unequal architectures that exchange what they know: one published method a file, on `base.py: Distilling`."""

from rayfl.methods.distillation.base import Distilling
from rayfl.methods.distillation.feddf import FedDF

DISTILLATION: dict[str, type[Distilling]] = {
    "feddf": FedDF,
}
