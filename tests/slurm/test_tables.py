"""Test the paper's tables as runs: the job of each cell, and the results that the collector reads from the logs."""

import csv
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from megatron_vp.cli.app import main
from megatron_vp.cost.layers.flops import paper_flops
from megatron_vp.cost.paper.cells import cell_arguments
from megatron_vp.cost.paper.published import Cell, jobs, read_cells
from megatron_vp.cost.paper.runs import PEAK_FLOPS
from megatron_vp.mcore.start.preflight import check_job
from tests.slurm.test_launch import TINY

ROOT = Path(__file__).parents[2]
HEADER = ["table", "gpus", "seq_length", "method", "vocab_k", "mfu_percent", "peak_memory_gb"]
SOME = [Cell(5, 8, 2048, method, 256) for method in ("baseline", "redis", "vocab-1", "vocab-2", "interlaced")]
SOME += [Cell(6, 24, 4096, method, 32) for method in ("baseline", "vocab-1")]

TIME = " [2026-01-01] iteration {:8d}/      20 | consumed samples: 128 | elapsed time per iteration (ms): {:.1f} | x |"
MEMORY = "[Rank 1] (after {} iterations) memory (MB) | allocated: 9.00 | max allocated: {:.2f} | reserved: 9.00 | x"


@pytest.fixture
def said(capsys, monkeypatch):
    """Runs the command in the repository; returns its exit status, output and errors."""
    monkeypatch.chdir(ROOT)

    def run(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in words])
        return (stop.value.code, *capsys.readouterr())

    return run


def accepted(cell: Cell) -> None:
    """Megatron takes the cell's arguments, and they are the cell's."""
    args = check_job(cell_arguments(cell), cell.gpus).args
    job = jobs()[cell]
    assert args.data_parallel_size == 1 and args.fp16 and args.save is None and args.mock_data
    assert (args.pipeline_model_parallel_size, args.seq_length) == (cell.gpus, cell.sequence)
    assert (args.vocab_size, args.hidden_size, args.num_layers) == (job.model.vocab, job.model.hidden, job.model.layers)
    assert args.global_batch_size == job.microbatches * args.micro_batch_size
    assert args.vocab_parallel == (cell.method not in ("baseline", "redis"))
    schedule = "interlaced" if cell.method == "interlaced" else "v-half" if cell.table == 6 else "1f1b"
    assert args.pipeline_schedule == schedule
    if cell.method.startswith("vocab"):
        assert args.vocab_parallel_algorithm == cell.method


@pytest.mark.parametrize("cell", SOME, ids=str)
def test_cell_can_be_run(cell, monkeypatch):
    monkeypatch.chdir(ROOT)
    accepted(cell)


def test_lists_hold_every_cell_and_say_how_to_submit_them(said, tmp_path):
    status, printed, _ = said("paper", "jobs", "-o", tmp_path)
    assert status == 0
    assert printed.splitlines() == [
        f"sbatch --nodes={nodes} --gpus-per-node=8 --array=1-{count} "
        f"scripts/slurm/tables.sbatch {tmp_path}/{gpus}_gpus.tsv"
        for gpus, nodes, count in ((8, 1, 40), (16, 2, 56), (24, 3, 16), (32, 4, 56))
    ]
    _, printed, _ = said("paper", "jobs", "-o", tmp_path, "--gpus-per-node", "16")
    assert printed.startswith("sbatch --nodes=1 --gpus-per-node=8 ")
    rows = [line.split("\t") for path in tmp_path.glob("*.tsv") for line in path.read_text().splitlines()[1:]]
    assert {name: shlex.split(words) for name, words in rows} == {str(c): cell_arguments(c) for c in jobs()}


def write_run(folder: Path, cell: Cell, milliseconds: list[float], peaks: list[float], **arguments: object) -> None:
    """A run's folder as two ranks leave it."""
    folder = folder / str(cell)
    folder.mkdir()
    model = jobs()[cell].model
    resolved = {
        **{"num_layers": model.layers, "hidden_size": model.hidden, "num_attention_heads": model.heads},
        **{"ffn_hidden_size": model.ffn, "vocab_size": model.vocab, "seq_length": cell.sequence},
        **{"micro_batch_size": 1, "global_batch_size": 128, "pipeline_model_parallel_size": cell.gpus},
        **{"world_size": cell.gpus, "untie_embeddings_and_output_weights": True, "fp16": True, **arguments},
    }
    (folder / "resolved_config.yaml").write_text(yaml.safe_dump(resolved))
    (folder / "rank_0000.log").write_text("".join(MEMORY.format(2, peak) + "\n" for peak in peaks))
    (folder / "rank_0001.log").write_text(
        "".join(TIME.format(number, each) + "\n" for number, each in enumerate(milliseconds, 1))
    )


def test_logs_become_a_table_that_the_predictions_are_set_beside(said, tmp_path):
    fits, full, broken = SOME[0], SOME[1], SOME[2]
    write_run(tmp_path, fits, [9e5, 5e4, 4e4, 3.1e4, 3e4, 2e4], [1024, 20480, 19456])
    write_run(tmp_path, full, [], [81000])
    (tmp_path / str(full) / "rank_0001.log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried ...")
    write_run(tmp_path, broken, [1e4, 1e4], [])
    status, _, errors = said("paper", "collect", tmp_path, "-o", tmp_path / "measured.csv")
    assert status == 0
    assert f"{broken}: {tmp_path / str(broken)} contains no iteration after the 3 warm-up iterations" in errors
    assert f"{SOME[3]}: not run" in errors
    header, *rows = csv.reader((tmp_path / "measured.csv").read_text().splitlines())
    assert header == HEADER
    job = jobs()[fits]
    mfu = 100 * paper_flops(job) / (30.0 * 8 * PEAK_FLOPS[5])  # the median of 31, 30 and 20 seconds
    assert rows == [
        ["5", "8", "2048", "baseline", "256", f"{mfu:.4g}", "20.00"],
        ["5", "8", "2048", "redis", "256", "", ""],
    ]
    assert set(read_cells(tmp_path / "measured.csv")) == {fits, full}
    _, printed, _ = said("paper", "collect", tmp_path, "--hardware", "h100")
    measured = float(printed.splitlines()[1].split(",")[5])
    assert measured == pytest.approx(mfu * PEAK_FLOPS[5] / 989e12, rel=0.01)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("paper", "collect", "nowhere"), "nowhere is not a folder"),
        (("paper", "collect", "configs"), "configs contains no finished run"),
        (("paper", "collect", "configs", "--hardware", "h10"), "h100"),
        (("paper", "jobs", "-o", "setup.py"), "cannot write the job lists to setup.py"),
    ],
)
def test_bad_input_is_one_line(said, words, line):
    status, _, errors = said(*words)
    assert status == 2
    (only,) = errors.splitlines()
    assert line in only


STUBS = {
    "srun": '#!/bin/bash\nprintf "%s\\n" srun "$@"\n',
    "scontrol": "#!/bin/bash\necho node\n",
    "python": "#!/bin/bash\n",
}


def batch(tmp_path, text: str, folder: str = "tables", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script of the array as SLURM would, with stubs that print what they are given."""
    for name, content in STUBS.items():
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "list.tsv").write_bytes(text.encode())
    variables = {
        **{"PATH": f"{tmp_path}:/usr/bin:/bin", "MEGATRON_VP_PYTHON": str(tmp_path / "python"), "PWNED": "x"},
        **{"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_ON_NODE": "8", "SLURM_NTASKS_PER_NODE": "2"},
        **{"SLURM_JOB_NODELIST": "node", "SLURM_JOB_NAME": "tables", "SLURM_ARRAY_TASK_ID": "1", **environment},
    }
    return subprocess.run(
        ["bash", "scripts/slurm/tables.sbatch", str(tmp_path / folder / "list.tsv")],
        **{"cwd": ROOT, "env": variables, "capture_output": True, "text": True},
    )


def test_arguments_of_a_cell_reach_the_job_whole_and_nothing_is_run(tmp_path):
    words = ["--save", "a b", "it's", "$(touch PWNED)", "*", "`id`", "x;y", "Et*3|t*2L", "\\", "%j"]
    done = batch(tmp_path, f"cell\targuments\r\na.b-1\t{shlex.join(words)}\r\n", folder="ta bles %j,x")
    assert done.returncode == 0, done.stderr
    _, check, train = done.stdout.split("srun\n")
    folder = tmp_path / "ta bles %j,x" / "a.b-1"
    assert check.splitlines()[-12:] == [*words, "--tensorboard-dir", str(folder)]
    assert train.splitlines()[-12:] == [*words, "--tensorboard-dir", str(folder)]
    assert f"--output={folder}/rank_%4t.log".replace("%j", "%%j") in train.splitlines()
    assert folder.is_dir() and not (ROOT / "PWNED").exists()


@pytest.mark.parametrize(
    ("row", "environment", "said"),
    [
        ("../../esc\t--x", {}, "has the name '../../esc'"),
        ("-rf\t--x", {}, "has the name '-rf'"),
        ("a b\t--x", {}, "has the name 'a b'"),
        ("\t--x", {}, "has the name"),
        ("a\t--x 'open", {}, "has an argument with an unclosed quote"),
        ("a\t--x", {"SLURM_ARRAY_TASK_ID": "x[$(touch PWNED)]"}, "SLURM_ARRAY_TASK_ID is 'x[$(touch PWNED)]'"),
        ("a\t--x", {"SLURM_ARRAY_TASK_ID": "2"}, "has no cell 2"),
        ("a\t--x", {"SLURM_JOB_ID": "x[$(touch PWNED)]"}, "SLURM_JOB_ID is 'x[$(touch PWNED)]'"),
        ("a\t--x", {"SLURM_NTASKS_PER_NODE": "0"}, "SLURM_NTASKS_PER_NODE is '0' but must be a whole number"),
        ("a\t--x", {"SLURM_NTASKS_PER_NODE": "2(x2)"}, "SLURM_NTASKS_PER_NODE is '2(x2)'"),
        ("a\t--x", {"SLURM_NTASKS_PER_NODE": "", "SLURM_GPUS_ON_NODE": "x[$(touch PWNED)]"}, "SLURM_GPUS_ON_NODE is"),
        ("a\t--x", {"SLURM_NTASKS_PER_NODE": "", "SLURM_NTASKS": "3", "SLURM_JOB_NUM_NODES": "2"}, "spread evenly"),
    ],
)
def test_what_cannot_be_a_cell_or_a_number_is_one_line(tmp_path, row, environment, said):
    done = batch(tmp_path, f"cell\targuments\n{row}\n", **environment)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "srun" not in done.stdout, done.stderr
    assert said in done.stderr and done.stderr.startswith("tables: error: ")
    assert not (ROOT / "PWNED").exists() and not (tmp_path / "esc").exists()


@pytest.mark.slow
def test_array_runs_cells_and_the_collector_reads_them(cluster, said):
    """Two cells, made tiny by flags, on a cluster of one machine."""
    folder = cluster.work / "tables"
    said("paper", "jobs", "-o", folder)
    names = [line.split("\t")[0] for line in (folder / "8_gpus.tsv").read_text().splitlines()]
    wanted = [Cell(5, 8, 2048, method, 32) for method in ("baseline", "vocab-2")]
    array = ",".join(str(names.index(str(cell))) for cell in wanted)
    flags = ("--pipeline-model-parallel-size=4", "--num-attention-heads=4", "--train-iters=5", "--num-workers=0")
    job = cluster.submit(f"--array={array}", "scripts/slurm/tables.sbatch", "tables/8_gpus.tsv", *TINY, *flags)
    cluster.until(lambda: not cluster.run("squeue", "--noheader", "--format=%i"), 400, "the array", job)
    status, printed, errors = said("paper", "collect", folder, "--hardware", "cpu")
    assert status == 0, errors
    rows = list(csv.DictReader(printed.splitlines()))
    assert [row["method"] for row in rows] == ["baseline", "vocab-2"]
    assert all(float(row["mfu_percent"]) > 0 for row in rows)
    assert "table5-8-2048-vocab-1-32k: not run" in errors
