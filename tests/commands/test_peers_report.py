"""The report of the comparison with other stores: no ratio where they did not do the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.peers import measure, report
from tests.peers.published_store import NEEDED
from tests.peers.setting import Setting
from tests.peers.subjects import SUBJECTS
from tests.support.published_checkout import make_checkout


def result(subject: str = "store", **changed: Any) -> dict[str, Any]:
    one = {
        "seconds": 3.0, "floor_seconds": 1.0, "processor_seconds": 2.0, "blocks": 1000, "hits": 400, "floor_hits": 400,
        "stores": 600, "floor_stores": 600, "wrong": 0, **changed,
    }  # fmt: skip
    other = {**one, "seconds": one["seconds"] + 1}
    return {
        "subject": subject, "kib": 64, "capacity_bytes": 1 << 30, "requests": 10, "trace": "synthetic", "date": "2026-11-24",
        "machine": "x86_64, 2 processors", "python": "3.11", "versions": {"trio": "0.35"}, "load": 0.5,
        "rounds": [one, other], "why_not": "",
    }  # fmt: skip


def test_a_ratio_is_the_median_of_the_rounds_with_their_spread() -> None:
    figure = report.figure_of(result())
    assert (figure.ratio, figure.ratios, figure.why_not) == (3.5, [3.0, 4.0], "")
    assert figure.microseconds == 3500


@pytest.mark.parametrize("changed", [{"hits": 395}, {"hits": 405}, {"stores": 593}, {"stores": 607}])
def test_there_is_no_ratio_where_hits_or_stores_differ_by_more_than_one_percent(changed: dict[str, int]) -> None:
    figure = report.figure_of(result(**changed))
    assert not figure.ratios
    assert "not comparable" in figure.why_not


@pytest.mark.parametrize("changed", [{"hits": 396}, {"stores": 606}])
def test_a_percent_is_allowed(changed: dict[str, int]) -> None:
    assert report.figure_of(result(**changed)).ratios


def test_a_store_that_gave_other_blocks_has_no_ratio() -> None:
    assert report.figure_of(result(wrong=1)).why_not == "2 blocks were not what was stored"


def test_a_table_and_a_picture_are_made_of_what_was_measured(tmp_path: Path) -> None:
    for one in (result("store"), result("redis", hits=100)):
        (tmp_path / f"{one['subject']}.64.json").write_text(json.dumps(one))
    results = report.results_in(tmp_path)
    table, picture = report.markdown(results), report.picture(results)
    assert "3.50 (3.00 to 4.00)" in table and "not comparable: 25.0%" in table
    assert "our page store, trio" in picture and "Redis" not in picture


async def test_a_round_drives_ours_and_the_floor_alike() -> None:
    requests = measure.requests_of("", 60)
    setting = Setting(8 << 20, 4096, measure.most_blocks(requests))
    done = await measure.one_round("memory", setting, requests)
    assert (done["hits"], done["stores"], done["wrong"]) == (done["floor_hits"], done["floor_stores"], 0)
    assert done["hits"] > 0 and done["floor_stores"] < done["blocks"]


def test_every_subject_of_ours_can_be_imported() -> None:
    for subject in SUBJECTS.values():
        if subject.environment == "ours":
            assert callable(subject.open())


def test_the_noxfile_reads_the_table_of_stores_where_none_of_their_packages_is_installed() -> None:
    """nox has an environment of its own, in which the rest of this package cannot be imported."""
    told = "import sys, tests.peers.subjects; print(*{name.partition('.')[0] for name in sys.modules})"
    asked = subprocess.run([sys.executable, "-c", told], check=True, capture_output=True, text=True)
    assert not {"offload", "backends", "maru", "trio", "torch", "xxhash"} & set(asked.stdout.split())


def test_without_a_store_that_can_be_compared_there_is_a_table_and_no_picture() -> None:
    results = [{**result("redis"), "rounds": [], "why_not": "redis-server: apt-get install redis-server"}]
    assert "not run: redis-server" in report.markdown(results)
    with pytest.raises(SystemExit, match="no picture"):
        report.picture(results)


# --- the published page store -------------------------------------------------------------------------------------


async def test_the_published_store_of_a_checkout_is_driven_like_the_others(tmp_path: Path) -> None:
    requests = measure.synthetic(40)
    checkout = str(make_checkout(tmp_path / "theirs"))
    setting = Setting(2 << 20, 4096, measure.most_blocks(requests), checkout=checkout)
    one = await measure.one_round("published", setting, requests)
    assert (one["hits"], one["stores"], one["wrong"]) == (one["floor_hits"], one["floor_stores"], 0)
    assert one["hits"] > 0 and one["stores"] > setting.blocks, "some of it was deleted for what came"


@pytest.mark.parametrize("missing", [*NEEDED, "all of it"])
def test_a_path_that_is_no_checkout_is_refused_with_what_is_missing(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "theirs"
    if missing in NEEDED:
        (make_checkout(path) / missing).unlink()
    monkeypatch.setattr("sys.argv", ["measure", "published", "--out", str(tmp_path), "--maru-checkout", str(path)])
    with pytest.raises(SystemExit) as ended:
        measure.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"there is no {missing if missing in NEEDED else NEEDED[0]} in '{path}'" in said
    assert "name the root of a checkout" in said


def test_without_a_checkout_the_row_of_the_published_store_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--out", str(tmp_path), "--kib", "64", "--capacity-mib", "1", "--requests", "9", "--trace", ""]
    monkeypatch.setattr("sys.argv", ["measure", "published", *options])
    measure.main()
    [row] = report.results_in(tmp_path)
    assert report.figure_of(row).why_not.startswith("not run: --maru-checkout PATH")
