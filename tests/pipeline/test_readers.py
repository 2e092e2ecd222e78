"""Every format is read, cut into spans and read again by locator, whatever bytes it holds."""

import gzip
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from askmany.engine.errors import ConfigError, DocumentError
from askmany.pipeline.config import InputConfig
from askmany.pipeline.documents import DeadLetter, Locator, SourceDocument
from askmany.pipeline.readers import GAP_BYTES, STRETCH_BYTES, Fetcher, columns_of, format_of, neighbours, plan_spans, scan
from askmany.pipeline.spool import Spool
from askmany.pipeline.storage import InputFile, list_files, read_range
from askmany.pipeline.whole_files import main_text

Found = SourceDocument | DeadLetter


def read(path: Path, span_bytes: int = 1 << 30, **columns: Any) -> list[Found]:
    """Everything a scan finds, span after span."""
    config = InputConfig(uri=str(path), **columns)
    spans = [span for file in list_files([str(path)], {}) for span in plan_spans(file, config, span_bytes)]
    return [item for span in spans for item in scan(span, config)]


def documents(found: Sequence[Found]) -> list[SourceDocument]:
    return [item for item in found if isinstance(item, SourceDocument)]


def letters(found: Sequence[Found]) -> list[DeadLetter]:
    return [item for item in found if isinstance(item, DeadLetter)]


def fetch_all(found: Sequence[Found], path: Path, **columns: Any) -> dict[str, SourceDocument | DocumentError]:
    fetcher = Fetcher(InputConfig(uri=str(path), **columns))
    by_locator = {document.locator: document.doc_id for document in documents(found)}
    fetched = {by_locator[locator]: item for locator, item in fetcher.fetch(list(by_locator))}
    fetcher.close()
    return fetched


def assert_reads_again(path: Path, found: Sequence[Found], **columns: Any) -> None:
    """Each document comes back equal by its locator."""
    again = fetch_all(found, path, **columns)
    assert again == {document.doc_id: document for document in documents(found)}


LINES = [{"doc_id": "a", "text": "first\r\nline", "n": 1}, {"doc_id": 2, "text": "שלום 🙂", "n": None}, {"doc_id": "c", "text": None}]


@pytest.mark.parametrize("ending", ["jsonl", "ndjson", "jsonl.gz", "jsonl.zst"])
def test_jsonl(tmp_path: Path, ending: str) -> None:
    data = "".join(json.dumps(line) + "\n" for line in LINES).encode()
    data = gzip.compress(data) if ending.endswith("gz") else zstandard.compress(data) if ending.endswith("zst") else data
    path = tmp_path / f"d.{ending}"
    path.write_bytes(data)
    found = read(path, keep=("n",))
    assert [(d.doc_id, d.text, d.keep["n"]) for d in documents(found)] == [
        ("a", "first\r\nline", "1"),
        ("2", "שלום 🙂", None),
        ("c", "", None),
    ]
    assert [d.locator.line for d in documents(found)] == [1, 2, 3]
    assert_reads_again(path, found, keep=("n",))


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_compressed_files_of_several_members(tmp_path: Path, compress: Any) -> None:
    path = tmp_path / ("d.jsonl.gz" if compress is gzip.compress else "d.jsonl.zst")
    path.write_bytes(b"".join(compress(json.dumps({"doc_id": str(i), "text": "t" * i}).encode() + b"\n") for i in range(5)))
    found = read(path)
    assert [d.doc_id for d in documents(found)] == list("01234")
    assert_reads_again(path, found)


def test_bad_lines_are_dead_letters_with_their_line(tmp_path: Path) -> None:
    lines = [
        b'\xef\xbb\xbf{"doc_id": "bom", "text": "t"}',
        b"{broken",
        b"",
        b"[1, 2]",
        b'{"doc_id": "no text"}',
        b'{"text": "no id"}',
        b'{"doc_id": null, "text": "t"}',
        b'{"doc_id": true, "text": "t"}',
        b'{"doc_id": "number", "text": 5}',
        b'{"doc_id": "bytes \xff", "text": "a\xe9"}',
        b'{"doc_id": "lone", "text": "a\\ud800b"}',
        b"[" * 100_000,
        b'{"doc_id": "\\ufeff", "text": "t"}',
        b'{"doc_id": "last", "text": "no line end"}',
    ]
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"\n".join(lines))
    found = read(path)
    assert [d.doc_id for d in documents(found)] == ["bom", "bytes \ufffd", "lone", "last"]
    assert documents(found)[1].flags == ("bytes_replaced:2",)
    assert documents(found)[2].flags == ("surrogates_replaced:1",)
    assert [letter.locator.line for letter in letters(found)] == [2, 4, 5, 6, 7, 8, 9, 12, 13]
    reasons = [letter.reason for letter in letters(found)]
    assert "malformed JSON" in reasons[0]
    assert "list" in reasons[1]
    assert reasons[2] == "no column 'text'; the row has 'doc_id'"
    assert "null" in reasons[4]
    assert letters(found)[6].doc_id == "number"
    assert reasons[8] == "column 'doc_id' is \"\\ufeff\"; a document needs a text or a whole number there"
    assert_reads_again(path, found)


JSON_LINE = st.dictionaries(st.text(max_size=5), st.text(max_size=30), max_size=3)


@settings(max_examples=60)
@given(
    st.lists(st.one_of(st.binary(max_size=40), JSON_LINE.map(lambda d: json.dumps({"doc_id": "x", "text": "y", **d}).encode()))),
    st.integers(1, 60),
    st.booleans(),
)
def test_any_bytes_round_trip_whatever_the_spans(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes], span_bytes: int, final_line_end: bool
) -> None:
    path = tmp_path_factory.mktemp("any") / "d.jsonl"
    path.write_bytes(b"\n".join(chunks) + (b"\n" if final_line_end else b""))
    whole, cut = read(path), read(path, span_bytes)
    assert [(i.locator.start, i.locator.length) for i in cut] == [(i.locator.start, i.locator.length) for i in whole]
    for item in cut:
        data = path.read_bytes()[item.locator.start : item.locator.start + item.locator.length]
        assert data.count(b"\n") <= 1
        assert data.strip()
    by_place = {item.locator.start: item for item in cut}
    fetcher = Fetcher(InputConfig(uri=str(path)))
    for locator, item in fetcher.fetch([document.locator for document in documents(cut)]):
        assert item == by_place[locator.start]


def test_a_compressed_file_that_breaks_off_keeps_what_came_before(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl.gz"
    lines = b"".join(json.dumps({"doc_id": str(i), "text": str(i * 7919) * 50}).encode() + b"\n" for i in range(2000))
    path.write_bytes(gzip.compress(lines)[:-2000])
    found = read(path)
    (letter,) = letters(found)
    assert 0 < len(documents(found)) < 2000
    assert "cannot be read from here on" in letter.reason
    assert letter.locator.line == len(documents(found)) + 1


CSV = 'doc_id,text,keep\r\na,"two\r\nlines, and ""quotes""",1\r\nb,plain 5" pipe,2\n\nc,"",3\nd,too,many,fields\ne,short\nf,"open'


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_bytes(b"\xef\xbb\xbf" + CSV.encode())
    found = read(path, keep=("keep",))
    assert [(d.doc_id, d.text, d.keep["keep"]) for d in documents(found)] == [
        ("a", 'two\r\nlines, and "quotes"', "1"),
        ("b", 'plain 5" pipe', "2"),
        ("c", "", "3"),
    ]
    assert [letter.locator.line for letter in letters(found)] == [7, 8, 9]
    assert letters(found)[0].reason == "malformed CSV: 4 fields where the header has 3"
    assert_reads_again(path, found, keep=("keep",))
    assert columns_of(InputFile(str(path), "d.csv", 1), InputConfig(uri=str(path))) == ["doc_id", "text", "keep"]


def test_csv_fields_over_the_default_limit(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text("doc_id,text\na," + "x" * 300_000 + "\n")
    assert [len(d.text) for d in documents(read(path))] == [300_000]


CELL = st.text(alphabet=st.sampled_from('ab,"\n\r é'), max_size=12)


@settings(max_examples=60)
@given(st.lists(st.tuples(CELL, CELL), max_size=8))
def test_any_quoted_csv_round_trips(tmp_path_factory: pytest.TempPathFactory, cells: list[tuple[str, str]]) -> None:
    quoted = [[f"d{i}", *row] for i, row in enumerate(cells)]
    path = tmp_path_factory.mktemp("csv") / "d.csv"
    text = "".join(",".join('"' + cell.replace('"', '""') + '"' for cell in row) + "\n" for row in [["doc_id", "text", "k"], *quoted])
    path.write_bytes(text.encode())
    found = read(path, keep=("k",))
    assert [[d.doc_id, d.text, d.keep["k"]] for d in documents(found)] == quoted
    assert_reads_again(path, found, keep=("k",))


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    rows = [{"id": i, "body": f"text {i}", "questions": [{"qid": f"q{i}", "question": "what?", "answers": None}]} for i in range(20)]
    pq.write_table(pa.Table.from_pylist([*rows, {"id": 20, "body": None, "questions": None}]), path, row_group_size=6)
    columns = {"id": "id", "text": "body", "questions": "questions"}
    found = read(path, span_bytes=200, **columns)
    assert [d.doc_id for d in documents(found)] == [str(i) for i in range(21)]
    assert [(d.locator.start, d.locator.length) for d in documents(found)] == [(i // 6, i % 6) for i in range(21)]
    assert documents(found)[3].questions == rows[3]["questions"]
    assert "row group 1, row 2" in documents(found)[8].locator.place()
    assert_reads_again(path, found, **columns)
    assert columns_of(InputFile(str(path), "d.parquet", 1), InputConfig(uri=str(path))) == ["id", "body", "questions"]


def test_text_markdown_and_html(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_bytes("caf\u00e9\r\n".encode("latin-1"))
    (tmp_path / "deep" / "b.md").write_text("# Title\n\n*text*")
    article = "<p>" + "This is the article, told at length. " * 20 + "</p>"
    page = f"<html><head><title>T</title></head><body><nav>Menu</nav><article><h1>Head</h1>{article}</article><script>x()</script></body>"
    (tmp_path / "c.html").write_text(page)
    (tmp_path / "d.htm").write_text("")
    (tmp_path / "e.html").write_text("<html><body><div>few words</div><script>var x = 1;</script></body></html>")
    found = documents(read(tmp_path))
    texts = {document.doc_id: document for document in found}
    assert sorted(texts) == ["a.txt", "c.html", "d.htm", "deep/b.md", "e.html"]
    assert texts["a.txt"].text == "café\r\n"
    assert texts["a.txt"].flags == ("encoding:cp1252",)
    assert texts["deep/b.md"].text == "# Title\n\n*text*"
    assert "told at length" in texts["c.html"].text
    assert "Menu" not in texts["c.html"].text
    assert "x()" not in texts["c.html"].text
    assert texts["d.htm"].text == ""
    assert "few words" in texts["e.html"].text
    assert "var x" not in texts["e.html"].text
    assert_reads_again(tmp_path, found)


@pytest.mark.parametrize("name", ["x.pdf", "x.docx", "x.doc.gz", "X.PPTX"])
def test_office_files_are_refused_by_name(name: str) -> None:
    for declared in ("auto", "txt"):
        with pytest.raises(ConfigError, match=f"{name}: .* files are not read"):
            format_of(name, declared)


def test_unknown_endings_need_a_declared_format() -> None:
    with pytest.raises(ConfigError, match=r"LICENSE: format not known by its name"):
        format_of("LICENSE", "auto")
    assert format_of("LICENSE", "txt") == "txt"


def test_files_that_are_not_what_their_name_says(tmp_path: Path) -> None:
    (tmp_path / "d.parquet").write_bytes(b"not parquet")
    file = InputFile(str(tmp_path / "d.parquet"), "d.parquet", 11)
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        plan_spans(file, InputConfig(uri="x"), 1 << 20)
    with pytest.raises(ConfigError, match="cannot be read as parquet"):
        columns_of(file, InputConfig(uri="x"))
    (tmp_path / "d.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(ConfigError, match="cannot be read as jsonl"):
        columns_of(InputFile(str(tmp_path / "d.jsonl.gz"), "d.jsonl.gz", 8), InputConfig(uri="x"))
    (letter,) = letters(read(tmp_path / "d.jsonl.gz"))
    assert "cannot be read" in letter.reason


def test_documents_that_changed_or_went_since_they_were_found(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"doc_id": str(i), "text": "some text"}) + "\n" for i in range(3)))
    found = read(path)
    path.write_text(path.read_text()[:-20])
    again = fetch_all(found, path)
    assert isinstance(again["2"], DocumentError)
    assert f"{path}:3: cannot be read again" in str(again["2"])
    path.write_text("x" * 500)
    assert "malformed JSON" in str(fetch_all(found, path)["0"])
    path.unlink()
    assert all(isinstance(item, DocumentError) for item in fetch_all(found, path).values())


def test_parquet_that_changed_since(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    table = pa.Table.from_pylist([{"doc_id": str(i), "text": "t"} for i in range(6)])
    pq.write_table(table, path, row_group_size=2)
    found = read(path)
    pq.write_table(table.slice(0, 3), path, row_group_size=2)
    again = fetch_all(found, path)
    assert [isinstance(again[str(i)], DocumentError) for i in range(6)] == [False, False, False, True, True, True]


def test_the_spool_keeps_at_most_its_bytes_and_the_file_in_use(tmp_path: Path) -> None:
    paths = []
    for i in range(3):
        paths.append(str(tmp_path / f"{i}.gz"))
        Path(paths[-1]).write_bytes(gzip.compress(bytes([i]) * 100))
    spool = Spool({}, max_bytes=150)
    for path in (*paths, paths[0]):
        with spool.open(path) as stream:
            assert stream.read() == bytes([paths.index(path)]) * 100
    assert len(spool._copies) == 1
    spool.close()
    spool.close()


@given(st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 3_000)), max_size=30))
def test_stretches_hold_each_row_once_in_order_and_skip_what_is_far(rows: list[tuple[int, int]]) -> None:
    locators, start = [], 0
    for line, (gap, length) in enumerate(rows):
        start += gap
        locators.append(Locator("f.jsonl", "f", "jsonl", start, length, line))
        start += length
    stretches = list(neighbours(locators))
    assert [row for stretch in stretches for row in stretch] == locators
    for stretch in stretches:
        assert all(b.start - (a.start + a.length) <= GAP_BYTES for a, b in itertools.pairwise(stretch))
        assert len(stretch) == 1 or stretch[-1].start + stretch[-1].length - stretch[0].start <= STRETCH_BYTES
    for before, after in itertools.pairwise(stretches):
        far = after[0].start - (before[-1].start + before[-1].length) > GAP_BYTES
        assert far or after[0].start + after[0].length - before[0].start > STRETCH_BYTES


def test_rows_beside_each_other_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"doc_id": f"d{n}", "text": "x" * (n * 37 % 501)}) + "\n" for n in range(300)))
    found = read(path)
    reads: list[int] = []

    def counted(uri: str, start: int, length: int, options: Any) -> bytes:
        reads.append(length)
        return read_range(uri, start, length, options)

    monkeypatch.setattr("askmany.pipeline.readers.read_range", counted)
    assert_reads_again(path, found)
    assert len(reads) == 1


def test_where_the_end_of_a_file_is_gone_the_rest_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"doc_id": f"d{n}", "text": "text"}) + "\n" for n in range(20)))
    found = read(path)
    path.write_bytes(path.read_bytes()[:-60])
    again = fetch_all(found, path)
    lost = sorted(doc_id for doc_id, document in again.items() if isinstance(document, DocumentError))
    assert lost == ["d18", "d19"]
    assert len(again) == 20


ROWS = b"".join(json.dumps({"doc_id": str(i), "text": str(i * 7919) * 50}).encode() + b"\n" for i in range(2000))


@pytest.mark.parametrize("cut", [1, 2000, -3])
def test_a_zst_file_that_breaks_off_is_told(tmp_path: Path, cut: int) -> None:
    """In the middle of a frame, before its last byte, and in the mark of another one."""
    packed = zstandard.ZstdCompressor(write_checksum=True).compress(ROWS)
    (tmp_path / "d.jsonl.zst").write_bytes(packed[:-cut] if cut > 0 else packed + packed[:-cut])
    found = read(tmp_path / "d.jsonl.zst")
    (letter,) = letters(found)
    assert letter.reason.startswith("the file cannot be read from here on: ")
    assert letter.locator.line == len(documents(found)) + 1
    assert 0 < len(documents(found)) <= 2000
    (tmp_path / "d.txt.zst").write_bytes(packed[:-cut] if cut > 0 else packed + packed[:-cut])
    (letter,) = read(tmp_path / "d.txt.zst")
    assert isinstance(letter, DeadLetter)
    assert "cannot be read" in letter.reason


def test_zst_frames_one_after_another_read_whole(tmp_path: Path) -> None:
    """Frames of other programs begin with frames to skip; an empty frame or file holds nothing."""
    skipped = b"\x50\x2a\x4d\x18\x04\x00\x00\x00size"
    third = len(ROWS) // 3
    parts = [ROWS[:third], b"", ROWS[third:]]
    path = tmp_path / "d.jsonl.zst"
    path.write_bytes(b"".join(skipped + zstandard.ZstdCompressor(write_content_size=False).compress(part) for part in parts) + skipped)
    found = read(path)
    assert [d.doc_id for d in documents(found)] == [str(i) for i in range(2000)]
    assert_reads_again(path, found)
    path.write_bytes(b"")
    assert read(path) == []


def test_a_carriage_return_alone_ends_no_csv_record(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_bytes(b'doc_id,text\r\r\na,one\rb,two\nc,"three\rfour"\r\n')
    found = read(path)
    assert [(d.doc_id, d.text) for d in documents(found)] == [("c", "three\rfour")]
    (letter,) = letters(found)
    assert letter.locator.line == 2
    assert "malformed CSV: a carriage return outside quotes" in letter.reason
    path.write_bytes(b"doc_id,text\ra,one\rb,two\r")
    with pytest.raises(ConfigError, match=r"d\.csv: cannot be read as csv: a carriage return outside quotes"):
        columns_of(InputFile(str(path), "d.csv", 1), InputConfig(uri=str(path)))
    (letter,) = letters(read(path))
    assert "a carriage return outside quotes" in letter.reason


def test_a_malformed_csv_header_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    for header, message in (('"doc_id"x,text', "expected after"), ("doc_id,text,text", "column 'text' is named twice")):
        path.write_text(f"{header}\na,b\n")
        with pytest.raises(ConfigError, match=rf"d\.csv: cannot be read as csv: .*{message}"):
            columns_of(InputFile(str(path), "d.csv", 1), InputConfig(uri=str(path)))
        (letter,) = letters(read(path))
        assert message in letter.reason
    path.write_text("doc_id,text,,\na,b,,\n")
    assert [d.doc_id for d in documents(read(path))] == ["a"]


def test_a_parquet_column_named_twice_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 3, names=["doc_id", "text", "text"]), path)
    with pytest.raises(ConfigError, match=r"d\.parquet: cannot be read as parquet: column 'text' is named twice"):
        columns_of(InputFile(str(path), "d.parquet", 1), InputConfig(uri=str(path)))
    (letter,) = letters(read(path))
    assert "column 'text' is named twice" in letter.reason


def test_a_file_that_a_library_chokes_on_ends_in_a_dead_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def choke(*arguments: object) -> None:
        raise RuntimeError("odd file")

    monkeypatch.setattr("askmany.pipeline.whole_files.main_text", choke)
    (tmp_path / "a.html").write_text("<p>x</p>")
    (tmp_path / "b.txt").write_text("w1")
    letter, document = read(tmp_path)
    assert isinstance(letter, DeadLetter)
    assert letter.reason == "the file cannot be read from here on: RuntimeError: odd file"
    assert document.doc_id == "b.txt"


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<p>w1 w2 w3</p>", "w1 w2 w3"),
        ("<div><p>" + "a long story. " * 40 + "</p></div>", "a long story. " * 40),
        ("<body><p>w1</p></body>", "w1"),
        ("<pre>a\nb</pre>", "a\nb"),
        ("<table><tr><td>x1</td><td>y1</td></tr></table>", "| x1 | y1 |"),
        ("<ul><li>i1</li><li>i2</li></ul>", "i1\ni2"),
        ("plain text", "plain text"),
        ("<h1>T</h1><p>w1 w2</p>", "T\nw1 w2"),
        ("<head><title>T</title></head><p>w1</p>", "w1"),
        ("<html><body><footer>w1 <b>w2</b></footer><script>x()</script></body></html>", "w1 w2"),
        ("<aside>w1</aside>", "w1"),
        ("<html><body><script>x()</script></body></html>", ""),
    ],
)
def test_visible_text_of_a_page_is_not_lost(page: str, text: str) -> None:
    assert main_text(page.encode()).text.strip() == text.strip()
    assert main_text(f"<!-- {'note ' * 20} -->\n{page}".encode()).text.strip() == text.strip()


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_parquet_text_that_is_not_utf_8_is_repaired_and_counted(tmp_path: Path, kind: pa.DataType) -> None:
    path = tmp_path / "d.parquet"
    texts = pa.array([b"fine", b"a\xffb", None], pa.large_binary()).cast(pa.large_binary() if kind == pa.large_string() else pa.binary())
    pq.write_table(pa.table({"doc_id": ["a", "b", "c"], "text": texts.cast(kind, safe=False), "n": [1, 2, 3]}), path)
    found = read(path, keep=("n",))
    assert [(d.doc_id, d.text, d.keep["n"], d.flags) for d in documents(found)] == [
        ("a", "fine", "1", ()),
        ("b", "a\ufffdb", "2", ("bytes_replaced:1",)),
        ("c", "", "3", ()),
    ]
    assert_reads_again(path, found, keep=("n",))


def test_parquet_lists_of_text_that_is_not_utf_8_end_in_a_dead_letter(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    asked = pa.array([[b"\xff"]], pa.list_(pa.binary())).cast(pa.list_(pa.string()), safe=False)
    pq.write_table(pa.table({"doc_id": ["a"], "text": ["t"], "questions": asked}), path)
    (letter,) = letters(read(path, questions="questions"))
    assert "cannot be read from here on: 'utf-8' codec can't decode" in letter.reason


def test_a_driver_that_is_missing_is_no_fault_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("w1")

    def missing(*arguments: object, **options: object) -> None:
        raise ImportError("no module")

    (span,) = plan_spans(list_files([str(tmp_path)], {})[0], InputConfig(uri="x"), 1 << 20)
    monkeypatch.setattr("askmany.pipeline.storage.url_to_fs", missing)
    with pytest.raises(ConfigError, match="no driver"):
        list(scan(span, InputConfig(uri="x")))


def test_a_csv_file_that_is_empty_since_it_was_found(tmp_path: Path) -> None:
    path = tmp_path / "d.csv.gz"
    path.write_bytes(gzip.compress(b"doc_id,text\na,b\n"))
    found = read(path)
    path.write_bytes(gzip.compress(b""))
    assert isinstance(fetch_all(found, path)["a"], DocumentError)
