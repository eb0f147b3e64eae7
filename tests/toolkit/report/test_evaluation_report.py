"""`edgetailor report` of evaluations: documents, the page, the picture and the table."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from rich.cells import cell_len

from commands import edgetailor, refusal
from device_agent.formats.protocol.fleet import FederatedEvaluation, KindEvaluation
from html_tables import Reader
from parameters import half_quick
from refusals import refused
from toolkit.cli.printed.evaluation_table import show_evaluations
from toolkit.cli.printed.round_details import show_federated
from toolkit.evaluation_sums import Evaluation
from toolkit.report.evaluation_charts import draw_png, drawn_classes
from toolkit.report.evaluation_document import (
    EvaluationDocument,
    as_json,
    evaluation_document,
    read_evaluation,
)
from toolkit.report.evaluation_page import evaluation_page

HOSTILE = [
    "\N{CJK UNIFIED IDEOGRAPH-732B}" * 9, "f" * 400, "<img src=x>&amp;$x_1$", "[red]:smile:[/red]",
    "e\N{COMBINING ACUTE ACCENT}", "\N{ARABIC LETTER MEEM}", "tab\t\x1b[31mred\n", "", "a", "b",
]  # fmt: skip
"""Names of classes that break tables, pages or terminals."""


def judged() -> FederatedEvaluation:
    """How 12 devices of two kinds judge a model of ten classes."""
    kind = KindEvaluation(
        devices=12, samples=240, counted=240, correct=180, accuracy=0.75, loss=0.5,
        trained_accuracy=0.875, trained_loss=0.25,
    )  # fmt: skip
    return FederatedEvaluation(
        **vars(kind), round=4, mean_accuracy=0.7, mean_loss=0.6, worst_accuracy=0.25,
        worst_loss=2.0, kinds={"board": kind}, classes=[(24, 18)] * 10, reporting_classes=12,
    )  # fmt: skip


def document(
    classes: int, seed: int = 0, names: list[str] | None = None, bad: int | None = 3
) -> EvaluationDocument:
    """An evaluation in which class `bad` is mostly taken for class 0, and the last is empty."""
    order = np.random.default_rng(seed)
    matrix = order.integers(0, 3, (classes, classes))
    np.fill_diagonal(matrix, 10 * classes)
    if bad is not None:
        matrix[bad, [bad, 0]] = 10, 9 * classes
    matrix[-1] = 0
    labels, correct = matrix.sum(1).tolist(), matrix.diagonal().tolist()
    total = int(matrix.sum())
    evaluation = Evaluation(
        total, total, sum(correct) / total, 0.5, tuple(zip(labels, correct, strict=True)), matrix
    )
    return evaluation_document(evaluation, "mymodels:net", seed, names or [], judged())


ERRORS = KindEvaluation(
    devices=3, samples=9, counted=9, correct=None, accuracy=None, loss=0.25, trained_accuracy=None,
    trained_loss=0.125, rmse=0.5, mae=0.4,
)  # fmt: skip
REGRESSION = evaluation_document(
    Evaluation(8, 8, None, 0.25, rmse=0.5, mae=0.4),
    "mymodels:line",
    devices=FederatedEvaluation(
        **vars(ERRORS), round=1, mean_accuracy=None, mean_loss=0.3, worst_accuracy=None,
        worst_loss=0.9, kinds={},
    ),
    weights="w",
)  # fmt: skip


def test_the_figures_of_devices_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without held-out data there are no confusions, but all else."""
    written = evaluation_document(judged(), "mymodels:net", 3, ["zero", "one"], judged())
    (tmp_path / "one.json").write_text(as_json(written))
    assert read_evaluation(tmp_path / "one.json") == written
    assert written.title == "mymodels:net after round 3, judged by the devices"
    show_evaluations([written])
    shown = capsys.readouterr().out
    assert shown.startswith("accuracy 75.0%, loss 0.5000 on 240 samples\n")
    assert re.search(r"^0 zero +24 +75\.0%$", shown, re.MULTILINE)
    done = edgetailor("report", "one.json", "--out", "one.html", "--png", "one.png", cwd=tmp_path)
    assert done.code == 0, done
    page = (tmp_path / "one.html").read_text()
    assert "By class" in page
    assert "Confusion matrix" not in page
    assert "Held-out data" not in page
    assert "labels on devices" not in page
    assert matplotlib.image.imread(tmp_path / "one.png").shape[1] > 500


def test_a_document_is_read_as_it_was_written(tmp_path: Path) -> None:
    for written in (document(10, names=HOSTILE), REGRESSION):
        (tmp_path / "one.json").write_text(as_json(written))
        assert read_evaluation(tmp_path / "one.json") == written
    content = json.loads(as_json(document(10)))
    assert content["worst_class"] == 3
    for change, problem in (
        ({"confusion": [[1]]}, "`confusion` must have a row and a column for each of the 10"),
        ({"worst_class": 10}, "`worst_class` must be one of the 10 classes"),
        ({"samples": "many"}, "Expected `int`"),
    ):
        (tmp_path / "bad.json").write_text(json.dumps({**content, **change}))
        with refused("evaluation.malformed", problem):
            read_evaluation(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text(json.dumps({**content, "version": 2}))
    with refused("evaluation.wrong-version", found=2):
        read_evaluation(tmp_path / "bad.json")


def test_the_page_has_the_numbers_of_the_document() -> None:
    shown = document(10, names=HOSTILE)
    text = evaluation_page([shown])
    page = Reader(text)
    assert shown.classes is not None
    figures = shown.classes[8]
    assert ["8 a", str(figures.labels), f"{figures.accuracy:.1%}", "24", "75.0%"] in page.rows
    assert ["all devices", "12", "240", "75.0%", "0.5", "87.5%", "0.25"] in page.rows
    assert ["worst tenth", "", "", "25.0%", "2", "", ""] in page.rows
    assert ["kind board", "12", "240", "75.0%", "0.5", "87.5%", "0.25"] in page.rows
    assert "class 3 [red]:smile:[/red] is far below the mean of the classes" in page.text
    assert "<img" not in text
    assert "2 <img src=x>&amp;$x_1$" in page.text
    assert shown.confusion is not None
    cells = re.findall(r">(\d+)</text>", text)
    assert [str(n) for row in shown.confusion for n in row if n] == cells[-sum(
        bool(n) for row in shown.confusion for n in row
    ):]  # fmt: skip
    for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        used = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", picture))
        assert not {colour for colour in used if colour.startswith("#")}  # dark screens


def test_a_regression_has_figures_and_no_picture(tmp_path: Path) -> None:
    assert ["mymodels:line with w", "8", "8", "0.25", "0.5", "0.4"] in Reader(
        evaluation_page([REGRESSION])
    ).rows
    shown = Reader(evaluation_page([REGRESSION])).rows
    assert ["", "devices", "labels", "loss", "loss trained", "RMSE", "MAE"] in shown
    assert ["all devices", "3", "9", "0.25", "0.125", "0.5", "0.4"] in shown
    assert ["worst tenth", "", "", "0.9", "", "", ""] in shown
    (tmp_path / "line.json").write_text(as_json(REGRESSION))
    done = edgetailor("report", "line.json", "--png", "line.png", cwd=tmp_path)
    assert "nothing to draw" in refusal(done)
    assert not (tmp_path / "line.png").exists()


def test_metrics_of_a_loss(capsys: pytest.CaptureFixture[str]) -> None:
    devices = REGRESSION.devices
    assert devices is not None
    kind = replace(ERRORS, rmse=None, mae=None, metrics={"iou": 0.25, "right": 0.75})
    every = replace(devices, rmse=None, mae=None, metrics={"iou": 0.5}, kinds={"board": kind})
    one = evaluation_document(
        Evaluation(8, 8, None, 0.25, metrics={"iou": 0.625}), "mymodels:net", devices=every
    )
    shown = Reader(evaluation_page([one, REGRESSION])).rows
    assert ["model", "samples", "labels", "loss", "iou", "RMSE", "MAE"] in shown
    assert ["mymodels:net", "8", "8", "0.25", "0.625", "", ""] in shown
    assert ["", "devices", "labels", "loss", "loss trained", "iou"] in shown
    assert ["kind board", "3", "9", "0.25", "0.125", "0.25"] in shown
    show_federated(every)
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == [
        *("iou", "0.5", "0.3000", "0.9000", "0.25")
    ]


@pytest.mark.parametrize("classes", half_quick([2, 25, 1000]))
def test_tables_and_pictures_of_many_classes(
    classes: int, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    documents = [
        document(classes, 0, HOSTILE, bad=None), document(classes, 1, HOSTILE, bad=None)
    ]  # fmt: skip
    for shown in ([documents[0]], documents):
        show_evaluations(shown)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(cell_len, lines)) <= 80
    assert all(line.isprintable() for line in lines)
    assert matplotlib.image.imread(io.BytesIO(draw_png(documents[:1]))).shape[0] < 7000
    assert len(evaluation_page(documents[:1])) < 1_000_000
    assert not recwarn.list


def test_the_worst_class_is_drawn_though_small_classes_are_worse() -> None:
    labels = [100] * 20 + [1] * 40
    correct = [95] * 19 + [10] + [0] * 30 + [1] * 10
    counts = tuple(zip(labels, correct, strict=True))
    shown = evaluation_document(Evaluation(1, 1, 0.5, 1.0, counts), "mymodels:net")
    assert shown.worst_class == 19
    drawn = drawn_classes([shown])
    assert drawn[0] == 19
    assert set(drawn[1:]) < set(range(20, 50))


def test_models_side_by_side(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.json").write_text(as_json(document(10, number)))
    done = edgetailor(
        "report", "0.json", "1.json", "--out", "both.html", "--png", "both.png", cwd=tmp_path
    )
    first, second = (document(10, number).classes or () for number in range(2))
    share = [own[4].correct / own[4].labels for own in (first, second)]
    row = ["4", *(f"{own:.1%}" for own in share), f"{100 * (share[1] - share[0]):+.1f}"]
    assert row in [line.split() for line in done.stdout.splitlines()]
    assert "worst class (2): 3, far below the mean" in done.stdout
    assert "Confusions of mymodels:net after round 1" in (tmp_path / "both.html").read_text()
    alone = matplotlib.image.imread(io.BytesIO(draw_png([document(10, 0)])))
    assert matplotlib.image.imread(tmp_path / "both.png").shape[0] > 1.5 * alone.shape[0]
    (tmp_path / "few.json").write_text(as_json(document(4)))
    said = refusal(edgetailor("report", "0.json", "few.json", cwd=tmp_path))
    assert said.startswith("The evaluations have different numbers of classes: 4, 10.")
