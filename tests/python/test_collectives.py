"""scape.nccl through the real, preloaded library."""

import pytest

from conftest import assert_all_ended_well, run_ranks


@pytest.mark.parametrize("size", [1, 2, 3])
def test_calls(size, library):
    assert_all_ended_well(run_ranks("worker_collectives.py", size, preload=library))
