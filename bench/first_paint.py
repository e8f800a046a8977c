"""How long a browser waits for the chat page's first paint.

    python -m bench.first_paint URL [URL ...] [--rounds 40]

Each visit is a headless Chromium's first: nothing is cached, the tab's process is new. Addresses are visited in turn; a page with nothing
but a word (served here) is the floor of this machine. Milliseconds from the navigation to `first-contentful-paint`.
"""

import argparse
import http.server
import statistics
import threading

from playwright.sync_api import Browser, sync_playwright

CHROMIUM, GOAL_MS = "/usr/bin/chromium", 200.0
WORD = b"<!doctype html><title>word</title><p>word</p>"
PAINTED = """() => new Promise(done => {
    const look = list => {
        const paint = list.getEntriesByName("first-contentful-paint")[0];
        if (paint) done(paint.startTime);
    };
    new PerformanceObserver(look).observe({type: "paint", buffered: true});
})"""


class Word(http.server.BaseHTTPRequestHandler):
    """A page that needs nothing."""

    def do_GET(self) -> None:
        """Answer anything with it."""
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(WORD)))
        self.end_headers()
        self.wfile.write(WORD)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def first_paint_ms(browser: Browser, url: str) -> float:
    """One visit of a new profile."""
    profile = browser.new_context()
    try:
        tab = profile.new_page()
        tab.goto(url)
        return float(tab.evaluate(PAINTED))
    finally:
        profile.close()


def main() -> None:
    """Visit, and print the quartiles of each address."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    floor = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Word)
    threading.Thread(target=floor.serve_forever, daemon=True).start()
    urls = [f"http://127.0.0.1:{floor.server_port}/", *options.urls]
    waited: dict[str, list[float]] = {url: [] for url in urls}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for _ in range(options.rounds):
            for url in urls:
                waited[url].append(first_paint_ms(browser, url))
        browser.close()
    for url, times in waited.items():
        low, middle, high = statistics.quantiles(times, n=4)
        below = sum(time < GOAL_MS for time in times)
        print(
            f"{url}  first paint {middle:.0f} ms (quartiles {low:.0f}, {high:.0f}; "
            f"{below} of {len(times)} below {GOAL_MS:.0f} ms)"
        )


if __name__ == "__main__":
    main()
