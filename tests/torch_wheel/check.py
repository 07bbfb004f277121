#!/usr/bin/env python3
"""The preloaded library beside PyTorch's CUDA wheel, on a machine without a GPU.

    python3 tests/torch_wheel/check.py [FOLDER]     default: build/torch-cuda

Makes a virtual environment in FOLDER with the wheel of torch and all that it needs (some 5 GB, once), and checks there:

- NCCL calls of the wheel are bound to libscape_nccl.so and go through it to the wheel's own libnccl, which Python
  has loaded RTLD_LOCAL;
- with the library preloaded, with its CUDA module beside it or hidden, importing torch and a training of two ranks
  on the CPU over Gloo print what they print without it, end the same, and have no thread more.

Needs the library: `make build`, or its path in SCAPE_LIB. Not a part of `make test`, because of what it downloads.
Exit status: 0 all right, 1 a check failed, 2 the environment or the library is not there.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TORCH = "2.14.1"
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LIBRARY = "libscape_nccl.so"
MODULE = "libscape_cuda.so"

NCCL_CALLS = """
import torch
print("version", *torch.cuda.nccl.version())
print("unique id of", len(torch.cuda.nccl.unique_id()), "bytes")
"""


def give_up(why):
    print(f"check.py: {why}", file=sys.stderr)
    sys.exit(2)


def environment(folder):
    """The Python of a virtual environment with the wheel, made where it is not there."""
    python = folder / "venv" / "bin" / "python"
    asked = [python, "-c", "import numpy, torch; print(torch.__version__, torch.version.cuda)"]
    if python.exists() and subprocess.run(asked, capture_output=True).returncode == 0:
        return python
    print(f"making {folder}/venv with torch {TORCH}, some 5 GB", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    for command in (
        [sys.executable, "-m", "venv", folder / "venv"],
        [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check",
         f"torch=={TORCH}", "numpy"],
    ):
        if subprocess.run(command).returncode != 0:
            give_up(f"{' '.join(map(str, command))} failed; see its message, or give a folder with more room")
    if subprocess.run(asked).returncode != 0:
        give_up(f"the torch of {folder}/venv cannot be imported; remove the folder and try again")
    return python


class Checks:
    def __init__(self, python, library, scratch):
        self.python, self.library, self.scratch = python, library, scratch
        self.failed = 0

    def expect(self, what, holds, detail=""):
        print(f"{'ok    ' if holds else 'FAILED'} {what}", flush=True)
        if not holds:
            self.failed += 1
            print(detail, flush=True)

    def start(self, arguments, preload=None, **settings):
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SCAPE_", "LD_"))}
        own.update(settings)
        if preload is not None:
            own["LD_PRELOAD"] = str(preload)
        return subprocess.Popen([self.python, *arguments], env=own, cwd=self.scratch, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(self, arguments, preload=None, **settings):
        process = self.start(arguments, preload, **settings)
        out, err = process.communicate(timeout=900)
        return process.returncode, out, err

    def nccl_calls(self):
        status, alone, err = self.run(["-c", NCCL_CALLS])
        self.expect("the wheel's NCCL answers without the library", status == 0, err)
        log = self.scratch / "bindings"
        status, out, err = self.run(["-c", NCCL_CALLS], self.library, SCAPE_MODE="device", SCAPE_LOG="info",
                                    LD_DEBUG="bindings", LD_DEBUG_OUTPUT=str(log))
        self.expect("the same with it", (status, out) == (0, alone), f"status {status}\n{out}{err}")
        print("       " + "; ".join(out.splitlines()))
        bindings = "".join(path.read_text(errors="replace") for path in self.scratch.glob("bindings.*"))
        for function in ("ncclGetVersion", "ncclGetUniqueId"):
            bound = [line.split(" to ")[1] for line in bindings.splitlines()
                     if f"`{function}'" in line and "libtorch_cuda.so [0] to " in line]
            self.expect(f"libtorch_cuda's {function} is bound to {LIBRARY}",
                        bound != [] and all(LIBRARY in to for to in bound), "\n".join(bound))
        told = [line for line in err.splitlines() if "NCCL calls go to" in line]
        real = Path(told[0].rsplit(" ", 1)[1]) if told else Path("/")
        self.expect("the library passes calls on to the wheel's libnccl",
                    real.is_relative_to(self.python.parent.parent) and real.name == "libnccl.so.2", err)
        print(f"       {real}")

    def training(self, preload):
        with tempfile.TemporaryDirectory(dir=self.scratch) as meeting:
            ranks = [self.start([HERE / "training.py", str(rank), f"{meeting}/store"], preload) for rank in range(2)]
            ended = [rank.communicate(timeout=900) + (rank.returncode,) for rank in ranks]
        return ended

    def unaffected(self):
        hidden = self.scratch / "lib"
        hidden.mkdir()
        for path in self.library.parent.glob("*.so"):
            if path.name != MODULE:
                shutil.copy2(path, hidden)
        imports = ["-c", "import os, torch; print(torch.__version__, torch.cuda.is_available(), "
                         "len(os.listdir('/proc/self/task')))"]
        plain_import, plain = self.run(imports), self.training(None)
        self.expect("a training without the library", all(status == 0 for _, _, status in plain),
                    "".join(err for _, err, _ in plain))
        print("       import: " + plain_import[1].strip())
        print("       " + "; ".join(plain[0][0].splitlines()[-3:]))
        for what, library in (("with the library", self.library), ("with its CUDA module hidden", hidden / LIBRARY)):
            imported = self.run(imports, library)
            self.expect(f"importing torch {what}: the same output, status and threads", imported == plain_import,
                        f"{plain_import}\n{imported}")
            trained = self.training(library)
            self.expect(f"a training {what}: the same output, status and threads",
                        trained == plain, f"{plain}\n{trained}")


def main():
    if len(sys.argv) > 2 or (len(sys.argv) == 2 and sys.argv[1].startswith("-")):
        give_up("usage: check.py [FOLDER]")
    folder = Path(sys.argv[1] if len(sys.argv) == 2 else ROOT / "build" / "torch-cuda").absolute()
    library = Path(os.environ.get("SCAPE_LIB", ROOT / "build" / "release" / "lib" / LIBRARY)).absolute()
    if library.is_dir():
        library /= LIBRARY
    if not library.exists():
        give_up(f"{library} is not there; run `make build`, or set SCAPE_LIB to its path")
    if not (library.parent / MODULE).exists():
        print(f"note: there is no {MODULE} beside the library, so its absence alone is checked")
    python = environment(folder)
    with tempfile.TemporaryDirectory(prefix="scape_torch_") as scratch:
        checks = Checks(python, library, Path(scratch))
        checks.nccl_calls()
        checks.unaffected()
    print("all right" if checks.failed == 0 else f"{checks.failed} checks failed")
    sys.exit(checks.failed > 0)


main()
