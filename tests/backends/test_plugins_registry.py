"""Tiers by name: what is looked for, where, and what is said when it is not there."""

import json
import sys

import pytest
import trio

import backends
from backends.plugins import (
    LMCacheTier,
    NativeTier,
    PluginClassError,
    PluginModuleError,
    PluginTypeError,
    UnknownTier,
    finding,
    known_tiers,
    make_tier,
    register_tier,
    register_tier_module,
)
from backends.testing import FakeTier
from tests.support.plugin_peers import LoopAdapter, LoopAdapterConfig, ThreadConnector

SIZE = 64
MODULE = "plugin_under_test"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes the module of a plugin, which nobody has imported yet."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text, name=MODULE):
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
        return name

    yield write
    for name in [name for name in sys.modules if name.startswith(MODULE)]:
        del sys.modules[name]


@pytest.fixture
def registry(monkeypatch):
    """Names given in a test are forgotten behind it."""
    from backends.plugins import _registry

    monkeypatch.setattr(_registry, "_registered", {})
    monkeypatch.setattr(_registry, "_modules", {})


# --- what there is ------------------------------------------------------------------------------------------------


def test_memory_and_files_by_name(tmp_path):
    memory = make_tier({"type": "memory", "capacity_bytes": "1MiB", "populate": False}, block_bytes=SIZE)
    assert isinstance(memory, backends.MemoryTier)
    assert memory.statistics().capacity_bytes == 1 << 20
    for spec in (f"file:{tmp_path / 'a'}", {"type": "file", "directory": tmp_path / "b", "capacity_bytes": 4096}):
        tier = make_tier(spec, block_bytes=SIZE)
        assert isinstance(tier, backends.FileTier)
        assert tier.block_bytes == SIZE
        tier.close()


def test_the_page_store_by_name():
    tier = make_tier("maru:tcp://127.0.0.1:5999", block_bytes=4096)
    assert isinstance(tier, backends.MaruTier)
    assert tier.handler.config.server_url == "tcp://127.0.0.1:5999"
    assert tier.handler.config.chunk_size_bytes == 4096
    assert make_tier({"type": "maru", "tenant": "t"}, block_bytes=4096).handler.config.tenant == "t"


def test_a_specification_may_be_json():
    tier = make_tier('{"type": "memory", "capacity_bytes": 4096}', block_bytes=SIZE)
    assert tier.statistics().capacity_bytes == 4096


def test_the_package_offers_it():
    assert backends.make_tier is make_tier
    assert backends.register_tier is register_tier
    assert backends.register_tier_module is register_tier_module


def test_any_class_or_function_by_its_place(module):
    module(
        "from backends.testing import FakeTier\n"
        "class Shelf:\n"
        "    def make(block_bytes, n=3):\n"
        "        return FakeTier(n, block_bytes)\n"
    )
    tier = make_tier(f"{MODULE}:Shelf.make", block_bytes=SIZE)
    assert (type(tier), tier.statistics().capacity_bytes) == (FakeTier, 3 * SIZE)
    tier = make_tier({"type": f"{MODULE}:Shelf.make", "n": 5}, block_bytes=SIZE)
    assert tier.statistics().capacity_bytes == 5 * SIZE


def test_what_a_place_returns_is_hosted_if_it_needs_to_be():
    tier = make_tier("tests.support.plugin_peers:ThreadConnector", block_bytes=SIZE)
    assert isinstance(tier, NativeTier)
    assert tier.connector.params == {"block_bytes": SIZE}
    tier.connector.close()


# --- registered ----------------------------------------------------------------------------------------------------


def test_a_registered_name(registry):
    register_tier("shelf", lambda block_bytes, n=2: FakeTier(n, block_bytes))
    assert "shelf" in known_tiers()
    assert make_tier({"type": "shelf", "n": 4}, block_bytes=SIZE).statistics().capacity_bytes == 4 * SIZE


def test_a_name_has_one_meaning(registry):
    register_tier("shelf", FakeTier)
    register_tier("shelf", FakeTier)
    with pytest.raises(ValueError, match="named 'shelf' already"):
        register_tier("shelf", lambda block_bytes: None)
    with pytest.raises(ValueError, match="named 'shelf' already"):
        register_tier_module("shelf", "somewhere")
    with pytest.raises(ValueError, match="'memory' is built in"):
        register_tier("memory", FakeTier)
    with pytest.raises(ValueError, match="cannot name a kind of tier"):
        register_tier("a:b", FakeTier)


def test_a_module_is_imported_when_its_name_is_first_asked_for(registry, module):
    module(
        "from backends import register_tier\nfrom backends.testing import FakeTier\n"
        "register_tier('lazy', lambda block_bytes: FakeTier(1, block_bytes))\n"
    )
    register_tier_module("lazy", MODULE)
    assert "lazy" in known_tiers()
    assert MODULE not in sys.modules
    assert isinstance(make_tier("lazy", block_bytes=SIZE), FakeTier)
    assert isinstance(make_tier("lazy", block_bytes=SIZE), FakeTier)


def test_a_module_that_does_not_register_its_name(registry, module):
    module("")
    register_tier_module("lazy", MODULE)
    with pytest.raises(PluginTypeError, match="did not register the tier 'lazy' when it was imported"):
        make_tier("lazy", block_bytes=SIZE)


def test_a_lazy_module_that_cannot_be_imported_says_so_each_time(registry):
    register_tier_module("lazy", "no_such_module")
    for _ in range(2):
        with pytest.raises(ImportError, match="module 'no_such_module' cannot be imported"):
            make_tier("lazy", block_bytes=SIZE)


@pytest.fixture
def entry_point(tmp_path, monkeypatch):
    """An installed distribution with entry points of our group."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(lines):
        folder = tmp_path / "shelves-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: shelves\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[trio_offload.tiers]\n{lines}\n")

    return install


def test_an_entry_point(registry, entry_point, module):
    module("from backends.testing import FakeTier\ndef make(block_bytes):\n    return FakeTier(7, block_bytes)\n")
    entry_point(f"shelf = {MODULE}:make\nother = {MODULE}")
    assert {"shelf", "other"} <= set(known_tiers())
    assert MODULE not in sys.modules
    assert make_tier("shelf", block_bytes=SIZE).statistics().capacity_bytes == 7 * SIZE
    with pytest.raises(PluginTypeError, match="did not register the tier 'other'"):
        make_tier("other", block_bytes=SIZE)


def test_an_entry_point_may_be_a_module_that_registers(registry, entry_point, module):
    module(
        "from backends import register_tier\nfrom backends.testing import FakeTier\n"
        "register_tier('shelf', lambda block_bytes: FakeTier(1, block_bytes))\n"
    )
    entry_point(f"shelf = {MODULE}")
    assert isinstance(make_tier("shelf", block_bytes=SIZE), FakeTier)


# --- plugins ---------------------------------------------------------------------------------------------------------


def plugin(class_name, directory, **more):
    return {
        "type": "plugin",
        "module_path": "tests.support.plugin_peers",
        "class_name": class_name,
        "adapter_params": {"directory": str(directory)},
        **more,
    }


async def test_a_plugin_of_the_published_form(tmp_path):
    spec = plugin("LoopAdapter", tmp_path, max_capacity_gb=0.5, deadline=3)
    tier = make_tier(json.dumps(spec), block_bytes=SIZE)
    assert isinstance(tier, LMCacheTier)
    assert isinstance(tier.adapter.config, LoopAdapterConfig)  # found by convention
    assert tier.adapter.kwargs == {"block_bytes": SIZE}  # offered, and tolerated
    assert (tier.config.capacity_bytes, tier.config.deadline) == (1 << 29, 3)
    with trio.fail_after(60):
        async with tier:
            assert await tier.contains([b"a"]) == set()
    assert tier.adapter.closed


def test_a_native_plugin_of_the_published_form():
    spec = {
        "type": "native_plugin",
        "module_path": "tests.support.plugin_peers",
        "class_name": "ThreadConnector",
        "adapter_params": {"host": "localhost", "port": 1234},
        "capacity_bytes": "64KiB",
    }
    tier = make_tier(spec, block_bytes=SIZE)
    assert isinstance(tier, NativeTier)
    assert tier.connector.params == {"host": "localhost", "port": 1234}
    assert tier.statistics().capacity_bytes == 65536
    tier.connector.close()


PLAIN = """
from backends.testing import FakeTier

class Shelf(FakeTier):
    {attribute}
    def __init__(self, config, **kwargs):
        super().__init__(2, kwargs["block_bytes"])
        self.config = config

class Config:
    kind = "named"
    @classmethod
    def from_dict(cls, params):
        config = cls()
        config.params = params
        return config

class Plain:
    "No from_dict."
"""
CONVENTIONAL = "\nclass ShelfConfig(Config):\n    kind = 'by convention'\n"


@pytest.mark.parametrize(
    ("attribute", "more", "said", "expected"),
    [
        ("", "", None, None),
        ("", CONVENTIONAL, None, "by convention"),
        ("", CONVENTIONAL, "Config", "named"),
        ("config_class_name = 'Config'", "", None, "named"),
        ("config_class_name = 'Config'", CONVENTIONAL, None, "by convention"),
        ("config_class_name = 'ShelfConfig'", CONVENTIONAL, "Config", "named"),
        ("", "\nShelfConfig = Config()\n", None, None),
        ("", "\nclass ShelfConfig:\n    'No from_dict.'\n", None, None),
    ],
    ids=[
        "none: the parameters themselves",
        "by convention",
        "the specification before convention",
        "the class says",
        "convention before what the class says",
        "the specification before the class",
        "only a name",
        "only a class",
    ],
)
def test_the_four_steps_to_the_config_class(attribute, more, said, expected, module):
    module(PLAIN.format(attribute=attribute or "pass") + more)
    spec = {"type": "plugin", "module_path": MODULE, "class_name": "Shelf", "adapter_params": {"a": 1}}
    tier = make_tier(spec if said is None else {**spec, "config_class_name": said}, block_bytes=SIZE)
    if expected is None:
        assert tier.config == {"a": 1}
    else:
        assert (tier.config.kind, tier.config.params) == (expected, {"a": 1})


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"module_path": "no_such_module"}, ImportError, "module 'no_such_module' cannot be imported"),
        ({"class_name": "Nope"}, AttributeError, f"module '{MODULE}' has no 'Nope', which was looked for as the class"),
        ({"class_name": "NUMBER"}, TypeError, f"{MODULE}.NUMBER is 7, not a class"),
        (
            {"class_name": "Plain"},
            TypeError,
            "is not a plugin: a tier would derive from backends.abc.Tier; .*; an L2 adapter of LMCache would",
        ),
        ({"class_name": "Open"}, TypeError, "leaves abstract methods open: close, reserve"),
        (
            {"class_name": "Greedy"},
            TypeError,
            r"cannot be called with \(dict, block_bytes=...\): missing a required arg",
        ),
        (
            {"config_class_name": "Nope"},
            AttributeError,
            "has no 'Nope', which was looked for as config_class_name of the",
        ),
        ({"config_class_name": "Plain"}, TypeError, "is not a class with a from_dict"),
        ({"deadline": 3}, ValueError, "is a tier itself and has no host to take deadline"),
        ({"class_name": ""}, ValueError, "class_name is ''"),
        ({"module_path": None}, ValueError, "module_path is None"),
        ({"adapter_params": [1]}, ValueError, r"adapter_params is \[1\], but must be a mapping"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_what_a_plugin_may_lack(change, error, words, module):
    module(
        PLAIN.format(attribute="pass")
        + "\nimport abc\nNUMBER = 7\n"
        + "class Open(Shelf, abc.ABC):\n    @abc.abstractmethod\n    def reserve(self): ...\n"
        + "    @abc.abstractmethod\n    def close(self): ...\n"
        + "class Greedy(Shelf):\n    def __init__(self, config, l1_memory_desc, block_bytes): ...\n"
    )
    spec = {"type": "plugin", "module_path": MODULE, "class_name": "Shelf", "adapter_params": {}, **change}
    with pytest.raises(error, match=words) as info:
        make_tier(spec, block_bytes=SIZE)
    if error in (ImportError, AttributeError, TypeError):
        assert isinstance(info.value, backends.BackendError)


def test_what_a_class_itself_names_must_be_there(module):
    module(PLAIN.format(attribute="config_class_name = 'Nope'"))
    with pytest.raises(PluginClassError, match="looked for as config_class_name of the class Shelf") as info:
        make_tier({"type": "plugin", "module_path": MODULE, "class_name": "Shelf"}, block_bytes=SIZE)
    assert (info.value.module_path, info.value.looked_for) == (MODULE, "Nope")


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ({"deadlin": 3}, "deadlin = 3: there is no such parameter; did you mean deadline?"),
        ({"deadline": -1}, "deadline = -1"),
        ({"max_capacity_gb": -1}, "max_capacity_gb is -1"),
        ({"max_capacity_gb": 1, "capacity_bytes": 1}, "are the same setting"),
        ({"capacity_bytes": "much"}, "capacity_bytes = 'much': must be a size"),
    ],
    ids=str,
)
def test_a_plugin_that_finds_no_host_is_closed(host, words, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(LoopAdapter, "__init__", remembering(LoopAdapter.__init__, made))
    with pytest.raises(ValueError, match=words):
        make_tier(plugin("LoopAdapter", tmp_path, **host), block_bytes=SIZE)
    assert all(adapter.closed for adapter in made)


def remembering(init, made):
    def remembered(self, config, **kwargs):
        made.append(self)
        init(self, config, **kwargs)

    return remembered


def test_unlimited_is_what_no_capacity_has_always_meant(tmp_path):
    tier = make_tier(plugin("LoopAdapter", tmp_path, max_capacity_gb=0), block_bytes=SIZE)
    assert tier.statistics().capacity_bytes == sys.maxsize
    tier.adapter.close()


def test_a_connector_whose_parameters_do_not_fit(module):
    module(
        "from tests.support.plugin_peers import ThreadConnector\n"
        "class Strict(ThreadConnector):\n    def __init__(self, host): ...\n"
    )
    spec = {"type": "native_plugin", "module_path": MODULE, "class_name": "Strict"}
    with pytest.raises(PluginTypeError, match="missing a required argument: 'host'"):
        make_tier(spec, block_bytes=SIZE)
    with pytest.raises(PluginTypeError, match="is not a plugin: a native connector would need event_fd"):
        make_tier({**spec, "module_path": "tests.support.plugin_peers", "class_name": "LoopAdapter"}, block_bytes=SIZE)


# --- what there is not -------------------------------------------------------------------------------------------------


def test_an_unknown_name_says_what_there_is_and_where_it_was_looked_for():
    with pytest.raises(UnknownTier, match=r"no kind of tier is named 'attic': there are .*file, maru, memory") as info:
        make_tier("attic", block_bytes=SIZE)
    assert isinstance(info.value, LookupError)
    assert "trio_offload.tiers" in str(info.value)


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("no_such_module:Thing", PluginModuleError, "no_such_module"),
        (
            "tests.support.plugin_peers:Thing",
            PluginClassError,
            "has no 'Thing', which was looked for as the tier 'tests.support.plugin_peers:Thing'",
        ),
        ("tests.support.plugin_peers:GET", PluginTypeError, "is 0, which cannot be called"),
        ("tests.support.plugin_peers:Bitmap", PluginTypeError, "cannot be called with"),
        ("builtins:dict", PluginTypeError, "builtins:dict is not a plugin"),
        ({"type": 3}, ValueError, "must have a 'type', a string"),
        ({}, ValueError, "must have a 'type', a string"),
        ("{nonsense", ValueError, "is not JSON"),
        ({"type": "memory", "capacity_bytes": "1 parsec"}, ValueError, "must be a size such as"),
        ({"type": "memory", "capacity_bytes": True}, ValueError, "must be a size such as"),
        ({"type": "file"}, PluginTypeError, "missing a required argument: 'directory'"),
        ({"type": "plugin"}, ValueError, "lacks module_path and class_name"),
        ({"type": "native_plugin", "module_path": "x"}, ValueError, "lacks class_name"),
        ({"type": "memory", "capacity_byte": 3}, ValueError, "did you mean capacity_bytes?"),
        ({"type": "memory", "block_bytes": 3}, ValueError, "block_bytes = 3: is already set"),
        ({"type": "file", "directory": "/nowhere", "fsnc": True}, ValueError, "did you mean fsync?"),
        ({"type": "file", "directory": 3}, ValueError, "directory = 3: must be a path"),
        ({"type": "maru", "pool_siz": 3}, ValueError, "did you mean pool_size?"),
        ({"type": "maru", "pool_size_gb": "4"}, ValueError, "must be a number of GiB"),
        ({"type": "maru", "pool_size_gb": float("inf")}, ValueError, "must be a number of GiB"),
        ({"type": "maru", "pool_size_gb": 1, "pool_size": 1}, ValueError, "is the same setting as pool_size"),
        (
            {
                "type": "native_plugin",
                "module_path": "tests.support.plugin_peers",
                "class_name": "ThreadConnector",
                "most_unanswerd": 1,
            },
            ValueError,
            "did you mean most_unanswered?",
        ),
        ({"type": "backends.memory:MemoryTier", "capacity": 1}, ValueError, "did you mean capacity_bytes?"),
    ],
    ids=str,
)
def test_what_is_no_specification(spec, error, words):
    with pytest.raises(error, match=words):
        make_tier(spec, block_bytes=SIZE)


def test_the_documented_names_of_the_page_stores_adapter_are_taken():
    spec = {"type": "maru", "server_url": "tcp://127.0.0.1:1", "pool_size_gb": 1.5, "chunk_size_bytes": 4096}
    tier = make_tier({**spec, "instance_id": "me", "timeout_ms": 500}, block_bytes=SIZE)
    config = tier.handler.config
    assert (config.pool_size, config.chunk_size_bytes, config.timeout_ms) == (3 << 29, 4096, 500)
    assert (config.server_url, config.instance_id) == ("tcp://127.0.0.1:1", "me")


def test_nothing_is_imported_that_was_not_asked_for():
    import subprocess

    program = (
        "import sys, backends; backends.make_tier\n"
        "assert not {'trio', 'torch', 'zmq', 'backends.memory', 'backends.plugins._hosted'} & set(sys.modules), sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# --- calling by signature -------------------------------------------------------------------------------------------------


def test_what_a_function_can_be_given():
    offered = {"a": 1, "b": 2}
    assert finding.accepted(lambda a: None, offered) == {"a": 1}
    assert finding.accepted(lambda *, b=0: None, offered) == {"b": 2}
    assert finding.accepted(lambda **more: None, offered) == offered
    assert finding.accepted(lambda **more: None, offered, by_any=False) == {}
    assert finding.accepted(lambda a, /: None, offered) == {}
    assert finding.accepted(dict.fromkeys, offered) == {}  # in C


def test_what_cannot_be_told_is_not_refused():
    finding.check_call(ThreadConnector, "x", a=1)
    finding.check_call(type, "x", 1, 2, 3, 4)  # in C, without a signature
