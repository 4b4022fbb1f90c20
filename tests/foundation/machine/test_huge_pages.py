"""Large tensors are on huge pages: the kernel hands them out in few faults."""

import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = """
import resource
import torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(64 * 2**20, dtype=torch.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.skipif(not SETTING.exists() or "[never]" in SETTING.read_text(), reason="the kernel has no huge pages to give")
def test_large_tensors_take_few_page_faults() -> None:
    faults = subprocess.run([sys.executable, "-c", f"import compress\n{FAULTS}"], capture_output=True, text=True, check=True).stdout
    # 64 MiB are 16,384 pages of 4 KiB. A machine without 32 free huge pages in a row may give some small ones.
    assert int(faults) < 8192


def test_a_setting_of_the_user_stays() -> None:
    code = "import os; os.environ['THP_MEM_ALLOC_ENABLE'] = '0'; import compress; assert os.environ['THP_MEM_ALLOC_ENABLE'] == '0'"
    subprocess.run([sys.executable, "-c", code], check=True)
