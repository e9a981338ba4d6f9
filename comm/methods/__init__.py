"""The training methods, by name. A new method needs a file with its options, and an entry in METHODS below."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minidl.comm.methods.base import Method

METHODS = {  # name -> module and class
    "local": "local.Local",
    "allreduce": "allreduce.AllReduce",
    "local-sgd": "local_sgd.LocalSGD",
    "dpsgd": "dpsgd.DPSGD",
    "gossip": "gossip.Gossip",
    "ps": "ps.ParameterServer",
}
SERVERS = {"ps": 1}  # number of servers, which a method needs in addition to its replicas


def method(name: str) -> type[Method]:
    """Import and return the class of a method."""
    module, _, word = METHODS[name].partition(".")
    found: type[Method] = getattr(import_module(f"minidl.comm.methods.{module}"), word)
    return found
