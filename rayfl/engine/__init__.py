"""The round, and where its jobs run: in this process, or on Ray. Nothing here knows a method by name."""

import os

# Read when ray is imported, in this process and in those that it starts.
_RAY = {
    # else every worker of `uv run` starts in a copied folder with an environment of its own
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # an actor without a GPU must not see one
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    # run records and MLflow are written by rayfl
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    # rounds without an evaluation report no accuracy
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    # its older output prints nothing where nothing is asked for
    "RAY_AIR_NEW_OUTPUT": "0",
}
for _name, _value in _RAY.items():
    os.environ.setdefault(_name, _value)
