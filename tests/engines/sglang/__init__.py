"""The tests of this folder run with SGLang where it is installed (`nox -s sglang`), and elsewhere over its interface alone."""

from importlib.util import find_spec

from . import gpu_modules, interface

if find_spec("sglang"):
    gpu_modules.stub()
else:
    interface.install()
