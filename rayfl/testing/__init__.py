"""Contract tests of methods, models, data sets, partitions, scores and listeners.

To test your own package, subclass one, with pytest:

    from rayfl.testing import MethodContract

    class TestMine(MethodContract):
        method = {"name": "my_package.heads:PersonalHead"}

Use `DenseContract` for a method that extends `rayfl.Dense`, and `NetworksContract` if clients run different networks.
Each class documents its further attributes. Properties in which a method may differ are its `contract`
(`rayfl.methods.contract.Contract`). pytest shows the values of a failed assertion.
"""

import sys

if "pytest" in sys.modules:
    # before the modules below are imported
    sys.modules["pytest"].register_assert_rewrite("rayfl.testing")

from rayfl.testing.data import DataContract as DataContract
from rayfl.testing.data import PartitionContract as PartitionContract
from rayfl.testing.data import ScoreContract as ScoreContract
from rayfl.testing.dense import DenseContract as DenseContract
from rayfl.testing.listeners import ListenerContract as ListenerContract
from rayfl.testing.methods import MethodContract as MethodContract
from rayfl.testing.models import ModelContract as ModelContract
from rayfl.testing.networks import NetworksContract as NetworksContract
