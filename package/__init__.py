"""swarmnode: a peer-to-peer daemon that trains a model together with strangers' machines.

The public names below are resolved on first use, so that `import swarmnode` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Node": "swarmnode.scripting:ScriptedNode",
    "RunSpec": "swarmnode.training.runspec",
    "load_runspec": "swarmnode.training.runspec",
    "NodeConfig": "swarmnode.node.config",
    "ControlClient": "swarmnode.node.control.client",
    "Network": "swarmnode.protocols.network",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'swarmnode' has no attribute {name!r}")
    module, _, called = _PUBLIC[name].partition(":")
    return getattr(import_module(module), called or name)


def __dir__() -> list[str]:
    return sorted(__all__)
