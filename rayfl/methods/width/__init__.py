"""Methods with submodels of fewer channels, one published method per file, based on `Dense`."""

from rayfl.methods.base import Method
from rayfl.methods.width.adaptivefl import AdaptiveFL
from rayfl.methods.width.feddropout import FedDropout
from rayfl.methods.width.fedrolex import FedRolex
from rayfl.methods.width.fiarse_neurons import FIARSENeurons
from rayfl.methods.width.fjord import FjORD
from rayfl.methods.width.flanc import FLANC
from rayfl.methods.width.heterofl import HeteroFL
from rayfl.methods.width.sheterofl import SHeteroFL
from rayfl.methods.width.splitmix import SplitMix

WIDTH: dict[str, type[Method]] = {
    "heterofl": HeteroFL,
    "sheterofl": SHeteroFL,
    "adaptivefl": AdaptiveFL,
    "splitmix": SplitMix,
    "fedrolex": FedRolex,
    "feddropout": FedDropout,
    "fjord": FjORD,
    "flanc": FLANC,
    "fiarse_neurons": FIARSENeurons,
}
