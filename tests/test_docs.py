"""What the README and the schema say is what the code says."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_generated_parts_are_up_to_date() -> None:
    result = subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_picture_of_the_readme_is_there() -> None:
    assert (ROOT / "docs" / "report.png").stat().st_size > 10_000
