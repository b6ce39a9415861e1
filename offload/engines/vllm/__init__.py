"""Connectors for vLLM: its blocks of KV go into the tiers of an engine, and come back in another process.

``OffloadConnector`` stores into any tiers (an ``engine`` table), ``MaruKVConnector`` into the page store, with the published
parameters. Name one of them as ``kv_connector``, and this package as ``kv_connector_module_path``. vLLM is imported when one
of the two is asked for, not before: everything else here runs, and is tested, without it.

vLLM makes a connector twice: one half beside its scheduler, one in each worker process. Rules of both:

Rule 1. Nothing here blocks vLLM's step: what takes time is begun, and asked for in a later step. Where a step has nothing to
        compute, it waits some milliseconds for what is under way instead of turning round at once.
Rule 2. vLLM sees no error of ours. What cannot be had is not cached: it is counted, and named in the log once.
Rule 3. A block is not overwritten while a store reads it: before each forward pass, what is still being stored of the blocks
        that were given out anew may end for some milliseconds, is cancelled then, and its end waited for.
Rule 4. What was matched stays pinned until it is loaded.
Rule 5. A block counts as found only if every rank of tensor parallelism has its part.

``OffloadSpec`` puts the tiers behind vLLM's own OffloadingConnector instead: name this package as ``spec_module_path``.

``_plans`` is what the scheduler's half tells the workers, ``_requests`` what it knows of each request, ``_naming`` what
blocks are called, ``_settings`` what can be set; all of these are pure. ``_chunks`` are the bytes; ``_published`` and
``_layers`` are the names and the bytes of published connectors. ``_scheduler`` and ``_worker`` are the halves,
``_connector`` what vLLM sees of them. Of ``OffloadSpec``, ``_rows`` (pure) knows which chunk lies where in host memory,
``_arena`` is that memory, ``_manager`` is beside the scheduler and ``_copies`` in a worker, ``_spec`` what vLLM sees of them.
"""

from maru.base.lazy import lazily

lazily(__name__, {"OffloadConnector": "._connector", "MaruKVConnector": "._connector", "OffloadSpec": "._spec"})
