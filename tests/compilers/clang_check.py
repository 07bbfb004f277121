#!/usr/bin/env python3
"""Shows the sources of the libraries and programs to Clang, which only looks for errors and warnings.

    tests/compilers/clang_check.py BUILD_FOLDER

The build's own compile commands are taken, with its warnings as errors. Builds that Clang does later (the fuzz targets, a
user's own) would else be the first to meet what GCC alone accepts. Status 77 when there is no clang++.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("base", "interposer", "kernels", "perf", "plugin")


def sources(build):
    """The compile command of each source, once, without what it would write."""
    commands = {}
    for entry in json.loads((build / "compile_commands.json").read_text(encoding="utf-8")):
        path = Path(entry["file"])
        if path.suffix == ".cc" and path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ROOMS:
            words = shlex.split(entry["command"])
            output = words.index("-o")
            commands[path] = [word for word in words[1:output] + words[output + 2:] if word != "-c"]
    return commands


def main():
    if shutil.which("clang++") is None:
        print("no clang++ here: skipped")
        return 77
    commands = sources(Path(sys.argv[1]))
    if not commands:
        print(f"no sources in {sys.argv[1]}/compile_commands.json")
        return 1

    def check(path):
        command = ["clang++", "-fsyntax-only", "-Wno-unknown-warning-option", *commands[path]]
        done = subprocess.run(command, cwd=sys.argv[1], capture_output=True, text=True)
        return path, done.returncode, done.stdout + done.stderr

    refused = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for path, status, text in pool.map(check, commands):
            if status != 0:
                refused += 1
                print(f"{path.relative_to(ROOT)}:\n{text}")
    print(f"{len(commands)} sources, {refused} refused")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
