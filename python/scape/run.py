"""scape-run: starts a program under torchrun with libscape_nccl.so preloaded.

    scape-run --nproc-per-node 2 --sparsity 0.99 -- train.py --epochs 3

Settings of the library are flags here; what is not named keeps its value in the environment.
"""

import argparse
import os
import re
import sys
from ctypes import util

_LIBRARY = "libscape_nccl.so"

# (flag, variable, help). The library itself checks the values and names the range.
_SETTINGS = (
    ("--sparsity", "SCAPE_SPARSITY", "fraction of elements NOT sent where the program names none"),
    ("--payload", "SCAPE_PAYLOAD", "type that values travel in: fp32 or bf16"),
    ("--mode", "SCAPE_MODE", "auto, host (serve NCCL on host memory) or device"),
    ("--transport", "SCAPE_TRANSPORT", "transport of host communicators"),
    ("--dense-steps", "SCAPE_DENSE_STEPS", "first steps that travel dense"),
    ("--ramp-steps", "SCAPE_RAMP_STEPS", "step from which the full sparsity holds"),
    ("--ramp-sparsity", "SCAPE_RAMP_SPARSITY", "most sparsity until then"),
    ("--timeout", "SCAPE_TIMEOUT", "seconds a collective may wait for its peers"),
    ("--log", "SCAPE_LOG", "none, error, warn, info or debug"),
    ("--log-file", "SCAPE_LOG_FILE", "file for log lines instead of stderr"),
    ("--nccl-lib", "SCAPE_NCCL_LIB", "path of the real libnccl.so.2"),
)


class LaunchError(Exception):
    """The command cannot be started; the text says why and what to do."""


def find_library(explicit=None, environ=os.environ):
    """Absolute path of libscape_nccl.so: what is named, SCAPE_LIB (a file, or its folder), beside
    this package, the source tree that this package or the working directory is in, then where the
    loader looks. Raises LaunchError that lists where it looked.
    """
    for source, path in (("--lib", explicit), ("SCAPE_LIB", environ.get("SCAPE_LIB"))):
        if path:
            found = os.path.join(path, _LIBRARY) if os.path.isdir(path) else path
            if not os.path.isfile(found):
                raise LaunchError(f"{source} is {path}: there is no {_LIBRARY} there")
            # The loader passes over what is no library with a line, and runs the program without.
            with open(found, "rb") as file:
                if file.read(4) != b"\x7fELF":
                    raise LaunchError(f"{source} is {path}: that is no shared library")
            return os.path.abspath(found)
    package = os.path.dirname(os.path.abspath(__file__))
    places = [
        os.path.join(package, "lib"),
        os.path.join(package, "..", "..", "build", "release", "lib"),
        os.path.join(os.getcwd(), "build", "release", "lib"),
        os.path.join(sys.prefix, "lib"),
    ]
    for place in places:
        found = os.path.join(place, _LIBRARY)
        if os.path.isfile(found):
            return os.path.abspath(found)
    if util.find_library("scape_nccl"):
        for place in ("/usr/local/lib", "/usr/local/lib64", "/usr/lib", "/usr/lib64"):
            found = os.path.join(place, _LIBRARY)
            if os.path.isfile(found):
                return found
    looked = ", ".join(dict.fromkeys(os.path.normpath(place) for place in places))
    raise LaunchError(
        f"{_LIBRARY} not found (looked in {looked}): build it with `make build`, or name it with "
        "--lib or SCAPE_LIB"
    )


def preload_with(library, preload):
    """The value of LD_PRELOAD that has `library` once and keeps the entries of `preload`, in order.

    Entries are separated by blanks or colons, as the loader takes them. New ones go to the end, so
    that a sanitizer or an allocator stays first. An entry that is the same library under another
    spelling (relative, through a link) gives way to the absolute path in its place; one that is
    another build of it is a LaunchError, since two copies in one process would not know of each
    other.
    """
    if re.search(r"[\s:]", library):
        raise LaunchError(
            f"the library's path {library!r} has a blank or a colon, which LD_PRELOAD cannot name: "
            "move it, or link to it from a path without"
        )
    # Split so that the separators, too, stay as they were.
    parts = re.split(r"([\s:]+)", preload or "")
    seen = False
    for index in range(0, len(parts), 2):
        entry = parts[index]
        if os.path.basename(entry) != _LIBRARY and not (
            os.path.exists(entry) and os.path.samefile(entry, library)
        ):
            continue
        if os.path.exists(entry) and not os.path.samefile(entry, library):
            raise LaunchError(
                f"LD_PRELOAD names {entry} already, which is another file than {library}: take it"
                f" out, or pass --lib {entry}"
            )
        parts[index] = "" if seen else library
        seen = True
    kept = "".join(parts).strip(" \t\n:")
    if seen:
        return kept
    return f"{kept}:{library}" if kept else library


def build_environment(args, environ):
    """The environment of the command: LD_PRELOAD and the SCAPE_* variables that flags name."""
    result = dict(environ)
    library = find_library(args.lib, environ)
    result["LD_PRELOAD"] = preload_with(library, environ.get("LD_PRELOAD", ""))
    for flag, variable, _ in _SETTINGS:
        value = getattr(args, flag[2:].replace("-", "_"))
        if value is not None:
            result[variable] = value
    if args.required:
        result["SCAPE_REQUIRED"] = "1"
    if args.dense:
        result["SCAPE_ENABLE"] = "0"
    for setting in args.set:
        name, separator, value = setting.partition("=")
        if not separator or not re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
            raise LaunchError(
                f"--set {setting}: must be NAME=VALUE with NAME in capitals, e.g. UCX_TLS=tcp"
            )
        result[name] = value
    return result


def build_command(args):
    """The command line to execute."""
    if args.no_torchrun:
        if args.command[0].endswith(".py"):
            return [sys.executable, *args.command]
        return list(args.command)
    count = args.nproc_per_node
    # Words (gpu, auto) are torchrun's to judge; a count that is none ends it in a bare assertion.
    if re.fullmatch(r"[+-]?\d+", count) and int(count) < 1:
        raise LaunchError(
            f"--nproc-per-node is {count}: must be 1 or more, or a word that torchrun takes (gpu,"
            " auto)"
        )
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    launcher += ["--nproc-per-node", count, *args.torchrun_arg]
    if not args.command[0].endswith(".py"):
        launcher.append("--no-python")
    # What follows the program's name is the program's, torchrun reads no further.
    return launcher + list(args.command)


def parser():
    result = argparse.ArgumentParser(
        prog="scape-run",
        usage="scape-run [options] -- program [arguments]",
        description="Starts a program under torchrun with libscape_nccl.so preloaded.",
        epilog="A program whose name ends in .py runs under this Python; any other as it is.",
        allow_abbrev=False,
    )
    result.add_argument("--nproc-per-node", default="1", metavar="N", help="processes on this node")
    result.add_argument(
        "--torchrun-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="an argument for torchrun, e.g. --torchrun-arg=--nnodes=2; may be repeated",
    )
    result.add_argument(
        "--no-torchrun", action="store_true", help="start the program itself (under mpirun, srun)"
    )
    result.add_argument("--lib", metavar="PATH", help=f"the {_LIBRARY} to preload, or its folder")
    result.add_argument(
        "--required", action="store_true", help="stop rather than train dense (SCAPE_REQUIRED=1)"
    )
    result.add_argument(
        "--dense", action="store_true", help="preload, but send everything (SCAPE_ENABLE=0)"
    )
    for flag, variable, text in _SETTINGS:
        result.add_argument(flag, metavar="VALUE", help=f"{text} ({variable})")
    result.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other variable for the program; may be repeated",
    )
    result.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return result


def main(argv=None):
    """Entry point of scape-run. Replaces this process, whose exit status is then the command's."""
    args = parser().parse_args(argv)
    if args.command and args.command[0] == "--":
        args.command = args.command[1:]
    if not args.command:
        parser().error("no program named: scape-run [options] -- program [arguments]")
    try:
        environment = build_environment(args, os.environ)
        command = build_command(args)
        os.execvpe(command[0], command, environment)
    except LaunchError as error:
        print(f"scape-run: {error}", file=sys.stderr)
    except OSError as error:
        print(f"scape-run: cannot start {args.command[0]}: {error.strerror}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
