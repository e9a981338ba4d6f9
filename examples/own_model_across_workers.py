"""A model of your own, trained by several processes.

    python -m minidl.launch --workers 2 examples/own_model_across_workers.py
    mpiexec -n 4 python examples/own_model_across_workers.py

Each process has a replica of the model. After each step, neighbours average their weights (the method dpsgd).
"""

import numpy as np

import minidl
from minidl import Tensor, nn


class TwoScales(nn.Module):
    """Looks at an image with small and with large filters, and adds both results."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Conv2d(1, 16, 3, padding=1)
        self.coarse = nn.Conv2d(1, 16, 5, padding=2)
        self.head = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 4 * 4, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fine(x) + self.coarse(x))


def main() -> None:
    data = minidl.data.load("digits")
    model = TwoScales()
    with minidl.join(model, method="dpsgd", lr=0.05) as replica:
        for epoch in range(8):
            mine = replica.shard(len(data.y_train), epoch)  # the images of this replica, in a new order in each epoch
            for batch in np.array_split(mine, len(mine) // 32):
                replica.step(data.x_train[batch], data.y_train[batch])
    if replica.rank == 0:  # now every replica has the average of all
        score = minidl.evaluate(model, data.x_test, data.y_test)
        print(f"{replica.size} replicas: test accuracy {score.accuracy:.1%}")


if __name__ == "__main__":
    main()
