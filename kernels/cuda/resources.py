#!/usr/bin/env python3
"""Registers, shared memory, spills and theoretical occupancy of each CUDA kernel, as a Markdown table.

    kernels/cuda/resources.py --nvcc nvcc [--arch 90] -- FLAGS... SOURCES.cu...

The numbers are ptxas's. Occupancy is that of a multiprocessor of compute capability 9.0 (64 warps, 65536 registers in
units of 256 a warp, 228 KiB of shared memory of which 1 KiB a block is the system's, 32 blocks). Of a kernel's
instances, one for each type and alignment, the one with the most registers is shown. The exit status is 1 where any of them spills.
"""
import argparse
import collections
import re
import subprocess
import sys

WARPS, REGISTERS, SHARED, BLOCKS = 64, 65536, 228 * 1024, 32

Kernel = collections.namedtuple("Kernel", "registers shared stack spilled")


def compile_source(nvcc, arch, flags, source):
    """The kernels of one source: (readable name, Kernel)."""
    command = [nvcc, *flags, f"-arch=sm_{arch}", "-Xptxas", "-v", "-cubin", "-o", "/dev/null", source]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode != 0:
        sys.exit(f"resources.py: {source} does not compile:\n{ran.stderr}")
    found = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers([^\n]*)", ran.stderr, re.DOTALL)
    names = subprocess.run(["c++filt"], input="\n".join(f[0] for f in found), capture_output=True, text=True, check=True)
    for name, (_, stack, stores, loads, registers, rest) in zip(names.stdout.splitlines(), found):
        shared = re.search(r"(\d+) bytes smem", rest)
        yield name, Kernel(int(registers), int(shared[1]) if shared else 0, int(stack), int(stores) + int(loads))


def occupancy(kernel, threads):
    warps = threads // 32
    per_warp = -(-kernel.registers * 32 // 256) * 256
    blocks = min(BLOCKS, WARPS // warps, REGISTERS // per_warp // warps, SHARED // (kernel.shared + 1024))
    return blocks * warps / WARPS


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--arch", default="90")
    parser.add_argument("rest", nargs="+", help="nvcc's flags, then the sources")
    args = parser.parse_args()
    sources = [item for item in args.rest if item.endswith(".cu")]
    flags = [item for item in args.rest if not item.endswith(".cu")]

    largest = {}
    spilled = []
    for source in sources:
        for name, kernel in compile_source(args.nvcc, args.arch, flags, source):
            if kernel.spilled or kernel.stack:
                spilled.append(name)
            short = re.search(r"kernel::(\w+)", name)[1]
            if short not in largest or kernel.registers > largest[short].registers:
                largest[short] = kernel
    print("| kernel | threads | registers | shared memory, B | spilled, B | occupancy |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, kernel in sorted(largest.items()):
        threads = 1024 if name in ("scan_tiles", "scan_counts") else 256
        print(f"| {name} | {threads} | {kernel.registers} | {kernel.shared} | {kernel.spilled} | "
              f"{occupancy(kernel, threads):.0%} |")
    if spilled:
        sys.exit("resources.py: these keep values in local memory:\n" + "\n".join(spilled))


if __name__ == "__main__":
    main()
