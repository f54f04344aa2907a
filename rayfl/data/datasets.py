"""Data set of torch's map-style Datasets: torchvision's, or the user's own."""

import functools
import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, field_serializer, model_validator

from rayfl.config import Config, ConfigError
from rayfl.core.seeds import global_scope, stream
from rayfl.data.arrays import Arrays, Column
from rayfl.data.goal import Classes, Goal
from rayfl.data.images import MOST_CLASSES
from rayfl.data.memory import HELD_OUT
from rayfl.data.own import OwnImages, Stored, classes_of, shape_of, with_test
from rayfl.data.reading import Given, Part, Reading
from rayfl.data.variables import Shaped


class Facts(Config):
    """What the first reads of Datasets tell."""

    shape: tuple[int, ...]
    """Shape of one sample: [F], [C, T] or [C, H, W]."""
    stored: Stored
    """Data type of samples."""
    classes: int
    """Number of classes."""
    samples: int
    """Number of training and test samples."""
    changes: bool
    """True if samples differ between reads."""
    digest: str
    """SHA-256 of all classes and of some samples."""


class Datasets(Shaped, OwnImages):
    """`Datasets(train, test)`: map-style Datasets of torch with samples (x, y).

    x is a PIL image, an array or a tensor of shape [F] (tables), [C, T] (series) or [C, H, W] (images), of bytes or
    floats; y is a class from 0. Samples are read for each batch, by the process that needs them, so that only batches
    are in memory. Transforms of the Datasets can draw from the global generators of torch, numpy and Python; draws are
    equal with every executor.

    >>> import torch
    >>> pixels, labels = torch.zeros(20, 1, 8, 8, dtype=torch.uint8), torch.arange(20) % 2
    >>> data = Datasets(torch.utils.data.TensorDataset(pixels, labels))
    >>> data.shape, data.arrays().test_samples
    ((1, 8, 8), 4)
    """

    positional: ClassVar = ("train", "test")
    name: Literal["datasets"] = "datasets"
    train: Given
    """Training samples: a Dataset, or a class or function that returns one, as "package.module:name", or as a section
    with `of` and `options`."""
    test: Given | None = None
    """Test samples. Default: a fifth of every class of the training samples, with a fixed seed."""
    plain: Given | None = None
    """The training samples without augmentation, in the same order, for validation and for statistics of norms.
    Default: `train`, with one fixed draw per sample."""
    keep: bool = False
    """True: read each sample once, before the run, and keep all in memory. Only without random transforms."""
    user: str | None = None
    """Attribute of the Datasets with the user of every sample, or a method from a sample's number to its user; for
    `partition: users`."""
    classes: int | None = Field(default=None, ge=1, le=MOST_CLASSES)  # pyright: ignore[reportIncompatibleVariableOverride]
    """Number of classes. Default: the number of different classes."""
    known: Facts | None = None
    """Description of objects in Python, in files of a run. Set by rayfl."""

    if TYPE_CHECKING:

        def __init__(self, train: Any, test: Any = None, **fields: Any): ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Datasets) and self.model_dump() == other.model_dump()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.keep and self.plain is not None:
            raise ConfigError("keep: true is not supported with plain. Allowed: false, or train without augmentation")
        if not self.keep and self.public is not None and self.public.share is None:
            raise ConfigError(
                "public: data and noise are not supported with keep: false. Allowed: share, or keep: true"
            )
        return self

    @field_serializer("known")
    def _describe(self, known: Facts | None) -> Facts | None:
        return self.facts if self._has_objects else known

    @property
    def _has_objects(self) -> bool:
        return any(source is not None and source.is_object for source in (self.train, self.plain, self.test))

    @property
    def _parts(self) -> list[Part]:
        """Return the training set and, if there is one, the test set."""
        test = [] if self.test is None else [self.test.part("data.test")]
        return [self.train.part("data.train"), *test]

    @functools.cached_property
    def facts(self) -> Facts:
        """The description; of objects in a file, that of the file."""
        if self.known is not None and not self._has_objects:
            return self.known
        plain = None if self.plain is None else self.plain.part("data.plain")
        return _facts(tuple(self._parts), plain, self.classes)

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.facts.shape

    @property
    def sample(self) -> tuple[int, ...]:
        return self.shape

    @property
    def dtype(self) -> Stored:
        return self.facts.stored

    @property
    def goal(self) -> Goal:
        return Classes(self.classes or self.facts.classes)

    @property
    def columns(self) -> Mapping[str, Column]:
        return super().columns if self.keep else {"x": Column((), below=self.facts.samples), "y": self.goal.column}

    @property
    def prepare(self) -> Any:
        inner = self.preparation
        if self.keep:
            return inner
        if inner.learns:
            raise ConfigError("data.scaling: standard is not supported with keep: false. Allowed: none, or keep: true")
        test = self.train if self.test is None else self.test
        return Reading(inner, self.train, self.plain or self.train, test, self.shape, self.dtype)

    @property
    def unit(self) -> Any:
        return super().unit if self.keep else None

    @property
    def digests(self) -> Mapping[str, str]:
        return {"some samples": self.facts.digest}

    @property
    def notes(self) -> tuple[str, ...]:
        if self.facts.changes and self.plain is None:
            return (
                "data: training samples change between reads, and validation samples are such samples, with one fixed "
                "draw each. Hint: plain, a Dataset of the training samples without augmentation",
            )
        if self.keep or self.facts.changes:
            return ()
        size = self.facts.samples * math.prod(self.shape) * np.dtype(self.dtype).itemsize
        return (f"data: samples do not change between reads. Hint: keep: true reads each once ({size / 1e9:.2g} GB)",)

    def load(self) -> Arrays:
        parts, end, splits = self._parts, 0, []
        if self.keep and self.facts.changes:
            raise ConfigError("data.keep: samples differ between reads, because a transform is random. Allowed: false")
        for part in parts:
            start, end = end, end + len(part)
            splits.append({"x": self._kept(part) if self.keep else np.arange(start, end), "y": part.labels})
        users = [None if self.user is None else part.users(self.user) for part in parts]
        if self.user is not None and users[0] is None:
            raise ConfigError(f"data.user: train has no attribute {self.user!r}. Allowed: one of its attributes")
        return Arrays(*splits, *users) if len(parts) > 1 else with_test(splits[0], self.goal, HELD_OUT, users[0])

    def _kept(self, part: Part) -> np.ndarray:
        """Return all samples [N, ...]."""
        x = np.empty((len(part), *self.shape), self.dtype)
        with global_scope():
            for row in part.progress("reading samples"):
                x[row] = part.x(row, like=x[row])
        return x

    def holding(self, given: Any) -> Self:
        """Return this data set with the objects of `given`. Raise ConfigError if they are not those of this one."""
        if given.facts != self.facts:
            raise ConfigError(
                f"data: the Datasets differ from those of the run. Allowed: digest {self.facts.digest[:12]}"
            )
        return self.model_copy(update={name: getattr(given, name) for name in ("train", "test", "plain")})


@functools.lru_cache(maxsize=4)
def _facts(parts: tuple[Part, ...], plain: Part | None, classes: int | None) -> Facts:
    """Read some samples of training set, test set if there is one, and `plain`; check them, and describe them all."""
    digest, changes = hashlib.sha256(), False
    labels = [part.labels for part in parts]
    if plain is not None and not np.array_equal(plain.labels, labels[0]):
        raise ConfigError("data.plain: the classes differ from those of train. Allowed: the same samples")
    with global_scope() as seeded:
        first = parts[0].x(0)
        for part in (*parts, *([] if plain is None else [plain])):
            digest.update(part.labels.tobytes())
            for row in part.probes:
                seen = []
                for seed in (0, 0, 1):
                    seeded(stream(seed, "read", row))
                    seen.append(part.x(row, like=first))
                    digest.update(seen[-1].tobytes())
                if not np.array_equal(seen[0], seen[1]):
                    raise ConfigError(
                        f"{part.where}: sample {row} differs between two reads with equal seeds. Allowed: random "
                        "draws by the global generators of torch, numpy and Python"
                    )
                changes = changes or not np.array_equal(seen[0], seen[2])
    return Facts(
        shape=shape_of(first[None], "data.train: one sample"),
        stored="uint8" if first.dtype == np.uint8 else "float32",
        classes=classes or classes_of(labels, "data: y"),
        samples=sum(map(len, labels)),
        changes=changes,
        digest=digest.hexdigest(),
    )
