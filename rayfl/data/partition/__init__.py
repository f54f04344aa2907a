"""Partition rules, one file each. Register a new rule here; rules of other packages need no registration."""

from rayfl.config import Kind
from rayfl.data.partition.base import NOBODY as NOBODY
from rayfl.data.partition.base import Labels as Labels
from rayfl.data.partition.base import Owners as Owners
from rayfl.data.partition.base import Partition as Partition
from rayfl.data.partition.base import Shards as Shards
from rayfl.data.partition.base import hold_out as hold_out
from rayfl.data.partition.base import label_counts as label_counts
from rayfl.data.partition.base import partition as partition
from rayfl.data.partition.dirichlet import Dirichlet
from rayfl.data.partition.iid import IID
from rayfl.data.partition.quantity import Quantity
from rayfl.data.partition.shards import LabelShards
from rayfl.data.partition.users import Users

PARTITIONS: dict[str, type[Partition]] = {
    "iid": IID,
    "quantity": Quantity,
    "dirichlet": Dirichlet,
    "shards": LabelShards,
    "users": Users,
}

PARTITIONS_KIND = Kind("partition", Partition, PARTITIONS, "rayfl.partitions")
