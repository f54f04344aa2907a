"""Methods for unequal architectures that exchange knowledge: one published method per file, on `base.py: Unequal`."""

from rayfl.methods.distillation.base import Unequal
from rayfl.methods.distillation.dsfl import DSFL
from rayfl.methods.distillation.fedbe import FedBE
from rayfl.methods.distillation.feddf import FedDF
from rayfl.methods.distillation.feddistill import FedDistill
from rayfl.methods.distillation.fedet import FedET
from rayfl.methods.distillation.fedgen import FedGen
from rayfl.methods.distillation.fedgh import FedGH
from rayfl.methods.distillation.fedgkt import FedGKT
from rayfl.methods.distillation.fedkd import FedKD
from rayfl.methods.distillation.fedl2g import FedL2G
from rayfl.methods.distillation.fedmd import FedMD
from rayfl.methods.distillation.fedmrl import FedMRL
from rayfl.methods.distillation.fedproto import FedProto
from rayfl.methods.distillation.fedtgp import FedTGP
from rayfl.methods.distillation.fml import FML
from rayfl.methods.distillation.takfl import TAKFL

DISTILLATION: dict[str, type[Unequal]] = {
    "feddf": FedDF,
    "dsfl": DSFL,
    "fedet": FedET,
    "fedbe": FedBE,
    "takfl": TAKFL,
    "fedgkt": FedGKT,
    "fedmd": FedMD,
    "fedproto": FedProto,
    "feddistill": FedDistill,
    "fml": FML,
    "fedgen": FedGen,
    "fedgh": FedGH,
    "fedtgp": FedTGP,
    "fedmrl": FedMRL,
    "fedkd": FedKD,
    "fedl2g": FedL2G,
}
