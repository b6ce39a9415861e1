"""Connectors that keep vLLM's blocks of KV in an engine's tiers.

Another process can load them from there. ``OffloadConnector`` stores into any tiers (an ``engine`` table),
``MaruKVConnector`` into the page store, with the published parameters. Name one of them as ``kv_connector``, and this
package as ``kv_connector_module_path``. vLLM is imported when one of the two is first accessed, not before: everything
else here runs, and is tested, without it.

vLLM makes a connector twice: one half next to its scheduler, one in each worker process. Rules of both:

Rule 1. Nothing here blocks vLLM's step: slow work is begun, and its result is collected in a later step. A step that
    has nothing to compute waits some milliseconds for running work instead of returning at once.
Rule 2. vLLM sees no error of ours. A block that cannot be had counts as not cached: the fault is counted, and logged
    once.
Rule 3. A block is not overwritten while a store reads it: before each forward pass, stores that still read reassigned
    blocks get some milliseconds to end, are cancelled then, and their end is waited for.
Rule 4. Matched blocks stay pinned until they are loaded.
Rule 5. A block counts as found only if every rank of tensor parallelism has its part.

``OffloadSpec`` puts the tiers under vLLM's own OffloadingConnector instead: name this package as ``spec_module_path``.

``_plans`` are the scheduler half's messages to the workers, ``_requests`` is its knowledge of each request, ``_naming``
makes the keys of blocks, ``_settings`` are the settings; all of these are pure. ``_chunks`` are the bytes;
``_published`` and ``_layers`` are the names and the bytes of published connectors. ``_scheduler`` and ``_worker`` are
the halves, ``_connector`` is their interface to vLLM. For ``OffloadSpec``, ``_rows`` (pure) knows which row of host
memory has which chunk, ``_arena`` is that memory, ``_manager`` runs in the scheduler and ``_copies`` in a worker,
``_spec`` is their interface to vLLM.
"""

from maru.base.lazy import lazily

lazily(__name__, {"OffloadConnector": "._connector", "MaruKVConnector": "._connector", "OffloadSpec": "._spec"})
