"""docs/path-of-a-block.md is what `make trace` writes."""

import trio

from tests.support import path_of_a_block
from tests.support.path_of_a_block import CANCELLED, PAGE


def test_the_page_names_the_files_and_functions_that_are_passed() -> None:
    with path_of_a_block.page_store() as endpoint:
        paths = trio.run(path_of_a_block.measure, endpoint)
    found = path_of_a_block.differences(PAGE.read_text(), paths)
    assert not found, f"{PAGE.name} is not what runs now (`make trace` writes it anew): {found}"


def test_a_page_is_given_back_within_six_files_of_the_readme() -> None:
    """Rendering it raises where a step names a function or a line that is not there."""
    assert len({step.file for step in CANCELLED}) <= 6
    assert CANCELLED[0].file == "README.md"
    page = PAGE.read_text()
    assert page.endswith("\n".join(path_of_a_block.render_walks()) + "\n")
