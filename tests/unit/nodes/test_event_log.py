from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest

from nodes.eventlog import EventLog, LogFullError, LogReader
from nodes.records import AnyRecord, Arrived, Failed, Token

RECORDS = [Arrived(0, 0.25, "c", 0.25, 20, 128), Token(0, 1.5, 0, 0.5, []), Failed(0, 2.0, "x" * 40)]

# A file-size limit makes the kernel write only a part, as a full disk does. Every possible limit is tried.
FILL = """
import json, pathlib, resource, sys
import msgspec
from nodes.eventlog import EventLog, LogFullError
from nodes.records import AnyRecord, Completed

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
            log.write(msgspec.convert(record, AnyRecord))
            n += 1
        except LogFullError as error:
            texts.append(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    try:  # there is room again, but the log has ended
        log.write(Completed(9, 9.0))
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
        records = [msgspec.convert(record, AnyRecord) for record in unpacker]
        assert unpacker.tell() == path.stat().st_size
    return records


def test_a_record_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log")
    for n, record in enumerate(RECORDS, 1):
        log.write(record)
        assert read(log.path) == RECORDS[:n]
    log.close()


def test_a_log_that_exists_is_continued(tmp_path: Path) -> None:
    for record in RECORDS:
        log = EventLog(tmp_path / "log")
        log.write(record)
        log.close()
    assert read(tmp_path / "log") == RECORDS


def test_wherever_the_disk_is_full_the_file_ends_after_the_last_whole_record(tmp_path: Path) -> None:
    ends = [0]
    for record in RECORDS:
        ends.append(ends[-1] + len(msgspec.msgpack.encode(record)))
    limits = list(range(ends[-1]))
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            FILL,
            str(tmp_path),
            json.dumps(msgspec.to_builtins(RECORDS)),
            json.dumps(limits),
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    for limit, (n_stored, texts) in zip(limits, json.loads(done.stdout), strict=True):
        path = tmp_path / f"{limit}.log"
        assert read(path) == RECORDS[:n_stored]
        assert n_stored == max(i for i, end in enumerate(ends) if end <= limit)
        assert len(texts) == len(RECORDS) - n_stored, "after the first failure nothing more is written"
        assert all(str(path) in text for text in texts)


def test_a_disk_without_any_space_is_named_with_the_file() -> None:
    log = EventLog(Path("/dev/full"))
    with pytest.raises(LogFullError, match=r"^cannot write /dev/full: No space left on device$"):
        log.write(RECORDS[0])
    with pytest.raises(LogFullError, match=r"^no space left for /dev/full$"):
        log.write(RECORDS[1])
    log.close()


@pytest.mark.parametrize("chunk_bytes", [1, 10, 1_000_000])
def test_a_log_is_read_while_it_grows_and_to_where_it_means_something(
    tmp_path: Path, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodes.eventlog._CHUNK_BYTES", chunk_bytes)
    log = EventLog(tmp_path / "log")
    reader = LogReader(tmp_path / "log")
    assert (list(reader), reader.unread_bytes) == ([], 0)
    for record in RECORDS:
        log.write(record)
        assert list(reader) == [record]
        assert list(reader) == []
    data = log.path.read_bytes()
    with log.path.open("ab") as file:
        file.write(data[:5])
    assert (list(reader), reader.unread_bytes) == ([], 5)
    log.close()
    for broken, whole in ((data + b"\0" * 40 + data, RECORDS), (data + data[:-1], RECORDS + RECORDS[:-1])):
        log.path.write_bytes(broken)
        again = LogReader(log.path)
        assert list(again) == whole
        assert again.unread_bytes > 0
