"""The `system:` section: devices, networks and availability of clients, and the simulated clock."""

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator, model_validator

from rayfl.config import Config
from rayfl.system import checked
from rayfl.system.availability import AVAILABILITY_KIND, Always, Availability
from rayfl.system.devices import DEVICES_KIND, Devices, Phones
from rayfl.system.samplers import SAMPLERS_KIND, Sampler, Uniform
from rayfl.system.staleness import Staleness

KINDS = {"devices": DEVICES_KIND, "availability": AVAILABILITY_KIND, "sampler": SAMPLERS_KIND}


class Sync(Config):
    """Synchronous rounds: the server asks clients and waits for their updates."""

    name: Literal["sync"] = "sync"
    select: float = Field(default=1.0, ge=1, le=100)
    """Over-selection: clients asked per round, as a multiple of `clients.cohort`. The first `cohort` updates count."""
    deadline_s: float | None = Field(default=None, gt=0, le=1e9)
    """Simulated seconds after which a round ends. Default: the server waits for all."""
    minimum: float = Field(default=0.0, ge=0, le=1)
    """Fraction of the cohort below which a round is abandoned: time passes, and the model does not change. All updates
    that would be aggregated count, late ones included."""
    late_rounds: int = Field(default=0, ge=0)
    """Number of rounds for which a late update is still aggregated. 0: clients stop when the round ends. Updates that
    arrived in an abandoned round wait as long; of two updates of a client, the newer is aggregated."""
    staleness: Staleness = Staleness()
    """Weights of late updates."""

    @model_validator(mode="after")
    def _weighs(self) -> Self:
        if not self.late_rounds and self.staleness != Staleness():
            raise ValueError("staleness only with late_rounds")
        return self

    def asked(self, cohort: int) -> int:
        """Return the number of clients asked per round."""
        return _up(self.select * cohort)

    def least(self, cohort: int) -> int:
        """Return the number of updates below which a round is abandoned."""
        return _up(self.minimum * cohort)


def _up(count: float) -> int:
    """Return a product rounded up, except for its rounding error: 0.55 * 100 is 55.00000000000001."""
    return math.ceil(count - 1e-9)


class Buffered(Config):
    """Buffered asynchrony (FedBuff): clients train all the time, and the server steps after every `buffer` updates."""

    name: Literal["buffered"] = "buffered"
    concurrency: int = Field(default=100, ge=1)
    """Clients that train at the same time, at most: one whose update waits in the buffer is not asked."""
    buffer: int = Field(default=10, ge=1)
    """Updates per step of the server. With 1, unlike FedAsync, the client's change moves the server's model."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Largest number of versions that an update may be old; older ones are dropped. Default: no limit."""
    staleness: Staleness = Staleness()
    """Weights of stale updates."""

    @model_validator(mode="after")
    def _weighs(self) -> Self:
        cancels = self.staleness.divide == "weights" and self.staleness.weight in ("polynomial", "hinge")
        if self.buffer == 1 and cancels:
            raise ValueError("staleness.divide: count with buffer: 1, where the weight of a single update cancels")
        return self


class System(Config):
    """The `system:` section. Without it, rounds have no simulated time."""

    devices: SerializeAsAny[Devices] = Phones()
    """Devices of the clients: a name, a mapping with a name, or "package.module:Class"."""
    availability: SerializeAsAny[Availability] = Always()
    """Times at which clients are available. The update of a client that leaves before it has finished is lost."""
    sampler: SerializeAsAny[Sampler] = Uniform()
    """Choice of the clients that are asked: a name, a mapping with a name, or "package.module:Class"."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability that an update is lost after training."""
    step_ms: float = Field(default=0.0, ge=0, le=1e9)
    """Milliseconds per local step in addition to its operations."""
    round_s: float = Field(default=0.0, ge=0, le=1e9)
    """Seconds of the server per round."""
    server_down_mbps: float | None = Field(default=None, ge=1e-6, le=1e9)
    """Mbit/s from the server, shared by the clients that are asked and those still training. Default: unlimited."""
    server_up_mbps: float | None = Field(default=None, ge=1e-6, le=1e9)
    """Mbit/s to the server, shared like `server_down_mbps`. Default: unlimited."""
    mode: Sync | Buffered = Field(default=Sync(), discriminator="name")
    """Rounds: synchronous, or with a buffer."""
    time_to: tuple[float, ...] = ()
    """Target values of the main score, e.g. 0.8: tables show the simulated time until an evaluation reached them."""
    until_s: float | None = Field(default=None, gt=0, le=1e12)
    """Simulated seconds after which the run ends: with the first evaluated round that ends then or later, so that its
    last scores are those at this time. A search then chooses by them. Default: after `rounds`."""
    capacities: Literal["given", "memory", "time"] = "given"
    """Capacity of a client. given: by `clients`. memory: the largest one of `clients` whose network its device can
    train within its memory, all blocks at once and without a second network beside it. time: the largest one with a
    visit of at most `capacity_s`. The smallest, if none fits."""
    capacity_s: float | None = Field(default=None, gt=0, le=1e9)
    """Only for capacities: time. Maximum seconds of a visit at the device's mean speeds."""

    @field_validator(*KINDS, mode="before")
    @classmethod
    def _by_name(cls, given: Any, info: ValidationInfo) -> Any:
        assert info.field_name
        return KINDS[info.field_name].read(given, info.field_name)

    @field_validator("mode", mode="before")
    @classmethod
    def _mode(cls, given: Any) -> Any:
        if isinstance(given, str):
            return {"name": given}
        return {"name": "sync", **given} if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.capacities == "time") != (self.capacity_s is not None):
            raise ValueError("capacity_s with capacities: time, and only then")
        if self.mode.staleness.compares and isinstance(self.mode, Buffered):
            raise ValueError(f"mode: sync with staleness.weight: {self.mode.staleness.weight}")
        if self.sampler.synchronous and isinstance(self.mode, Buffered):
            raise ValueError(f"mode: sync with sampler: {self.sampler.name}")
        return self

    def check(self, clients: int, cohort: int) -> None:
        """Raise a ValueError if the section does not fit a population."""
        for place, part in (("devices", self.devices), ("availability", self.availability)):
            checked.fits(part, clients, place)
        asked = self.asked(cohort)
        if asked > clients:
            what = "concurrency" if isinstance(self.mode, Buffered) else "select"
            raise ValueError(
                f"system.mode.{what}: {asked} clients train at a time. Allowed: at most clients.count = {clients}"
            )
        if isinstance(self.mode, Buffered) and self.mode.buffer > clients:
            raise ValueError(
                f"system.mode.buffer: {self.mode.buffer} updates of different clients are aggregated at a time. "
                f"Allowed: at most clients.count = {clients}"
            )

    @property
    def gives_capacities(self) -> bool:
        """True if a client's capacity is the largest one that its device can train, not the population's."""
        return self.capacities != "given"

    @property
    def can_fail(self) -> bool:
        """True if no client may meet a deadline, or too few may be available (`Schedule.check`)."""
        has_deadline = isinstance(self.mode, Sync) and self.mode.deadline_s is not None
        return has_deadline or not isinstance(self.availability, Always)

    @property
    def mixes_versions(self) -> bool:
        """True if updates of older versions of the model are aggregated."""
        return isinstance(self.mode, Buffered) or self.mode.late_rounds > 0

    def asked(self, cohort: int) -> int:
        """Return the number of clients that train at the same time."""
        mode = self.mode
        return mode.concurrency if isinstance(mode, Buffered) else mode.asked(cohort)
