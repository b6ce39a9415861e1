"""Modules that SGLang imports at its start and that need a GPU: empty ones in their place. docs/how-to/sglang.md names them.

Nothing that the tests call is in them: whoever did would get an object that does nothing, and not what it computes.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MODULES = ("triton", "torchvision")


class _Attributes(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Anything(metaclass=_Attributes):
    """A decorator that leaves functions as they are, and a class with every attribute."""

    def __new__(cls, *args, **options):
        if len(args) == 1 and callable(args[0]) and not options:
            return args[0]
        return object.__new__(cls)

    def __class_getitem__(cls, item):
        return cls

    def __call__(self, *args, **options):
        return type(self).__new__(type(self), *args, **options)


class _Module(ModuleType):
    __version__ = "3.6.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name, path, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in MODULES else None

    def create_module(self, spec):
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


def stub():
    """From now on, importing one of them gives an empty one."""
    # torch looks for triton, too, and must not find this one: what it looks up is imported before.
    import torch._dynamo
    import torch._inductor.config  # noqa: F401

    sys.meta_path.insert(0, _Finder())
