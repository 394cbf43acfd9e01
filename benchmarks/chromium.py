"""A headless Chromium for the tests of the report's page: no network of its own, its console and requests recorded."""

import json
import shutil
import time

FLAGS = (
    "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
    "disable-component-update", "disable-sync", "disable-dev-shm-usage",
)  # fmt: skip


def missing() -> str:
    """Why there can be no such tests here; "" where they can."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed: pip install -e '.[test]'"
    absent = [name for name, paths in (("chromium", browser_path()), ("chromedriver", shutil.which("chromedriver"))) if not paths]
    return f"{' and '.join(absent)} not found on the PATH" if absent else ""


def browser_path() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """A window with one file in it."""

    def __init__(self, width: int = 1360, height: int = 900, phone: bool = False, dark: bool = False):
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = browser_path()
        for flag in (*FLAGS, f"window-size={width},{height}"):
            options.add_argument(f"--{flag}")
        if phone:
            metrics = {"width": 390, "height": 844, "pixelRatio": 2}
            options.add_experimental_option("mobileEmulation", {"deviceMetrics": metrics})
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        if dark:
            features = [{"name": "prefers-color-scheme", "value": "dark"}]
            self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.driver.quit()

    def open(self, path, fragment: str = "") -> float:
        """Open a report and wait until its rollouts can be used; returns the seconds that took."""
        self.driver.get("about:blank")
        self.driver.get_log("performance"), self.driver.get_log("browser")
        began = time.monotonic()
        self.driver.get(f"file://{path}{fragment}")
        self.until("return document.querySelector('#browser')?.dataset.ready")
        return time.monotonic() - began

    def do(self, script: str, *arguments):
        return self.driver.execute_script(script, *arguments)

    def until(self, script: str, seconds: float = 20.0):
        """What the script returns, once that is true."""
        end = time.monotonic() + seconds
        while not (found := self.do(script)):
            assert time.monotonic() < end, f"not within {seconds} s: {script}; console: {self.driver.get_log('browser')}"
            time.sleep(0.02)
        return found

    def press(self, keys: str):
        """One key after another, to whatever has the focus."""
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(keys).perform()

    def find(self, selector: str):
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list:
        return self.driver.find_elements("css selector", selector)

    def text(self, selector: str) -> str:
        return self.do("return document.querySelector(arguments[0]).textContent", selector)

    def console(self) -> list[str]:
        """Messages since the page was opened; refusals by the security policy are among them."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses that were asked for since the page was opened, without those that the page's policy refused."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        refused = {m["params"]["requestId"] for m in messages if m["params"].get("blockedReason") == "csp"}
        asked = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in asked if one["requestId"] not in refused]
