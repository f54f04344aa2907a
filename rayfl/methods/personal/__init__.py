"""Methods with personal networks or layers, one published method per file, based on `Dense`."""

from rayfl.methods.base import Method
from rayfl.methods.personal.apfl import APFL
from rayfl.methods.personal.ditto import Ditto
from rayfl.methods.personal.fedbabu import FedBABU
from rayfl.methods.personal.fedbn import FedBN
from rayfl.methods.personal.fedper import FedPer
from rayfl.methods.personal.fedrep import FedRep
from rayfl.methods.personal.lg_fedavg import LGFedAvg
from rayfl.methods.personal.pfedme import PFedMe
from rayfl.methods.personal.standalone import Standalone

PERSONAL: dict[str, type[Method]] = {
    "lg_fedavg": LGFedAvg,
    "standalone": Standalone,
    "fedper": FedPer,
    "fedbn": FedBN,
    "fedrep": FedRep,
    "fedbabu": FedBABU,
    "ditto": Ditto,
    "apfl": APFL,
    "pfedme": PFedMe,
}
