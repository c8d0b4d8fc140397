"""What the documentation says has to run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from toys import TableModel, decode, requests

import specbench
from specbench.strategies.autoregressive import Autoregressive
from specbench.strategies.autoregressive import Options as PlainOptions
from specbench.strategies.sampling import Sampling

ROOT = Path(__file__).resolve().parents[1]
checkout = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the documentation is not part of the wheel")


@checkout
def test_the_example_strategy_is_lossless():
    (code,) = re.findall(r"```python\n(.*?class EchoStrategy.*?)```", (ROOT / "docs/strategies.md").read_text(), re.S)
    names: dict = {}
    exec(code, names)
    models = {"target": TableModel(6, seed=2)}
    asked = requests(20, 6)
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        echo = decode(names["EchoStrategy"](models, names["Options"]()), asked, sampling)
        assert echo == decode(Autoregressive(models, PlainOptions()), asked, sampling)


@checkout
@pytest.mark.parametrize(
    "page", ["README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


@checkout
def test_every_page_is_reached_from_the_readme_in_one_step():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert f"docs/{page.name}" in readme, page.name


@checkout
def test_nothing_is_left_to_be_filled_in():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        assert not re.search(r"^(TABLE|TODO|TBD|FIXME)\b", page.read_text(encoding="utf-8"), re.M), page.name


@checkout
def test_changelog_knows_the_version():
    assert f"## {specbench.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
