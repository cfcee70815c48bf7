"""Other ``forward`` methods on modules that stay what they are.

Activation checkpointing, compiling and ghost passes change what a module does when it is called. They do it on the
instance, around its own ``forward``: no module is wrapped, so that names in the state, classes, hooks (FSDP's and tensor
parallelism's among them) and what user code holds on to are the same with and without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

Forward = Callable[..., Any]  # takes the module first


def forward_of(module: nn.Module) -> Forward:
    """What the module's ``forward`` runs, as a function of the module: one function for all modules of a class.

    It is bound to a module by :class:`Forwards`, so that a copy of the module (``copy.deepcopy``) runs itself and not the
    original.
    """
    own = module.__dict__.get("forward")
    if own is None:
        return type(module).forward
    if isinstance(own, MethodType) and own.__self__ is module:
        return own.__func__
    return lambda module, *args, **kwargs: own(*args, **kwargs)  # user code has put a function there


class Forwards:
    """Replacements of ``forward`` that can be taken back, the latest first."""

    def __init__(self) -> None:
        self._kept: list[tuple[nn.Module, Any]] = []

    def replace(self, module: nn.Module, forward: Forward) -> None:
        self._kept.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = MethodType(forward, module)

    def restore(self) -> None:
        """Every module as it was; idempotent."""
        for module, own in reversed(self._kept):
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own
        self._kept.clear()

    @contextmanager
    def without(self) -> Iterator[None]:
        """Within, modules are as they were before."""
        replaced = [(module, module.__dict__["forward"]) for module, _ in self._kept]
        kept = list(self._kept)
        self.restore()
        try:
            yield
        finally:
            self._kept = kept
            for module, forward in replaced:
                module.__dict__["forward"] = forward
