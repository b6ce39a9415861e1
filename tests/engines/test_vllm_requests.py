"""What the scheduler's half of the vLLM connector knows of a request: pure, so nothing here needs vLLM."""

import pickle

import pytest

from offload.engines.vllm._naming import ChunkNaming, keys_of_all_ranks, layout_text
from offload.engines.vllm._plans import LoadPlan, StepPlan, StorePlan
from offload.engines.vllm._requests import MOVES, BlockGroup, Question, RequestRecord, RequestTable, State

BLOCK, CHUNK = 16, 64  # four blocks in a chunk


def hashes(n: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(n)]


def of_chunks(*numbers: int) -> list[bytes]:
    """The hash of the last block of each of these chunks."""
    return [(4 * number + 3).to_bytes(32, "big") for number in numbers]


def table() -> RequestTable:
    return RequestTable([BlockGroup(BLOCK)], CHUNK, BLOCK)


def asked(requests: RequestTable, tokens: int, computed: int = 0) -> RequestRecord:
    record = requests.add("r", hashes(tokens // BLOCK))
    assert isinstance(requests.match(record, tokens, computed), Question)
    return record


def found(requests: RequestTable, tokens: int, chunks: int, computed: int = 0) -> RequestRecord:
    record = asked(requests, tokens, computed)
    requests.answer(record, chunks)
    return record


# --- how much is cached ---------------------------------------------------------------------------------------------


def test_a_request_is_asked_for_once_and_its_answer_is_remembered():
    requests = table()
    record = requests.add("r", hashes(16))
    question = requests.match(record, 256, 0)
    assert question == Question(of_chunks(0, 1, 2))  # the chunk that holds the last token is computed
    assert requests.match(record, 256, 0) is None
    requests.answer(record, 2)
    assert [requests.match(record, 256, 0) for _ in range(3)] == [128] * 3
    assert requests.add("r", hashes(16)) is record


def test_what_vllm_has_computed_already_is_not_asked_for():
    requests = table()
    record = requests.add("r", hashes(17))
    assert requests.match(record, 272, 80) == Question(of_chunks(1, 2, 3))  # from the chunk that it has in part
    requests.answer(record, 3)
    assert requests.match(record, 272, 80) == 256 - 80
    assert requests.match(record, 272, 256) == 0  # meanwhile another request has computed the same


def test_a_miss_is_remembered_until_the_request_is_preempted():
    requests = table()
    record = found(requests, 256, 0)
    assert [requests.match(record, 256, 0) for _ in range(3)] == [0] * 3
    requests.allocated(record, [range(16)], 0)
    assert requests.match(record, 256, 0) == Question(of_chunks(0, 1, 2))  # vLLM asks only for what is not running


def test_a_prompt_without_a_whole_chunk_is_not_asked_for():
    requests = table()
    assert requests.match(requests.add("short", hashes(3)), 63, 0) == 0
    assert requests.match(requests.add("just", hashes(4)), 64, 0) == 0
    assert requests.match(requests.add("unhashed", []), 640, 0) == 0


def test_what_vllm_has_evicted_meanwhile_is_asked_for_anew():
    requests = table()
    record = found(requests, 272, 2, computed=128)
    assert requests.match(record, 272, 64) == Question(of_chunks(1, 2, 3))


def test_an_answer_for_a_request_that_was_admitted_meanwhile_is_nothing():
    requests = table()
    record = asked(requests, 256)
    requests.allocated(record, [range(16)], 0)
    requests.answer(record, 3)
    assert record.state is State.ADMITTED


# --- loading --------------------------------------------------------------------------------------------------------


def test_what_was_found_is_loaded_into_the_blocks_of_the_request():
    requests = table()
    record = found(requests, 256, 2)
    requests.match(record, 256, 0)
    plan = requests.allocated(record, [range(100, 116)], 128)
    assert plan == LoadPlan("r", of_chunks(0, 1), [[100, 101, 102, 103], [104, 105, 106, 107]])
    assert requests.allocated(record, [range(100, 116)], 0) is None  # vLLM says it twice where a load is asynchronous
    assert record.state is State.LOADING
    requests.loaded(record, complete=True)
    assert record.state is State.ADMITTED


def test_blocks_that_a_request_has_already_are_not_written_to():
    requests = table()
    record = found(requests, 272, 3, computed=80)
    assert requests.match(record, 272, 80) == 176
    plan = requests.allocated(record, [range(100, 117)], 176)
    assert plan is not None
    assert plan.blocks == [[None, 105, 106, 107], [108, 109, 110, 111], [112, 113, 114, 115]]
    assert list(plan.hashes) == of_chunks(1, 2, 3)


def test_fewer_tokens_than_were_offered_are_loaded_if_vllm_wants_fewer():
    requests = table()
    record = found(requests, 256, 3)
    requests.match(record, 256, 0)
    plan = requests.allocated(record, [range(16)], 80)
    assert plan is not None and plan.blocks == [[0, 1, 2, 3], [4, None, None, None]]


def test_tokens_that_are_loaded_are_told_apart_by_the_tiers_of_their_chunks():
    requests = table()
    record = found(requests, 272, 3, computed=80)  # chunks 1 to 3, of the first of which 16 tokens are there
    assert requests.sources(record, 176, ["host", "disk", "host"]) == {"host": 48 + 64, "disk": 64}
    assert requests.sources(record, 100, ["host", "disk", "disk"]) == {"host": 48, "disk": 52}  # vLLM may want fewer
    assert requests.sources(record, 0, ["host"]) == {}


def test_a_load_that_failed_is_not_tried_again():
    requests = table()
    record = found(requests, 256, 2)
    requests.match(record, 256, 0)
    requests.allocated(record, [range(16)], 128)
    requests.loaded(record, complete=False)
    assert requests.match(record, 256, 0) == 0
    assert requests.allocated(record, [range(16)], 0) is None
    assert record.state is State.FAILED
    # What could not be loaded is stored anew, once it is computed.
    assert requests.store(record, 256, lambda: [range(16)]) == StorePlan(
        "r", of_chunks(0, 1, 2, 3), [[*range(n, n + 4)] for n in (0, 4, 8, 12)], 0
    )


# --- storing --------------------------------------------------------------------------------------------------------


def test_a_partial_hit_is_completed():
    requests = table()
    record = found(requests, 256, 2)
    requests.match(record, 256, 0)
    requests.allocated(record, [range(16)], 128)
    requests.loaded(record, complete=True)
    plan = requests.store(record, 256, lambda: [range(16)])
    assert plan is not None and (list(plan.hashes), plan.first) == (of_chunks(2, 3), 2)


def test_each_chunk_is_stored_once_when_it_is_whole():
    requests = table()
    record = requests.add("r", hashes(0))
    blocks = list(range(100))
    assert requests.store(record, 200, lambda: [blocks]) is None  # nothing has a hash yet
    record.hashes = hashes(12)
    assert requests.store(record, 63, lambda: [blocks]) is None
    plan = requests.store(record, 150, lambda: [blocks])  # the prompt comes in chunks of its own
    assert plan == StorePlan("r", of_chunks(0, 1), [blocks[0:4], blocks[4:8]], 0)
    assert requests.store(record, 191, lambda: [blocks]) is None
    assert requests.store(record, 500, lambda: [blocks]) == StorePlan("r", of_chunks(2), [blocks[8:12]], 2)
    assert requests.store(record, 500, lambda: [blocks]) is None


def test_block_numbers_are_asked_for_only_where_there_is_something_to_store():
    requests = table()
    record = requests.add("r", hashes(4))

    def never() -> list[int]:
        raise AssertionError("nobody needs them")

    assert requests.store(record, 63, never) is None


def test_what_was_preempted_is_offered_once_more():
    requests = table()
    record = requests.add("r", hashes(16))
    requests.match(record, 256, 0)
    requests.answer(record, 0)
    requests.allocated(record, [range(16)], 0)
    requests.store(record, 256, lambda: [range(16)])
    requests.match(record, 256, 0)
    requests.answer(record, 0)
    requests.allocated(record, [range(50, 66)], 0)
    plan = requests.store(record, 256, lambda: [range(50, 66)])
    assert plan is not None and plan.first == 0 and plan.blocks[0] == [50, 51, 52, 53]


def test_hashes_may_be_of_smaller_units_than_blocks():
    requests = RequestTable([BlockGroup(32)], 64, 16)
    record = requests.add("r", hashes(9))
    assert requests.match(record, 144, 0) == Question(of_chunks(0, 1))


def test_a_move_that_is_none_raises_and_changes_nothing():
    for state in State:
        for other in set(State) - MOVES[state]:
            record = RequestRecord("r", [], state)
            with pytest.raises(RuntimeError, match="cannot become"):
                record.move(other)
            assert record.state is state


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="chunks of 48"):
        RequestTable([BlockGroup(32)], 48, 16)
    with pytest.raises(ValueError, match="hashes of 20"):
        RequestTable([BlockGroup(32)], 64, 20)


# --- several groups of KV caches ------------------------------------------------------------------------------------


def hybrid(window: int) -> RequestTable:
    """A group that sees all, and one with smaller blocks that sees a window."""
    return RequestTable([BlockGroup(BLOCK), BlockGroup(8, window)], CHUNK, 8)


def passed(blocks: list[int], upto: int) -> list[int]:
    """These, of which a window has passed the first ones."""
    return [0] * upto + blocks[upto:]


def test_a_chunk_has_the_blocks_of_all_groups():
    requests = hybrid(window=100)
    record = requests.add("r", hashes(16))
    plan = requests.store(record, 128, lambda: [range(10, 18), range(50, 66)])
    assert plan is not None
    assert plan.blocks == [[*range(10, 14), *range(50, 58)], [*range(14, 18), *range(58, 66)]]
    assert [int.from_bytes(one, "big") for one in plan.hashes] == [7, 15]


def test_only_what_the_window_reaches_is_loaded():
    requests = hybrid(window=20)
    record = requests.add("r", hashes(32))
    assert isinstance(requests.match(record, 256, 0), Question)
    requests.answer(record, 2)
    assert requests.match(record, 256, 0) == 128
    plan = requests.allocated(record, [range(10, 18), passed([*range(50, 66)], 13)], 128)
    assert plan is not None
    assert plan.blocks == [[*range(10, 14)] + [None] * 8, [*range(14, 18)] + [None] * 5 + [63, 64, 65]]


@pytest.mark.parametrize("window", [9, 16, 20, 64, 65, 100, 200])
@pytest.mark.parametrize("part", [1, 8, 24, 64, 100])
def test_each_prefix_that_was_stored_can_be_loaded_whatever_is_computed_at_once(window, part):
    """vLLM's part: before each step it gives up what the window has passed, and gives a load what its window reaches."""
    requests, group = hybrid(window), BlockGroup(8, window)
    record = requests.add("r", hashes(48))
    stored: list[list[int | None]] = []
    for before in range(0, 384, part):
        held = passed([*range(100, 148)], max(0, before - window + 1) // 8)
        plan = requests.store(record, min(384, before + part), lambda held=held: [range(24), held])
        stored += [] if plan is None else [list(column) for column in plan.blocks]
    assert len(stored) == 6
    for chunks in range(1, 7):
        reader = hybrid(window)
        other = reader.add("s", hashes(64))
        reader.match(other, 512, 0)
        reader.answer(other, chunks)
        tokens = reader.match(other, 512, 0)
        assert tokens == chunks * CHUNK
        load = reader.allocated(
            other, [range(200, 232), passed([*range(300, 364)], max(0, tokens - window + 1) // 8)], tokens
        )
        assert load is not None
        for wanted, had in zip(load.blocks, stored, strict=False):
            assert all(there is not None for block, there in zip(wanted, had, strict=True) if block is not None)
        assert group.first_needed(tokens) == max(0, tokens - window + 1) // 8


def test_of_a_prefix_that_vllm_had_itself_only_the_chunks_that_are_whole_are_stored():
    """vLLM takes over all blocks of the one group, and of the other those of the last window."""
    requests = hybrid(window=20)
    record = requests.add("r", hashes(40))
    held = passed([*range(50, 90)], (256 - 20 + 1) // 8)
    plan = requests.store(record, 320, lambda: [range(10, 30), held])
    assert plan is not None and plan.first == 3  # the window behind the fourth chunk, and the fifth
    again = requests.add("s", hashes(32))
    assert requests.store(again, 192, lambda: [range(10, 30), held]) is None


def test_where_all_is_seen_block_0_is_a_block():
    assert BlockGroup(16).has([0], 0) and not BlockGroup(16, 32).has([0], 0)
    assert BlockGroup(16).first_needed(1_000) == 0


# --- names ----------------------------------------------------------------------------------------------------------


def test_all_that_bytes_depend_on_is_in_a_key():
    one = ChunkNaming("model", "float32", "layout")
    others = [
        ChunkNaming("model 2", "float32", "layout"),
        ChunkNaming("model", "bfloat16", "layout"),
        ChunkNaming("model", "float32", "layout 2"),
        ChunkNaming("model", "float32", "layout", rank=1),
        ChunkNaming("model", "float32", "layout", tenant="acme"),
    ]
    keys = [tuple(naming.keys(of_chunks(0, 1))) for naming in [one, *others]]
    keys.append(tuple(one.keys(of_chunks(0, 1), "after a reset")))
    assert len({key for pair in keys for key in pair}) == 2 * len(keys)
    assert ChunkNaming("model", "float32", "layout").keys(of_chunks(0)) == one.keys(of_chunks(0))


def test_a_prefix_is_asked_for_chunk_by_chunk_with_all_ranks_of_each():
    ranks = [ChunkNaming("m", "d", "l", rank=rank) for rank in range(2)]
    keys = keys_of_all_ranks(ranks, of_chunks(0, 1))
    assert keys == [ranks[0].keys(of_chunks(0))[0], ranks[1].keys(of_chunks(0))[0]] + [
        ranks[rank].keys(of_chunks(1))[0] for rank in range(2)
    ]


def test_layouts_of_one_shape_and_other_strides_differ():
    shape = (2, 2, 8)
    assert layout_text([("a", "float32", shape, (16, 8, 1))], 64) != layout_text(
        [("a", "float32", shape, (8, 16, 1))], 64
    )
    assert layout_text([("a", "float32", shape, (16, 8, 1))], 64) != layout_text(
        [("a", "float32", shape, (16, 8, 1))], 128
    )


def test_plans_cross_to_another_process():
    plan = StepPlan(
        loads=[LoadPlan("r", of_chunks(0), [[1, None]])],
        stores=[StorePlan("r", of_chunks(1), [[1, 2]], 1)],
        overwritten=frozenset({1}),
        cancelled=frozenset({"r"}),
        idle=True,
        generation="g",
    )
    assert pickle.loads(pickle.dumps(plan)) == plan
