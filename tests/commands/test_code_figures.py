"""The script that counts what there is to read counts it right."""

from pathlib import Path

from tests.support.code_figures import Source, duplicates

TEXT = '''"""A docstring.

Of three lines."""
import os  # a comment behind code
# a comment alone


def public(a, b):
    """What it does."""
    first = a
    second = (
        b
    )
    return first + second


def _private():
    pass


value: int = 1
"""What it is."""
'''


def source_of(path: Path, text: str) -> Source:
    path.write_text(text)
    source = Source(path)
    source.path = Path(path.name)
    return source


def test_docstrings_and_comments_are_no_code(tmp_path: Path) -> None:
    source = source_of(tmp_path / "one.py", TEXT)
    assert len(source.code) == 10 and len(source.comments) == 2
    assert sorted(source.bodies()) == [1, 5]
    assert source.public_names() == 2


def test_a_longer_run_is_one_duplicate(tmp_path: Path) -> None:
    run = "\n".join(f"name_{number} = {number}" for number in range(8))
    one, other = source_of(tmp_path / "one.py", run), source_of(tmp_path / "other.py", f"something = 1\n{run}")
    assert duplicates([one, other]) == 1
    assert duplicates([one]) == 0
