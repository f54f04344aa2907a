"""Named axes, submodels cut along them, and aggregation over the holders of each coordinate.

Methods and models of other packages import from here.
"""

from rayfl.core.axes import Axis as Axis
from rayfl.core.axes import conv as conv
from rayfl.core.axes import declare as declare
from rayfl.core.axes import embedding as embedding
from rayfl.core.axes import layer_norm as layer_norm
from rayfl.core.axes import linear as linear
from rayfl.core.axes import norm as norm
from rayfl.core.fold import Fold as Fold
from rayfl.core.fold import State as State
from rayfl.core.fold import Update as Update
from rayfl.core.net import Net as Net
from rayfl.core.net import load as load
from rayfl.core.net import params_of as params_of
from rayfl.core.seeds import numpy_generator as numpy_generator
from rayfl.core.seeds import stream as stream
from rayfl.core.seeds import torch_generator as torch_generator
from rayfl.core.submodel import Mask as Mask
from rayfl.core.submodel import Selection as Selection
from rayfl.core.submodel import Slice as Slice
from rayfl.core.tensors import Params as Params
from rayfl.core.tensors import copied as copied
