"""Every row of the scenario catalogue is played: S01 to S53 and S56 (S54 and S55 need leases across instances)."""

import re
from pathlib import Path

HERE = Path(__file__).parent
ROWS = [*range(1, 54), 56]


def test_every_row_is_played():
    played = {
        int(row)
        for path in HERE.glob("test_catalogue_*.py")
        for row in re.findall(r"^async def test_s(\d\d)b?_", path.read_text(), re.MULTILINE)
    }
    assert sorted(set(ROWS) - played) == []
