"""Draw the peak memory of every stage that `replay_tables.py --shapes-only` counted, next to the prediction.

python benchmarks/memory_by_stage.py benchmarks/results/replay_shapes.jsonl -o docs/images/memory_by_stage.png
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure

GIB = 2**30


def main() -> None:
    """Read the lines, and draw those of one vocabulary size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="lines of JSON")
    parser.add_argument("-o", "--output", type=Path, required=True, help="a PNG or SVG")
    parser.add_argument("--models", default="gpt_4b,gpt_10b,gpt_21b")
    parser.add_argument("--vocab-size", type=int, default=262144)
    args = parser.parse_args()
    stages: dict[tuple[str, str], dict[int, tuple[float, float]]] = defaultdict(dict)
    for line in map(json.loads, args.results.read_text().splitlines()):
        if line["vocab_size"] == args.vocab_size and "error" not in line:
            peaks = line["memory_bytes"]["peak"] / GIB, line["predicted_bytes"] / GIB
            stages[line["model"], line["method"]][line["rank"]] = peaks
    models = args.models.split(",")
    figure = Figure(figsize=(4.2 * len(models), 3.6), layout="constrained")
    panels = figure.subplots(1, len(models), squeeze=False)
    for model, panel in zip(models, panels[0], strict=True):
        found = {method: peaks for (of, method), peaks in stages.items() if of == model}
        for method, by_rank in found.items():
            ranks, peaks = zip(*sorted(by_rank.items()), strict=True)
            counted, predicted = zip(*peaks, strict=True)
            line = panel.plot(ranks, counted, "o-", markersize=3, linewidth=1.2, label=method)[0]
            panel.plot(ranks, predicted, "x", markersize=4, color=line.get_color())
        panel.set(title=model.replace("gpt_", "").upper(), xlabel="pipeline rank", ylim=(0, None))
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("peak, GiB of tensors (x: predicted)")
    panels[0][-1].legend(fontsize=8)
    figure.savefig(args.output, dpi=110)


if __name__ == "__main__":
    main()
