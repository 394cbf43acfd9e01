"""The picture of docs/report.md: python tools/report_picture.py [--workdir=runs/demo] [--out=docs/report.png]

A trained run's report in headless Chromium (on the PATH, with its driver), at a question that one rollout of a group answered right
and another wrong, both beside each other. Needs `pip install -e '.[test,bench]'` and a run, such as that of `make demo`.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

HOME = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HOME / "benchmarks"))

import chromium  # noqa: E402

from bridge_jax.report import page  # noqa: E402

WIDTH, HEIGHT = 1280, 900
# A question of two searches in the last logged step whose group has both outcomes: a right rollout and a wrong one.
MIXED = """
const done = arguments[arguments.length - 1];
openData().then((data) => {
  const heads = data.index.step.map((_, n) => data.head(n)).filter((head) => !head.evaluation && head.queries.length > 1);
  const last = heads.filter((head) => head.step === heads.at(-1).step);
  for (const head of last.filter((head) => head.right)) {
    const other = last.find((other) => other.id === head.id && !other.right);
    if (other) return done([head.number, other.number]);
  }
  done(null);
});
"""


def picture(workdir: Path) -> bytes:
    """A PNG."""
    with tempfile.TemporaryDirectory() as folder, chromium.Page(WIDTH, HEIGHT) as window:
        path = page.write_report(workdir, Path(folder) / "report.html")
        window.open(path)
        both = window.driver.execute_async_script(MIXED)
        if both is None:
            raise SystemExit(f"{workdir}: no group of the last logged step has both outcomes")
        window.open(path, f"#rollout={both[0]}&beside={both[1]}")
        size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        window.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        window.do("document.querySelector('.panes').style.height = '730px'")
        window.do("document.activeElement.blur(); document.querySelector('#browser').scrollIntoView()")
        window.until("return document.querySelector('.row[aria-selected=true]') !== null")
        image = Image.open(io.BytesIO(window.driver.get_screenshot_as_png())).convert("RGB").crop((0, 0, WIDTH, HEIGHT - 70))
    found = io.BytesIO()
    image.quantize(256, Image.Quantize.MAXCOVERAGE).save(found, "PNG", optimize=True)
    return found.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workdir", type=Path, default=HOME / "runs" / "demo", metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=HOME / "docs" / "report.png", metavar="FILE")
    args = parser.parse_args()
    args.out.write_bytes(picture(args.workdir))
    print(f"{args.out}: {args.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
