"""Clients and lessons that fail on purpose, once or always, and a run that waits for none of them."""

import os
import signal
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
from helpers import PersonalHead

from rayfl.config import Config, ConfigError
from rayfl.engine.on_ray import pool
from rayfl.listeners import Listener
from rayfl.methods.distillation import FedDF, FedGKT


class Failing(Config):
    """A process dies, hangs or raises in its work; `marker` holds the pids it happened in."""

    fault: Literal["die", "stop", "hang", "raise", "refuse", "wait", "hoard"]
    times: int = 1
    """How often; `wait` waits until the marker is there."""
    marker: str

    def _fail(self) -> None:
        marker = Path(self.marker)
        if self.fault == "wait":
            while not marker.exists():
                time.sleep(0.01)
            return
        happened = marker.read_text().split() if marker.exists() else []
        if len(happened) >= self.times:
            return
        marker.write_text(" ".join([*happened, str(os.getpid())]))
        if self.fault == "die":
            os.kill(os.getpid(), 9)
        if self.fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.fault == "hang":
            time.sleep(600)
        if self.fault == "hoard":
            self._hoard()
        if self.fault == "refuse":
            raise ConfigError("method.client: a client is not valid. Allowed: nobody")
        raise ArithmeticError("on purpose")

    def _hoard(self) -> None:
        """Takes 6.6 GB, slowly enough for Ray to see it, and keeps them."""
        hoard = []
        for _ in range(44):
            hoard.append(np.ones(150 * 2**20, np.uint8))
            time.sleep(0.05)
        time.sleep(20)
        Path(f"{self.marker}-survived").touch()


class Faulty(Failing, PersonalHead):
    """One client's work fails, before its update."""

    name: Literal["faulty"] = "faulty"
    client: int

    def local_update(self, payload, visit):
        if visit.client.id == self.client:
            self._fail()
        return super().local_update(payload, visit)


class FailingServerTasks(Failing):
    """A client's work fails behind its steps, or a lesson of the server's does, in a round."""

    client: int | None = None
    """The client; None: a lesson."""
    round: int = 1

    def local_update(self, payload, visit):
        update = super().local_update(payload, visit)
        if (visit.client.id, visit.round) == (self.client, self.round):
            self._fail()
        return update

    def refine(self, server_task, context):
        refined = super().refine(server_task, context)
        if self.client is None and context.round == self.round:
            self._fail()
        return refined


class FaultyFedDF(FailingServerTasks, FedDF):
    name: Literal["faulty_feddf"] = "faulty_feddf"


class FaultyFedGKT(FailingServerTasks, FedGKT):
    name: Literal["faulty_fedgkt"] = "faulty_fedgkt"


class Impatient(Listener):
    """A job of the run is given to somebody else after some seconds: in the server's process, which it is sent to."""

    seconds: float

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        pool.RayPool.__init__.__kwdefaults__["deadline"] = self.seconds
