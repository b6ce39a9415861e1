"""The prose of packages and pages becomes plainer, and never less so: tests/support/prose.toml has the counts."""

from collections import Counter

from tests.support import prose


def test_prose_only_improves() -> None:
    grown, fallen = prose.compare(prose.counts(), prose.recorded())
    assert not grown, f"name the thing (CONTRIBUTING.md, Comments and docstrings): {grown}"
    assert not fallen, f"run python -m tests.support.prose --write: {fallen}"


def test_phrases_are_counted() -> None:
    module = '''"""Keep the blocks."""
def count(log):
    """What it has, and says: a first line of a good deal more than a dozen words, as this one here is."""
    # what it was told
    log.info("what %s says: %d", name, n)
    if name:
        raise ValueError(f"{name} is no table; there is no other")
    return "what a string says"
'''
    assert prose.count_module(module) == Counter(opening=1, long=1, what=2, tell=2, message=3)
    assert prose.count_page("It says\n```\nwhat\n```\nwhat it has\n") == Counter(what=1, tell=1)
