"""Methods whose submodels are masks over single parameters: one published method per file."""

from rayfl.methods.base import Method
from rayfl.methods.masks.fedpm import FedPM
from rayfl.methods.masks.fiarse import FIARSE
from rayfl.methods.masks.pruning_greedy import PruningGreedy
from rayfl.methods.masks.spafl import SpaFL

MASKS: dict[str, type[Method]] = {"fiarse": FIARSE, "pruning_greedy": PruningGreedy, "spafl": SpaFL, "fedpm": FedPM}
