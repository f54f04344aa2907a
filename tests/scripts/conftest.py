import importlib
import sys
from pathlib import Path

import pytest

SCRIPTS = Path.cwd() / "scripts"


@pytest.fixture
def script(monkeypatch):
    """Imports a script by its name; the test's process forgets all of them."""
    for name, value in (("OMP_NUM_THREADS", "1"), ("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(SCRIPTS):
            del sys.modules[name]
