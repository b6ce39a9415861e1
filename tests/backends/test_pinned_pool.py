"""Both pools have one face and one behaviour: each test here is passed by a pool of this process, by a server's pool mapped
here, and by a server's pool whose bytes go through the socket."""

from __future__ import annotations

import functools
import gc
import random
import threading
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest

from tests.support.pinned_pools import CHUNK, address_of, server_in_thread

torch = pytest.importorskip("torch")

from backends.pinned_pool import (  # noqa: E402  # behind the check for torch
    BlockFreed,
    MemoryBlock,
    MemoryPool,
    PinnedMemoryPool,
    PinnedPoolConfigError,
    PinnedPoolError,
    PoolClosed,
    PoolRefused,
    ServerPinnedMemoryPool,
    pinned_memory_pool,
)
from backends.pinned_pool._keeping import Place  # noqa: E402

Make: TypeAlias = Callable[..., MemoryPool]
KINDS = ("local", "shared", "streamed")
CHUNKS = 64
"""Of a pool here: 4 MiB."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with server_in_thread(pool_memory_size=256) as running:
        yield address_of(running)


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, server: str) -> Iterator[Make]:
    made: list[MemoryPool] = []

    def make(pool_size: int = CHUNKS * CHUNK >> 20, device: str = "cpu") -> MemoryPool:
        if request.param == "local":
            made.append(PinnedMemoryPool(torch.bfloat16, pool_size, device, chunk_size=CHUNK))
        else:
            shared = request.param == "shared"
            made.append(ServerPinnedMemoryPool(torch.bfloat16, pool_size, device, server=server, shared_memory=shared))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


@pytest.fixture
def pool(make: Make) -> MemoryPool:
    return make()


def block_for(pool: MemoryPool, tensor: torch.Tensor) -> MemoryBlock:
    block = pool.alloc_same_pin_tensor(tensor)
    assert block is not None
    return block


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bits: what must come back are these, NaNs included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape, size), dtype=torch.uint8, generator=generator)
    return raw.reshape(-1).view(dtype).reshape(shape)


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    assert one.shape == two.shape and one.dtype == two.dtype
    return torch.equal(one.contiguous().reshape(-1).view(torch.uint8), two.contiguous().reshape(-1).view(torch.uint8))


def scattered(pool: MemoryPool, nbytes: int) -> MemoryBlock:
    """A block in every other chunk."""
    chunk = torch.empty(CHUNK, dtype=torch.uint8)
    singles = [block_for(pool, chunk) for _ in range(CHUNKS)]
    for block in singles[::2]:
        pool.free(block)
    block = block_for(pool, torch.empty(nbytes, dtype=torch.uint8))
    for single in singles[1::2]:
        pool.free(single)
    assert len(block.chunk_indices) == 1 or not block.is_contiguous()
    return block


# --- sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 7])
def test_bytes_come_back_whatever_the_chunk_borders(pool: MemoryPool, nbytes: int) -> None:
    tensor = filled((nbytes,), torch.uint8)
    block = block_for(pool, tensor)
    assert len(block.chunk_indices) == -(-nbytes // CHUNK)
    assert block.copy_(tensor) is block
    assert same_bits(block.to("cpu"), tensor)
    usage = pool.get_usage_info()
    assert usage["active_allocations"] == 1
    assert usage["allocated_chunks"] == len(block.chunk_indices)
    assert usage["allocated_bytes"] == nbytes
    assert usage["chunk_size"] == CHUNK
    assert pool.free(block)
    assert pool.get_usage_info()["allocated_chunks"] == 0


@pytest.mark.parametrize("nbytes", [CHUNK - 1, CHUNK + 1, 5 * CHUNK - 3, 20 * CHUNK])
def test_bytes_come_back_from_chunks_that_are_not_adjacent(pool: MemoryPool, nbytes: int) -> None:
    block = scattered(pool, nbytes)
    tensor = filled((nbytes,), torch.uint8)
    block.copy_(tensor)
    assert same_bits(block.to("cpu"), tensor)


def test_blocks_do_not_touch_each_other(pool: MemoryPool) -> None:
    rng = random.Random(1)
    held: list[tuple[MemoryBlock, torch.Tensor]] = []
    for number in range(60):
        if held and rng.random() < 0.4:
            block, _ = held.pop(rng.randrange(len(held)))
            pool.free(block)
        tensor = filled((rng.randrange(1, 5 * CHUNK),), torch.uint8, number)
        new = pool.alloc_same_pin_tensor(tensor)
        if new is not None:
            new.copy_(tensor)
            held.append((new, tensor))
    assert len(held) > 5
    assert all(same_bits(block.to("cpu"), tensor) for block, tensor in held)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
    ids=str,
)
def test_every_dtype_travels_as_its_bytes(pool: MemoryPool, dtype: torch.dtype) -> None:
    tensor = filled((7, 11, 333), dtype)
    block = block_for(pool, tensor)
    assert (block.shape, block.dtype, block.nbytes) == (tensor.shape, dtype, tensor.nbytes)
    assert same_bits(block.copy_(tensor).to("cpu"), tensor)


def test_scalar_and_empty_shapes(pool: MemoryPool) -> None:
    for tensor in (torch.tensor(3.5), torch.empty(3, 0, 2), torch.empty(0)):
        block = block_for(pool, tensor)
        assert same_bits(block.copy_(tensor).to("cpu"), tensor)
        assert block.dim() == tensor.dim()
        assert block.size() == tensor.size()


# --- copies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_scattered", [False, True])
def test_source_with_gaps_is_copied_in_its_order(pool: MemoryPool, is_scattered: bool) -> None:
    base = filled((300, 200, 2), torch.uint8)
    for source in (base.transpose(0, 1), base[::2], base.flip(0), base[:, :, :1]):
        block = (scattered(pool, source.nbytes) if is_scattered else block_for(pool, source)).view(source.shape)
        assert same_bits(block.copy_(source).to("cpu"), source)
        pool.free(block)


@pytest.mark.parametrize("is_scattered", [False, True])
def test_source_of_another_dtype_is_converted(pool: MemoryPool, is_scattered: bool) -> None:
    like = torch.empty(100_000, dtype=torch.bfloat16)
    block = scattered(pool, like.nbytes).view(torch.bfloat16) if is_scattered else block_for(pool, like)
    source = torch.randn(100_000)
    assert same_bits(block.copy_(source).to("cpu"), source.to(torch.bfloat16))


def test_source_is_expanded_as_torch_does(pool: MemoryPool) -> None:
    block = block_for(pool, torch.empty(64, 1000))
    row = torch.randn(1000)
    assert same_bits(block.copy_(row).to("cpu"), row.expand(64, 1000))
    with pytest.raises(RuntimeError, match="expand"):
        block.copy_(torch.randn(3))


def test_conjugate_source_is_resolved(pool: MemoryPool) -> None:
    source = torch.randn(1000, dtype=torch.complex64).conj()
    assert same_bits(block_for(pool, source).copy_(source).to("cpu"), source.resolve_conj())


@pytest.mark.parametrize("is_scattered", [False, True])
def test_runs_of_chunks_are_tensors_for_a_devices_copies(pool: MemoryPool, is_scattered: bool) -> None:
    tensor = filled((5 * CHUNK + 3,), torch.uint8)
    block = (scattered(pool, tensor.nbytes) if is_scattered else block_for(pool, tensor)).copy_(tensor)
    place = block._reach()
    if not isinstance(place, Place):
        assert block.as_tensor() is None  # there is no memory to look at
        return
    runs = list(block._tensors(place))
    assert [at for _, at in runs] == ([n * CHUNK for n in range(6)] if is_scattered else [0])
    assert same_bits(torch.cat([run for run, _ in runs]), tensor)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("is_scattered", [False, True])
@pytest.mark.parametrize("non_blocking", [False, True])
def test_device_and_back(make: Make, is_scattered: bool, non_blocking: bool) -> None:
    pool = make(device="cuda")
    source = filled((5 * CHUNK + 4,), torch.uint8).cuda()
    block = scattered(pool, source.nbytes) if is_scattered else block_for(pool, source)
    block.copy_(source, non_blocking=non_blocking)
    torch.cuda.synchronize()
    back = block.to(non_blocking=non_blocking)
    torch.cuda.synchronize()
    assert back.is_cuda
    assert same_bits(back.cpu(), source.cpu())
    assert block.is_pinned() == (pool.get_usage_info()["transport"] != "socket")
    pool.free(block)
    gaps = torch.randn(300, 200, device="cuda").T
    block = block_for(pool, gaps).copy_(gaps)
    assert same_bits(block.to("cpu"), gaps.cpu())


def test_source_that_wants_a_gradient_is_taken_without(pool: MemoryPool) -> None:
    source = torch.randn(1000, requires_grad=True)
    assert not block_for(pool, source).copy_(source).to("cpu").requires_grad


def test_block_is_copied_into_a_block(pool: MemoryPool) -> None:
    tensor = filled((2 * CHUNK + 5,), torch.uint8)
    one, two = block_for(pool, tensor), block_for(pool, tensor)
    assert same_bits(two.copy_(one.copy_(tensor)).to("cpu"), tensor)


def test_out_is_filled_and_must_fit(pool: MemoryPool) -> None:
    tensor = filled((3, CHUNK), torch.uint8)
    block = block_for(pool, tensor).copy_(tensor)
    out = torch.empty_like(tensor)
    assert block.to(out=out) is out
    assert same_bits(out, tensor)
    for wrong in (torch.empty(3, CHUNK), torch.empty(CHUNK, 3, dtype=torch.uint8).T, torch.empty(1, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="out must be"):
            block.to(out=wrong)


def test_to_goes_to_the_pools_device_by_default(make: Make) -> None:
    block = block_for(make(device="cpu"), torch.empty(4))
    assert block.to().device.type == "cpu"
    assert block.to(torch.device("cpu"), non_blocking=True).device.type == "cpu"


# --- views, addresses, lifetimes ----------------------------------------------------------------------------------


def test_view_shows_the_same_bytes(pool: MemoryPool) -> None:
    tensor = filled((6, 50_000), torch.float32)
    block = block_for(pool, tensor).copy_(tensor)
    assert same_bits(block.view(-1, 3).to("cpu"), tensor.view(-1, 3))
    assert same_bits(block.view(300_000).view(6, 50_000).to("cpu"), tensor)
    assert same_bits(block.view(torch.int32).to("cpu"), tensor.view(torch.int32))
    block.view(2, -1).copy_(torch.zeros(2, 150_000))
    assert not block.to("cpu").any()
    assert block.view(-1).data_ptr() == block.data_ptr()
    with pytest.raises(RuntimeError):
        block.view(7)


def test_view_keeps_the_chunks_alive(pool: MemoryPool) -> None:
    tensor = filled((CHUNK + 1,), torch.uint8)
    view = block_for(pool, tensor).copy_(tensor).view(1, -1)  # its block is gone already
    gc.collect()
    assert pool.get_usage_info()["allocated_chunks"] == 2
    others = [block_for(pool, tensor).copy_(tensor * 0) for _ in range(5)]
    assert same_bits(view.to("cpu")[0], tensor)
    del view, others
    gc.collect()
    assert pool.get_usage_info()["allocated_chunks"] == 0


def test_block_that_dies_gives_its_chunks_back_at_the_next_call(pool: MemoryPool) -> None:
    whole = torch.empty(CHUNKS * CHUNK, dtype=torch.uint8)
    for _ in range(5):
        block_for(pool, whole)  # each would fail if the one before were there
        gc.collect()


def test_block_that_dies_inside_the_pools_lock_does_not_hang(pool: MemoryPool) -> None:
    """The collector may run anywhere: here it runs where the lock is held."""
    cycle: list[object] = [block_for(pool, torch.empty(CHUNK, dtype=torch.uint8))]
    cycle.append(cycle)
    del cycle
    lock = getattr(pool._keeper, "_lock", None) or pool._keeper._client._lock  # type: ignore[attr-defined]
    with lock:
        gc.collect()
    assert pool.get_usage_info()["allocated_chunks"] == 0


def test_data_ptr_is_the_address_or_nobody_elses(pool: MemoryPool) -> None:
    tensor = filled((2 * CHUNK,), torch.uint8)
    one, two = block_for(pool, tensor).copy_(tensor), block_for(pool, tensor)
    assert one.data_ptr() != two.data_ptr()
    assert one.data_ptr() == one.data_ptr()
    mapped = one.as_tensor()
    if pool.get_usage_info()["transport"] == "socket":
        assert mapped is None
    else:
        assert mapped is not None
        assert mapped.data_ptr() == one.data_ptr()
        assert same_bits(mapped, tensor)
        mapped.zero_()
        assert not one.to("cpu").any()
    pool.free(one)
    pool.free(two)
    three = scattered(pool, 2 * CHUNK)
    assert three.as_tensor() is None
    assert three.data_ptr() >= 1 << 62


def test_tensor_over_a_block_survives_block_and_pool(pool: MemoryPool) -> None:
    tensor = filled((CHUNK,), torch.uint8)
    block = block_for(pool, tensor).copy_(tensor)
    mapped = block.as_tensor()
    if mapped is None:  # streamed: there is no memory to look at
        assert pool.get_usage_info()["transport"] == "socket"
        return
    del block
    gc.collect()
    assert pool.get_usage_info()["allocated_chunks"] == 1
    pool.close()
    gc.collect()
    assert same_bits(mapped, tensor)


# --- freeing, and a full pool -------------------------------------------------------------------------------------


def test_full_pool_is_an_answer(pool: MemoryPool) -> None:
    chunk = torch.empty(CHUNK, dtype=torch.uint8)
    blocks = [pool.alloc_same_pin_tensor(chunk) for _ in range(CHUNKS)]
    assert None not in blocks
    assert pool.alloc_same_pin_tensor(chunk) is None
    assert pool.alloc_same_pin_tensor(torch.empty(0)) is not None
    block = blocks.pop()
    assert block is not None
    pool.free(block)
    assert pool.alloc_same_pin_tensor(chunk) is not None
    assert pool.alloc_same_pin_tensor(torch.empty(1 << 30, dtype=torch.uint8, device="meta")) is None


def test_freed_block_says_so(pool: MemoryPool) -> None:
    block = block_for(pool, torch.empty(10))
    view = block.view(2, 5)
    assert pool.free(block) is True
    assert pool.free(block) is False
    assert pool.free(view) is False
    for use in (block.to, view.to, block.data_ptr, block.as_tensor, functools.partial(block.view, -1)):
        with pytest.raises(BlockFreed):
            use()
    with pytest.raises(BlockFreed):
        block.copy_(torch.empty(10))
    assert "freed" in repr(block)
    other = block_for(pool, torch.empty(10))
    del block, view, use
    gc.collect()
    assert pool.get_usage_info()["active_allocations"] == 1
    assert other.to("cpu").shape == (10,)


def test_block_of_another_pool_is_refused(make: Make) -> None:
    one, two = make(), make()
    block = block_for(one, torch.empty(10))
    with pytest.raises(ValueError, match="does not belong to"):
        two.free(block)


def test_closed_pool_says_so(make: Make) -> None:
    with make() as pool:
        block = block_for(pool, torch.empty(10))
    pool.close()
    for use in (block.to, block.data_ptr, pool.get_usage_info, lambda: pool.alloc_same_pin_tensor(torch.empty(1))):
        with pytest.raises(PoolClosed):
            use()
    with pytest.raises(PoolClosed):
        pool.free(block)


def test_errors_are_runtime_errors() -> None:
    assert issubclass(PinnedPoolError, RuntimeError)


def test_sizes_must_make_sense(make: Make) -> None:
    for size in (0, -1, 1 << 25):
        with pytest.raises(PinnedPoolConfigError, match="pool_size"):
            make(size)
    for chunk in (0, 3 << 12, 2048):
        with pytest.raises(PinnedPoolConfigError, match="power of two"):
            PinnedMemoryPool(torch.uint8, 1, chunk_size=chunk)
    with pytest.raises(PoolRefused, match="at most"):
        PinnedMemoryPool(torch.uint8, 1 << 20, chunk_size=4096)


# --- threads ------------------------------------------------------------------------------------------------------


def test_threads_share_a_pool(pool: MemoryPool) -> None:
    wrong: list[object] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for number in range(25):
                tensor = filled((rng.randrange(0, 3 * CHUNK),), torch.uint8, seed * 1000 + number)
                block = pool.alloc_same_pin_tensor(tensor)
                if block is None:
                    continue
                block.copy_(tensor)
                if not same_bits(block.to("cpu"), tensor):
                    wrong.append((seed, number))
                if rng.random() < 0.5:
                    pool.free(block)
        except BaseException as exc:
            wrong.append(exc)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    gc.collect()
    assert pool.get_usage_info()["allocated_chunks"] == 0


def test_two_threads_free_a_block_once(pool: MemoryPool) -> None:
    for _ in range(20):
        block = block_for(pool, torch.empty(10))
        answers: list[bool] = []
        threads = [threading.Thread(target=lambda b=block, a=answers: a.append(pool.free(b))) for _ in range(3)]  # type: ignore[misc]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(answers) == [False, False, True]
    assert pool.get_usage_info()["active_allocations"] == 0


# --- choosing -----------------------------------------------------------------------------------------------------


def test_one_flag_chooses(server: str) -> None:
    with pinned_memory_pool(torch.float32, 1, use_server_pool=True, server=server) as remote:
        assert isinstance(remote, ServerPinnedMemoryPool)
        assert remote.get_usage_info()["transport"] == "shared memory"
        assert repr(remote) == f"<ServerPinnedMemoryPool of 1 MiB in {server}>"
    with pinned_memory_pool(torch.float32, 4) as local:
        assert isinstance(local, PinnedMemoryPool)
        assert local.get_usage_info()["chunk_size"] == 4 << 20


def test_drop_in(make: Make) -> None:
    """The published way to use it, with either pool."""
    pool = make(pool_size=4, device="cpu")
    tensor = torch.randn(1024, 1024, dtype=torch.bfloat16)
    allocated_block = pool.alloc_same_pin_tensor(tensor)
    assert allocated_block is not None
    allocated_block.copy_(tensor)
    assert same_bits(allocated_block.to("cpu"), tensor)
    usage = pool.get_usage_info()
    assert usage["active_allocations"] == 1
    assert usage["allocated_chunks"] == 32
    pool.free(allocated_block)
