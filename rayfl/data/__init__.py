"""One data set a file, and how it is split over clients. To add one: its file, and its line here."""

from rayfl.data.base import Arrays as Arrays
from rayfl.data.base import DataSet as DataSet
from rayfl.data.cifar import CIFAR10, CIFAR100
from rayfl.data.digits import Digits
from rayfl.data.mnist import MNIST, FashionMNIST
from rayfl.data.svhn import SVHN
from rayfl.data.synthetic import Synthetic

DATASETS: dict[str, type[DataSet]] = {
    "digits": Digits,
    "mnist": MNIST,
    "fashion_mnist": FashionMNIST,
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
    "svhn": SVHN,
    "synthetic": Synthetic,
}
