"""Every test that SECURITY.md names as its evidence exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_evidence_exists():
    rows = [
        line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("| ")
    ]
    cited = 0
    for row in rows:
        file = None
        for name in re.findall(r"`([\w/.]+\.py(?:::\w+)?|\.\.\.::\w+)`", row):
            path, _, test = name.partition("::")
            if path != "...":
                file = ROOT / path if path.startswith("tests/") else ROOT / "tests/serving" / path
            assert file is not None
            assert file.is_file(), path
            assert not test or re.search(rf"^def {test}\(", file.read_text(), re.MULTILINE), name
            cited += 1
    assert cited > 10
