"""Pages of runs in a headless browser, at 1280 and 390 pixels, light and dark: nothing overflows, nothing is loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench import pages
from minidl import simulate, train
from minidl.report.run_page import write_page

SMALL = ["--data", "synthetic:96x8x8x1:4", "--model", "mlp", "--batch-size", "16", "--epochs", "3", "--quiet",
         "--no-report"]  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not any(map(shutil.which, pages.CHROMIUM)), reason="no Chromium")]


def test_pages_of_runs(tmp_path: Path) -> None:
    assert train.main([*SMALL, "--workers", "1", "--out", str(tmp_path / "one")]) == 0
    assert simulate.main([*SMALL, "--ranks", "5", "--method", "gossip", "--out", str(tmp_path / "five")]) == 0
    (tmp_path / "net.py").write_text("from minidl import nn\n\n\ndef build(shape, classes):\n"
                                     "    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n")  # fmt: skip
    many = ["--data", "synthetic:1024x8x8x1:4", "--model", f"{tmp_path / 'net.py'}:build", "--batch-size", "1",
            "--epochs", "2", "--quiet", "--no-report", "--method", "gossip", "--cluster", "stragglers"]  # fmt: skip
    assert simulate.main([*many, "--ranks", "1024", "--out", str(tmp_path / "many")]) == 0
    with pages.browser() as tab:
        for name in ("one", "five", "many"):
            assert pages.look(tab, write_page(tmp_path / name, ""), tmp_path, "") == []
    assert len(list(tmp_path.glob("*.png"))) == 12


def test_a_bad_page_is_found(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text("<html><body><p style='width: 3000px'>wide</p><img src='http://localhost:1/x.png'>"
                    "<script>console.error('wrong')</script></body></html>")  # fmt: skip
    with pages.browser() as tab:
        wrong = " ".join(pages.look(tab, page, tmp_path, ""))
    assert "wider than the window" in wrong and "request: http://localhost:1/x.png" in wrong and "console" in wrong
