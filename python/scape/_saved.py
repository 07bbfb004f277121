"""The entry "scape" of an optimizer's state: the library's part of it, and what is checked before
anything of a state is taken.
"""

import struct
import zlib

import torch

from . import _api
from . import _library as lib
from ._buckets import check_group

# Of the container (interposer/saved_state.h): magic, version, records, bytes, reserved, checksum;
# then of each record name, offset, count, rank, size, bytes, reserved, checksum, and its bytes.
_HEADER = struct.Struct("<8sIIQII")
_RECORD = struct.Struct("<64sQQiiQII")


def save(names):
    """The library's state of the registrations of these names alone, as a tensor of bytes: what
    other optimizers hold would otherwise be loaded, or go on waiting, with this one's.
    """
    data = memoryview(_api.save_state())
    magic, version, count, _, reserved, _ = _HEADER.unpack_from(data)
    position, kept = _HEADER.size, []
    for _ in range(count):
        name, *_, length, _, _ = _RECORD.unpack_from(data, position)
        end = position + _RECORD.size + length
        if name.rstrip(b"\0").decode() in names:
            kept.append(data[position:end])
        position = end
    size = _HEADER.size + sum(map(len, kept))
    header = _HEADER.pack(magic, version, len(kept), size, reserved, 0)
    checksum = zlib.crc32(header[: -struct.calcsize("<I")])
    header = _HEADER.pack(magic, version, len(kept), size, reserved, checksum)
    return torch.frombuffer(bytearray(b"".join((header, *kept))), dtype=torch.uint8)


def load(library):
    """Hands the library what save() gave."""
    _api.load_state(library.cpu().numpy().tobytes())


def check_entry(saved, fields, communicator, name, sparse):
    """ScapeError unless `saved` is an entry "scape" that this optimizer can take."""
    if not isinstance(saved, dict) or any(field not in saved for field in fields):
        raise _refused(
            f"its entry 'scape' is {saved!r:.60}, and should hold {', '.join(fields)}: load what"
            " state_dict() gave"
        )
    for field in fields:
        if field not in ("library", "name") and not isinstance(saved[field], int):
            raise _refused(f"its {field} is {saved[field]!r:.60}, and should be a whole number")
    library = saved["library"]
    if library is None:
        return
    if not isinstance(library, torch.Tensor) or library.dtype != torch.uint8:
        raise _refused(
            f"its library part is {library!r:.60}, and should be a tensor of bytes: load what"
            " state_dict() gave"
        )
    if not sparse:
        return
    here = (communicator.rank, communicator.size)
    if (saved["rank"], saved["size"]) != here:
        raise _refused(
            f"it is of rank {saved['rank']} of {saved['size']}, this is rank {here[0]} of"
            f" {here[1]}: each rank loads what it saved, in a run of as many ranks"
        )
    if saved["name"] != name:
        raise _refused(
            f"it is of the optimizer named {saved['name']!r}, this one is {name!r}: make the"
            f" optimizers in the same order, or name this one with name={saved['name']!r}, and"
            " close() one that has the name no longer"
        )


def check_groups(optimizer, state_dict):
    """ScapeError unless the groups of the state, and its moments, fit the optimizer's."""
    groups, state = state_dict.get("param_groups"), state_dict.get("state")
    if (
        not isinstance(groups, list)
        or not isinstance(state, dict)
        or any(not isinstance(group, dict) or "params" not in group for group in groups)
    ):
        raise _refused("it has no 'param_groups' or no 'state': load what state_dict() gave")
    sizes = [len(group["params"]) for group in groups]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != here:
        raise _refused(f"its groups have {sizes} parameters, the optimizer's {here}")
    for saved, group in zip(groups, optimizer.param_groups):
        check_group({**group, **saved})
        for index, parameter in zip(saved["params"], group["params"]):
            moment = state.get(index, {}).get("exp_avg")
            if moment is not None and moment.shape != parameter.shape:
                raise _refused(
                    f"its moment of parameter {index} has shape {tuple(moment.shape)}, the"
                    f" parameter {tuple(parameter.shape)}: load it into the model it was saved with"
                )


def _refused(why):
    return lib.ScapeError(lib.Status.DATA, f"the state is refused: {why}")
