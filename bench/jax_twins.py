"""minidl's models in JAX, layer by layer, for images x (N, H, W, C). Each is a function of (net, x); see `Net`.

The parameters are a list of dictionaries, one for each layer with parameters. The running statistics are a list of
dictionaries, one for each batch norm layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Arrays = list[dict[str, jax.Array]]
Shape = tuple[int, int, int]
MOMENTUM, EPS = 0.1, 1e-5  # of batch norm


class Net:
    """A network defined by a function `body`.

    The constructor calls `body` once to create the parameters. `apply` calls it again with given parameters.
    """

    def __init__(self, body: Callable[[Net, jax.Array], jax.Array], shape: Shape) -> None:
        self.body, self.random = body, np.random.default_rng(0)
        self.parameters: Arrays = []
        self.statistics: Arrays = []
        self.making = True
        self.training = True
        self.next, self.next_norm = 0, 0
        body(self, jnp.zeros((2, *shape), jnp.float32))
        self.making = False

    def apply(self, parameters: Arrays, statistics: Arrays, x: jax.Array, training: bool) -> tuple[jax.Array, Arrays]:
        """Return (logits, new statistics)."""
        kept = self.parameters, self.statistics
        self.parameters, self.statistics, self.training = parameters, list(statistics), training
        self.next = self.next_norm = 0
        y, changed = self.body(self, x), self.statistics
        self.parameters, self.statistics = kept
        return y, changed

    def layer(self, **shapes: tuple[int, ...]) -> dict[str, jax.Array]:
        """Return the parameters of the next layer; create them with these shapes on the first call of `body`."""
        if self.making:
            width = math.sqrt(1 / math.prod(shapes["weight"][:-1])) if "weight" in shapes else 0.0
            made = {name: self.random.uniform(-width, width, shape) for name, shape in shapes.items()}
            self.parameters.append({name: jnp.asarray(value, jnp.float32) for name, value in made.items()})
        self.next += 1
        return self.parameters[self.next - 1]

    def linear(self, x: jax.Array, outputs: int) -> jax.Array:
        p = self.layer(weight=(x.shape[-1], outputs), bias=(outputs,))
        return x @ p["weight"] + p["bias"]

    def conv(self, x: jax.Array, outputs: int, size: int, stride: int = 1, bias: bool = True) -> jax.Array:
        shapes: dict[str, tuple[int, ...]] = {"weight": (size, size, x.shape[-1], outputs)}
        p = self.layer(**(shapes | {"bias": (outputs,)} if bias else shapes))
        around = [(size // 2, size // 2)] * 2
        layout = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(x, p["weight"], (stride, stride), around, dimension_numbers=layout)
        return y + p["bias"] if bias else y

    def batch_norm(self, x: jax.Array) -> jax.Array:
        channels = x.shape[-1]
        if self.making:
            self.parameters.append({"scale": jnp.ones(channels), "shift": jnp.zeros(channels)})
            self.statistics.append({"mean": jnp.zeros(channels), "variance": jnp.ones(channels)})
        p, at = self.parameters[self.next], self.next_norm
        self.next, self.next_norm = self.next + 1, at + 1
        if not self.training:
            mean, variance = self.statistics[at]["mean"], self.statistics[at]["variance"]
        else:
            mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
            count = math.prod(x.shape[:3])
            seen = {"mean": mean, "variance": variance * (count / (count - 1))}
            old = self.statistics[at]
            self.statistics[at] = {name: (1 - MOMENTUM) * old[name] + MOMENTUM * seen[name] for name in old}
        return (x - mean) * (lax.rsqrt(variance + EPS) * p["scale"]) + p["shift"]


def max_pool(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def flatten(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], -1)


def mlp(net: Net, x: jax.Array) -> jax.Array:
    x = flatten(x)
    for _ in range(2):
        x = jax.nn.relu(net.linear(x, 512))
    return net.linear(x, 10)


def lenet(net: Net, x: jax.Array) -> jax.Array:
    for outputs in (32, 64):
        x = max_pool(jax.nn.relu(net.conv(x, outputs, 5)))
    return net.linear(jax.nn.relu(net.linear(flatten(x), 512)), 10)


def vgg(net: Net, x: jax.Array) -> jax.Array:
    for outputs in (64, 128, 256):
        for _ in range(2):
            x = jax.nn.relu(net.conv(x, outputs, 3))
        x = max_pool(x)
    return net.linear(flatten(x), 10)


def resnet20(net: Net, x: jax.Array) -> jax.Array:
    x = jax.nn.relu(net.batch_norm(net.conv(x, 16, 3, bias=False)))
    for outputs, first in ((16, 1), (32, 2), (64, 2)):
        for stride in (first, 1, 1):
            y = jax.nn.relu(net.batch_norm(net.conv(x, outputs, 3, stride, bias=False)))
            y = net.batch_norm(net.conv(y, outputs, 3, bias=False))
            new_channels = outputs - x.shape[-1]
            x = jnp.pad(x[:, ::stride, ::stride], ((0, 0), (0, 0), (0, 0), (0, new_channels)))
            x = jax.nn.relu(x + y)
    return net.linear(x.mean((1, 2)), 10)


TWINS = {"mlp": mlp, "lenet": lenet, "vgg": vgg, "resnet20": resnet20}


def training_step(name: str, x: np.ndarray, y: np.ndarray, lr: float) -> Callable[[], Any]:
    """Return a function that makes one step of momentum SGD, waits for its results, and returns the loss."""
    net = Net(TWINS[name], x.shape[1:])
    images, labels = jnp.asarray(x), jnp.asarray(y)

    def loss(parameters: Arrays, statistics: Arrays, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Arrays]:
        logits, changed = net.apply(parameters, statistics, images, True)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean(), changed

    def step(theta: Arrays, velocity: Arrays, statistics: Arrays, images: jax.Array, labels: jax.Array) -> Any:
        (value, statistics), gradient = jax.value_and_grad(loss, has_aux=True)(theta, statistics, images, labels)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradient)
        theta = jax.tree.map(lambda w, v: w - lr * v, theta, velocity)
        return value, theta, velocity, statistics

    compiled = jax.jit(step, donate_argnums=(0, 1, 2))
    state = [net.parameters, jax.tree.map(jnp.zeros_like, net.parameters), net.statistics]

    def one() -> float:
        value, *state[:] = jax.block_until_ready(compiled(*state, images, labels))
        return float(value)

    return one


def prediction(name: str, x: np.ndarray) -> Callable[[], Any]:
    """Return a function that computes the logits (N, 10) of images x (N, H, W, C) and waits for them."""
    net, images = Net(TWINS[name], x.shape[1:]), jnp.asarray(x)
    compiled = jax.jit(lambda parameters, statistics, images: net.apply(parameters, statistics, images, False)[0])
    return lambda: np.asarray(compiled(net.parameters, net.statistics, images))
