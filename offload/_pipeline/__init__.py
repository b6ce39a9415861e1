"""The pipeline, which copies blocks from one memory tier to another.

A block passes four stages, linked by channels: admission (the policies decide which blocks may leave), awaiting (the
forward pass that writes them ends), batching, and transfer (the copy).
:mod:`offload._pipeline.pipeline` joins the stages, and alone knows their order. Each stage is a module of its own name;
``slot`` makes the copies of the transfer stage. ``container`` is the unit of work, ``lifecycle`` has its states,
``settlement`` ends it, and ``handle`` shows it to the caller. ``chain``, ``offer`` and ``spill`` copy on to further
tiers.

Six promises, which the modules refer to:

P1. A container (the blocks of one enqueue) is cancelled whole or not at all.
P2. A container carries its own cancellation from enqueue on.
P3. From the upgrade on, when its source refs are taken, nothing is cancelled.
P4. The last sweep for cancelled containers comes right before the upgrade.
P5. After the upgrade a batch is one flat list of blocks, in which each container owns a span.
P6. A precondition is awaited together with a cancellation, whichever comes first.
"""
