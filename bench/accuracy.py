"""Test accuracy of minidl and PyTorch with the same initial weights, batches, augmentation, schedule and update rule.

    python bench/accuracy.py --data cifar10 --data-dir ../shared/data --model resnet20 --epochs 15 --seeds 3

Prints both test accuracies after the last epoch for each seed, then their means over the seeds and the difference.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
import torch.nn.functional as F

import minidl
from bench.pytorch_twins import TWINS
from minidl import models, ops, optim, schedules
from minidl.data import Augment, Dataset, Loader, load


def train_minidl(model: minidl.nn.Module, data: Dataset, loader: Loader, args: argparse.Namespace) -> float:
    optimizer = optim.build("sgd", model, lr=args.lr, momentum=0.9, weight_decay=args.weight_decay)
    schedule = schedules.build("cosine", args.epochs * len(loader))
    step = 0
    for epoch in range(args.epochs):
        model.train()
        for x, y in loader.epoch(epoch):
            optimizer.lr = args.lr * schedule(step)
            loss = ops.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        print(f"  minidl epoch {epoch + 1}: loss {loss.item():.3f}", file=sys.stderr, flush=True)
    model.eval()
    with minidl.no_grad():
        right = [model(data.x_test[i : i + 500]).numpy().argmax(1) for i in range(0, len(data.x_test), 500)]
    return float((np.concatenate(right) == data.y_test).mean())


def train_pytorch(model: torch.nn.Module, data: Dataset, loader: Loader, args: argparse.Namespace) -> float:
    model = model.to(memory_format=torch.channels_last)
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": args.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=0.9, fused=True)
    schedule = schedules.build("cosine", args.epochs * len(loader))
    step = 0
    for epoch in range(args.epochs):
        model.train()
        for x, y in loader.epoch(epoch):
            for group in optimizer.param_groups:
                group["lr"] = args.lr * schedule(step)
            loss = F.cross_entropy(model(torch.from_numpy(x).permute(0, 3, 1, 2)), torch.from_numpy(y))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        print(f"  PyTorch epoch {epoch + 1}: loss {loss.item():.3f}", file=sys.stderr, flush=True)
    model.eval()
    with torch.no_grad():
        images = torch.from_numpy(data.x_test).permute(0, 3, 1, 2)
        right = [model(images[i : i + 500]).argmax(1).numpy() for i in range(0, len(images), 500)]
    return float((np.concatenate(right) == data.y_test).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--model", default="resnet20", choices=list(TWINS))
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="to divide the seeds among processes")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--augment", default="pad-crop,flip")
    parser.add_argument("--quick", action="store_true", help="one seed and one epoch, to check that it runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    if args.quick:
        args.epochs = args.seeds = 1
    rows = []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        data = load(args.data, args.data_dir, seed=seed)
        augment = Augment(args.augment, data.black)
        loader = Loader(data.x_train, data.y_train, args.batch_size, seed=seed, augment=augment)
        minidl.seed(seed)
        ours = models.build(args.model, data.input_shape, data.classes)
        theirs = TWINS[args.model](data.input_shape, data.classes)
        theirs.load_state_dict({name: torch.from_numpy(value) for name, value in ours.state_dict().items()})
        row: dict[str, float] = {"seed": seed}
        for name, train, model in (("minidl", train_minidl, ours), ("pytorch", train_pytorch, theirs)):
            start = time.perf_counter()
            row[name] = train(model, data, loader, args)
            row[f"{name}_seconds"] = round(time.perf_counter() - start, 1)
        rows.append(row)
        print(f"seed {seed}: minidl {row['minidl']:.4f} ({row['minidl_seconds']:.0f} s), "
              f"PyTorch {row['pytorch']:.4f} ({row['pytorch_seconds']:.0f} s)", flush=True)  # fmt: skip
    means = {name: statistics.mean(row[name] for row in rows) for name in ("minidl", "pytorch")}
    print(f"mean: minidl {means['minidl']:.4f}, PyTorch {means['pytorch']:.4f}, "
          f"difference {100 * (means['minidl'] - means['pytorch']):+.2f} points")  # fmt: skip
    if args.json:
        print(json.dumps({"rows": rows, **means}))


if __name__ == "__main__":
    main()
