"""The contract suite: what every method, model, data set, partition, score and listener promises.

A package of your own inherits it by one import, with pytest:

    from rayfl.testing import MethodContract

    class TestMine(MethodContract):
        method = {"name": "my_package.heads:PersonalHead"}

A method that extends `rayfl.Dense` takes `DenseContract`, one whose clients run different networks
`NetworksContract`. Each class documents what else a subclass may say. For the
values in a failed assertion: `pytest.register_assert_rewrite("rayfl.testing")` in your conftest.py.
"""

from rayfl.testing.data import DataContract as DataContract
from rayfl.testing.data import PartitionContract as PartitionContract
from rayfl.testing.data import ScoreContract as ScoreContract
from rayfl.testing.dense import DenseContract as DenseContract
from rayfl.testing.listeners import ListenerContract as ListenerContract
from rayfl.testing.methods import MethodContract as MethodContract
from rayfl.testing.models import ModelContract as ModelContract
from rayfl.testing.networks import NetworksContract as NetworksContract
