"""How closely float32 results of different programs agree on this processor.

The bounds of tests that compare whole models were set on processors with AVX-512. With AVX2 alone, sums of half the width round
otherwise: torch differs from itself by more than 1e-5 there, on the same weights loaded twice.
"""

from pathlib import Path

_CPU = Path("/proc/cpuinfo")
SPREAD = 1.0 if not _CPU.exists() or "avx512f" in _CPU.read_text() else 2.0  # factor of such a bound
