"""Read the metrics of a run: one JSON object per line.

    python -m minidl.train --out runs/mine
    python examples/read_metrics.py runs/mine
"""

import json
import sys
from pathlib import Path


def main(folder: Path) -> None:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    epochs = [entry for entry in entries if entry["event"] == "epoch"]
    worst = max(epoch["loss"] for epoch in epochs)
    for epoch in epochs:
        bar = "#" * round(40 * epoch["loss"] / worst)
        print(f"epoch {epoch['epoch']:3}  accuracy {epoch['accuracy']:7.2%}  loss {epoch['loss']:.4f} {bar}")
    result = json.loads((folder / "summary.json").read_text())
    print(f"test accuracy {result['test_accuracy']:.2%} after {result['seconds']:.1f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
