"""Samples of torch's map-style Datasets, read for every batch that needs them.

Before a sample is read, the global generators of torch, numpy and Python are seeded: for training by a draw of the
batch's generator, which follows from seed, round, client, epoch and sample; otherwise by the sample's number. So its
bits do not depend on the process that reads it, nor on what was read before.
"""

import functools
import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import GetJsonSchemaHandler, JsonValue, ModelWrapValidatorHandler, PrivateAttr, model_validator
from torch.utils.data import IterableDataset, Subset

from rayfl.config import Config, ConfigError, ask, imported, shown, with_options
from rayfl.core.seeds import global_scope, stream
from rayfl.data.arrays import as_array, as_integers
from rayfl.data.samples import Batch, Prepare, Samples

LABELS = ("targets", "labels", "_labels")
"""Attributes of Datasets that may hold the classes of all samples."""
PROBED = 16
"""Samples of each Dataset that are read before a run."""


class Source(Config):
    """A Dataset of torch with samples (x, y), or a class or function that returns one."""

    of: str
    """Dataset, class or function, "package.module:name". The package must be installed or in PYTHONPATH."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments of the class or function."""
    _object: Any = PrivateAttr(default=None)

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, given: Any, read: ModelWrapValidatorHandler["Source"]) -> "Source":
        """Read a section, a name, or an object in Python."""
        if given is None or isinstance(given, Source | Mapping):
            return read(given)
        if isinstance(given, str):
            return read({"of": given})
        found = read({"of": f"<{type(given).__name__}>"})
        found._object = given() if callable(given) else given
        return found

    @property
    def is_object(self) -> bool:
        """True for an object of this Python program, which is no part of files."""
        return self._object is not None

    def part(self, where: str) -> "Part":
        """Return the Dataset. One with a name is made once per process."""
        if not self.is_object:
            return _made(self.of, json.dumps(self.options), where)
        if not isinstance(self._object, Part):
            self._object = Part(self._object, where)
        return self._object


class _OrName:
    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler(schema)]}


Given = Annotated[Source, _OrName()]
"""A section, or `of` alone."""


class Part:
    """A map-style Dataset. `where`: its setting, for errors."""

    def __init__(self, dataset: Any, where: str):
        is_mapped = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if isinstance(dataset, IterableDataset) or not is_mapped:
            raise ConfigError(
                f"{where}: {_kind(dataset)} is not a map-style Dataset. Allowed: an object with __len__() and "
                "__getitem__(index) -> (x, y), such as a torch.utils.data.Dataset"
            )
        self.dataset, self.where = dataset, where
        if not len(self):
            raise ConfigError(f"{where}: the Dataset is empty. Allowed: one or more samples")

    def __len__(self) -> int:
        return ask(f"{self.where}, __len__", lambda: len(self.dataset))

    @property
    def probes(self) -> list[int]:
        return np.unique(np.linspace(0, len(self) - 1, PROBED).astype(int)).tolist()

    def read(self, row: int) -> tuple[Any, Any]:
        """Return (x, y) of a sample as the Dataset returns it."""
        found = ask(f"{self.where}: sample {row}", lambda: self.dataset[row])
        if not (isinstance(found, tuple | list) and len(found) == 2):
            raise ConfigError(f"{self.where}: sample {row} is {_kind(found)}. Allowed: (x, y)")
        return found[0], found[1]

    def x(self, row: int, like: np.ndarray | None = None) -> np.ndarray:
        """Return x of a sample: uint8 or float32, of the shape and type of `like`."""
        place = f"{self.where}: x of sample {row}"
        x = _array(self.read(row)[0], place)
        if like is not None and (x.shape, x.dtype) != (like.shape, like.dtype):
            raise ConfigError(
                f"{place} has shape {list(x.shape)} and type {x.dtype}. Allowed: {list(like.shape)} and {like.dtype}, "
                "as the first training sample. Hint: transforms that resize or convert"
            )
        return x

    def label(self, row: int) -> int:
        y = self.read(row)[1]
        try:
            if (label := operator.index(y)) >= 0:
                return label
        except TypeError:
            pass
        raise ConfigError(f"{self.where}: y of sample {row} is {shown(y)}. Allowed: a class, a whole number from 0")

    @functools.cached_property
    def labels(self) -> np.ndarray:
        """Classes [N] int64: an attribute in `LABELS` that agrees with `probes`. Otherwise all samples are read."""
        with global_scope():
            probed = {row: self.label(row) for row in self.probes}
            for name in LABELS:
                try:
                    found = as_integers(self.attribute(name), "").astype(np.int64)
                except ConfigError:
                    continue
                if found.shape == (len(self),) and all(found[row] == label for row, label in probed.items()):
                    return found
            return np.array([self.label(row) for row in self.progress("reading classes")])

    def attribute(self, name: str) -> Any:
        """Return an attribute of the Dataset, or of that of which it is a `Subset`: one value per sample, or a function
        of a sample's number. None: there is none."""
        found = getattr(self.dataset, name, None)
        if found is not None or not isinstance(self.dataset, Subset):
            return found
        found, rows = Part(self.dataset.dataset, self.where).attribute(name), self.dataset.indices
        return found if found is None else [found(i) for i in rows] if callable(found) else [found[i] for i in rows]

    def users(self, name: str) -> np.ndarray | None:
        """Return the users [N] of the samples, from the attribute of this name."""
        found = self.attribute(name)
        if callable(found):
            found = [ask(f"data.user: {name}({row})", functools.partial(found, row)) for row in range(len(self))]
        return None if found is None else as_array(found, f"data.user: {name}")

    def progress(self, verb: str) -> Iterable[int]:
        """Yield all rows and show progress on a terminal."""
        from rich.console import Console
        from rich.progress import track

        console, rows = Console(stderr=True), range(len(self))
        return track(rows, f"{self.where}: {verb}", console=console, transient=True, disable=not console.is_terminal)


@dataclass(frozen=True)
class Reading(Prepare):
    """Reads the samples of a batch, and prepares them by `inner`. Stored samples are `x` [N], their numbers: those of
    `test` follow those of `train`."""

    inner: Prepare
    train: Source
    plain_train: Source
    """The training samples as evaluations read them."""
    test: Source
    shape: tuple[int, ...]
    dtype: str

    def whole(self, samples: Samples) -> Samples:
        return samples

    def batch(self, samples: Samples, generator: torch.Generator | None) -> Batch:
        numbers, device = samples["x"].tolist(), samples["x"].device
        test = self.test.part("data.test")
        if generator is None:
            train, seeds = self.plain_train.part("data.plain"), [stream(0, "read", number) for number in numbers]
        else:
            train = self.train.part("data.train")
            seeds = torch.randint(2**63 - 1, (len(numbers),), generator=generator).tolist()
        x, count = np.empty((len(numbers), *self.shape), self.dtype), len(train)
        with global_scope() as seeded:
            for i, number in enumerate(numbers):
                part, row = (train, number) if number < count else (test, number - count)
                seeded(seeds[i])
                x[i] = part.x(row, like=x[i])
        read = samples | {"x": torch.from_numpy(x).to(device)}
        return self.inner.batch(self.inner.whole(read), generator)

    def plain(self) -> dict[str, Any]:
        return self.inner.plain()

    def module(self) -> torch.nn.Module:
        return self.inner.module()


@functools.lru_cache(maxsize=8)
def _made(of: str, options: str, where: str) -> Part:
    if of.startswith("<"):
        raise ConfigError(
            f"{where}: the file describes an object of a Python program, {of}. Allowed: the same object in Python"
        )
    found, given = imported(of, where), json.loads(options)
    if callable(found):
        with global_scope() as seeded:
            seeded(stream(0, "read"))
            found = ask(where, with_options(found, of, given, where))
    return Part(found, where)


def _array(x: Any, place: str) -> np.ndarray:
    """Return x as uint8 or finite float32; PIL images as [C, H, W]."""
    from PIL import Image

    if isinstance(x, Image.Image):
        if x.mode not in ("L", "RGB"):
            raise ConfigError(f'{place} is a PIL image of mode {x.mode}. Allowed: L, RGB. Hint: image.convert("RGB")')
        x = np.asarray(x).reshape(x.height, x.width, -1).transpose(2, 0, 1)
    if not isinstance(x, np.ndarray | torch.Tensor):
        raise ConfigError(f"{place} is {_kind(x)}. Allowed: a PIL image, an array or a tensor")
    x = as_array(x, place)
    if x.dtype == np.uint8:
        return x
    if x.dtype.kind not in "biuf" or not np.isfinite(x).all():
        raise ConfigError(f"{place} has {x.dtype} values that are not finite numbers. Allowed: finite numbers")
    return x.astype(np.float32)


def _kind(value: Any) -> str:
    """Describe an object by its type and size."""
    size = f" of length {len(value)}" if isinstance(value, Sequence) else ""
    return f"{type(value).__name__}{size}"
