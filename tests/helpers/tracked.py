"""What trackers have of a run, read with their own readers: `tensorboard`, `wandb`, `trackio` -> {(axis/name, step): [values]}.

A W&B offline file is a log in LevelDB's format (blocks of 32 KiB, records in chunks) of protobuf records; W&B reads it in Go only.
Run as a program, it prints one of them as JSON, so that the packages and their threads and warnings stay out of the tests' process.
"""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

Points = dict[tuple[str, int], list[float]]
BLOCK, HEADER, FULL, LAST = 32768, 7, 1, 4


def tensorboard(run: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    points: Points = {}
    for tag in read.Tags()["scalars"]:
        for event in read.Scalars(tag):
            points.setdefault((tag, event.step), []).append(event.value)
    for tag in read.Tags()["tensors"]:
        for event in read.Tensors(tag):
            if event.tensor_proto.float_val:
                points.setdefault((tag, event.step), []).append(event.tensor_proto.float_val[0])
            else:
                points.setdefault((tag, event.step), []).append(float(len(event.tensor_proto.string_val[0])))
    return points


def wandb(run: Path) -> Points:
    points: Points = {}
    for row in wandb_history(run):
        axis = "train" if "train_step" in row else "eval"
        for name, value in row.items():
            table, _, field = name.partition("/samples/")
            if name.startswith(f"{axis}/") and (not field or field == "nrows"):
                key = f"{table}/samples" if field else name
                points.setdefault((key, int(row[f"{axis}_step"])), []).append(float(value))
    return points


def wandb_history(run: Path) -> Iterator[dict]:
    """Yield the rows of the history of all offline files of a run."""
    from wandb.proto import wandb_internal_pb2

    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        for data in _records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                yield {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log; what a killed writer has left at its end is none."""
    at, parts = HEADER, b""  # the file begins with 7 bytes of its own
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        chunk = data[at + HEADER : at + HEADER + length]
        if not kind or len(chunk) < length:
            return
        parts += chunk
        at += HEADER + length
        if kind in (FULL, LAST):
            yield parts
            parts = b""


def trackio(run: Path) -> Points:
    from trackio.sqlite_storage import SQLiteStorage

    points: Points = {}
    for row in SQLiteStorage.get_logs("rlvr", run.name):
        axis = "train" if "train_step" in row else "eval"
        for name, value in row.items():
            if name.startswith(f"{axis}/"):
                number = float(len(value["_value"])) if isinstance(value, dict) else float(value)
                points.setdefault((name, row["step"]), []).append(number)
    return points


if __name__ == "__main__":
    found = {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio}[sys.argv[1]](Path(sys.argv[2]))
    print(json.dumps([[*key, values] for key, values in found.items()]))
