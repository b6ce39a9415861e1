"""The command ``offload size``."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import click

from maru.base.console import print_json
from maru.base.ending import BadInput
from maru.base.files import read_file
from maru.configuration import as_bytes, as_size

from .model import ITEM_BYTES, GroupSize, ModelShape, PoolSize


@click.command(name="size", short_help="Compute the pool size for a number of tokens of a model.")
@click.argument("config", type=click.Path(exists=True, path_type=Path), required=False)
@click.option("--tokens", required=True, metavar="N", help="Number of tokens to keep at once: 1000000, 64K, 2M.")
@click.option(
    "--dtype",
    default="auto",
    type=click.Choice(["auto", *ITEM_BYTES]),
    help="Data type of the KV cache; auto: by the model's configuration.",
    show_default=True,
)
@click.option(
    "--block-size", default=16, type=click.IntRange(1), help="Tokens in a block of the engine.", show_default=True
)
@click.option("--chunk-tokens", default=256, type=click.IntRange(1), help="Tokens in a chunk.", show_default=True)
@click.option(
    "--tensor-parallel", default=1, type=click.IntRange(1), help="Ranks that share the heads.", show_default=True
)
@click.option(
    "--object-bytes",
    metavar="SIZES",
    help="Bytes of a chunk's object in each group of layers, such as 64KiB,8KiB, for LMCache; in place of CONFIG.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    config: Path | None,
    tokens: str,
    dtype: str,
    block_size: int,
    chunk_tokens: int,
    tensor_parallel: int,
    object_bytes: str | None,
    as_json: bool,
) -> None:
    """Compute the pool size for a number of tokens of a model.

    CONFIG is the config.json of a model, or its directory. Each rank of tensor parallelism has a pool of its own.

    LMCache stores an object of each chunk for each group of layers, in a page as large as the largest object: groups of two
    sizes need a larger pool than their bytes. --object-bytes computes it.
    """
    if (config is None) == (object_bytes is None):
        raise BadInput(
            "name either CONFIG, the config.json of a model, or --object-bytes, the sizes of LMCache's objects"
        )
    wanted = as_bytes(tokens)  # K and M of tokens are powers of 1,024, as lengths of contexts are
    if isinstance(wanted, str) or wanted < 1:
        raise BadInput(f"--tokens {tokens}: must be a positive number, such as 1000000 or 64K")
    if object_bytes is not None:
        _print_groups(GroupSize.of(wanted, _sizes(object_bytes), chunk_tokens, tensor_parallel), as_json)
        return
    assert config is not None
    try:
        model = ModelShape.from_config(_read(config))
        item_bytes = ITEM_BYTES[_dtype_of(model, dtype)]
        size = PoolSize.of(
            model,
            wanted,
            item_bytes=item_bytes,
            block_size=block_size,
            chunk_tokens=chunk_tokens,
            tensor_parallel=tensor_parallel,
        )
    except ValueError as error:
        raise BadInput(f"{config}: {error}") from None
    if as_json:
        print_json({"tokens": wanted, **attrs.asdict(size)})
        return
    of_each = " of each worker" if size.workers > 1 else ""
    click.echo(f"{size.bytes_per_token:,} bytes of KV for each token{of_each}, in chunks of {size.chunk_tokens} tokens")
    click.echo(f"{size.chunks:,} chunks of {size.chunk_bytes:,} bytes")
    click.echo(f"maru_pool_size: {as_size(size.pool_bytes)}{of_each}")
    if size.workers > 1:
        click.echo(f"of all {size.workers} workers: {as_size(size.total_bytes)}")


def _print_groups(size: GroupSize, as_json: bool) -> None:
    if as_json:
        print_json(attrs.asdict(size))
        return
    of_each = " of each worker" if size.workers > 1 else ""
    click.echo(f"{size.chunks:,} chunks of {size.chunk_bytes:,} bytes{of_each}, in {size.groups} objects each")
    ratio = f"the pool is {size.pages_to_bytes:.2f} times the bytes of the objects"
    click.echo(f"pages of {size.page_bytes:,} bytes, one for each object: {ratio}")
    click.echo(
        f"pool_size_gb: {size.pool_bytes / (1 << 30):.3f}, or capacity_bytes: {as_size(size.pool_bytes)}{of_each}"
    )


def _sizes(text: str) -> list[int]:
    sizes = [as_bytes(part) for part in text.split(",")]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise BadInput(f"--object-bytes {text}: must be positive sizes with commas between them, such as 64KiB,8KiB")
    return sizes


def _read(path: Path) -> dict[str, object]:
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(read_file(path))
    except FileNotFoundError:
        raise ValueError("there is no config.json in it") from None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror or error}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError("is not a table")
    return config


def _dtype_of(model: ModelShape, said: str) -> str:
    if said != "auto":
        return said
    if model.dtype not in ITEM_BYTES:
        raise ValueError(f"the dtype of the model is {model.dtype or 'unknown'}: set that of the cache with --dtype")
    return model.dtype
