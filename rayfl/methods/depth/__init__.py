"""Methods with submodels of fewer blocks or with early exits, one published method per file, based on `Dense`."""

from rayfl.methods.base import Method
from rayfl.methods.depth.depthfl import DepthFL
from rayfl.methods.depth.depthfl_nefl import DepthFLNeFL
from rayfl.methods.depth.fedepth import FeDepth
from rayfl.methods.depth.fedra import FedRA
from rayfl.methods.depth.inclusivefl import InclusiveFL
from rayfl.methods.depth.nefl import NeFL
from rayfl.methods.depth.scalefl import ScaleFL
from rayfl.methods.depth.scalefl_nefl import ScaleFLNeFL

DEPTH: dict[str, type[Method]] = {
    "depthfl": DepthFL,
    "scalefl": ScaleFL,
    "scalefl_nefl": ScaleFLNeFL,
    "nefl": NeFL,
    "depthfl_nefl": DepthFLNeFL,
    "inclusivefl": InclusiveFL,
    "fedra": FedRA,
    "fedepth": FeDepth,
}
