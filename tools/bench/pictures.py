"""JPEGs with the detail of photographs, made from a seed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

# As most of ImageNet.
WIDTH, HEIGHT = 500, 375
_QUALITY = 90
_NUM_SHAPES = 12


def write_pictures(folder: Path, count: int) -> list[str]:
    """Write JPEGs of about 100 KB each.

    Args:
        folder: `Path`, which is there.
        count: Int.

    Returns:
        List of strings, the paths of the files.
    """
    rng = np.random.default_rng(0)
    paths = [folder / f"{number:04}.jpg" for number in range(count)]
    for path in paths:
        path.write_bytes(_encoded(_picture(rng)))
    return [str(path) for path in paths]


def _picture(rng: np.random.Generator) -> np.ndarray:
    """Noise of the spectrum of photographs, edges, and the noise of a sensor.

    Source: Field 1987, "Relations between the statistics of natural images and the
    response properties of cortical cells": amplitudes fall as 1 / frequency.
    """
    from PIL import Image, ImageDraw

    common = _clouds(rng)
    colours = [common + 0.4 * _clouds(rng) for _ in range(3)]
    image = Image.fromarray(_bytes(128 + 45 * np.stack(colours, axis=-1)))
    draw = ImageDraw.Draw(image)
    for number in range(_NUM_SHAPES):
        x, y = rng.integers(0, WIDTH), rng.integers(0, HEIGHT)
        width, height = rng.integers(20, 150, 2)
        shape = draw.ellipse if number % 2 else draw.rectangle
        red, green, blue = rng.integers(0, 256, 3)
        box = [int(x), int(y), int(x + width), int(y + height)]
        shape(box, fill=(int(red), int(green), int(blue)))
    return _bytes(np.asarray(image) + rng.normal(0, 4, (HEIGHT, WIDTH, 3)))


def _clouds(rng: np.random.Generator) -> np.ndarray:
    rows, columns = np.fft.fftfreq(HEIGHT)[:, None], np.fft.rfftfreq(WIDTH)[None]
    frequency = np.hypot(rows, columns)
    frequency[0, 0] = 1.0
    spectrum = np.fft.rfft2(rng.normal(size=(HEIGHT, WIDTH))) / frequency
    clouds = np.fft.irfft2(spectrum, (HEIGHT, WIDTH))
    return clouds / clouds.std()


def _bytes(values: Any) -> np.ndarray:
    return np.clip(values, 0, 255).astype(np.uint8)


def _encoded(picture: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()
