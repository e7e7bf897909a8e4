"""Test the paper's tables: reading files, counting errors, error bounds and, as a slow test, the whole command."""

import csv
import io

import pytest

from evidence.calibration import known_cells, other_layout_rows
from megatron_vp.cli.app import main
from megatron_vp.cost.paper import runs
from megatron_vp.cost.paper.published import Cell, Measurement, Row, jobs, read_cells
from megatron_vp.cost.paper.runs import predict_cell
from megatron_vp.cost.paper.tables import errors, make_rows, to_csv, to_text
from megatron_vp.errors import UserError

HEADER = "table,gpus,seq_length,method,vocab_k,mfu_percent,peak_memory_gb\n"


def rows_of(*entries):
    predictions = [Row(cell, mfu, memory, memory < 80) for cell, mfu, memory, _ in entries]
    return make_rows(predictions, {cell: published for cell, _, _, published in entries if published})


ROWS = rows_of(
    (Cell(5, 8, 2048, "vocab-2", 32), 55.0, 20.0, Measurement(50.0, 25.0)),
    (Cell(5, 8, 2048, "baseline", 32), 49.0, 11.0, Measurement(50.0, 10.0)),
    (Cell(6, 32, 4096, "baseline", 256), 20.0, 95.0, Measurement(None, None)),
    (Cell(6, 32, 4096, "vocab-1", 256), 20.0, 50.0, None),
)


def test_the_tables_have_all_their_cells():
    cells = jobs()
    assert len(cells) == 3 * 2 * 4 * (5 + 2)
    assert set(known_cells()) < set(cells)
    assert {(cell.table, cell.gpus): job.model.layers for cell, job in cells.items()}[6, 24] == 48


def test_csv_has_the_stated_columns_and_errors():
    found = list(csv.DictReader(io.StringIO(to_csv(ROWS))))
    assert tuple(found[0]) == (
        *("table", "gpus", "seq_length", "method", "vocab_k", "mfu_percent", "peak_memory_gb"),
        *("published_mfu_percent", "published_peak_memory_gb", "mfu_error_percent", "memory_error_percent"),
    )
    assert [row["method"] for row in found] == ["baseline", "vocab-2", "baseline", "vocab-1"]
    assert (found[0]["mfu_error_percent"], found[0]["memory_error_percent"]) == ("-2.00", "10.00")
    assert (found[1]["published_mfu_percent"], found[1]["mfu_error_percent"]) == ("50.00", "10.00")
    assert found[2]["published_peak_memory_gb"] == found[2]["memory_error_percent"] == ""


def test_text_shows_what_does_not_fit_and_the_summary():
    text = to_text(ROWS)
    assert "!95.00   oom" in text and "all published cells: MFU error mean 6.00, largest 10.00" in text
    assert "disagree" not in text and max(map(len, text.splitlines())) <= 125
    assert "error" not in to_text(rows_of((Cell(5, 8, 2048, "baseline", 32), 49.0, 11.0, None)))


def test_the_command_predicts_every_cell_and_sets_what_was_published_beside_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runs, "predict_cell", lambda cell: Row(cell, 40.0, 20.0, True))
    published = tmp_path / "cells.csv"
    published.write_text(HEADER + "5,8,2048,baseline,32,50,10\n")
    written = tmp_path / "tables.csv"
    for arguments in (["-o", str(written)], []):
        with pytest.raises(SystemExit) as stopped:
            main(["tables", "--published", str(published), "--format", "csv", *arguments])
        assert stopped.value.code == 0
    assert capsys.readouterr().out == written.read_text()
    rows = list(csv.DictReader(written.read_text().splitlines()))
    assert len(rows) == len(jobs()) == 168
    (beside,) = (row for row in rows if row["mfu_error_percent"])
    assert (beside["mfu_error_percent"], beside["memory_error_percent"]) == ("-20.00", "100.00")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "contains no measurements"),
        ("table,gpus\n5,8\n", "line 2 is not a cell of the paper's tables"),
        *(
            (
                HEADER + lines,
                "line [23] is not a cell of the paper's tables, or repeats one: give the columns table,gpus",
            )
            for lines in (
                "5,8,2048,baseline,32,x,1\n",
                "5,8,2048,baseline,32,1\n",
                "6,16,2048,vocab-2,32,1,1\n",
                2 * "5,8,2048,baseline,32,1,1\n",
                "5,8,2048,baseline,32,0,1\n",
                "5,8,2048,baseline,32,50,1e300\n",
            )
        ),
    ],
)
def test_a_malformed_published_file_is_one_line(tmp_path, capsys, text, words):
    path = tmp_path / "cells.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        read_cells(path)
    with pytest.raises(SystemExit) as stopped:
        main(["tables", "--published", str(path)])
    assert stopped.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.slow
def test_every_cell_is_predicted_within_the_bounds():
    rows = make_rows(map(predict_cell, jobs()), known_cells())
    assert len(rows) == len(jobs())
    apart = {row.cell for row in other_layout_rows(rows)}
    (mean, largest), memory = errors([row for row in rows if row.cell not in apart], "mfu"), errors(rows, "memory")
    assert mean < 1 and largest < 4 and memory[0] < 0.5 and memory[1] < 3
