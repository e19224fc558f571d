"""`dejavu report`: one page that opens without a network, also in a real browser where there is one."""

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from finished_runs import write_run

from dejavu.errors import ConfigError, DataError
from dejavu.schema import NOTEBOOKS, Config, Report
from dejavu.stages import report

# Put at the end of a copy: what the browser made of the page, told in its title.
PROBE = """<script>
addEventListener("load", () => { document.title = JSON.stringify([...document.images].map(image =>
  [image.complete, image.naturalWidth, image.getBoundingClientRect().height])); });
</script>"""
PICTURES = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A sweep's folder with its page, and what the command printed."""
    folder = tmp_path_factory.mktemp("made") / "my sweep"
    write_run(folder, "dense")
    for ratio in (0.5, 0.75):
        write_run(folder, "oracle", ratio)
    write_run(folder, "random", 0.5, status="failed", error={"type": "DataError", "message": "no space left"})
    command = [str(Path(sys.executable).parent / "dejavu"), "report", "run_dir=my sweep"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder.parent)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.strip() == str(folder / "report.html")
    return folder


class Page(HTMLParser):
    """Tags, what they point to, and the text that is shown."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.pointers: list[str] = []
        self.text = ""
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.pointers += [
            value or "" for name, value in attributes if name in ("src", "href", "srcset", "data", "action")
        ]

    def handle_data(self, data):
        if self.tags[-1:] != ["style"]:
            self.text += data


def test_the_page_holds_everything_and_points_nowhere(folder):
    page = Page(folder / "report.html")
    assert "script" not in page.tags and "link" not in page.tags and "iframe" not in page.tags
    assert page.tags.count("img") == PICTURES
    assert all(pointer.startswith(("data:image/png;base64,", "#")) for pointer in page.pointers)
    styles = re.findall(r"<style[^>]*>(.*?)</style>", (folder / "report.html").read_text(), re.DOTALL)
    for style in styles:
        loaded = re.findall(r"(?:url\(|@import)\s*['\"]?([^'\")]*)", re.sub(r"/\*.*?\*/", "", style, flags=re.DOTALL))
        assert all(place.startswith("data:") for place in loaded), loaded


def test_the_page_shows_the_table_the_pairs_and_what_failed(folder):
    text = Page(folder / "report.html").text.replace("\N{NO-BREAK SPACE}", " ")
    assert "my sweep: 3 evaluations of opt-tiny" in text and "oracle" in text
    assert "random-0.5" in text and "DataError: no space left" in text
    assert "import" not in text and "Traceback" not in text, "no code, no error"
    figures = {path.name for path in (folder / "figures").iterdir()}
    assert {"sparsity_vs_quality.png", "sparsity_vs_quality.svg"} <= figures and len(figures) == 2 * PICTURES
    assert not list(folder.glob("*.ipynb")) and not list(folder.glob("kernel*"))


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium on the path")
def test_a_browser_shows_every_picture_and_reports_no_error(folder, tmp_path):
    page = tmp_path / "page.html"
    page.write_text((folder / "report.html").read_text("utf-8") + PROBE, "utf-8")
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom",
        page.as_uri(),
    ]  # fmt: skip
    shown = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "HOME": str(tmp_path)}
    )
    assert shown.returncode == 0, shown.stderr
    assert "CONSOLE" not in shown.stderr, shown.stderr
    title = re.search(r"<title>(.*?)</title>", shown.stdout, re.DOTALL)
    assert title is not None
    images = json.loads(title[1])
    assert len(images) == PICTURES
    assert all(complete and width > 500 and height > 100 for complete, width, height in images), images


def test_what_cannot_be_reported_is_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="add run_dir=DIR"):
        report.answer(Config())
    with pytest.raises(DataError, match="no finished evaluation"):
        report.answer(Config(run_dir=str(tmp_path)))
    write_run(tmp_path, "oracle", 0.5, status="failed")
    with pytest.raises(DataError, match="no finished evaluation"):
        report.answer(Config(run_dir=str(tmp_path)))
    write_run(tmp_path, "dense")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "papermill" else name)
    with pytest.raises(DataError, match=r"needs papermill: run pip install 'dejavu\[notebooks\]'"):
        report.answer(Config(run_dir=str(tmp_path)))
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_every_notebook_says_what_its_folder_lacks(tmp_path, notebook):
    config = Config(run_dir=str(tmp_path), report=Report(notebook))
    with pytest.raises(DataError, match=r"no finished evaluation|is missing|no evaluation that decoded"):
        report.answer(config)
