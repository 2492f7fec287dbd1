"""The goals for two GPUs, judged from what tests/device.sh left in its folder: the benchmarks' HDF5 files of its part gpus,
and the text of the lane's benchmark. A line a goal; one that was missed, or not measured, fails nothing.

    python3 tests/tools/gpu_goals.py FOLDER"""
import math
import pathlib
import re
import sys

from scale_table import lane_share, rows

folder = pathlib.Path(sys.argv[1])


def by_batch(name):
    """Rows of a benchmark by sequences a GPU."""
    path = folder / name
    return {int(row["batch"]) // row["ranks"]: row for row in rows(path)} if path.exists() else {}


def judge(what, goal, at_least, measured):
    """measured() raises KeyError, or gives nan, where something is missing."""
    try:
        value = measured()
    except KeyError:
        value = math.nan
    met = value >= goal if at_least else value <= goal
    found = "not measured" if math.isnan(value) else f"measured {value:.2f}; {'met' if met else 'missed'}"
    print(f"goal {what}: {'at least' if at_least else 'at most'} {goal:g}; {found}")


def lanes():
    """Microseconds there and back by transport and rows a rank; GB/s out and back."""
    took, rate = {}, {}
    log = folder / "lane.log"
    for line in log.read_text().splitlines() if log.exists() else ():
        m = re.match(r"(lsa|nccl) +F32 +2 ranks, +(\d+) rows .*dispatch +\S+ us +(\S+) GB/s, sums and combine +\S+ us +(\S+) "
                     r"GB/s, both +(\S+) us", line)
        if m:
            took[m[1], int(m[2])] = float(m[5])
            rate[m[1], int(m[2])] = float(m[3]), float(m[4])
    return took, rate


one, lsa, flash = (by_batch(f"gpus-{name}.h5") for name in ("one", "lsa", "flash"))
took, rate = lanes()
judge("tokens/s of two GPUs, times those of one, 256 sequences a GPU", 1.85, True, lambda: 2 * one[256]["ms"] / lsa[256]["ms"])
judge("% of an iteration in dispatch and combine by lsa, 1 sequence a GPU", 12, False, lambda: lane_share(lsa[1]))
judge("% of an iteration in dispatch and combine by lsa, 256 sequences a GPU", 6, False, lambda: lane_share(lsa[256]))
judge("lsa, times as fast as nccl there and back, 1 sequence a GPU", 3, True, lambda: took["nccl", 32] / took["lsa", 32])
judge("GB/s out by lsa, least at 2048 rows a GPU or more", 250, True,
      lambda: min((r[0] for (name, n), r in rate.items() if name == "lsa" and n >= 2048), default=math.nan))
judge("GB/s back by lsa, least at 2048 rows a GPU or more", 250, True,
      lambda: min((r[1] for (name, n), r in rate.items() if name == "lsa" and n >= 2048), default=math.nan))
for batch in sorted(flash) or [1]:
    judge(f"flash shape, times its floor, {batch} sequences a GPU", 1.6, False,
          lambda batch=batch: flash[batch]["ms"] / flash[batch]["floor_ms"])
