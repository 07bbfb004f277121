"""Real text that every machine with Python has: the sources of Python's standard library.

About 11 MB of code, comments and documentation, read as bytes. Other text: name folders with
--data. The split is by document: whole files are held out.
"""

import hashlib
import os
import sysconfig

import torch

SUFFIXES = (".py", ".txt", ".md", ".rst", ".pod", ".html", ".tex")
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def default_folders():
    """The standard library of this interpreter."""
    return [sysconfig.get_paths()["stdlib"]]


def load(folders, max_bytes):
    """(train, validation, documents): two byte tensors, and how many files they are made of.

    Files go in the order of their paths below their folder. One in twenty is held out, chosen by a
    hash of that path, so the split is the same on all ranks, in every run and wherever the folder
    is.
    """
    train, validation, total = [], [], 0
    for folder in folders:
        for name in sorted(_text_files(folder)):
            if total >= max_bytes:
                break
            with open(os.path.join(folder, name), "rb") as file:
                text = file.read()
            total += len(text)
            held_out = hashlib.sha256(name.encode()).digest()[0] % 20 == 0
            (validation if held_out else train).append(text)
    if not train or not validation:
        raise SystemExit(
            f"no text found in {', '.join(folders)}: name folders that hold files ending in "
            f"{', '.join(SUFFIXES)} with --data"
        )
    return _join(train), _join(validation), len(train) + len(validation)


def _text_files(root):
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _SKIPPED_FOLDERS]
        for name in names:
            path = os.path.join(folder, name)
            if name.endswith(SUFFIXES) and os.path.isfile(path):
                yield os.path.relpath(path, root).replace(os.sep, "/")


def _join(documents):
    return torch.frombuffer(bytearray(b"\n".join(documents)), dtype=torch.uint8)


def train_batch(text, step, rank, seed, batch, context):
    """(inputs, targets) of one rank and step. Depends on nothing else, so that runs which differ in
    their optimizer see the same data.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 4096 + rank)
    starts = torch.randint(0, len(text) - context - 1, (batch,), generator=generator)
    return _windows(text, starts, context)


def validation_batches(text, windows, batch, context, rank, size):
    """This rank's share of `windows` evenly spaced windows, in batches."""
    starts = torch.linspace(0, len(text) - context - 2, windows).long()[rank::size]
    for chunk in starts.split(batch):
        yield _windows(text, chunk, context)


def _windows(text, starts, context):
    tokens = text[starts.unsqueeze(1) + torch.arange(context + 1)].long()
    return tokens[:, :-1], tokens[:, 1:]
