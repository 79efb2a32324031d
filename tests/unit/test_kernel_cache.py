"""Several processes that compile one kernel for different types all find what the others saved."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, time
from numba.core.caching import IndexDataCacheFile
from hocket.kernels.jit import kernel

@kernel
def double(x):
    return x + x

if sys.argv[1:]:
    save = IndexDataCacheFile._save_index

    def slowly(self, overloads):
        time.sleep(1)
        save(self, overloads)

    IndexDataCacheFile._save_index = slowly
    double(eval(sys.argv[1]))
else:
    double(1), double(1.0)
    print(sum(double.stats.cache_hits.values()))
"""


def test_none_overwrites_what_another_saved(tmp_path: Path) -> None:
    script = tmp_path / "doubling.py"
    script.write_text(SCRIPT)
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    both = [subprocess.Popen([sys.executable, script, argument], env=env) for argument in ("1", "1.0")]
    assert [process.wait(60) for process in both] == [0, 0]
    found = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=True)
    assert found.stdout == "2\n"
