"""Reads traces: Mooncake and Qwen-Bailian JSONL, conversations of ShareGPT and AIPerf, Azure and BurstGPT CSV, and a run's
``requests.parquet``.

The content decides which kind a file is; text may be compressed with gzip. Every reader yields rows of
(arrival in seconds, input tokens, output tokens).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from policies.workload import RequestPlan
from testbed.experiments import recorded_talks
from testbed.experiments.limits import MAX_REQUESTS, MAX_TOKENS
from testbed.experiments.problems import KeyedError, shown
from testbed.experiments.prompts import BAILIAN_TOKENS, MOONCAKE_TOKENS, Prompt, check_ids
from testbed.experiments.recorded_talks import Place
from testbed.records.requests import COMPLETED
from testbed.rundir import parquet_path

Row = tuple[float, int, int] | tuple[float, int, int, Prompt] | recorded_talks.Row
_KEY = ("workload", "file")
_log = logging.getLogger(__name__)
MAX_FILE_BYTES = 4 * 1024**3


class Trace(NamedTuple):
    """A recorded workload: its kind, and its requests as [arrival in s, input tokens, output tokens].

    ``prompts`` has what is known of the prompts, and ``places`` where each stands in a conversation whose further messages come
    after answers; empty if the trace has nothing of them.
    """

    kind: str
    requests: list[list[int | float]]
    prompts: list[Prompt]
    places: list[Place] = []  # noqa: RUF012 - nobody changes it

    def check_prompts(self) -> None:
        """Raises ``KeyedError`` if a prompt's ids contradict its length."""
        for (at_s, n_input, _), prompt in zip(self.requests, self.prompts, strict=self.prompts != []):
            try:
                check_ids(len(prompt.ids), int(n_input), prompt.block_tokens)
            except ValueError as error:
                raise KeyedError(
                    _KEY, f"the request {at_s:g} s after the first contradicts itself: {error}"
                ) from None


def read_trace(path: Path) -> Trace:
    """Return the requests of ``path``, sorted by arrival, the first at 0 s.

    Requests without input or output tokens (failed ones) are left out with a warning.
    Raises ``KeyedError`` if the file cannot be read or is of no known kind.
    """
    try:
        with path.open("rb") as file:
            start = file.read(4)
        if path.stat().st_size > MAX_FILE_BYTES:
            raise KeyedError(_KEY, f'"{path}" is larger than {MAX_FILE_BYTES:,} bytes; use a part of it')
        rows = []
        kind, found = ("run", _parquet(path)) if start == b"PAR1" else _text(path)
        for row in found:
            rows.append(row)
            if len(rows) > MAX_REQUESTS:
                raise KeyedError(
                    _KEY, f'"{path}" holds more than {MAX_REQUESTS:,} requests; use a part of it'
                )
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise KeyedError(_KEY, f'"{path}" cannot be unpacked: {error}') from None
    except OSError as error:
        raise KeyedError(_KEY, f'cannot read "{path}": {error.strerror}') from None
    except UnicodeDecodeError:
        raise KeyedError(_KEY, f'"{path}" is neither text nor Parquet') from None
    except csv.Error as error:  # a field of more than 131,072 characters
        raise KeyedError(_KEY, f'"{path}" cannot be read as CSV: {error}') from None
    served = sorted((row for row in rows if row[1] >= 1 and row[2] >= 1), key=lambda row: row[0])
    if not served:
        raise KeyedError(_KEY, f'"{path}" holds no request with input and output tokens')
    if len(served) < len(rows):
        _log.warning(
            "%s: left out %d of %d requests that have no input or no output tokens",
            path,
            len(rows) - len(served),
            len(rows),
        )
    places = [row[3] for row in served if len(row) == 4 and isinstance(row[3], Place)]
    prompts = [row[3] for row in served if len(row) == 4 and isinstance(row[3], Prompt)]
    if len(prompts) < len(served):  # some without ids: then nothing is known of who shares what
        prompts = []
    return Trace(
        kind,
        [[row[0] - served[0][0], row[1], row[2]] for row in served],
        prompts,
        places,
    )


class _Unpacked(gzip.GzipFile):
    """A gzip file that raises ``KeyedError`` after ``MAX_FILE_BYTES``; a small one can expand to any size."""

    n_read = 0

    def read1(self, size: int = -1) -> bytes:
        found = super().read1(size)
        self.n_read += len(found)
        if self.n_read > MAX_FILE_BYTES:
            raise KeyedError(
                _KEY, f'"{self.name}" unpacks to more than {MAX_FILE_BYTES:,} bytes; use a part of it'
            )
        return found


def _open(path: Path) -> io.TextIOBase:
    """Open a text file, compressed with gzip or not. Line ends are not changed."""
    with path.open("rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    if is_packed:
        return io.TextIOWrapper(_Unpacked(path), encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _text(path: Path) -> tuple[str, Iterator[Row]]:
    with _open(path) as file:
        first = next((line for line in file if line.strip()), "")
        file.seek(0)
        if first.lstrip().startswith("["):
            return SHAREGPT, _json_array(path)
        if first.lstrip().startswith("{") and (found := _IS_TALK.search(first)):
            is_sharegpt = found[1] == "conversations"
            of_talk = recorded_talks.sharegpt() if is_sharegpt else recorded_talks.sessions(_whole, _number)
            return (SHAREGPT if is_sharegpt else SESSIONS), _json_lines(
                path, lambda line: [*of_talk(json.loads(line))]
            )
        if first.lstrip().startswith("{"):
            return (BAILIAN if _IS_TURN.search(first) else "Mooncake"), _json_lines(path, _json_line())
        columns = set(_csv_reader(file).fieldnames or ())
    for kind, needed, read in _CSV:
        if needed <= columns:
            return kind, _csv_lines(path, read())
    kinds = "; ".join(", ".join(sorted(needed)) for _, needed, _ in _CSV)
    raise KeyedError(
        _KEY,
        f'"{path}" is not a known kind of trace: it must be JSON lines (timestamp, input_length, output_length; or session_id '
        f"with these or delay and text; or conversations with from and value, also as one JSON list), a CSV with the columns {kinds}, or a run's requests.parquet",
    )


def _json_lines(path: Path, read: Callable[[str], Row | list[Row]]) -> Iterator[Row]:
    with _open(path) as file:
        lines = ((n, line) for n, line in enumerate(file, 1) if line.strip())
        yield from _rows(path, lines, read)


def _json_array(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        try:
            records = json.load(file)
        except (ValueError, RecursionError) as error:
            raise KeyedError(_KEY, f'"{path}" cannot be read as a JSON list: {error}') from None
    of_talk = recorded_talks.sharegpt()
    yield from _rows(path, enumerate(records, 1), lambda record: [*of_talk(record)], "conversation")


def _csv_reader(file: io.TextIOBase) -> csv.DictReader[str]:
    """Returns a reader of records by column; the header may come after blank lines and have spaces around names."""
    reader = csv.DictReader(file)
    rows = ([name.strip() for name in row] for row in reader.reader)
    reader.fieldnames = next((row for row in rows if any(row)), [])
    return reader


def _csv_lines(path: Path, read: Callable[[dict[str, str]], Row]) -> Iterator[Row]:
    def read_whole(record: dict[str, str]) -> Row:
        if any(record.pop(None, ())):  # type: ignore[call-overload]  # what csv puts there: the cells beyond the header
            raise ValueError("it has more cells than the header; quote a cell that contains a comma")
        return read(record)

    with _open(path) as file:
        reader = _csv_reader(file)
        yield from _rows(path, ((reader.line_num, record) for record in reader), read_whole)


def _rows(
    path: Path,
    records: Iterator[tuple[int, Any]],
    read: Callable[[Any], Row | list[Row]],
    unit: str = "line",
) -> Iterator[Row]:
    """Yields the rows of all ``records``, each with its number; a record may have several."""
    for number, record in records:
        try:
            found = read(record)
            for row in found if isinstance(found, list) else [found]:
                if not math.isfinite(row[0]):
                    raise ValueError(f"arrival {row[0]} is not a finite time")
                if min(row[1:3]) < 0:
                    raise ValueError(f"{min(row[1:3])} tokens are fewer than 0")
                if max(row[1:3]) > MAX_TOKENS:
                    raise ValueError(f"{max(row[1:3]):.0g} tokens are more than {MAX_TOKENS:,}")
                yield row
        except RecursionError:
            raise KeyedError(
                _KEY, f'"{path}" {unit} {number} cannot be read: it is nested too deeply'
            ) from None
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            if isinstance(error, json.JSONDecodeError):
                what = error.msg  # without its place, which is one within the line
            raise KeyedError(_KEY, f'"{path}" {unit} {number} cannot be read: {what}') from None


def _json_line() -> Callable[[str], Row]:
    """Returns a reader of one file's lines.

    ``timestamp`` is in milliseconds in Mooncake, in seconds in Qwen-Bailian (turns of chats).
    """
    conversations: dict[Any, int] = {}
    """Numbers of conversations by the ids of all their chats: each further turn has an id of its own, and its parent's."""
    numbers: set[int] = set()

    def read(line: str) -> Row:
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError("it is no JSON object")
        is_bailian = "chat_id" in record or "turn" in record
        at_s = _number(record, "timestamp") / (1 if is_bailian else 1000)
        lengths = _whole(record, "input_length"), _whole(record, "output_length")
        ids = record.get("hash_ids")
        if ids is None:
            return at_s, *lengths
        if not (isinstance(ids, list) and all(isinstance(each, int) for each in ids)):
            raise ValueError(f"hash_ids must be a list of whole numbers, not {shown(ids)}")
        size = BAILIAN_TOKENS if is_bailian else MOONCAKE_TOKENS
        conversation, turn = -1, -1
        if is_bailian and "chat_id" in record:
            conversation = conversations.get(record.get("parent_chat_id"), len(numbers))
            numbers.add(conversation)
            conversations[record["chat_id"]] = conversation
            turn = max(_whole(record, "turn") - 1, 0) if "turn" in record else 0
        return at_s, *lengths, Prompt(conversation, turn, size, tuple(ids))

    return read


def _number(record: Mapping[str, Any], name: str) -> float:
    value = record[name]
    if isinstance(value, str):
        value = value.strip()
    try:
        if value in (None, "") or isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError):
        what = "is missing" if value in (None, "") else f"must be a number, not {shown(value)}"
        raise ValueError(f"{name} {what}") from None


def _whole(record: Mapping[str, Any], name: str) -> int:
    """Returns a number of tokens: 472, "472" and 472.0 are the same in all formats, 472.5 and true are none."""
    value = record[name]
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = _number(record, name)
    if not number.is_integer():
        raise ValueError(f"{name} must be a whole number, not {shown(value)}")
    return int(number)


def _azure() -> Callable[[dict[str, str]], Row]:
    """Returns a reader of one file's rows: either all of their times have a zone, or all are UTC."""
    zones: set[bool] = set()

    def read(record: dict[str, str]) -> Row:
        at = datetime.fromisoformat(record["TIMESTAMP"])
        zones.add(at.tzinfo is not None)
        if len(zones) > 1:
            raise ValueError(
                "some times have a zone and others do not; give all of them one, or none (then they are UTC)"
            )
        if at.tzinfo is None:
            at = at.replace(tzinfo=UTC)  # not this machine's time zone: see _azure_text
        return at.timestamp(), _whole(record, "ContextTokens"), _whole(record, "GeneratedTokens")

    return read


def _burstgpt() -> Callable[[dict[str, str]], Row]:
    def read(record: dict[str, str]) -> Row:
        return (
            _number(record, "Timestamp"),
            _whole(record, "Request tokens"),
            _whole(record, "Response tokens"),
        )

    return read


BAILIAN, SHAREGPT, SESSIONS = "Qwen-Bailian", "ShareGPT", "AIPerf sessions"
_CSV: tuple[tuple[str, frozenset[str], Callable[[], Callable[[dict[str, str]], Row]]], ...] = (
    ("Azure", frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), _azure),
    ("BurstGPT", frozenset({"Timestamp", "Request tokens", "Response tokens"}), _burstgpt),
)
_IS_TURN = re.compile(r'"(chat_id|turn)"\s*:')
_IS_TALK = re.compile(r'"(session_id|conversations)"\s*:')


def trace_text(kind: str, requests: Sequence[RequestPlan]) -> str:
    """Return a trace of ``kind`` (one of ``TRACE_KINDS``) as text; times are rounded as it requires."""
    return _WRITERS[kind](requests)


def _azure_text(requests: Sequence[RequestPlan]) -> str:
    began_at = datetime(2000, 1, 1, tzinfo=UTC)  # UTC: a time zone's change of clocks would change arrivals
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for r in requests:
        at = began_at + timedelta(seconds=r.arrival_at_s)
        lines.append(
            f"{at.isoformat(sep=' ', timespec='microseconds')},{r.n_input_tokens},{r.n_output_tokens}"
        )
    return "\n".join([*lines, ""])


def _burstgpt_text(requests: Sequence[RequestPlan]) -> str:
    lines = ["Timestamp,Request tokens,Response tokens"]
    lines += [f"{r.arrival_at_s:.6f},{r.n_input_tokens},{r.n_output_tokens}" for r in requests]
    return "\n".join([*lines, ""])


def _mooncake_text(requests: Sequence[RequestPlan]) -> str:
    fields = (
        {
            "timestamp": round(1000 * r.arrival_at_s, 3),
            "input_length": r.n_input_tokens,
            "output_length": r.n_output_tokens,
        }
        for r in requests
    )
    return "".join(json.dumps(line) + "\n" for line in fields)


_WRITERS: dict[str, Callable[[Sequence[RequestPlan]], str]] = {
    "azure": _azure_text,
    "burstgpt": _burstgpt_text,
    "mooncake": _mooncake_text,
}
TRACE_KINDS = tuple(_WRITERS)


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa  # imported only here: most scenarios replay nothing
    import pyarrow.parquet as pq

    columns = ["arrival_at_s", "n_input_tokens", "n_output_tokens"]
    try:
        with pq.ParquetFile(parquet_path(path)) as file:
            missing = [name for name in columns if name not in file.schema_arrow.names]
            if missing:
                raise KeyedError(
                    _KEY, f'"{path}" cannot be read as requests of a run: no column {missing[0]}'
                )
            n_rows = file.metadata.num_rows
            if n_rows > MAX_REQUESTS:  # a few kilobytes can hold any number of equal rows
                raise KeyedError(
                    _KEY,
                    f'"{path}" holds {n_rows:,} requests, but at most {MAX_REQUESTS:,} are allowed; use a '
                    "part of it",
                )
            ends = [name for name in ("status", "n_tokens_done") if name in file.schema_arrow.names]
            batches = file.iter_batches(columns=columns + ends)
            records = enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), 1)
            yield from _rows(path, records, _recorded)
    except (pa.ArrowException, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise KeyedError(_KEY, f'"{path}" cannot be read as requests of a run: {reason}') from None


def _recorded(record: dict[str, Any]) -> Row:
    # The text of a request that completed may have ended before the tokens that it asked for.
    came = "n_tokens_done" in record and record.get("status") == COMPLETED
    return (
        _number(record, "arrival_at_s"),
        _whole(record, "n_input_tokens"),
        _whole(record, "n_tokens_done" if came else "n_output_tokens"),
    )
