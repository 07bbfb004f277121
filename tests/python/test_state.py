"""Loaded state, state files and refused arguments, through the real, preloaded library."""

import os
import subprocess

from conftest import assert_all_ended_well, clean_environment, run_ranks


def run_cases(cases, size, folder, library):
    assert_all_ended_well(run_ranks("worker_state.py", size, cases, folder, preload=library))


def test_loaded_state_belongs_to_its_optimizer(tmp_path, library):
    cases = "not_taken,refused_at_the_call,two_optimizers,saved_before_the_call"
    run_cases(cases, 2, tmp_path, library)


def test_loaded_state_is_what_a_flush_sends(tmp_path, library):
    run_cases("flushed_after_loading", 2, tmp_path, library)


def test_refused_state_changes_nothing(tmp_path, library):
    run_cases("refused_at_loading", 2, tmp_path, library)


def test_values_and_residuals_of_a_run(tmp_path, library):
    run_cases("changed_values,clipped", 2, tmp_path, library)


def test_files_and_arguments(tmp_path, library):
    run_cases("files,arguments", 1, tmp_path, library)


def test_scape_info_shows_refused_settings(library):
    program = os.path.join(os.path.dirname(library), "..", "bin", "scape-info")
    environment = {**clean_environment(), "SCAPE_SPARSITY": "7", "SCAPE_TIMEOUT": "soon", "SCAPE_ENABLE": "on"}
    result = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=60)
    lines = {line.split()[1]: line for line in result.stdout.splitlines() if line[:1] == "*"}
    assert lines["SCAPE_SPARSITY"].endswith('("7" is REFUSED, see below)')
    assert lines["SCAPE_TIMEOUT"].endswith('("soon" is REFUSED, see below)')
    assert lines["SCAPE_ENABLE"].endswith('1 (from "on")')
    assert result.returncode == 1
    assert 'SCAPE_SPARSITY="7" is not valid' in result.stderr and 'SCAPE_TIMEOUT="soon" is not valid' in result.stderr
