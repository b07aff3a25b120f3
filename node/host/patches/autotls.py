"""What py-libp2p 0.8.1 loads for AutoTLS, which no node uses, is loaded when somebody uses it.

Upstream (`host/basic_host.py:102`) imports a client of ACME with two HTTP libraries, and these more: 220 modules, and
10 MB in each process. No longer needed when `test_stock_libp2p_still_loads_http_clients` fails.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

CLIENTS = ("httpx", "requests")


class _WhenUsed(ModuleType):
    """Stands in `sys.modules` for a module until one of its attributes is asked for.

    `importlib.util.LazyLoader` does not do: the import statement asks for one.
    """

    def __getattr__(self, name: str) -> Any:
        if name == "__file__":  # `inspect` asks every module for it
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def apply() -> None:
    """Before the first import of libp2p; needs nothing of it. A library that is loaded already stays as it is."""
    for name in CLIENTS:
        if name not in sys.modules and (spec := find_spec(name)) is not None:
            sys.modules[name] = module = _WhenUsed(name)
            module.__spec__ = spec
