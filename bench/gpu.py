"""What a GPU is needed for, in one command: are its results right, how fast is it, and what does it add to the cores?

    python -m bench.gpu                                      all parts, about an hour; writes gpu-report.md
    python -m bench.gpu --only kernels steps --out FILE
    python -m bench.gpu --quick                              the smallest sizes: does everything run?

tests       all kernels against the reference in float64; 20 steps of LeNet against the CPU
sanitizer   the same kernels under NVIDIA's compute-sanitizer
kernels     products against cuBLAS, convolutions against cuDNN (PyTorch, TF32 off), others against a copy on the device
steps       training steps against PyTorch, torch.compile and JAX
together    a GPU and the cores train one model by gossip: images/s, against the sum of both alone
predicted   steps as a sum over kernels, for A100 and H100

What is compared takes turns; figures are medians. A part without what it needs says so in a line. The exit code is 1 if
a part has failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure  # isort: skip

from bench.gpu_kernels import PASSES, Bench, Peer
from bench.kernels import NETS, Layer
from bench.training import Worker
from minidl.engine.gpus import open_gpu
from minidl.errors import ConfigError
from minidl.resources import cores

ROOT = Path(__file__).parent.parent
TESTS = "tests/cuda/test_cuda_on_device.py"
TOOLS = ("memcheck", "racecheck", "synccheck")
PACKAGES = ("numba-cuda", "cuda-core", "torch", "jax", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
STEPS = {"lenet": 64, "vgg": 64, "resnet20": 128, "mlp": 128}  # net -> images of a batch
LENET = {"model": "lenet", "data": "synthetic:40000x28x28x1:10", "batch-size": "64", "epochs": "3"}
SMALL = {"model": "mlp", "data": "synthetic:96x4x4x1:3", "batch-size": "16", "epochs": "2"}
CALL = 1e-3  # seconds that a measured call should take at least
FLOPS, BYTES, LAUNCH = 50e12, 3e12, 2e-6  # per second, and seconds: of a fast GPU, to choose the number of calls


class Report:
    """Lines of Markdown, printed and written to a file as they come, and the rows of all benchmarks."""

    def __init__(self, args: argparse.Namespace, gpu: Any) -> None:
        self.args, self.gpu, self.failed = args, gpu, False
        self.rows: list[dict[str, Any]] = []
        self.bench = Bench(gpu)
        args.out.write_text("")
        driver = ".".join(map(str, gpu.driver.version))
        found = {"GPU": gpu.model, "compute capability": ".".join(map(str, gpu.capability)),
                 "free memory": f"{gpu.free() / 2**30:.1f} GiB", "CUDA of the driver": driver,
                 "driver": _driver(), **{name: _version(name) for name in PACKAGES}, **measure.machine()}  # fmt: skip
        self.line("# minidl on a GPU\n")
        for name, value in found.items():
            if value:
                self.line(f"- {name}: {value}")

    def line(self, text: str) -> None:
        print(text, flush=True)
        with self.args.out.open("a", encoding="utf-8") as file:
            print(text, file=file)

    def row(self, name: str, value: float, unit: str, goal: str = "") -> None:
        self.rows.append({"name": name, "value": float(f"{value:.4g}"), "unit": unit, "goal": goal})

    def times(self, functions: Mapping[str, Callable[[], object]], calls: int) -> dict[str, measure.Times]:
        """Measure functions in turns. Returns the seconds of one of the `calls` that each makes."""
        seconds, turns = (0.0, 2) if self.args.quick else (0.5, 20)
        found = measure.alternate(functions, seconds * len(functions), turns)
        return {name: measure.Times(tuple(turn / calls for turn in each.turns)) for name, each in found.items()}

    def calls(self, flops: float, nbytes: float) -> int:
        seconds = max(flops / FLOPS, nbytes / BYTES) + LAUNCH
        return 1 if self.args.quick else math.ceil(CALL / seconds)

    def peer(self) -> Peer | None:
        """Return PyTorch on this GPU, or None after a line that says why not."""
        try:
            import torch
        except ImportError:
            self.line("\nPyTorch is not installed: no comparison with cuBLAS and cuDNN.")
            return None
        if not torch.cuda.is_available():
            self.line(f"\nPyTorch {torch.__version__} finds no GPU: no comparison with cuBLAS and cuDNN.")
            return None
        return Peer(self.gpu.name)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _driver() -> str:
    file = Path("/proc/driver/nvidia/version")
    return file.read_text().splitlines()[0] if file.exists() else ""


# -- are the results right? --------------------------------------------------------------------------------------------


def run_tests(report: Report, *before: str, select: str = "") -> None:
    """Run the tests on the device in another process. Raises RuntimeError if one fails.

    before: a command that runs other commands. select: which tests, as for pytest -k.
    """
    chosen = ["-k", select] if select else []
    command = [*before, sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", TESTS, *chosen]
    variables = os.environ | {"MINIDL_TEST_GPU": report.gpu.name}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    output = (done.stdout + done.stderr).strip()
    report.line(f"- `{' '.join((*before[:3], TESTS, *chosen))}`: {done.stdout.strip().splitlines()[-1:]}")
    if done.returncode or "passed" not in done.stdout:
        report.line(f"\n```\n{output[-4000:]}\n```")
        raise RuntimeError(f"the tests end with exit code {done.returncode}")


def tests(report: Report) -> None:
    run_tests(report, select="elementwise and float32" if report.args.quick else "")


def sanitizer(report: Report) -> None:
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if found is None:
        report.line("compute-sanitizer is not installed: it comes with the CUDA toolkit.")
        return
    for tool in TOOLS:
        run_tests(report, found, "--tool", tool, "--error-exitcode", "9",
                  select="elementwise and float32" if report.args.quick else "float32")  # fmt: skip


# -- how fast is it? ---------------------------------------------------------------------------------------------------


def kernels(report: Report) -> None:
    bench, peer, quick = report.bench, report.peer(), report.args.quick
    report.line("\n| kernel | ms | spread | TFLOP/s or GB/s | compared with | its ms | minidl's speed | goal |")
    report.line("| --- " * 8 + "|")
    for n in (96,) if quick else (512, 1024, 4096):
        for form in ("nn", "nt", "tn"):
            flops, calls = 2.0 * n**3, report.calls(2.0 * n**3, 12.0 * n**2)
            functions = {"minidl": bench.product(calls, form, n)}
            if peer:
                functions["cuBLAS"] = peer.product(calls, form, n)
            _compare(report, f"{form}-{n}", functions, calls, flops / 1e12, ">= 0.7" if n >= 1024 else "")
    nets = {"small": [Layer(1, 6, 8, 8, 3)]} if quick else {net: NETS[net] for net in ("lenet", "vgg", "resnet20")}
    for net, layers in nets.items():
        for number, layer in enumerate(layers):
            for which in PASSES:
                if which != "backward_input" or number or quick:  # the first layer needs no gradient of its input
                    _convolution(report, peer, net, layer, which)
    size = 4_000 if quick else 64_000_000
    calls = report.calls(0, 8.0 * size)
    for name, (function, vectors) in bench.streams(calls, size).items():
        copied = vectors * 4 * size // 2  # bytes of the copy that moves as many
        functions = {"minidl": function, "copy": bench.copy(calls, copied)}
        _compare(report, f"{name}-{4 * size / 1e6:.3g}MB", functions, calls, 4.0 * vectors * size / 1e9, ">= 0.85")


def _convolution(report: Report, peer: Peer | None, net: str, layer: Layer, which: str) -> None:
    n, size, inputs, outputs, k, stride = layer
    flops = 2.0 * n * ((size - 1) // stride + 1) ** 2 * outputs * k * k * inputs
    calls = report.calls(flops, 4.0 * n * size**2 * (inputs + outputs / stride**2))
    functions = {"minidl": report.bench.convolution(calls, layer, which)}
    if peer:
        functions |= {f"cuDNN, {name}": call for name, call in peer.convolution(calls, layer, which).items()}
    goal = ">= 0.6" if net in ("vgg", "resnet20") else ""
    _compare(report, f"{net}-{layer}-{which}", functions, calls, flops / 1e12, goal)


def _compare(
    report: Report, name: str, functions: Mapping[str, Callable[[], object]], calls: int, work: float, goal: str
) -> None:
    """Measure minidl against the fastest of the others, and write a row. work: of a call, in units of the rate."""
    times = report.times(functions, calls)
    ours = times.pop("minidl")
    cells = [name, f"{1e3 * ours.median:.4g}", f"{ours.spread:.0%}", f"{work / ours.median:.4g}"]
    if times:
        best = min(times, key=lambda other: times[other].median)
        ratio = times[best].median / ours.median
        cells += [best, f"{1e3 * times[best].median:.4g}", f"{ratio:.2f}x", goal]
        report.row(f"kernel-{name}", ratio, f"x {best}", goal)
    else:
        report.row(f"kernel-{name}", work / ours.median, "T or G per s")
    report.line(f"| {' | '.join(cells + [''] * (8 - len(cells)))} |")


def steps(report: Report) -> None:
    quick, threads = report.args.quick, cores()
    report.line("\n| step | minidl, ms | " + " | ".join(f"{name}, ms (minidl's speed)" for name in PEERS) + " |")
    report.line("| --- " * (2 + len(PEERS)) + "|")
    absent: dict[str, str] = {}
    for net, batch in {"lenet": 4}.items() if quick else STEPS.items():
        workers: dict[str, Worker] = {}
        try:
            for name, (library, options) in {"minidl": ("minidl", {}), **PEERS}.items():
                worker = Worker(library, threads, XLA_PYTHON_CLIENT_PREALLOCATE="false")
                try:
                    worker.build(net, batch, False, 900, threads=threads, device=report.gpu.name, **options)
                    workers[name] = worker
                except RuntimeError as error:
                    worker.close()
                    if name == "minidl":
                        raise
                    absent.setdefault(name, str(error).splitlines()[0][:200])
            seconds: dict[str, list[float]] = {name: [] for name in workers}
            for _ in range(3 if quick else 20):
                for name, worker in workers.items():
                    worker.steps(1)
                    seconds[name] += worker.steps(1 if quick else 20)
        finally:
            for worker in workers.values():
                worker.close()
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        ours = medians["minidl"]
        cells = [f"{1e3 * medians[n]:.3f} ({medians[n] / ours:.2f}x)" if n in medians else "" for n in PEERS]
        report.line(f"| {net}, batch {batch} | {1e3 * ours:.3f} | {' | '.join(cells)} |")
        report.row(f"step-{net}-b{batch}", 1e3 * ours, "ms")
        for name in set(medians) - {"minidl"}:
            goal = ">= 1" if net == "lenet" and name.startswith("PyTorch") and "compile" not in name else ""
            report.row(f"step-{net}-b{batch}-{name}", medians[name] / ours, f"x {name}", goal)
    for name, reason in absent.items():
        report.line(f"\n{name}: {reason}")


PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "PyTorch": ("pytorch", {"channels_last": False, "compile": False}),
    "PyTorch, channels last": ("pytorch", {"channels_last": True, "compile": False}),
    "torch.compile": ("pytorch", {"channels_last": True, "compile": True}),
    "JAX": ("jax", {}),
}


# -- a GPU and the cores -----------------------------------------------------------------------------------------------


def together(report: Report) -> None:
    gpu, threads = report.gpu.name, max(1, cores() - 1)
    runs = {
        "the GPU": ["--workers", "1", "--device", gpu],
        "the cores": ["--workers", "1", "--threads", str(threads)],
        "both, by gossip": ["--workers", f"{gpu},cpu:{threads}", "--method", "gossip"],
    }
    common = [word for name, value in (SMALL if report.args.quick else LENET).items() for word in (f"--{name}", value)]
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(1 if report.args.quick else 3):
        for name, words in runs.items():
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "minidl.train", *common, *words, "--quiet", "--json", "--no-report",
                           "--out", f"{folder}/run"]  # fmt: skip
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{name}: {done.stderr.strip()[-2000:]}")
            found = json.loads(done.stdout.splitlines()[-1])
            rates[name].append(found["images_per_second"])
            each = [round(one["images_per_second"]) for one in found.get("replicas", [])]
            report.line(f"- turn {turn + 1}, {name}: {rates[name][-1]:,.0f} images/s"
                        + (f", of its replicas {each}" if each else ""))  # fmt: skip
    alone = [a + b for a, b in zip(rates["the GPU"], rates["the cores"], strict=True)]
    shares = [both / sum_ for both, sum_ in zip(rates["both, by gossip"], alone, strict=True) if sum_]
    share = statistics.median(shares or [0.0])
    report.line(f"\nTogether they reach {share:.1%} of the sum of both alone (goal: at least 95%).")
    report.row("together", 100 * share, "% of the sum", ">= 95")


def predicted(report: Report) -> None:
    nets = ["mlp"] if report.args.quick else list(STEPS)
    command = [sys.executable, "tests/cuda/predicted.py", *nets]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1:])
    report.line(done.stdout)


PARTS = {"tests": tests, "sanitizer": sanitizer, "kernels": kernels, "steps": steps, "together": together,
         "predicted": predicted}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, to check that everything runs")
    parser.add_argument("--json", action="store_true", help='print one JSON object, {"rows": [...]}, as the last line')
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, default=Path("gpu-report.md"), help="default: gpu-report.md")
    args = parser.parse_args(argv)
    try:
        gpu = open_gpu(args.device)
        if gpu is None:
            raise ConfigError(f"--device {args.device}: expected a GPU, such as cuda:0")
    except ConfigError as error:
        print(f"bench.gpu: error: {error}", file=sys.stderr)
        return 2
    report = Report(args, gpu)
    for name in args.only:
        report.line(f"\n## {name}\n")
        try:
            PARTS[name](report)
        except Exception as error:  # the other parts still run
            report.failed = True
            report.line(f"\n**{name} has failed**: {type(error).__name__}: {error}")
            traceback.print_exc()
    print(f"\nwritten: {args.out}")
    if args.json:
        print(json.dumps({"rows": report.rows}))
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
