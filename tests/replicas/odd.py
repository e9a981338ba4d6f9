"""Run a rank of `python -m minidl.train OPTIONS`, where rank 1 differs from the others: odd.py WHAT OPTIONS...

WHAT: "weights", "labels" or "rate" (the learning rate).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from minidl import nn
from minidl.data import Dataset
from minidl.run.config import Config
from minidl.train import main
from minidl.training import session
from minidl.training.job import find_job

what, *options = sys.argv[1:]
prepare = session.prepare


def odd(config: Config, *rest: Any) -> tuple[Dataset, nn.Module]:
    data, model = prepare(config, *rest)
    if what == "weights":
        model.flatten().theta[-1] += 1e-6
    if what == "labels":
        labels = data.y_train.copy()
        labels[0] = 1 - labels[0]
        data = replace(data, y_train=labels)
    return data, model


job = find_job()
assert job
if job.rank == 1:
    session.prepare = odd
    if what == "rate":
        options += ["--lr", "0.5"]
sys.exit(main(options))
