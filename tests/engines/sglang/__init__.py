"""The tests of this folder run with SGLang where it is installed (`nox -s sglang`), and elsewhere over its interface alone."""

from importlib.util import find_spec

from . import gpu_modules, interface

INSTALLED = find_spec("sglang") is not None

if INSTALLED:
    gpu_modules.stub()
else:
    interface.install()
