"""States of replicas: how they are averaged, collected and restored. Samplers: how replicas divide the images."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from minidl import data, models, nn
from minidl.data.sampler import Sampler, parse_skew, replica_seed
from minidl.errors import CheckpointError
from minidl.run.config import resolve
from minidl.training.replica_state import (
    ReplicaState,
    averaged,
    gather_numbers,
    mean_and_distance,
    own_state,
    reestimate,
    restore_replica,
)
from minidl.training.trainer import Trainer

CONFIG = resolve({"data": "synthetic:96x8x8x1:3", "model": "lenet", "batch_size": 16, "epochs": 2, "optimizer": "adam"})


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(144, 3)
    )


def trainer(model: nn.Module | None = None) -> Trainer:
    nn.seed(0)
    dataset = data.load(CONFIG.data, None, 0.0, 0)
    return Trainer(model or models.build("lenet", dataset.input_shape, dataset.classes), dataset, CONFIG)


def test_mean_is_computed_in_float64() -> None:
    vectors = [np.array([1e8, 1], np.float32), np.array([1, 1], np.float32), np.array([-1e8, 4], np.float32)]
    mean, _ = mean_and_distance(vectors)
    assert mean.dtype == np.float32 and mean.tolist() == [np.float32(1 / 3), 2]


def test_statistics_are_the_means_over_batches() -> None:
    """The running statistics depend on earlier weights. `reestimate` computes them again with the current weights."""
    model = normed()
    one = trainer(model)
    list(one.run())
    running = dict(model.named_buffers())
    before = {name: buffer.numpy().copy() for name, buffer in running.items()}
    state = one.engine.model, nn.random_state()
    reestimate(one, batches=3)
    weight = dict(model.named_parameters())["0.weight"].numpy().astype(np.float64)  # (3, 3, 1, 4)
    means, variances = [], []
    for x, _ in one.sampler.sample(3):
        windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64)[..., 0], (3, 3), axis=(1, 2))
        y = np.einsum("nhwij,ijo->nhwo", windows, weight[:, :, 0]).reshape(-1, 4)
        means.append(y.mean(0))
        variances.append(y.var(0, ddof=1))
    np.testing.assert_allclose(running["1.running_mean"].numpy(), np.mean(means, 0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(running["1.running_var"].numpy(), np.mean(variances, 0), rtol=1e-4)
    assert not np.allclose(before["1.running_mean"], running["1.running_mean"].numpy())
    assert nn.random_state() == state[1], "dropout continues from the same random state"


def test_the_average_replaces_the_model_only_in_its_context() -> None:
    one = trainer(normed())
    list(one.run())
    own = own_state(one)
    before = {name: vector.copy() for name, vector in own.vectors.items()}
    average, _ = mean_and_distance([before["theta"], before["theta"] + 2])
    with averaged(one, average) as model:
        first = next(iter(model.parameters())).numpy()
        assert np.allclose(one.replica.theta[: first.size], before["theta"][: first.size] + 1)
        assert not np.array_equal(one.replica.statistics, before["statistics"])
    for name, vector in own_state(one).vectors.items():
        assert np.array_equal(vector, before[name]), name


def test_a_restored_replica_continues_bit_identically() -> None:
    whole = trainer()
    entries = whole.run()
    for _ in range(5):
        next(entries)
    saved = own_state(whole)
    saved = ReplicaState(0, {name: vector.copy() for name, vector in saved.vectors.items()}, saved.numbers)
    again = trainer()
    restore_replica(again, saved)
    again.progress = replace(whole.progress)
    list(entries)
    list(again.run())
    assert np.array_equal(again.replica.theta, whole.replica.theta)
    assert all(np.array_equal(vector, whole.replica.state[name]) for name, vector in again.replica.state.items())


def test_the_state_of_another_optimizer_is_refused() -> None:
    one = trainer()
    saved = own_state(one)
    del saved.vectors["second_moment"]
    with pytest.raises(CheckpointError, match="another optimizer"):
        restore_replica(one, saved)


def test_numbers_are_gathered() -> None:
    one = trainer()
    assert dict(gather_numbers(one, {"words": "é"})) == {0: {"words": "é"}}
    with pytest.raises(CheckpointError, match="numbers take"):
        list(gather_numbers(one, {"words": "x" * 20_000}))


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
def test_shares_are_equal_and_disjoint(replicas: int) -> None:
    dataset = data.load(CONFIG.data, None, 0.0, 0)
    labels = np.arange(len(dataset.y_train))  # the label identifies the image
    dataset = replace(dataset, y_train=labels)
    seen, lengths = [], set()
    for rank in range(replicas):
        sampler = Sampler(dataset, CONFIG.batch_size, CONFIG.seed, rank, replicas, prefetch=0)
        lengths.add(len(sampler))
        seen.append(np.concatenate([y for _, y in sampler.epoch(3)]))
    every = np.concatenate(seen)
    assert len(lengths) == 1 and len({part.size for part in seen}) == 1
    assert len(np.unique(every)) == every.size >= labels.size - replicas + 1


def test_skewed_shares_stay_with_their_replica() -> None:
    dataset = data.load(CONFIG.data, None, 0.0, 0)
    dataset = replace(dataset, x_train=np.arange(96, dtype=np.float32).reshape(96, 1, 1, 1))
    owners = []
    for rank in range(3):
        sampler = Sampler(dataset, CONFIG.batch_size, CONFIG.seed, rank, 3, shards="skewed:2", prefetch=0)
        epochs = [np.concatenate([x.ravel() for x, _ in sampler.epoch(epoch)]) for epoch in range(12)]
        assert all(epoch.size == 32 for epoch in epochs) and not np.array_equal(epochs[0], epochs[1])
        owners.append(set(np.concatenate(epochs).astype(int)))
    assert not owners[0] & owners[1] and not owners[1] & owners[2] and not owners[0] & owners[2]


def test_seeds_of_replicas() -> None:
    assert replica_seed(5, 0) == 5
    assert len({replica_seed(seed, place) for seed in range(20) for place in range(20)}) == 400


@pytest.mark.parametrize("words", ["skewed:", "skewed:0", "skewed:-1", "skewed:inf", "skewed:nan", "skewed:a"])
def test_invalid_skews(words: str) -> None:
    with pytest.raises(ValueError, match="skewed:ALPHA"):
        parse_skew(words)
