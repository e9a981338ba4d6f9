"""A method of your own: replicas average their weights with their neighbours on a ring, at first often, then rarely.

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
    exchanges = {step * step for step in range(1, 18)}  # after steps 1, 4, 9, 16, ...
    for step in range(1, STEPS + 1):
        batch = random.integers(0, len(data.y_train), 32)
        gradient(data.x_train[batch], data.y_train[batch])
        optimizer.step()
        for parameter in model.parameters() if step in exchanges else ():
            parameter.copy_(minidl.neighbor_average(parameter.numpy(), topology="ring"))
    for parameter in model.parameters():  # the result: the average of all replicas
        parameter.copy_(minidl.allreduce(parameter.numpy()) / minidl.size())
    if minidl.rank() == 0:
        accuracy = minidl.evaluate(model, data.x_test, data.y_test).accuracy
        print(f"{minidl.size()} replicas, {len(exchanges)} exchanges in {STEPS} steps: test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
