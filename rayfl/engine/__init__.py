"""The round loop and its executors: this process or Ray. Nothing here knows a method by name."""

import os

# Ray and CUDA's libraries read these when they start, here and in the processes that Ray starts.
_VARIABLES = {
    # otherwise every worker under `uv run` gets a copied folder and a new environment
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # hide GPUs from actors without one
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    # matrix products on GPUs repeat their bits
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # run records and MLflow are written by rayfl
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    # rounds without an evaluation report no accuracy
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    # the older output prints nothing unless asked
    "RAY_AIR_NEW_OUTPUT": "0",
}
for _name, _value in _VARIABLES.items():
    os.environ.setdefault(_name, _value)
