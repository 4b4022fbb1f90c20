"""The digits of scikit-learn, a data set of images that needs no file."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from compress.reading.class_folders import LabelledFile


def digits() -> list[LabelledFile]:
    """Returns the 1,797 digits of scikit-learn as 8 x 8 greyscale PNG images: the train split, then the test split.

    The split is stratified, 80/20, with seed 0. Pixel values 0 to 16 are scaled to 0 to 255.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    pixels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    train, test = train_test_split(np.arange(len(pixels)), test_size=0.2, stratify=bunch.target, random_state=0)

    def encode(index: int, split: str) -> LabelledFile:
        file = io.BytesIO()
        Image.fromarray(pixels[index]).save(file, "PNG")
        return LabelledFile(f"sklearn:digits image {index}", split, str(bunch.target[index]), file.getvalue())

    return [encode(i, "train") for i in train] + [encode(i, "test") for i in test]
