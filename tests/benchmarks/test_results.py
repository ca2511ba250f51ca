"""Result files and the page that is made of them."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import results_page
from benchmarks.common import Headline, Repeated, read_result, result_file


def test_repeated_is_median_and_range() -> None:
    assert Repeated.of([3.0, 1.0, 2.0, 10.0]) == Repeated(4, 2.5, 1.0, 10.0)
    assert str(Repeated.of([0.98, 0.97])) == "0.975 (0.97 to 0.98, n = 2)"


def test_a_result_file_comes_back_as_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = argparse.Namespace(output=tmp_path / "some.json")
    shares = Repeated.of([0.9, 0.95, 0.97])
    headlines = [Headline("share of the limit", shares, target=">= 0.95"), Headline("rate", 2165.1, "tokens/s")]
    result_file(arguments, "benchmarks.some", {"points": [1, 2]}, headlines)
    written = json.loads((tmp_path / "some.json").read_text())
    assert json.loads(capsys.readouterr().out)["points"] == written["points"] == [1, 2]
    (tmp_path / "some.png").touch()
    (tmp_path / "some.rates.png").touch()
    (tmp_path / "some-other.png").touch()
    text = results_page.page(tmp_path)
    assert "## some\n" in text
    assert "| share of the limit | 0.95 (0.9 to 0.97, n = 3) |  | >= 0.95 |\n| rate | 2165 | tokens/s |  |\n" in text
    assert f"commit {written['commit'][:7]}" in text and written["date"] in text
    assert "](some.png)" in text and "](some.rates.png)" in text and "some-other" not in text


def test_a_result_without_headlines_shows_its_numbers() -> None:
    figures = {
        "cost": {"median": 1.0, "min": 0.5, "max": 2.0},
        "sizes": {"10M": {"raw_s": 0.25}},
        "curve": [1],
        "x": "y",
    }
    rows = [headline.row() for headline in results_page.numbers(figures, n=7)]
    assert rows == ["| `cost` | 1 (0.5 to 2, n = 7) |  |  |", "| `sizes.10M.raw_s` | 0.25 |  |  |"]


def test_the_page_is_what_the_files_give() -> None:
    page = (results_page.RESULTS / results_page.PAGE).read_text(encoding="utf-8")
    assert page == results_page.page(), "run `python -m benchmarks.results_page`"


@pytest.mark.parametrize("text", [None, "no JSON"])
def test_a_file_that_is_no_result_is_one_line(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        read_result(file)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {file} is no result: ") and said.endswith("; name a file that --output wrote\n")
    assert said.count("\n") == 1
