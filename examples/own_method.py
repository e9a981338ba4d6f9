"""A method of your own: replicas average their weights with their neighbours on a ring, more and more rarely.

    python -m minidl.launch --workers 2 examples/own_method.py

The functions for arrays (`minidl.neighbor_average`, `allreduce`, `broadcast`) work in any script. A method that shall
be available as `--method NAME`, in simulations and with deaths of replicas, is a class in a separate file
(CONTRIBUTING.md).
"""

import numpy as np

import minidl
from minidl import nn

STEPS = 300


def main() -> None:
    minidl.seed(0)  # all replicas begin with the same weights
    data = minidl.data.load("digits")
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = minidl.optim.SGD(model, lr=0.05, momentum=0.9)
    gradient = minidl.Gradient(model, minidl.ops.cross_entropy)
    random = np.random.default_rng(minidl.rank())  # replicas draw different batches
    next_exchange, exchanges = 1, 0
    for step in range(STEPS):
        batch = random.integers(0, len(data.y_train), 32)
        gradient(data.x_train[batch], data.y_train[batch])
        optimizer.step()
        if step == next_exchange:
            average(model)
            exchanges += 1
            next_exchange += 1 + step // 10
    for parameter in model.parameters():
        parameter.copy_(minidl.allreduce(parameter.numpy()) / minidl.size())
    if minidl.rank() == 0:
        accuracy = minidl.evaluate(model, data.x_test, data.y_test).accuracy
        print(f"{minidl.size()} replicas, {exchanges} exchanges in {STEPS} steps: test accuracy {accuracy:.1%}")


def average(model: nn.Module) -> None:
    """Replace each parameter by its average over this replica and its neighbours on a ring."""
    for parameter in model.parameters():
        parameter.copy_(minidl.neighbor_average(parameter.numpy(), topology="ring"))


if __name__ == "__main__":
    main()
