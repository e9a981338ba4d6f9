"""The tape (the graph of recorded functions): what it records, the order of the backward pass, when it is freed."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import minidl
from minidl import ops
from minidl.engine.autograd import Function, GraphError, grad_enabled, gradcheck, no_grad
from minidl.engine.tensor import Tensor
from minidl.errors import ShapeError


def leaf(*values: float) -> Tensor:
    return Tensor(np.array(values, np.float64), requires_grad=True)


# -- the flow of gradients -----------------------------------------------------------------------------------


def test_a_tensor_used_twice_gets_both_gradients() -> None:
    x = leaf(2.0, -3.0)
    (x * x + x).sum().backward()  # the derivative is 2 * x + 1
    np.testing.assert_array_equal(x.grad, [5, -5])


def test_diamond() -> None:
    x = leaf(3.0)
    a = x * 2
    left, right = a * a, a + 1
    (left * right).sum().backward()  # d/da (a^3 + a^2) = 3 * a^2 + 2 * a = 120 at a = 6, times da/dx = 2
    np.testing.assert_array_equal(x.grad, [240])


def test_many_diamonds_take_one_visit_each() -> None:
    x = leaf(1.0)
    y = x
    for _ in range(60):
        y = y + y
    y.sum().backward()  # 2^60 paths
    np.testing.assert_array_equal(x.grad, [2.0**60])


def test_branches_of_different_length_meet() -> None:
    """The gradient of the short branch reaches `start` early. The backward of `start` must wait for the long branch."""
    x = leaf(1.0)
    start = x * 3
    long = start
    for _ in range(9):
        long = long * 2
    (start + long).sum().backward()
    np.testing.assert_array_equal(x.grad, [3 * 513])


def test_a_gradient_that_two_inputs_share_is_not_written_to() -> None:
    """The backward of a + b passes one array to both inputs. Adding to a's gradient must not change b's gradient."""
    x, y = leaf(2.0), leaf(3.0)
    a, b = x * 1, y * 1
    older = a * 3  # its gradient reaches `a` after the gradient of a + b
    ((a + b) + older).backward()
    np.testing.assert_array_equal((x.grad, y.grad), [[4], [1]])


def test_two_backward_passes_accumulate() -> None:
    x = leaf(2.0)
    for expected in (4, 8, 12):
        (x * x).sum().backward()
        np.testing.assert_array_equal(x.grad, [expected])
    x.zero_grad()
    assert x.grad is None


def test_a_long_chain() -> None:
    x = leaf(1.0)
    y = x
    for _ in range(10_000):
        y = y + 1
    y.backward()
    assert y.item() == 10_001
    np.testing.assert_array_equal(x.grad, [1])


def test_a_long_chain_is_freed_without_backward() -> None:
    """Freeing the chain must not recurse from node to node, and must not need the garbage collector."""
    gc.disable()
    try:
        x = leaf(1.0)
        y = first = x + 1
        watch = weakref.ref(first)
        del first
        for _ in range(50_000):
            y = y + 1
        del y
        assert watch() is None
    finally:
        gc.enable()


def test_backward_of_a_leaf_and_of_a_single_number() -> None:
    x = Tensor(3.0, requires_grad=True)
    x.backward()
    assert x.grad is not None and x.grad.shape == () and x.grad == 1
    (x * x).backward()
    assert x.grad.shape == () and x.grad == 7


def test_backward_with_a_gradient_given() -> None:
    x = leaf(1.0, 2.0)
    v = np.array([10, 100])  # integers are converted to x's type
    (x * 3).backward(v)
    np.testing.assert_array_equal(x.grad, [30, 300])
    y = Tensor(np.ones((2, 3)), requires_grad=True)
    v = np.arange(6.0).reshape(3, 2).T  # not contiguous
    (y * 1).backward(v)
    np.testing.assert_array_equal(y.grad, v)


# -- what cannot be differentiated ---------------------------------------------------------------------------


def test_backward_needs_a_single_number_or_a_gradient() -> None:
    y = leaf(1.0, 2.0) * 2
    with pytest.raises(ShapeError, match=r"backward: \(2,\) is not a single number"):
        y.backward()
    with pytest.raises(ShapeError, match=r"gradient \(3,\) for an output of shape \(2,\)"):
        y.backward(np.ones(3))


def test_backward_needs_an_input_that_requires_a_gradient() -> None:
    with pytest.raises(GraphError, match="requires_grad=True"):
        (Tensor([1.0]) * 2).backward()


def test_a_second_backward_says_what_to_do() -> None:
    x = leaf(2.0)
    a = x * x
    y = a * 3
    y.backward()
    for output in (y, y + 1, a):
        with pytest.raises(GraphError, match=r"freed by an earlier backward.*again.*retain_graph=True"):
            output.backward()
    np.testing.assert_array_equal(x.grad, [12])  # the failed calls added nothing


def test_retain_graph() -> None:
    x = leaf(2.0)
    y = x * x * x
    y.backward(retain_graph=True)
    y.backward(retain_graph=True)
    y.backward()
    np.testing.assert_array_equal(x.grad, [36])
    with pytest.raises(GraphError):
        y.backward()


def test_a_freed_subgraph_is_noticed_before_any_gradient_is_added() -> None:
    x, z = leaf(2.0), leaf(5.0)
    shared = x * x
    (shared + 1).backward()
    with pytest.raises(GraphError):
        (shared * z).backward()
    assert z.grad is None


# -- no_grad and detach --------------------------------------------------------------------------------------


def test_no_grad() -> None:
    x = leaf(1.0)
    with minidl.no_grad():
        y = x * 2
    assert not y.requires_grad and y.creator is None
    assert (x * 2).requires_grad


def test_no_grad_nests_and_ends_with_an_exception() -> None:
    guard = no_grad()
    with guard:
        with guard, no_grad():
            assert not grad_enabled()
        assert not grad_enabled()
    assert grad_enabled()
    with pytest.raises(ZeroDivisionError), no_grad():
        1 / 0  # noqa: B018
    assert grad_enabled()


def test_no_grad_as_a_decorator() -> None:
    @no_grad()
    def predict(x: Tensor, depth: int = 3) -> Tensor:
        return predict(x, depth - 1) if depth else x * 2

    assert not predict(leaf(1.0)).requires_grad
    assert grad_enabled()


def test_no_grad_affects_only_its_thread() -> None:
    with no_grad(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(grad_enabled).result()


def test_a_decorated_function_in_two_threads_at_once() -> None:
    """One thread calls the function while gradients are recorded, the other inside no_grad: each restores its state."""
    entered = threading.Barrier(2, timeout=30)

    @no_grad()
    def inside() -> None:
        entered.wait()

    def on() -> bool:
        inside()
        return grad_enabled()

    def off() -> bool:
        with no_grad():
            inside()
            return grad_enabled()

    for _ in range(5):
        with ThreadPoolExecutor(2) as pool:
            results = pool.submit(on), pool.submit(off)
            assert [result.result() for result in results] == [True, False]


def test_detach() -> None:
    x = leaf(2.0, 3.0)
    y = x * x
    d = y.detach()
    assert np.shares_memory(d.numpy(), y.numpy()) and not d.requires_grad
    (y * d).sum().backward()  # d is a constant
    np.testing.assert_array_equal(x.grad, 2 * x.numpy() ** 3)


# -- memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["backward", "deletion"])
def test_the_graph_is_freed_without_the_garbage_collector(how: str) -> None:
    x, w = (Tensor(np.ones(shape), requires_grad=True) for shape in ((3, 5), (5, 2)))

    def forward() -> tuple[Tensor, list[weakref.ref]]:
        hidden = ops.relu(x @ w)
        return (hidden * hidden).sum(), [weakref.ref(hidden), weakref.ref(hidden.numpy())]

    forward()[0].backward()  # compiles the kernels: a compilation may leave references to its arguments in Numba
    gc.disable()
    try:
        loss, watched = forward()
        assert all(watch() is not None for watch in watched)  # alive: backward needs them
        if how == "backward":
            loss.backward()
        else:
            del loss
        assert [watch() for watch in watched] == [None, None]
    finally:
        gc.enable()


def test_gradients_of_leaves_share_no_memory() -> None:
    a, b = leaf(1.0, 2.0), leaf(3.0, 4.0)
    dy = np.array([1.0, 10.0])
    (a + b).backward(dy)
    assert a.grad is not None and b.grad is not None
    a.grad[:] = -1
    np.testing.assert_array_equal(b.grad, [1, 10])
    np.testing.assert_array_equal(dy, [1, 10])
    (a + b.reshape(2)).backward(dy)  # accumulates into a.grad, not into dy
    np.testing.assert_array_equal(a.grad, [0, 9])
    np.testing.assert_array_equal(b.grad, [2, 20])
    np.testing.assert_array_equal(dy, [1, 10])


# -- user-defined functions ----------------------------------------------------------------------------------


class Clip(Function):
    """A typical user-defined function. It calls NumPy and returns the results without converting their type."""

    def forward(self, x: np.ndarray, low: float, high: float) -> np.ndarray:
        self.inside = (x > low) & (x < high)
        return np.clip(x, low, high)

    def backward(self, dy: np.ndarray) -> np.ndarray:
        return dy * self.inside


class TransposedView(Function):
    def forward(self, x: np.ndarray) -> np.ndarray:
        return x.T

    def backward(self, dy: np.ndarray) -> np.ndarray:
        return dy.T


class Total(Function):
    """The sum: forward returns a NumPy scalar, backward a view with strides of 0."""

    def forward(self, x: np.ndarray) -> np.ndarray:
        self.shape = x.shape
        return x.sum()

    def backward(self, dy: np.ndarray) -> np.ndarray:
        return np.broadcast_to(dy, self.shape)


class Weighted(Function):
    """The product a * b, without a gradient for b. backward checks `needs` before it computes."""

    def forward(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        self.b = b
        return a * b

    def backward(self, dy: np.ndarray) -> tuple[np.ndarray | None, None]:
        return dy * self.b if self.needs[0] else None, None


class WrongDerivative(Function):
    def forward(self, x: np.ndarray) -> np.ndarray:
        self.x = x
        return x**2

    def backward(self, dy: np.ndarray) -> np.ndarray:
        dx = 2 * dy * self.x
        dx.flat[-1] *= 1.001  # the last element is wrong
        return dx


class WrongShape(Function):
    def forward(self, x: np.ndarray) -> np.ndarray:
        return x[:1]

    def backward(self, dy: np.ndarray) -> np.ndarray:
        return dy


def test_user_defined_functions() -> None:
    x = Tensor(np.random.default_rng(0).standard_normal((3, 5)), requires_grad=True)
    assert gradcheck(lambda x: Clip.apply(x, low=-0.5, high=0.5), x)
    # surrounded by ops of minidl, whose kernels need contiguous arrays
    assert gradcheck(lambda x: TransposedView.apply(x.T).reshape(15) * np.arange(15), x)
    assert gradcheck(lambda x: Total.apply((x * x).T).reshape(1) * 3, x)


def test_a_function_without_a_gradient_for_an_input() -> None:
    a, b = leaf(2.0), leaf(3.0)
    Weighted.apply(a, b * 2).backward()
    np.testing.assert_array_equal(a.grad, [6])
    assert b.grad is None
    Weighted.apply(Tensor(np.array([1.0])), b).backward()
    assert b.grad is None


def test_a_gradient_of_the_wrong_shape_is_an_error() -> None:
    x = leaf(1.0, 2.0)
    with pytest.raises(ShapeError, match=r"WrongShape.backward: .*\(1,\).* \(2,\)"):
        WrongShape.apply(x).backward()


def test_gradcheck_finds_one_wrong_element() -> None:
    x = Tensor(np.random.default_rng(0).standard_normal((7, 5)), requires_grad=True)
    assert gradcheck(lambda x: x * x, x)
    with pytest.raises(AssertionError, match=r"gradcheck: backward gives .*, differences give"):
        gradcheck(WrongDerivative.apply, x)


def test_gradcheck_varies_only_inputs_that_require_a_gradient_and_restores_them() -> None:
    x, constant = leaf(0.5, 2.0), Tensor(np.array([0.0, 1.0]))
    assert gradcheck(lambda x, c: ops.relu(c) * x * x, x, constant)  # relu has a kink at 0, so varying c would fail
    np.testing.assert_array_equal(x.numpy(), [0.5, 2.0])
    with pytest.raises(ShapeError, match="float32; differences need float64"):
        gradcheck(lambda x: x, Tensor([1.0], requires_grad=True).astype("float32"))
