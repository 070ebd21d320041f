"""Checkpoints of an attacker, who can make every sum fit: for test_hostile_checkpoints.py and the fuzz of files."""

import json
import shutil
import zlib
from hashlib import sha256
from pathlib import Path

import numpy as np
from hostile_hdf5 import VALUES

from mpitrain import checkpoint
from mpitrain.checkpoint.layout import SlabRef
from mpitrain.comm.world import world

NAME, FILE = "weight/x", "rank-00000.h5"


def slab(fill=True):
    array = VALUES.copy() if fill else np.zeros_like(VALUES)
    return SlabRef(NAME, array.shape, tuple(slice(0, length) for length in array.shape), array, (0, 1))


def make(run):
    """A good checkpoint of one tensor."""
    return checkpoint.save(run, 1, [slab()], {"updates": 1}, world())


def read(folder):
    return json.loads((folder / "manifest.json").read_text())


def write(folder, manifest):
    """A manifest with the sum that it needs; `manifest` is a value, or the text of one without its last brace."""
    if not isinstance(manifest, str):
        manifest.pop("sha256", None)
        manifest = json.dumps(manifest)[:-1]
    head = manifest.encode("utf-8", "surrogateescape")
    (folder / "manifest.json").write_bytes(head + b',\n "sha256": "%s"\n}\n' % sha256(head).hexdigest().encode())


def with_file(good: Path, file: Path, folder: Path, offset=0):
    """A copy of a checkpoint whose file is another one, with a manifest whose sums are all those of that file."""
    shutil.copytree(good, folder)
    shutil.copyfile(file, folder / FILE)
    data, manifest = file.read_bytes(), read(good)
    slab = data[offset : offset + VALUES.nbytes]
    entry = manifest["files"][FILE]
    entry["bytes"], entry["sha256"] = len(data), sha256(data).hexdigest()
    entry["metadata_crc32"] = zlib.crc32(data[:offset] + data[offset + VALUES.nbytes :])
    (about,) = manifest["tensors"][NAME]["slabs"]
    about["offset"], about["crc32"] = offset, [zlib.crc32(slab)]
    write(folder, manifest)
