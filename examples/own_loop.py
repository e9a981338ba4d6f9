"""A training loop of your own: batches, a recorded gradient, an optimizer, a schedule.

    python examples/own_loop.py

The first call of `gradient` records the operations of a step. Later calls replay them without Python.
"""

import minidl
from minidl import nn

EPOCHS = 10


def main() -> None:
    minidl.seed(0)
    data = minidl.data.load("digits", validation=0.1)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * 4 * 4, 10),
    )  # fmt: skip
    batches = minidl.data.Loader(data.x_train, data.y_train, batch_size=32, seed=0)
    optimizer = minidl.optim.AdamW(model, lr=0.003)
    gradient = minidl.Gradient(model, minidl.ops.cross_entropy)
    for epoch in range(EPOCHS):
        for x, y in batches.epoch(epoch):
            gradient(x, y)  # writes the gradients of all parameters, and returns the loss and the correct answers
            optimizer.step()
        optimizer.lr *= 0.8
        score = minidl.evaluate(model, data.x_validation, data.y_validation)
        print(f"epoch {epoch + 1}: validation accuracy {score.accuracy:.1%}, loss {score.loss:.3f}")
    print(f"test accuracy {minidl.evaluate(model, data.x_test, data.y_test).accuracy:.1%}")


if __name__ == "__main__":
    main()
