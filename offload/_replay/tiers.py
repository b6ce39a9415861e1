"""The tiers of a replay, open from its beginning to its end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

from backends import BackendError
from backends.abc import Tier
from backends.base.closing import closing
from backends.file import FileTier
from backends.memory import MemoryTier
from maru.base.scratch import scratch

from .options import ReplayError, ReplayOptions, TierSpec
from .units import size_text

_REGION_STEP: Final = 2 << 20
"""The page size of regions.

A page store's capacity is rounded up to it.
"""


@asynccontextmanager
async def open_tiers(options: ReplayOptions, unique: int) -> AsyncIterator[dict[str, Tier]]:
    """Open the tiers of the options, and close them at the end."""
    tiers: dict[str, Tier] = {}
    async with AsyncExitStack() as stack:
        for spec in options.tiers:
            blocks = spec.blocks(options.block_bytes, unique)
            if not blocks and unique:
                raise ReplayError(f"--capacity of {spec.name}: must hold a block of {options.block_bytes} bytes")
            nbytes = max(1, blocks) * options.block_bytes
            tier: Tier
            if spec.made is not None:
                # The engine enters a tier that has to be entered, and leaves it; so only close() is called here.
                tier = stack.enter_context(closing(_made(spec, spec.made, options.block_bytes)))
            elif spec.kind == "maru":
                tier = await stack.enter_async_context(_page_store(nbytes, options))
            elif spec.directory is None:
                _check_memory(spec, nbytes)
                tier = memory = MemoryTier(nbytes, options.block_bytes, checksums=options.checksums)
                stack.callback(memory.close)
            else:
                tier = files = FileTier(
                    spec.directory,
                    nbytes,
                    block_bytes=options.block_bytes,
                    fingerprint="offload.replay",
                    checksums=options.checksums,
                )
                stack.callback(files.close)
            tiers[spec.name if spec.name not in tiers else f"{spec.name} ({len(tiers) + 1})"] = tier
        yield tiers


def _made(spec: TierSpec, made: str | Mapping[str, Any], block_bytes: int) -> Tier:
    """Make a tier from the caller's specification.

    Raises:
        ReplayError: there is no such tier, or it cannot be made. The message names the tier, and the places searched.
    """
    from backends.plugins import make_tier

    try:
        return make_tier(made, block_bytes=block_bytes)
    except (BackendError, ValueError, OSError) as error:
        raise ReplayError(f"--tier {spec.name}: {error}") from error
    except Exception as error:  # the class is the caller's and may raise anything
        raise ReplayError(f"--tier {spec.name}: {error!r}") from error


@asynccontextmanager
async def _page_store(nbytes: int, options: ReplayOptions) -> AsyncIterator[Tier]:
    """Open a tier over a page store in this process.

    It has one region, and does not evict ahead of need.
    """
    import click

    from backends.maru import MaruTier
    from maru import MaruHandler, ServerConfig, open_server
    from maru.base.errors import PoolUnusable
    from maru.doctor import find_place

    try:
        place = find_place(nbytes + _REGION_STEP)
    except PoolUnusable as error:
        raise ReplayError(f"maru: {error}: set its --capacity, or lower --block-bytes") from error
    if place.note:
        click.echo(place.note, err=True)
    with scratch("offload-replay", str(place.parent)) as home:
        config = ServerConfig(
            host="",
            rm_address="",
            pool_path=home,
            capacity_bytes=nbytes + _REGION_STEP,
            high_watermark=1.0,
            log_level="error",
        )
        async with open_server(config) as server:
            handler = MaruHandler(
                server_url=server.endpoints[-1],
                chunk_size_bytes=options.block_bytes,
                pool_size=nbytes,
                auto_expand=False,
                checksums=options.checksums,
            )
            async with MaruTier(handler) as tier:
                yield tier


def _check_memory(spec: TierSpec, nbytes: int) -> None:
    """Refuse a tier that does not fit into free memory.

    Linux overcommits, and kills a process later instead.
    """
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):  # not Linux, or another format
        return
    if nbytes > available:
        raise ReplayError(
            f"{spec.name} would take {size_text(nbytes)} of memory, of which {size_text(available)} is free: "
            "set its --capacity, or lower --block-bytes"
        )
