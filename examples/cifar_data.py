"""The images of cifar_resnet.py: CIFAR-10 from its archive, or made-up ones."""

from __future__ import annotations

import dataclasses
import tarfile
import zlib
from pathlib import Path

import numpy as np

SIZE = 32  # pixels of a side
NUM_CLASSES = 10
RECORDS_PER_FILE = 10_000
RECORD_BYTES = 1 + 3 * SIZE * SIZE  # a label, then the red, green and blue planes
FOLDER = "cifar-10-batches-bin"
ARCHIVE = "cifar-10-binary.tar.gz"
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
_PICKLES = ("cifar-10-batches-py", "cifar-10-python.tar.gz", "data_batch_1")
_WAVES = 3  # of which the texture of a made-up class consists


@dataclasses.dataclass(frozen=True)
class Images:
    """Images, uint8 of [num_images, 32, 32, 3], and labels, int32 of [num_images]."""

    images: np.ndarray
    labels: np.ndarray


def read_cifar(folder: Path) -> tuple[Images, Images]:
    """Reads CIFAR-10's binary version: unpacked, or straight from its archive.

    Args:
        folder: Path, holds `cifar-10-batches-bin`, or its files, or
            `cifar-10-binary.tar.gz`.

    Returns:
        The 50,000 images to train with, and the 10,000 to test with.

    Raises:
        ValueError: If a file is missing or is not what it should be, by its name.

    Source: https://www.cs.toronto.edu/~kriz/cifar.html, "Binary version".
    """
    unpacked = next(
        (place for place in (folder / FOLDER, folder) if _holds_any(place)), None
    )
    if unpacked is not None:
        files = {
            name: _read_file(unpacked / name) for name in (*TRAIN_FILES, TEST_FILE)
        }
    elif (folder / ARCHIVE).is_file():
        files = _read_archive(folder / ARCHIVE)
    else:
        raise ValueError(_why_nothing(folder))
    parts = [_parse(name, files[name]) for name in TRAIN_FILES]
    images = np.concatenate([part.images for part in parts])
    labels = np.concatenate([part.labels for part in parts])
    return Images(images, labels), _parse(TEST_FILE, files[TEST_FILE])


def _holds_any(folder: Path) -> bool:
    return any((folder / name).exists() for name in (*TRAIN_FILES, TEST_FILE))


def _why_nothing(folder: Path) -> str:
    if any((folder / name).exists() for name in _PICKLES):
        return (
            "This is CIFAR-10 as Python pickles, which can run any code when they are "
            f"read; get its binary version, {ARCHIVE}. Received: {folder}"
        )
    return (
        f"There is no CIFAR-10 here; the folder must hold {ARCHIVE}, or {FOLDER} with "
        f"data_batch_1.bin to data_batch_5.bin and {TEST_FILE}. Received: {folder}"
    )


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            # One byte more than there should be tells a file that is too long.
            return file.read(RECORDS_PER_FILE * RECORD_BYTES + 1)
    except FileNotFoundError:
        raise ValueError(f"A file of CIFAR-10 is missing. Received: {path}") from None
    except OSError as error:
        raise ValueError(
            f"A file of CIFAR-10 cannot be read ({error.strerror}). Received: {path}"
        ) from error


def _read_archive(path: Path) -> dict[str, bytes]:
    """Reads the members from the archive; nothing is written to the disk."""
    contents = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                file = archive.extractfile(member)
                if name in (*TRAIN_FILES, TEST_FILE) and file is not None:
                    contents[name] = file.read(RECORDS_PER_FILE * RECORD_BYTES + 1)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise ValueError(
            f"The archive of CIFAR-10 is corrupt ({error}). Received: {path}"
        ) from error
    for name in (*TRAIN_FILES, TEST_FILE):
        if name not in contents:
            raise ValueError(f"{name} is missing in the archive. Received: {path}")
    return contents


def _parse(name: str, content: bytes) -> Images:
    """Checks the bytes of a file and takes them apart."""
    if len(content) != RECORDS_PER_FILE * RECORD_BYTES:
        more = "more" if len(content) > RECORDS_PER_FILE * RECORD_BYTES else "fewer"
        raise ValueError(
            f"{name} of CIFAR-10 must have {RECORDS_PER_FILE * RECORD_BYTES:,} bytes: "
            f"{RECORDS_PER_FILE:,} records of {RECORD_BYTES:,}. "
            f"Received: {more}, the file is corrupt"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD_BYTES)
    labels = records[:, 0].astype("int32")
    if labels.max() >= NUM_CLASSES:
        wrong = int(np.argmax(labels >= NUM_CLASSES))
        raise ValueError(
            f"{name} of CIFAR-10 is corrupt: labels go from 0 to {NUM_CLASSES - 1}. "
            f"Received: {labels[wrong]} in record {wrong}"
        )
    planes = records[:, 1:].reshape(-1, 3, SIZE, SIZE)
    return Images(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels)


def make_images(num_images: int, seed: int) -> tuple[Images, Images]:
    """Makes a stand-in for CIFAR-10 that a convolutional network can learn.

    Each class is a texture, a sum of coloured waves; an image shows its class's
    texture, shifted at random and under noise. The same seed makes the same images.

    Args:
        num_images: Int, to train with; a fifth as many come on top to test with.
        seed: Int.

    Returns:
        The images to train with, and the images to test with.
    """
    generator = np.random.default_rng(seed)
    # Of each class: cycles per image in both directions, and a colour per wave.
    cycles = generator.uniform(-5, 5, (NUM_CLASSES, _WAVES, 2)).astype("float32")
    colours = generator.normal(0, 1, (NUM_CLASSES, _WAVES, 3)).astype("float32")
    made = []
    for count in (num_images, max(NUM_CLASSES, num_images // 5)):
        labels = generator.permutation(np.arange(count) % NUM_CLASSES).astype("int32")
        images = np.concatenate(
            [
                _draw(cycles[chunk], colours[chunk], generator)
                for chunk in np.array_split(labels, -(-count // 1000))
            ]
        )
        made.append(Images(images, labels))
    return made[0], made[1]


def _draw(
    cycles: np.ndarray, colours: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """One image for each row: [count, 32, 32, 3], uint8."""
    count = len(cycles)
    place = np.arange(SIZE, dtype="float32") / SIZE
    rows, columns = cycles[..., 0, None] * place, cycles[..., 1, None] * place
    phases = generator.random((count, _WAVES, 1, 1), dtype="float32")
    angles = rows[..., :, None] + columns[..., None, :] + phases
    waves = np.sin(2 * np.pi * angles)  # [count, _WAVES, 32, 32]
    texture = np.einsum("nwyx,nwc->nyxc", waves, colours)
    noise = generator.standard_normal(texture.shape, dtype="float32")
    return np.clip(128 + 25 * texture + 50 * noise, 0, 255).astype("uint8")
