"""Events for all listeners."""

import pytest

from rayfl.config import PluginFailed
from rayfl.listeners import Listener, end

TOLD = []


class Recording(Listener):
    label: str

    def on_end(self, status):
        TOLD.append((self.label, status))
        if self.label == "broken":
            raise OSError("disk full")


def test_all_listeners_learn_of_the_end_although_one_raises():
    TOLD.clear()
    with pytest.raises(PluginFailed, match="^listeners: test_listeners:Recording, on_end: OSError: disk full\n"):
        end([Recording(label="first"), Recording(label="broken"), Recording(label="last")], "finished")
    assert TOLD == [("first", "finished"), ("broken", "finished"), ("last", "finished")]
