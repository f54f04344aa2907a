"""Torch without its compiler.

torch's optimizers and its kernels for the meta device mark where nothing may be compiled, and import `torch._dynamo`
for it: 880 modules, more than a second and 50 MB in each process. Outside of `torch.compile` the marks do nothing.
"""

import sys
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


class _Marks(ModuleType):
    """The marks of `torch._dynamo`, without effect."""

    @staticmethod
    def disable(function: Any, *_: Any, **__: Any) -> Any:
        return function

    @staticmethod
    def graph_break() -> None: ...


class _WithoutCompiler:
    def __enter__(self) -> None:
        sys.modules.setdefault(NAME, _MARKS)

    def __exit__(self, *_: Any) -> None:
        if sys.modules.get(NAME) is _MARKS:
            del sys.modules[NAME]


_MARKS = _Marks(NAME)
without_compiler = _WithoutCompiler()
"""Context manager: marks inside the block have no effect, unless the compiler was imported before. For calls of torch
that need nothing else of the compiler."""
