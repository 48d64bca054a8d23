"""Modules that answer to every import and every name. Calling what they hold raises.

SGLang imports packages that are built for GPUs, also where none of it runs. Tests of a CPU have
these in their place.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class Name(type):
    """The class of what stands in for a function or a class: both a name and what it holds."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return make(f"{cls.path}.{name}")

    def __call__(cls, *arguments, **named):
        if len(arguments) == 1 and not named and callable(arguments[0]):
            return arguments[0]  # it is a decorator
        raise NotImplementedError(f"{cls.path} stands in for a package that is not installed")

    def __or__(cls, other):
        return cls

    __ror__ = __or__


def make(path):
    """Make what stands in for a name."""
    return Name(path.rpartition(".")[2], (), {"path": path})


class Standing(ModuleType):
    """A module in which every name is found."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = make(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Finder(MetaPathFinder, Loader):
    """Finds every module of a package."""

    def __init__(self, package):
        self.package = package

    def find_spec(self, name, path=None, target=None):
        inside = name.startswith(f"{self.package}.")
        return ModuleSpec(name, self, is_package=True) if inside else None

    def create_module(self, spec):
        module = Standing(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        """Do nothing: names are made when they are asked for."""


def stand_in(package):
    """Let a package, whose ``__init__`` calls this, have every module and every name."""
    sys.meta_path.append(Finder(package))
    sys.modules[package].__class__ = Standing
    sys.modules[package].__version__ = "0.0.0"
