"""CINIC-10 as a tfds builder, because tfds has none.

Darlow, Crowley, Antoniou, Storkey: "CINIC-10 is not ImageNet or CIFAR-10",
https://arxiv.org/abs/1810.03505. The official archive `CINIC-10.tar.gz` holds
`train/<class>/*.png`, `valid/...` and `test/...`, 90,000 images each. Put it into
`--data_dir`, packed or unpacked. The builder reads each train and test image once, and
tfds keeps them.
"""

import pathlib
import tarfile
import zlib
from collections.abc import Iterator

from data import files

CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()
NAME, SIDE, ARCHIVE = "cinic10", 32, "CINIC-10.tar.gz"
# The folders that it may be unpacked to, and what is in them
FOLDERS, CONTENT = ("CINIC-10", "cinic-10", "cinic10"), f"train/{CLASSES[0]}"


def images(source: pathlib.Path, split: str) -> Iterator[tuple[str, str, bytes]]:
    """Yields (key, class, PNG bytes) of a split's images, in the source's order.

    Raises ValueError if the archive is truncated or damaged.
    """
    if source.is_dir():
        for path in sorted(source.glob(f"{split}/*/*.png")):
            if path.parts[-2] in CLASSES:
                yield "/".join(path.parts[-2:]), path.parts[-2], path.read_bytes()
        return
    try:
        with open(source, "rb") as raw:
            is_packed = raw.read(2) == b"\x1f\x8b"
        mode = "r|" if is_packed else "r|*"
        with files.tar_stream(source, is_packed, mode) as archive:
            for member in archive:
                parts = pathlib.PurePosixPath(member.name).parts
                is_image = member.isfile() and member.name.endswith(".png")
                if is_image and parts[-3:-2] == (split,) and parts[-2] in CLASSES:
                    content = archive.extractfile(member).read()
                    yield "/".join(parts[-2:]), parts[-2], content
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{source} cannot be read: {error}; fetch it again") from error
