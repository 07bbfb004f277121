"""Runs pytest over the files given; exits with 77, which ctest reports as skipped, where a package
that the tests need is missing.
"""

import importlib.util
import sys

MISSING = [name for name in ("pytest", "torch", "numpy") if importlib.util.find_spec(name) is None]
if MISSING:
    print(
        f"SKIPPED: {sys.executable} has no {', '.join(MISSING)}; configure with "
        "-DSCAPE_PYTHON=/path/to/python of an environment that does",
        file=sys.stderr,
    )
    sys.exit(77)

import pytest

sys.exit(pytest.main(["-q", "-ra", "-p", "no:cacheprovider", *sys.argv[1:]]))
