"""The arena: a flat vector `theta` whose slices are the parameters, and a vector `grad` for their gradients."""

from __future__ import annotations

import gc
import mmap
from multiprocessing import shared_memory

import numpy as np
import pytest
from arena_helper import loss_of, model
from hypothesis import given
from hypothesis import strategies as st

from minidl import Tensor, nn, optim
from minidl.engine.arena import Arena
from minidl.engine.device import ALIGNMENT, aligned
from minidl.engine.parameter import Parameter
from minidl.errors import MinidlError, ShapeError


def parameters(*shapes: tuple[int, ...], dtype: str = "float32") -> dict[str, Parameter]:
    rng = np.random.default_rng(0)
    return {f"p{i}": Parameter(rng.standard_normal(shape).astype(dtype)) for i, shape in enumerate(shapes)}


def gaps(arena: Arena) -> np.ndarray:
    """Return a mask of `theta` (size,): True where no parameter is stored."""
    outside = np.ones(arena.size, bool)
    for slot in arena.slots:
        outside[slot.start : slot.stop] = False
    return outside


# Layout


def test_flatten_moves_the_values_and_aligns_them() -> None:
    network = model()
    before = network.state_dict()
    arena = network.flatten()
    assert [slot.name for slot in arena.slots] == [name for name, _ in network.named_parameters()]
    for slot, (_, parameter) in zip(arena.slots, network.named_parameters()):
        assert slot.shape == parameter.shape and slot.stop - slot.start == parameter.size
        assert parameter.data.ctypes.data % ALIGNMENT == 0
        assert parameter.data.ctypes.data == arena.theta.ctypes.data + slot.start * 4
        assert parameter.grad.ctypes.data == arena.grad.ctypes.data + slot.start * 4
    for name, value in network.state_dict().items():
        np.testing.assert_array_equal(value, before[name])
    assert gaps(arena).any() and not arena.theta[gaps(arena)].any() and not arena.grad.any()


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=8),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_slots_are_disjoint_and_aligned(shapes: list[tuple[int, ...]], dtype: str) -> None:
    given_ = parameters(*shapes, dtype=dtype)
    before = {name: parameter.data.copy() for name, parameter in given_.items()}
    size = Arena.required_size(given_)
    arena = Arena(given_)
    used = np.zeros(arena.size, int)
    end = 0
    for slot in arena.slots:
        assert end <= slot.start <= slot.stop <= arena.size == size
        assert slot.start * np.dtype(dtype).itemsize % ALIGNMENT == 0
        used[slot.start : slot.stop] += 1
        end = slot.stop
    assert used.max(initial=0) <= 1 and arena.size - end < ALIGNMENT // np.dtype(dtype).itemsize
    assert arena.theta.dtype == arena.grad.dtype == dtype and arena.theta.size == arena.grad.size == size
    assert not arena.theta[gaps(arena)].any()
    for name, part in arena.views(arena.theta):
        np.testing.assert_array_equal(part, before[name])
        assert np.shares_memory(part, given_[name].data) or not part.size


def test_a_tied_parameter_has_one_slot() -> None:
    given_ = parameters((3, 5), (7,))
    given_["again"] = given_["p0"]
    assert [slot.name for slot in Arena(given_).slots] == ["p0", "p1"]
    apart = parameters((3, 5), (1,))
    assert Arena.required_size(apart) == Arena.required_size({**apart, "again": apart["p0"]}) == 32


def test_layout_hash_covers_names_shapes_order_and_type() -> None:
    def hashed(*shapes: tuple[int, ...], dtype: str = "float32", names: str = "p0 p1") -> str:
        made = parameters(*shapes, dtype=dtype)
        return Arena(dict(zip(names.split(), made.values()))).layout_hash

    usual = hashed((3, 5), (4,))
    assert model().flatten().layout_hash == model().flatten().layout_hash
    assert usual == hashed((3, 5), (4,))
    others = [
        hashed((5, 3), (4,)),  # the same number of elements in another shape
        hashed((15,), (4,)),
        hashed((4,), (3, 5)),
        hashed((3, 5), (4,), names="p1 p0"),
        hashed((3, 5), (4,), names="p0 bias"),
        hashed((3, 5), (4,), dtype="float64"),
        hashed((3, 5)),
    ]
    assert len({usual, *others}) == 8


def test_no_parameters_and_mixed_types_are_refused() -> None:
    with pytest.raises(ShapeError, match="0 types; expected one or more parameters of one type"):
        Arena({})
    mixed = {**parameters((3,)), "double": parameters((3,), dtype="float64")["p0"]}
    with pytest.raises(ShapeError, match="2 types"):
        Arena(mixed)


# Views


def test_theta_and_the_parameters_are_the_same_memory() -> None:
    network = model()
    arena = network.flatten()
    arena.theta[:] = np.arange(arena.size)
    for slot, parameter in zip(arena.slots, network.parameters()):
        np.testing.assert_array_equal(parameter.data.ravel(), np.arange(slot.start, slot.stop))
    weight = network[0].weight
    weight.copy_(np.full(weight.shape, 7.0))
    assert (arena.theta[: weight.size] == 7).all() and arena.theta[weight.size] != 7


def test_gradients_accumulate_into_the_arena() -> None:
    network, apart = model(), model()
    arena = network.flatten()
    loss_of(apart).backward()
    loss_of(network).backward()
    assert not arena.grad[gaps(arena)].any()
    for (name, part), parameter in zip(arena.views(arena.grad), apart.parameters()):
        assert part.any(), name
        np.testing.assert_array_equal(part, parameter.grad)
    once = arena.grad.copy()
    loss_of(network).backward()  # the same gradient: in training, batch norm does not use its running statistics
    np.testing.assert_array_equal(arena.grad, 2 * once)


def test_flatten_keeps_existing_gradients() -> None:
    network = model()
    loss_of(network).backward()
    before = network[0].weight.grad.copy()
    arena = network.flatten()
    np.testing.assert_array_equal(arena.view(arena.grad, arena.slots[0]), before)


def test_zero_grad_keeps_the_views() -> None:
    network = model()
    arena = network.flatten()
    loss_of(network).backward()
    network.zero_grad()
    assert not arena.grad.any()
    for parameter in network.parameters():
        assert np.shares_memory(parameter.grad, arena.grad)
    network[0].bias.grad = np.arange(3.0)
    np.testing.assert_array_equal(arena.view(arena.grad, arena.slots[1]), [0, 1, 2])


def test_data_is_read_only_and_cannot_be_replaced() -> None:
    network = model()
    weight = network[0].weight
    weight.data = weight.data + 1  # allowed outside an arena
    network.flatten()
    with pytest.raises(MinidlError, match=r"\(3, 3, 2, 3\): its array is part of .* write .* parameter.copy_"):
        weight.data = np.zeros(weight.shape, np.float32)
    with pytest.raises(ValueError, match="read-only"):
        weight.data[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        weight.data += 1
    with pytest.raises(ShapeError, match=r"values of shape \(3,\) for a parameter of shape \(3, 3, 2, 3\)"):
        weight.copy_(np.zeros(3))


def test_every_write_increases_the_version() -> None:
    network = model()
    arena = network.flatten()
    versions = [arena.version]

    def risen() -> bool:
        versions.append(arena.version)
        return versions[-1] > versions[-2]

    network[0].weight.copy_(Tensor(np.zeros((3, 3, 2, 3), np.float32)))
    assert risen()
    network.load_state_dict(network.state_dict())
    assert risen()
    nn.init.normal(network[4].weight)
    assert risen()
    optimizer = optim.SGD(network, lr=0.1)
    optimizer.step()
    assert risen()
    arena.touch()
    assert risen()
    loss_of(network).backward()
    optimizer.zero_grad()
    assert not risen()  # neither reading theta nor writing grad changes the version


def test_new_vectors_are_zeros_in_the_layout_of_theta() -> None:
    arena = model().flatten()
    vector = arena.new_vector()
    assert not vector.any() and vector.shape == arena.theta.shape and vector.dtype == arena.dtype
    assert vector.ctypes.data % ALIGNMENT == 0 and arena.new_vector() is not vector


# Memory that the caller provides


def test_theta_in_a_given_buffer() -> None:
    given_ = parameters((3, 5), (7,))
    before = given_["p0"].data.copy()
    buffer = aligned(Arena.required_size(given_), "float32")
    buffer[:] = np.nan  # old contents must not remain in the gaps
    arena = Arena(given_, buffer)
    assert arena.theta is buffer
    np.testing.assert_array_equal(buffer[:15].reshape(3, 5), before)
    assert not buffer[gaps(arena)].any()
    buffer[16:23] = 3
    assert (given_["p1"].data == 3).all()


def test_training_updates_theta_in_shared_memory() -> None:
    network = model()
    own = dict(network.named_parameters())
    size = Arena.required_size(own)
    memory = shared_memory.SharedMemory(create=True, size=size * 4)
    try:
        network.arena = Arena(own, np.frombuffer(memory.buf, np.float32, size))
        before = network.arena.theta.copy()
        optimizer = optim.SGD(network, lr=0.1)
        loss_of(network).backward()
        optimizer.step()
        other = shared_memory.SharedMemory(memory.name)
        seen = np.frombuffer(other.buf, np.float32, size).copy()
        other.close()
        np.testing.assert_array_equal(seen, network.arena.theta)
        assert (seen != before).any()
        del network, own, optimizer  # the memory cannot be closed while these hold views of it
        gc.collect()  # needed because the arena and the parameters reference each other
    finally:
        memory.close()
        memory.unlink()


def test_theta_in_mapped_memory() -> None:
    given_ = parameters((3, 5))
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        arena = Arena(given_, np.frombuffer(memory, np.float32, Arena.required_size(given_)))
        given_["p0"].copy_(np.full((3, 5), 2.0))
        assert memory[:4] == np.float32(2).tobytes()
        del arena, given_
        gc.collect()


def shifted(size: int) -> np.ndarray:
    return aligned(size + 1, "float32")[1:]


def read_only(size: int) -> np.ndarray:
    buffer = aligned(size, "float32")
    buffer.flags.writeable = False
    return buffer


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda n: aligned(n - 1, "float32"), r"float32 \(31,\)"),
        (lambda n: aligned(n + 1, "float32"), r"float32 \(33,\)"),
        (lambda n: aligned(n, "float64"), r"float64 \(32,\)"),
        (lambda n: aligned(n, "float32").reshape(2, -1), r"float32 \(2, 16\)"),
        (lambda n: aligned(2 * n, "float32")[::2], r"float32 \(32,\)"),
        (shifted, r"float32 \(32,\)"),
        (read_only, r"float32 \(32,\)"),
    ],
)
def test_bad_buffers(make: object, found: str) -> None:
    given_ = parameters((3, 5), (7,))
    size = Arena.required_size(given_)
    assert size == 32
    expected = f"arena: a buffer of {found}; expected a writable contiguous vector of 32 float32 that begins on a 64-"
    with pytest.raises(ShapeError, match=expected):
        Arena(given_, make(size))  # type: ignore[operator]
    assert all(parameter.arena is None for parameter in given_.values())
    given_["p0"].data = np.zeros((3, 5), np.float32)  # allowed: the parameter is in no arena
