"""Tables and series: samples of named or numbered variables, standardised and without missing values for networks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import nn

from rayfl.config import ConfigError
from rayfl.data.arrays import Column, Split
from rayfl.data.base import DataSet
from rayfl.data.goal import Goal, on_device
from rayfl.data.modules import Constants, as_numbers
from rayfl.data.samples import Batch, Prepare, Samples

Missing = Literal["refuse", "mean", "median"]
Scaling = Literal["standard", "none"]


@dataclass(frozen=True)
class Variables(Prepare):
    """Tables `x` [N, F] or series [N, C, T] of numbers and NaN for missing ones, and targets `y`.

    Network inputs are x [B, F'] or [B, C, T] float32: numbers, standardised per variable, then one column per category
    of each categorical variable. `fitted` computes means, medians and standard deviations with scikit-learn.
    """

    categories: tuple[tuple[int, int], ...] = ()
    """Categorical columns of a table, and their numbers of categories. They hold numbers from 0; a missing category is
    NaN or -1, and becomes 0 in all of its columns."""
    missing: Missing = "refuse"
    """Value of missing numbers: the mean or median of the variable."""
    scaling: Scaling = "standard"
    """standard: (x - mean) / standard deviation."""
    fill: tuple[float, ...] = (0.0,)
    """Value of missing numbers, mean and standard deviation: per variable, set by `fitted`, or one for all."""
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    @property
    def learns(self) -> bool:
        return self.scaling != "none" or self.missing != "refuse"

    def fitted(self, split: Split) -> Self:
        from sklearn.impute import SimpleImputer
        from sklearn.preprocessing import StandardScaler

        x = split["x"].astype(np.float64)
        rows = x[:, self.numbers(x.shape[1])] if x.ndim == 2 else x.transpose(0, 2, 1).reshape(-1, x.shape[1])
        if not rows.shape[1]:
            return replace(self, fill=(), mean=(), std=())
        strategy = "mean" if self.missing == "refuse" else self.missing
        imputer = SimpleImputer(strategy=strategy, keep_empty_features=True).fit(rows)
        standard = self.scaling == "standard"
        scaler = StandardScaler(with_mean=standard, with_std=standard).fit(imputer.transform(rows))
        mean, std = (scaler.mean_, scaler.scale_) if standard else (np.zeros(rows.shape[1]), np.ones(rows.shape[1]))
        fill, mean, std = (tuple(np.asarray(values).tolist()) for values in (imputer.statistics_, mean, std))
        return replace(self, fill=fill, mean=mean, std=std)

    def whole(self, samples: Samples) -> Samples:
        x = samples["x"]
        shape = (-1,) if x.dim() == 2 else (-1, 1)
        fill, mean, std = (on_device(values, x.device).view(shape) for values in (self.fill, self.mean, self.std))
        numbers = x[:, self.numbers(x.shape[1])] if self.categories else x
        numbers = numbers.float()
        found = [(torch.where(numbers.isnan(), fill, numbers) - mean) / std]
        for column, count in self.categories:
            found.append((x[:, column, None] == torch.arange(count, device=x.device)).float())
        return samples | {"x": torch.cat(found, 1)}

    def batch(self, samples: Samples, generator: torch.Generator | None) -> Batch:
        return samples["x"], samples["y"]

    def plain(self) -> dict[str, Any]:
        """Return the categorical columns, and the constants of (x - mean) / std with missing numbers at `fill`."""
        return {name: getattr(self, name) for name in ("categories", "fill", "mean", "std")}

    def module(self) -> nn.Module:
        return _Standardised(self)

    def numbers(self, columns: int) -> list[int]:
        """Return the columns of a table that are numbers."""
        categorical = {column for column, _ in self.categories}
        return [i for i in range(columns) if i not in categorical]

    def width(self, columns: int) -> int:
        """Return F', the columns of network inputs."""
        return len(self.numbers(columns)) + sum(count for _, count in self.categories)


class _Standardised(Constants):
    """Tables [B, F] or series [B, C, T] as stored, with NaN for missing numbers -> network inputs."""

    fill: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, variables: Variables):
        super().__init__((-1, 1), fill=variables.fill, mean=variables.mean, std=variables.std)
        self.variables = variables

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = as_numbers(x)
        numbers = x[:, self.variables.numbers(x.shape[1])] if self.variables.categories else x
        fill, mean, std = (t if x.dim() > 2 else t.flatten() for t in (self.fill, self.mean, self.std))
        found = [(torch.where(numbers.isnan(), fill, numbers) - mean) / std]
        for column, count in self.variables.categories:
            found.append((x[:, column, None] == torch.arange(count, device=x.device)).to(x.dtype))
        return torch.cat(found, 1)

    def extra_repr(self) -> str:
        return f"(x - mean) / std, {super().extra_repr()}, categories={self.variables.categories}"


class Shaped(DataSet):
    """Samples of any shape: tables [N, F], series [N, C, T], or what the next base class describes."""

    missing: Missing = "refuse"
    """Missing numbers (NaN) of tables and series: an error, or replaced by the mean or median of the variable over the
    training samples of all clients."""
    scaling: Scaling = "standard"
    """Numbers of tables and series. standard: (x - mean) / standard deviation of the variable, over the training
    samples of all clients; not over validation, test and public samples. none: unchanged."""
    shape: ClassVar[tuple[int, ...]]
    """Shape of one sample: [F] of a table, [C, T] of a series: variables, steps in time."""
    image_fields: ClassVar[tuple[str, ...]] = ("size", "pixels", "scale", "mean", "std", "crop", "flip")

    @property
    def categorical(self) -> tuple[tuple[int, int], ...]:
        """Categorical columns of a table, and their numbers of categories."""
        return ()

    @property
    def _is_image(self) -> bool:
        return len(self.shape) > 2

    @property
    def columns(self) -> Mapping[str, Column]:
        return {
            "x": Column(tuple(self.shape), missing=self.missing != "refuse" and not self._is_image),
            "y": self.goal.column,
        }

    @property
    def prepare(self) -> Any:
        return self.preparation

    @property
    def preparation(self) -> Any:
        """Conversion of samples of shape `shape` to network inputs."""
        if self._is_image:
            self._refuse(("missing", "scaling"), "images", "tables and series")
            return super().prepare  # pyright: ignore[reportAbstractUsage]
        self._refuse(self.image_fields, f"samples of shape {list(self.shape)}", "images")
        return Variables(self.categorical, self.missing, self.scaling)

    def _refuse(self, names: Sequence[str], what: str, allowed: str) -> None:
        """Raise a ConfigError if one of these fields is changed, which the samples, `what`, do not use."""
        fields = type(self).model_fields
        for name in names:
            if name in fields and getattr(self, name) != fields[name].default:
                raise ConfigError(f"data.{name}: not supported with {what}. Allowed: with {allowed} only")

    @property
    def offers(self) -> Mapping[str, Any]:
        prepare = self.preparation
        if self._is_image:
            return super().offers  # pyright: ignore[reportAbstractUsage]
        assert isinstance(prepare, Variables)
        if len(self.shape) == 1:
            return {"variables": prepare.width(self.shape[0]), "classes": self.goal.classes}
        return {"series": tuple(self.shape), "classes": self.goal.classes}

    @property
    def unit(self) -> Any:
        return super().unit if self._is_image else None

    @property
    def goal(self) -> Goal:
        return super().goal  # pyright: ignore[reportAbstractUsage]
