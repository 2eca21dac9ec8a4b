"""Write torch_orders.csv: the order of actions in torch's own pipeline schedules, as its schedule visualizer lists them.

    python tests/golden/make_torch_orders.py

No process is started and nothing is computed. Idle slots and the sums over data-parallel ranks (REDUCE_GRAD) are left out; an
overlapped pair is written as ours, 0F3+1B1. What torch refuses is a row with its message.
"""

import csv
import re
from pathlib import Path

import torch
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

NAMES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble", "DualPipeV")
PATH = Path(__file__).with_name("torch_orders.csv")


def row_of(actions):
    """`(0F3;3B1)OVERLAP_F_B` -> `0F3+3B1`."""
    found = [str(action) for action in actions if action is not None and "REDUCE_GRAD" not in str(action)]
    return " ".join(re.sub(r"\((.*);(.*)\)OVERLAP_F_B", r"\1+\2", text) for text in found)


def main():
    with PATH.open("w", newline="") as file:
        version = torch.__version__.partition("+")[0]
        file.write(f"# torch {version}, torch.distributed.pipelining; made by {Path(__file__).name}\n")
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["schedule", "ranks", "microbatches", "rank", "actions", "refused"])
        for name in NAMES:
            for ranks in (2, 4, 8):
                for microbatches in (8, 16):
                    try:
                        orders = get_schedule_ops(name, ranks, microbatches)
                    except ValueError as error:
                        table.writerow([name, ranks, microbatches, "", "", str(error)])
                        continue
                    for rank, actions in enumerate(orders):
                        table.writerow([name, ranks, microbatches, rank, row_of(actions), ""])


if __name__ == "__main__":
    main()
