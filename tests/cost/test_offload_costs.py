"""What offloading costs and saves: the way to the host's memory, bytes that leave a rank, copies in a prediction."""

from pathlib import Path

from megatron_vp.cost.hardware.gpus import GIB, GIGA, HARDWARE

PAGE = (Path(__file__).parents[2] / "docs/cost_model.md").read_text()


def test_the_docs_have_every_gpus_way_to_the_host():
    _, _, section = PAGE.partition("## Copies to the host's memory")
    rows = [line.strip("| ").split(" | ") for line in section.partition("\n## ")[0].splitlines() if line[:1] == "|"]
    found = {name: row[1:] for row in rows[2:] for name in row[0].split(", ")}
    assert found.keys() == HARDWARE.keys()
    for name, (*figures, where) in found.items():
        host = HARDWARE[name].host
        assert list(map(float, figures)) == [host.out / GIGA, host.back / GIGA, host.duplex, host.memory / GIB]
        assert where in ("quoted", "estimate") and (where == "quoted") == host.source.startswith("quoted")
