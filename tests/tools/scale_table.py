"""The table at the end of tests/scale.sh, from the benchmarks' HDF5 files in its folder.

    python3 tests/tools/scale_table.py FOLDER

One GPU beside all: `per GPU` is sequences of each, `of one` tokens/s of each over those of one GPU alone with as many. `lane`:
share of dispatch and combine among the phases; GB/s: of a rank, out and back. `x full` and its share of the floors' ratio:
against mode full at the same batch in the same file."""
import pathlib
import sys

import h5py
import numpy


def rows(path):
    with h5py.File(path) as f:
        assert f.attrs["synthetic"]
        table = {name: data[:] for name, data in f["bench"].items()}
        ranks, transport = int(f.attrs["ranks"]), f.attrs["transport"]
        shape = f.attrs["shape"]
    phases = [p.decode() for p in table.pop("phase_names")]
    for i in range(len(table["ms"])):
        row = {name: data[i] for name, data in table.items()}
        row["mode"] = row["mode"].decode()
        row.update(ranks=ranks, transport=transport, shape=shape, phase=dict(zip(phases, row.pop("phase_ms"))))
        yield row


def cell(value, digits, width):
    return f"{'-' if value is None or numpy.isnan(value) else f'{value:.{digits}f}':>{width}}"


def lane_share(row):
    """Dispatch and combine of all phases of the same pass, in percent, as `epoch bench` prints it."""
    return 100 * (row["phase"]["dispatch"] + row["phase"]["combine"]) / sum(row["phase"].values())


def line(row, alone):
    there, back = row["phase"]["dispatch"], row["phase"]["combine"]
    several, ranks = row["ranks"] > 1, row["ranks"]
    one = alone.get((row["shape"], row["mode"], row["batch"] // ranks))
    return " ".join((
        f"{row['shape']:12} {row['mode']:8} {ranks:5} {row['transport']:>9} {row['batch']:6} {row['batch'] // ranks:7}",
        cell(row["ms"], 3, 9), cell(row["floor_ms"], 3, 9), cell(row["percent"], 1, 6), cell(row["tokens_per_second"], 0, 9),
        cell(row["tokens_per_second"] / ranks / one if several and one else None, 2, 8),
        cell(lane_share(row) if several else None, 1, 7),
        cell(row["dispatched"] / ranks / there / 1e6 if several and there > 0 else None, 1, 9),
        cell(row["combined"] / ranks / back / 1e6 if several and back > 0 else None, 1, 9),
        cell(row["ratio"], 2, 7), cell(100 * row["ratio"] / row["floor_ratio"], 0, 5)))


def main():
    folder = pathlib.Path(sys.argv[1])
    files = [folder / f"{name}.h5" for name in ("mini-one", "mini-mpi", "mini-nccl", "mini-lsa", "flash", "modes")]
    found = [row for path in files if path.exists() for row in rows(path)]
    if not found:
        print("no benchmark left a file")
        return
    alone = {(r["shape"], r["mode"], r["batch"]): r["tokens_per_second"] for r in found if r["ranks"] == 1}
    print(f"{'synthetic':12} {'mode':8} {'ranks':>5} {'transport':>9} {'batch':>6} {'per GPU':>7} {'ms/iter':>9} {'floor':>9} "
          f"{'%':>6} {'tokens/s':>9} {'of one':>8} {'lane %':>7} {'GB/s out':>9} {'GB/s back':>9} {'x full':>7} {'%':>5}")
    for row in found:
        print(line(row, alone))


if __name__ == "__main__":
    main()
