"""How long a visitor waits: from asking for the page to a chart and a control that answers.

    python benchmarks/page_load.py [--visits 5] [--pause 6]

Prints a line a visit and the median; the bar is 5 s. The server is started here, on a free port, and ended.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.browser.server import chromium, served  # noqa: E402


def visit(browser, base: str) -> float:
    """Seconds from asking to usable: a fresh browser profile, nothing cached."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    begun = time.perf_counter()
    page.goto(base, wait_until="commit")
    page.locator(".vega-embed svg path[aria-label*='Estimated']").first.wait_for(timeout=60_000, state="attached")
    page.get_by_role("slider").first.wait_for()
    seconds = time.perf_counter() - begun
    context.close()
    return seconds


def main() -> None:
    """Visit and print."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--visits", type=int, default=5)
    options.add_argument("--pause", type=float, default=6.0, help="seconds between visits")
    given = options.parse_args()
    with served() as base, chromium() as browser:
        visits = []
        for number in range(1, given.visits + 1):
            visits.append(visit(browser, base))
            print(f"visit {number}: {visits[-1]:.2f} s" + ("  (as soon as the server answers)" if number == 1 else ""), flush=True)
            time.sleep(given.pause)
    print(f"median {statistics.median(visits):.2f} s, slowest {max(visits):.2f} s (bar: 5 s)")
    sys.exit(0 if statistics.median(visits) <= 5 else 1)


if __name__ == "__main__":
    main()
