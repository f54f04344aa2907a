"""Data sets, one file each, and their partition over clients. See README.md for adding one."""

from rayfl.data.arrays import Arrays as Arrays
from rayfl.data.arrays import Column as Column
from rayfl.data.arrays import Split as Split
from rayfl.data.base import DATASETS
from rayfl.data.base import DATASETS_KIND as DATASETS_KIND
from rayfl.data.base import DataSet as DataSet
from rayfl.data.choices import Choices
from rayfl.data.cifar import CIFAR10, CIFAR100
from rayfl.data.datasets import Datasets
from rayfl.data.digits import Digits
from rayfl.data.federation import Federation as Federation
from rayfl.data.federation import federate as federate
from rayfl.data.folder import Folder
from rayfl.data.function import Function
from rayfl.data.generated import Generated
from rayfl.data.goal import Classes as Classes
from rayfl.data.goal import Goal as Goal
from rayfl.data.goal import LabelSets as LabelSets
from rayfl.data.goal import Numbers as Numbers
from rayfl.data.huggingface import HuggingFace
from rayfl.data.images import ImageData as ImageData
from rayfl.data.images import Images as Images
from rayfl.data.instructions import Instructions
from rayfl.data.memory import InMemory
from rayfl.data.mnist import MNIST, FashionMNIST
from rayfl.data.partition import NOBODY as NOBODY
from rayfl.data.partition import PARTITIONS as PARTITIONS
from rayfl.data.partition import PARTITIONS_KIND as PARTITIONS_KIND
from rayfl.data.partition import Labels as Labels
from rayfl.data.partition import Partition as Partition
from rayfl.data.samples import ClientData as ClientData
from rayfl.data.samples import Prepare as Prepare
from rayfl.data.scores import SCORES as SCORES
from rayfl.data.scores import SCORES_KIND as SCORES_KIND
from rayfl.data.scores import Score as Score
from rayfl.data.svhn import SVHN
from rayfl.data.synthetic import Synthetic
from rayfl.data.synthetic_text import SyntheticText
from rayfl.data.table import BreastCancer, Diabetes, Table
from rayfl.data.text import SST2, AGNews, OwnText, Shakespeare, WikiText2

SCORES["generated"] = Generated
SCORES["choices"] = Choices

DATASETS |= {
    "digits": Digits,
    "breast_cancer": BreastCancer,
    "diabetes": Diabetes,
    "mnist": MNIST,
    "fashion_mnist": FashionMNIST,
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
    "svhn": SVHN,
    "wikitext2": WikiText2,
    "shakespeare": Shakespeare,
    "ag_news": AGNews,
    "sst2": SST2,
    "synthetic": Synthetic,
    "synthetic_text": SyntheticText,
    "arrays": InMemory,
    "folder": Folder,
    "function": Function,
    "datasets": Datasets,
    "text": OwnText,
    "instructions": Instructions,
    "table": Table,
    "huggingface": HuggingFace,
}
