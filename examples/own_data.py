"""Data of your own: drawings of circles and squares, made with NumPy.

    python examples/own_data.py

`fit` takes arrays: images (N, H, W, C), labels (N,) from 0. It does not standardise them, so this script does.
"""

import numpy as np

import minidl

SIDE, IMAGES = 16, 2000


def draw(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return noisy drawings: images (IMAGES, SIDE, SIDE, 1), labels (IMAGES,): 0 for a circle, 1 for a square."""
    labels = random.integers(0, 2, IMAGES)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    centers = random.uniform(5, 11, (2, IMAGES, 1, 1))
    radii = random.uniform(3, 5, (IMAGES, 1, 1))
    across, down = np.abs(columns - centers[0]), np.abs(rows - centers[1])
    circles, squares = np.hypot(across, down) < radii, np.maximum(across, down) < radii
    images = np.where(labels[:, None, None], squares, circles) + random.normal(0, 0.3, (IMAGES, SIDE, SIDE))
    return ((images - images.mean()) / images.std()).astype(np.float32)[..., None], labels


def main() -> None:
    random = np.random.default_rng(0)
    model = minidl.models.build("lenet", input_shape=(SIDE, SIDE, 1), classes=2)
    history = minidl.fit(model, (*draw(random), *draw(random)), epochs=4, lr=0.02)
    assert history.test
    print(f"test accuracy {history.test.accuracy:.1%}")


if __name__ == "__main__":
    main()
