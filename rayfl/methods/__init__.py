"""Methods: one published method per file, grouped in families. See README.md for adding one."""

from rayfl.config import Kind
from rayfl.core.fold import Update as Update
from rayfl.methods.base import Client as Client
from rayfl.methods.base import Deployment as Deployment
from rayfl.methods.base import Method as Method
from rayfl.methods.base import Payload as Payload
from rayfl.methods.base import Task as Task
from rayfl.methods.base import Visit as Visit
from rayfl.methods.contract import Contract as Contract
from rayfl.methods.dense import Dense as Dense
from rayfl.methods.depth import DEPTH
from rayfl.methods.distillation import DISTILLATION
from rayfl.methods.lowrank import LOWRANK
from rayfl.methods.masks import MASKS
from rayfl.methods.personal import PERSONAL
from rayfl.methods.sizes import fixed_capacities as fixed_capacities
from rayfl.methods.whole import WHOLE
from rayfl.methods.width import WIDTH

METHODS: dict[str, type[Method]] = WHOLE | WIDTH | DEPTH | MASKS | PERSONAL | LOWRANK | DISTILLATION

METHODS_KIND = Kind("method", Method, METHODS, "rayfl.methods")
