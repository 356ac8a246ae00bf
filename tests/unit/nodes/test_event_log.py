from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import pytest

from nodes.eventlog import EventLog, LogFullError

RECORDS = [["state", 0, "arrived", 0.25, {"client": "c"}], ["token", 0, 0, 0.5, 1.5, [[1, 0, 3]]], ["x" * 40]]

# A file-size limit makes the kernel write only a part, as a full disk does. Every possible limit is tried.
FILL = """
import json, pathlib, resource, sys
from nodes.eventlog import EventLog, LogFullError

folder, records, sizes = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
stored = []
for limit in sizes:
    log = EventLog(folder / f"{limit}.log")
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    n = 0
    texts = []
    for record in records:
        try:
            log.write(*record)
            n += 1
        except LogFullError as error:
            texts.append(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    try:  # there is room again, but the log has ended
        log.write("late")
        n += 1
    except LogFullError:
        pass
    log.close()
    stored.append((n, texts))
print(json.dumps(stored))
"""


def read(path: Path) -> list[Any]:
    """All records; fails if the file does not end with a whole one."""
    with path.open("rb") as file:
        unpacker = msgpack.Unpacker(file)
        records = list(unpacker)
        assert unpacker.tell() == path.stat().st_size
    return records


def test_a_record_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log")
    for n, record in enumerate(RECORDS, 1):
        log.write(*record)
        assert read(log.path) == RECORDS[:n]
    log.close()


def test_a_log_that_exists_is_continued(tmp_path: Path) -> None:
    for record in RECORDS:
        log = EventLog(tmp_path / "log")
        log.write(*record)
        log.close()
    assert read(tmp_path / "log") == RECORDS


def test_wherever_the_disk_is_full_the_file_ends_after_the_last_whole_record(tmp_path: Path) -> None:
    ends = [0]
    for record in RECORDS:
        ends.append(ends[-1] + len(msgpack.packb(record)))
    limits = list(range(ends[-1]))
    done = subprocess.run(
        [sys.executable, "-c", FILL, str(tmp_path), json.dumps(RECORDS), json.dumps(limits)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    for limit, (n_stored, texts) in zip(limits, json.loads(done.stdout), strict=True):
        path = tmp_path / f"{limit}.log"
        assert read(path) == RECORDS[:n_stored]
        assert n_stored == max(i for i, end in enumerate(ends) if end <= limit)
        assert len(texts) == len(RECORDS) - n_stored, "after the first failure nothing more is taken"
        assert all(str(path) in text for text in texts)


def test_a_disk_without_any_space_is_named_with_the_file() -> None:
    log = EventLog(Path("/dev/full"))
    with pytest.raises(LogFullError, match=r"^cannot write /dev/full: No space left on device$"):
        log.write("state", 1)
    with pytest.raises(LogFullError, match=r"^no space left for /dev/full$"):
        log.write("state", 2)
    log.close()
