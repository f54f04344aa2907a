"""Unequal architectures that exchange what they know: one published method a file, on `base.py: Unequal`."""

from rayfl.methods.distillation.base import Unequal
from rayfl.methods.distillation.feddf import FedDF
from rayfl.methods.distillation.fedgkt import FedGKT

DISTILLATION: dict[str, type[Unequal]] = {
    "feddf": FedDF,
    "fedgkt": FedGKT,
}
