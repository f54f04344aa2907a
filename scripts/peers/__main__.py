"""`python -m peers SYSTEM WORKLOAD`: one system on one workload, told by `peers.turns` when to run a round."""

import os
import sys
from importlib import import_module

from .turns import Turns
from .workloads import WORKLOADS

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    system, name = sys.argv[1:]
    # a module of its own, because what is defined in __main__ travels by value
    side = import_module(f"peers.on_{system}")
    side.main(name, Turns(WORKLOADS[name], side.PACKAGES))
