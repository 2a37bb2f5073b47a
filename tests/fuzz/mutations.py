"""Files of every kind that data is read from, whole ones and damaged ones."""

import gzip
import io
import json

import pyarrow as pa
import pyarrow.parquet
from hypothesis import strategies as st
from PIL import Image

ROWS = [
    {"text": "A river runs, past the house.", "label": "noun", "source": "a b", "target": "c d", "file_name": "0.png"},
    {"text": 'It said "no"\nand ünter', "label": "verb", "source": "é", "target": "f", "file_name": "1.png"},
    {"text": "  ", "label": "noun", "source": "g", "target": "h", "file_name": "0.png"},
]


def _csv(separator):
    lines = [separator.join(ROWS[0])]
    lines += [separator.join('"' + value.replace('"', '""') + '"' for value in row.values()) for row in ROWS]
    return "\n".join(lines).encode()


def _parquet(rows):
    buffer = io.BytesIO()
    pa.parquet.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def _image():
    buffer = io.BytesIO()
    Image.new("RGB", (5, 3), (200, 30, 60)).save(buffer, "PNG")
    return buffer.getvalue()


PLAIN = {
    ".txt": "One line.\n\nAnother, with ü.\r\n\u2028 And a third.\n".encode(),
    ".jsonl": "\n".join(map(json.dumps, ROWS)).encode(),
    ".json": json.dumps(ROWS).encode(),
    ".csv": _csv(","),
    ".tsv": _csv("\t"),
    ".parquet": _parquet(ROWS),
}
WHOLE = PLAIN | {
    f"{suffix}.gz": gzip.compress(PLAIN[suffix], mtime=0) for suffix in (".txt", ".jsonl", ".csv", ".tsv")
}
IMAGE = _image()
# What is in a file of each kind that is read in a way of its own.
SPLINTERS = [b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b'"', b"\r", b"\n", b"{", b"[[" * 2_000, b"\x1f\x8b", b"PAR1"]
SPLINTERS += [b"null", b"NaN", b"1e999", b'"\\ud800"', b"\xed\xa0\x80", b"-9" * 99, b"1" * 5_000, b"{}", b"[]"]


@st.composite
def damaged(draw, content):
    """A file with a few bytes changed, left out or put in, or cut off."""
    spoilt = bytearray(content)
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(spoilt)))
        match draw(st.sampled_from(["change", "remove", "insert", "cut"])):
            case "change":
                spoilt[place : place + 1] = draw(st.binary(min_size=1, max_size=1))
            case "remove":
                del spoilt[place : place + draw(st.integers(1, 9))]
            case "insert":
                spoilt[place:place] = draw(st.sampled_from(SPLINTERS) | st.binary(max_size=4))
            case "cut":
                del spoilt[place:]
    return bytes(spoilt)


def contents(suffix):
    """What a file of a kind may hold: what it should, about what it should, or anything."""
    plain = suffix.removesuffix(".gz")
    kinds = [damaged(WHOLE[suffix]), st.binary(max_size=40), st.sampled_from(list(WHOLE.values()))]
    if suffix != plain:
        kinds.append(damaged(PLAIN[plain]).map(gzip.compress))
    if plain in (".jsonl", ".json"):
        kinds.append(json_rows())
    if plain == ".parquet":
        kinds.append(parquet_tables())
    return st.one_of(kinds)


_names = st.sampled_from([*ROWS[0], "other", ""])
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_names, inner, max_size=2),
    max_leaves=4,
)


def json_rows():
    """Tables whose rows are of all kinds."""
    rows = st.lists(st.dictionaries(_names, _values, max_size=3) | _values, max_size=3)
    whole = rows.map(lambda rows: json.dumps(rows).encode())
    return whole | rows.map(lambda rows: "\n".join(map(json.dumps, rows)).encode())


_TYPES = [pa.string(), pa.large_string(), pa.binary(), pa.int64(), pa.float64(), pa.bool_(), pa.list_(pa.string())]
_TYPES += [pa.timestamp("s"), pa.decimal128(5, 2), pa.null(), pa.struct([("en", pa.string())]), pa.date32()]
_TYPES += [pa.dictionary(pa.int32(), pa.string()), pa.map_(pa.string(), pa.int64()), pa.duration("s"), pa.float16()]


def _rare(number):
    """Columns of what Python has no values for."""
    large = [pa.array([2**62] * number, kind) for kind in (pa.timestamp("us"), pa.duration("us"))]
    return [*large, pa.array([b"\xff"] * number, pa.binary())]


@st.composite
def parquet_tables(draw):
    """Tables of columns of all types."""
    names = draw(st.lists(_names, min_size=1, max_size=4, unique=draw(st.booleans())))
    number = draw(st.integers(0, 2))
    columns = [draw(st.sampled_from([*(pa.nulls(number, kind) for kind in _TYPES), *_rare(number)])) for _ in names]
    table = pa.table(columns, names=names)
    buffer = io.BytesIO()
    pa.parquet.write_table(table, buffer)
    return buffer.getvalue()
